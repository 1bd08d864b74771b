"""Stage ``respond``: the target writes the assistant turns itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from eyas import config, console, fs
from eyas.canonical import digest
from eyas.contracts import TargetIdentity
from eyas.conversations.generation import Generated, GenerateRequest
from eyas.conversations.journal import Journal
from eyas.conversations.respond import REJECTS_NAME, Responder, RespondSummary, pass_through
from eyas.engines.base import Engine
from eyas.engines.registry import make_engine
from eyas.stages import common
from eyas.target.load import load_tokenizer
from eyas.target.locate import ensure

JOURNALS = Path(".eyas/respond")


def main(argv: Sequence[str]) -> None:
    """Run the stage: ``python -m eyas.stages.respond models/target.json data/conversations data/responses``."""
    target_path, conversations, out = common.paths("respond", ("target", "conversations", "responses"), argv)
    params = config.load()
    with common.stage_run("respond", [target_path, conversations], [out]) as run:
        if params.respond.enabled:
            done = _respond(params, fs.read_record(TargetIdentity, target_path), conversations, out)
        else:
            done = pass_through(conversations, out)
        run.num_tokens, run.work_s = done.num_new_tokens, done.generate_s or None
        run.facts["counts"] = dict(done.counts())
        console.emit(console.table(done.counts(), ("respond", "count")))
        if done.rejected:
            console.log(f"rejected rows are listed in {out / REJECTS_NAME}")


def _respond(params: config.Params, target: TargetIdentity, conversations: Path, out: Path) -> RespondSummary:
    folder = ensure(target, params.target)
    engine = make_engine(
        params.respond.engine,
        target=target,
        folder=folder,
        boundaries=(),
        dtype=params.target.dtype,
        batch_size=params.respond.batch_size,
        device=params.target.device,
        trust_remote_code=params.target.trust_remote_code,
    )
    key = digest([target, engine.describe(), params.target.device, params.respond.batch_size, params.respond.revision])[
        :16
    ]
    path = JOURNALS / f"{key}.jsonl"
    tokenizer = load_tokenizer(folder, params.target.trust_remote_code)
    try:
        with fs.volume_lock(path.with_suffix(".lock"), "respond"), Journal(path) as journal:
            generate = _LazyEngine(engine, params)
            return Responder(params.respond, tokenizer, target.max_position_embeddings, generate, journal).respond(
                conversations, out
            )
    finally:
        engine.close()


class _LazyEngine:
    """Opens the engine at the first prompt: a run whose answers are all known loads no model.

    It says so before: the first answers come when their whole batch is written, which takes a minute or more.
    """

    def __init__(self, engine: Engine, params: config.Params) -> None:
        self._engine, self._params, self._is_open = engine, params, False

    def __call__(self, requests: Sequence[GenerateRequest]) -> Iterator[Generated]:
        if not self._is_open:
            respond, device = self._params.respond, self._params.target.device
            console.log(
                f"respond: loading engine {respond.engine} on {device}, then writing {len(requests):,} answers, "
                f"{respond.batch_size} at a time, up to {respond.max_new_tokens} tokens each"
            )
            self._engine.open()
            self._is_open = True
        return self._engine.generate(requests)


if __name__ == "__main__":
    console.run_main(main)
