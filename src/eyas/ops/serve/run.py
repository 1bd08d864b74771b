"""``eyas serve-bench``: a real server without and with the exported drafter, and the walk over what it wrote.

The server loads ``models/export/sglang``; the walk takes ``models/drafter``, its weights rounded as the export's are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas import config, console, fs
from eyas.canonical import digest
from eyas.config import Params
from eyas.contracts import CheckpointMeta, ExportMeta, TargetIdentity
from eyas.engines.sglang import versions
from eyas.engines.sglang.launch import URL_VARIABLE, Wanted
from eyas.engines.sglang.session import Session
from eyas.errors import ConfigError, ExportError
from eyas.evaluate.summary import WalkedDocument
from eyas.ops.serve.figures import Pair, figures
from eyas.ops.serve.measure import Pass, Text, make_requests, run_pass
from eyas.ops.serve.offline import Judge, Judged, Written, as_served, walk_written
from eyas.ops.serve.prompts import read_sets
from eyas.ops.serve.turns import Asked, Asker
from eyas.plan.interpreter import sglang_versions
from eyas.target.load import load_model, load_tokenizer, read_ends
from eyas.target.locate import ensure
from eyas.train.checkpoint import load_drafter

REPORT = Path("reports/serve.json")
WARM_UP_TOKENS = 8
SHARED_OPTIONS = ("attention_backend", "tp_size")
"""Of ``extract.engine_options``: what the same machine needs for serving too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRequest:
    """What is measured."""

    sets: tuple[str, ...]
    batch_sizes: tuple[int, ...] = (1, 8, 16)
    num_prompts: int = 16
    """Of each set; 0 takes all."""
    max_new_tokens: int = 128
    chain_length: int = 3
    dtype: str = ""
    """Empty: that of ``evaluate.dtype``."""

    def check(self) -> None:
        """Refuse values out of range.

        Raises:
            ConfigError: One is.
        """
        sizes = self.batch_sizes
        for name, value, right, expected in (
            ("batch-sizes", list(sizes), bool(sizes) and sorted(set(sizes)) == list(sizes) and sizes[0] >= 1, "rising numbers from 1"),
            ("num-prompts", self.num_prompts, self.num_prompts >= 0, "0 or more"),
            ("max-new-tokens", self.max_new_tokens, self.max_new_tokens >= 2, "2 or more"),
            ("chain-length", self.chain_length, 1 <= self.chain_length <= 16, "1 to 16"),
            ("dtype", self.dtype, self.dtype in ("", "bfloat16", "float32"), "bfloat16 or float32"),
        ):  # fmt: skip
            if not right:
                raise ConfigError(f"{name}: {value}, expected {expected}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Served:
    """What both servers have in common."""

    params: Params
    target: TargetIdentity
    folder: Path
    meta: CheckpointMeta
    dtype: str
    version: str

    def wanted(self, request: ServeRequest, drafter: Path | None) -> Wanted:
        """A server that writes answers, with or without a drafter."""
        extract = self.params.extract
        given = extract.engine_options if extract.engine == "sglang" else {}
        options: dict[str, Any] = {name: given[name] for name in SHARED_OPTIONS if name in given}
        drafting = versions.drafting_arguments(str(drafter.resolve()), request.chain_length) if drafter else []
        return Wanted(
            target=self.target,
            folder=self.folder,
            boundaries=(),
            dtype=self.dtype,
            device=self.params.target.device,
            version=self.version,
            options=options | {"max_running_requests": request.batch_sizes[-1]},
            trust_remote_code=self.params.target.trust_remote_code,
            drafting=tuple(drafting),
        )


def serve_bench(root: Path, request: ServeRequest) -> dict[str, Any]:
    """Measure; writes ``REPORT``.

    Raises:
        ConfigError: A value is out of range, or a prompt does not fit the context.
        DataError: A prompt set cannot be read.
        ExportError: There is no export of this drafter for SGLang.
        ServerError: A server does not start, or fails.
    """
    request.check()
    if os.environ.get(URL_VARIABLE):
        raise ConfigError(
            f"{URL_VARIABLE} is set, but the benchmark starts servers of its own", f"unset {URL_VARIABLE}"
        )
    served = _prepare(root, request)
    asker = _asker(served, request)
    asked = asker.first(read_sets(root, request.sets, request.num_prompts))
    longest = asker.longest(asked)
    with _server(served, request, None, longest) as session:
        asked = _whole_conversations(session, served, request, asker, asked)
        plain = _passes(session, served, request, asked, "plain")
    with _server(served, request, root / "models/export/sglang", longest) as session:
        drafted = _passes(session, served, request, asked, "drafted")
    pairs = [Pair(*both) for both in zip(plain, drafted, strict=True)]
    walked, judged = _look_back(root, served, request, asked, pairs)
    found = figures([one.source for one in asked], pairs, walked, judged, _facts(served, request))
    fs.write_text(root / REPORT, json.dumps(found, indent=2, sort_keys=True) + "\n")
    return found


def _prepare(root: Path, request: ServeRequest) -> _Served:
    params = config.load(root / config.PARAMS_PATH)
    target = fs.read_record(TargetIdentity, root / "models/target.json")
    meta = fs.read_record(CheckpointMeta, root / "models/drafter/checkpoint.json")
    export = fs.read_record(ExportMeta, root / "models/export/export.json")
    if "sglang" not in export.servers:
        raise ExportError(
            f"models/export is for {', '.join(export.servers)}, expected sglang among them", "`make export`"
        )
    for name, found, expected in (("drafter", export.drafter, digest(meta)), ("target", meta.target, target.digest)):
        if found != expected:
            raise ExportError(f"models/export is of {name} {found[:16]}, expected {expected[:16]}", "`make export`")
    return _Served(
        params=params,
        target=target,
        folder=ensure(target, params.target),
        meta=meta,
        dtype=request.dtype or params.evaluate.dtype,
        version=sglang_versions()["sglang"],
    )


def _asker(served: _Served, request: ServeRequest) -> Asker:
    room = served.target.max_position_embeddings - request.max_new_tokens - request.chain_length - 1
    tokenizer = load_tokenizer(served.folder, served.params.target.trust_remote_code)
    return Asker(tokenizer, room, request.max_new_tokens)


@contextmanager
def _server(served: _Served, request: ServeRequest, drafter: Path | None, longest: int) -> Iterator[Session]:
    room = longest + request.max_new_tokens + request.chain_length + 1
    session = Session(served.wanted(request, drafter), 2 if drafter else 1, request.batch_sizes[-1] * room, 0)
    try:
        yield session
    finally:
        session.close()


def _whole_conversations(
    session: Session, served: _Served, request: ServeRequest, asker: Asker, asked: Sequence[Asked]
) -> list[Asked]:
    """All turns, a prompt's own in their order: each follows the answers that this server writes."""
    found, wave = list(asked), [one for one in asked if one.later]
    while wave:
        requests = make_requests([one.ids for one in wave], request.max_new_tokens)
        done = run_pass(session, requests, request.batch_sizes[-1], served.target.eos_token_ids)
        wave = asker.next(wave, [text.ids for text in done.texts])
        found += wave
        wave = [one for one in wave if one.later]
    return found


def _passes(session: Session, served: _Served, request: ServeRequest, asked: Sequence[Asked], name: str) -> list[Pass]:
    """Every batch size on one server."""
    eos, prompts, passes = served.target.eos_token_ids, [one.ids for one in asked], []
    for batch_size in request.batch_sizes:
        run_pass(session, make_requests(prompts[:batch_size], WARM_UP_TOKENS), batch_size, eos)
        done = run_pass(session, make_requests(prompts, request.max_new_tokens), batch_size, eos)
        console.log(f"serve-bench: {name}, batch {batch_size}: {done.tokens_per_s:,.1f} tokens/s")
        passes.append(done)
    return passes


def _look_back(
    root: Path, served: _Served, request: ServeRequest, asked: Sequence[Asked], pairs: Sequence[Pair]
) -> tuple[list[WalkedDocument], list[list[Judged | None]]]:
    """The walk over the first pass' texts, and what the target says of drafted texts that are not the plain ones."""
    params = served.params
    ends = read_ends(served.folder)
    drafter, meta = load_drafter(root / "models/drafter", ends.embedding_VD)
    model = load_model(served.folder, served.dtype, params.target.device, params.target.trust_remote_code)
    head_VD = ends.head_VD.to(next(model.parameters()).dtype)
    as_served(drafter, params.export.dtype)
    written = [_written(one, text) for one, text in zip(asked, pairs[0].drafted.texts, strict=True)]
    walked = walk_written(drafter, model, meta.boundaries, head_VD, written, request.chain_length)
    judge = Judge(model, served.target.eos_token_ids, request.max_new_tokens)
    judged = [
        [
            None if plain.ids == text.ids else judge(_written(one, text))
            for one, plain, text in zip(asked, pair.plain.texts, pair.drafted.texts, strict=True)
        ]
        for pair in pairs
    ]
    return walked, judged


def _written(one: Asked, text: Text) -> Written:
    return Written(prompt_id=one.prompt_id, source=one.source, prompt_ids=one.ids, answer_ids=text.ids)


def _facts(served: _Served, request: ServeRequest) -> dict[str, Any]:
    return {
        "server": f"sglang {served.version}",
        "device": served.params.target.device,
        "dtype": served.dtype,
        "chain_length": request.chain_length,
        "max_new_tokens": request.max_new_tokens,
        "drafter": digest(served.meta),
        "target": served.target.digest,
        "machine": config.machine(),
    }
