"""A real SGLang server made to fail in every way that was seen, under a running capture; does every sample survive?

One request runs at a time (``max_running_requests: 1``), so that states are equal to the byte or wrong.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from eyas import config, console, fs
from eyas.config import resolve_boundaries
from eyas.contracts import TargetIdentity, TokenSample
from eyas.engines.base import CapturedSample
from eyas.engines.sglang.engine import SglangEngine
from eyas.engines.sglang.session import Session
from eyas.errors import CaptureError
from eyas.target.locate import ensure

NUM_SAMPLES = 24
MOST_TOKENS = 700
BATCH = 4
AFTER = 6
"""Samples that are there when a fault strikes."""
WATCHDOG_S = 20
SEED = 0

States = dict[str, CapturedSample]


def measure(root: Path, names: Sequence[str] = ()) -> dict[str, Any]:
    """Strike and compare; gives per fault what was done, seconds to detect it, whether the states are identical.

    Args:
        root: A repository with a fetched target and an interpreter that has SGLang.
        names: Of ``FAULTS``; empty takes all.
    """
    params = config.load(root / config.PARAMS_PATH)
    target = fs.read_record(TargetIdentity, root / "models/target.json")
    engine = SglangEngine(
        target,
        ensure(target, params.target),
        resolve_boundaries(params.extract, target.num_layers),
        dtype=params.target.dtype,
        device=params.target.device,
        max_running_requests=1,
        chunked_prefill_size=512,
    )
    engine.keeper.watchdog_s = WATCHDOG_S
    samples = make_samples(target.vocab_size, NUM_SAMPLES)
    found: dict[str, Any] = {}
    try:
        engine.announce(samples)
        engine.open()
        undisturbed, _ = _capture(engine, samples)
        for name, fault in FAULTS.items():
            if not names or name in names:
                start_s = time.monotonic()
                found[name] = fault(engine, samples, undisturbed) | {"seconds": round(time.monotonic() - start_s, 1)}
                console.log(f"bench: {name}: {found[name]}")
    finally:
        engine.close()
    return {"faults": found, "engine": engine.describe().version, "machine": config.machine()}


def make_samples(vocab_size: int, num_samples: int, most: int = MOST_TOKENS) -> list[TokenSample]:
    """Samples of random ids, of 10 tokens and more."""
    rng = random.Random(SEED)  # noqa: S311 - samples for a test, the same each time
    return [
        _sample(f"s{index:03d}", [rng.randrange(20, vocab_size - 100) for _ in range(rng.randrange(10, most))])
        for index in range(num_samples)
    ]


def _sample(name: str, ids: Sequence[int]) -> TokenSample:
    return TokenSample(
        sample_id=name,
        conversation_id=name,
        source="random",
        split="train",
        variant="given",
        input_ids=tuple(ids),
        loss_mask=(1,) * len(ids),
    )


def _capture(
    engine: SglangEngine, samples: Sequence[TokenSample], strike: Callable[[Session], None] | None = None
) -> tuple[States, list[str]]:
    """As the extraction does: batch by batch, what is missing again and alone."""
    engine.announce(samples)
    got: States = {}
    problems: list[str] = []
    for begin in range(0, len(samples), BATCH):
        part = samples[begin : begin + BATCH]
        for tried in [part, *([sample] for sample in part)]:
            missing = [sample for sample in tried if sample.sample_id not in got]
            try:
                for captured in engine.capture(missing) if missing else ():
                    got[captured.sample_id] = captured
                    if strike is not None and len(got) == AFTER:
                        strike(engine.keeper.session)
            except CaptureError as error:
                problems.append(error.message)
    return got, problems


def same(first: States, second: States) -> bool:
    """Whether both hold the same samples with the same bytes."""
    return first.keys() == second.keys() and all(_equal(first[name], second[name]) for name in first)


def _equal(first: CapturedSample, second: CapturedSample) -> bool:
    return all(
        torch.equal(getattr(first, part), getattr(second, part)) for part in ("input_ids_T", "aux_TAD", "last_TD")
    )


Fault = Callable[[SglangEngine, Sequence[TokenSample], States], dict[str, Any]]


def _struck(done: str, strike: Callable[[Session], None], *, is_first: bool = False) -> Fault:
    """Strikes when some samples are there; or before all of them, since requests are worked on in the order they came."""

    def run(engine: SglangEngine, samples: Sequence[TokenSample], undisturbed: States) -> dict[str, Any]:
        struck_s: list[float] = []
        before = len(engine.keeper.lost_at_s)

        def timed(session: Session) -> None:
            if not struck_s:
                struck_s.append(time.monotonic())
                strike(session)

        if is_first:
            threading.Thread(target=timed, args=(engine.keeper.session,), daemon=True).start()
        got, problems = _capture(engine, samples, None if is_first else timed)
        lost = engine.keeper.lost_at_s[before:]
        seconds = round(lost[0] - struck_s[0], 2) if lost else None
        return {
            "done": done,
            "seconds_to_detect": seconds,
            "restarts": len(lost),
            "tried_again": len(problems),
            "identical": same(got, undisturbed),
        }

    return run


def _signal_scheduler(number: signal.Signals) -> Callable[[Session], None]:
    def strike(session: Session) -> None:
        assert session.hello is not None
        os.kill(session.hello.pid, number)

    return strike


def _kill_http(session: Session) -> None:
    assert session.server is not None
    os.kill(session.server.pid, signal.SIGKILL)


def _abort(session: Session) -> None:
    request = urllib.request.Request(  # noqa: S310 - our own server
        f"{session.client.url}/abort_request",
        json.dumps({"rid": "", "abort_all": True}).encode(),
        session.client.headers,
    )
    urllib.request.urlopen(request, timeout=30).close()  # noqa: S310 - our own server


def _poison(session: Session) -> None:
    """Somebody else's request, past our checks; the server may be gone before it says a word."""
    body = {"input_ids": [5, 10_000_000], "sampling_params": {"max_new_tokens": 1}}
    request = urllib.request.Request(  # noqa: S310 - our own server
        f"{session.client.url}/generate", json.dumps(body).encode(), session.client.headers
    )
    with contextlib.suppress(OSError, http.client.HTTPException):
        urllib.request.urlopen(request, timeout=30).close()  # noqa: S310 - our own server


def _compared(done: str, change: Callable[[Sequence[TokenSample]], list[TokenSample]]) -> Fault:
    """Other samples, each compared with the same ids captured alone in the undisturbed run."""

    def run(engine: SglangEngine, samples: Sequence[TokenSample], undisturbed: States) -> dict[str, Any]:
        changed = change(samples)
        by_ids = {sample.input_ids: undisturbed[sample.sample_id] for sample in samples}
        got, problems = _capture(engine, changed)
        known = [sample for sample in changed if sample.input_ids in by_ids]
        right = all(
            sample.sample_id in got and _equal(by_ids[sample.input_ids], got[sample.sample_id]) for sample in known
        )
        whole = [s for s in changed if s.sample_id in got and len(got[s.sample_id].last_TD) == len(s.input_ids)]
        return {
            "done": done,
            "compared": len(known),
            "captured": len(whole),
            "refused": len(changed) - len(got),
            "reasons": sorted(set(problems))[:2],
            "identical": right,
        }

    return run


def _duplicates(samples: Sequence[TokenSample]) -> list[TokenSample]:
    return [_sample(f"d{copy}-{s.sample_id}", s.input_ids) for copy in range(3) for s in samples[:8]]


def _prefixes(samples: Sequence[TokenSample]) -> list[TokenSample]:
    longest = max(samples, key=lambda sample: len(sample.input_ids))
    tails = [_sample(f"p{n:03d}", longest.input_ids[:-n] + (30 + n,) * n) for n in range(1, 12)]
    return [*tails, *samples]


def _beyond(samples: Sequence[TokenSample]) -> list[TokenSample]:
    return [*samples[:5], _sample("beyond", (30,) * 200_000), _sample("outside", (30, 10_000_000)), *samples[5:]]


def _many(samples: Sequence[TokenSample]) -> list[TokenSample]:
    return [*make_samples(40_000, 200, 60), *(_sample(f"m-{s.sample_id}", s.input_ids) for s in samples)]


FAULTS: dict[str, Fault] = {
    "duplicates": _compared("8 prompts three times each", _duplicates),
    "shared_prefix": _compared("11 prompts that share a long prefix", _prefixes),
    "beyond": _compared("a prompt beyond the context and an id outside the vocab, never sent", _beyond),
    "many": _compared("200 more requests at a time", _many),
    "abort": _struck("/abort_request for all that is under way", _abort),
    "disconnect": _struck("every connection of the client shut", lambda session: session.client.hang_up()),
    "kill_http": _struck("kill -9 of the HTTP process", _kill_http),
    "kill_scheduler": _struck("kill -9 of the scheduler", _signal_scheduler(signal.SIGKILL)),
    "poison": _struck("another client sends an id outside of the vocab: the whole server dies", _poison, is_first=True),
    "stop_scheduler": _struck(f"SIGSTOP of the scheduler, watchdog {WATCHDOG_S} s", _signal_scheduler(signal.SIGSTOP)),
}
