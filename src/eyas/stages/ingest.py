"""Stage ``ingest``: conversations of any source into ``data/conversations``."""

from __future__ import annotations

from collections.abc import Sequence

from eyas import config, console
from eyas.conversations.ingest import REJECTS_NAME, IngestSummary, ingest
from eyas.stages import common


def main(argv: Sequence[str]) -> None:
    """Run the stage: ``python -m eyas.stages.ingest data/raw data/conversations``."""
    raw, out = common.paths("ingest", ("raw", "conversations"), argv)
    params = config.load()
    with common.stage_run("ingest", [raw], [out]) as run:
        done = ingest(params.data, raw, out)
        run.facts["counts"] = dict(counts(done))
        console.emit(console.table([(what, f"{count:,}") for what, count in counts(done)], ("ingest", "conversations")))
        if done.rejected:
            console.log(f"rejected rows are listed in {out / REJECTS_NAME}")


def counts(done: IngestSummary) -> list[tuple[str, int]]:
    """Every count in the order in which rows come and go; the account closes."""
    rejected = [(f"rejected: {reason}", count) for reason, count in sorted(done.rejected.items())]
    return [
        ("files", done.num_files),
        ("damaged files, cut at the damage", len(done.damaged)),
        ("records read", done.num_records),
        *rejected,
        ("duplicates", done.num_duplicates),
        ("left out by max_conversations", done.num_left_out),
        *[(f"kept: {source}, {split}", count) for source, split, count in done.kept],
        ("rows that lost leading assistant turns", done.num_rows_without_leading_answers),
    ]


if __name__ == "__main__":
    console.run_main(main)
