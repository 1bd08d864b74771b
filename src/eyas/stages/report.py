"""Stage ``report``: one self-contained page about the run, and the few figures that DVC compares."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eyas import console, fs
from eyas.report.metrics import headline
from eyas.report.page import render
from eyas.report.sources import gather
from eyas.stages import common


def main(argv: Sequence[str]) -> None:
    """Write both from the records of the stages before. The same records give the same bytes."""
    page, metrics = common.paths("report", ("PAGE", "METRICS.json"), argv)
    with common.stage_run("report", reads=(), writes=(page, metrics)):
        sources = gather(Path(), generations=True)
        fs.write_text(page, render(sources))
        fs.write_record(metrics, headline(sources))
    console.log(f"report: {page}")


if __name__ == "__main__":
    console.run_main(main)
