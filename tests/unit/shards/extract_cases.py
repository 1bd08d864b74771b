"""Extractions with the fake engine: a whole one, one in a forked child, engines that misbehave."""

from __future__ import annotations

import dataclasses
import os
import random
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

import torch
from shard_cases import make_capture, make_plan, make_tokens

from eyas import fs
from eyas.contracts import EngineFacts, FileDigest, TokenSample
from eyas.engines.base import CapturedSample, Engine
from eyas.engines.loop import ExtractLimits, ExtractResult, extract
from eyas.engines.registry import make_engine
from fake_target import HIDDEN_SIZE, make_target

Edit = Callable[[Iterator[CapturedSample]], Iterator[CapturedSample]]


def fake_engine() -> Engine:
    return make_engine(
        "fake",
        target=make_target(),
        folder=None,
        boundaries=(1, 2, 3),
        dtype="bfloat16",
        batch_size=8,
        options={},
        device="cpu",
    )


class Case:
    """A plan with its tokens, and folders to extract into."""

    def __init__(self, root: Path, num_samples: int = 40, seed: int = 0, **changes) -> None:
        rng = random.Random(seed)
        self.root = root
        self.tokens = make_tokens([rng.randrange(1, 30) for _ in range(num_samples)], seed)
        facts = fake_engine().describe()
        changes = {"shard_bytes": 60 * 4 * HIDDEN_SIZE * 2, "batch_tokens": 40, **changes}
        capture = make_capture(engine=facts.name, engine_version=facts.version, engine_options=facts.options, **changes)
        self.plan = make_plan(self.tokens, capture, HIDDEN_SIZE)
        self.out, self.manifest_path = root / "data/hidden_states", root / "data/hidden_states.json"
        self.home = root / ".eyas"
        self.spool = self.home / "spool" / self.plan.identity

    def extract(self, engine: Engine | None = None, *, max_failed: int = 0, **limits) -> ExtractResult:
        return extract(
            self.plan,
            self.tokens,
            engine or fake_engine(),
            ExtractLimits(max_failed_samples=max_failed, **{"reserve_bytes": 0, **limits}),
            out=self.out,
            manifest_path=self.manifest_path,
            home=self.home,
        )

    def hashes(self) -> tuple[FileDigest, ...]:
        """Every published byte, by path."""
        return (*fs.tree_digests(self.out), fs.file_digest(self.manifest_path, self.root))

    def at(self, root: Path) -> Case:
        other = Case.__new__(Case)
        other.__dict__.update(self.__dict__)
        other.root, other.home = root, root / ".eyas"
        other.out, other.manifest_path = root / "data/hidden_states", root / "data/hidden_states.json"
        other.spool = other.home / "spool" / self.plan.identity
        return other


class EditedEngine:
    """The fake engine, its answers passed through ``edit``; counts what it was asked for."""

    def __init__(self, edit: Edit | None = None) -> None:
        self.inner, self.edit = fake_engine(), edit
        self.asked: list[tuple[str, ...]] = []
        self.num_opened = 0

    def announce(self, samples):
        pass

    def open(self) -> None:
        self.num_opened += 1
        self.inner.open()

    def capture(self, batch: Sequence[TokenSample]) -> Iterator[CapturedSample]:
        self.asked.append(tuple(sample.sample_id for sample in batch))
        answers = self.inner.capture(batch)
        return self.edit(answers) if self.edit else answers

    def generate(self, requests):
        return self.inner.generate(requests)

    def describe(self) -> EngineFacts:
        return self.inner.describe()

    def close(self) -> None:
        self.inner.close()


def with_nan(captured: CapturedSample) -> CapturedSample:
    aux_TAD = captured.aux_TAD.clone()
    aux_TAD[0, 1, 2] = torch.nan
    return dataclasses.replace(captured, aux_TAD=aux_TAD)


_last_words: dict[int, IO[str]] = {}


def in_child(work: Callable[[], None]) -> int:
    """Fork, run ``work``, end; gives the pid. The parent must not have used torch's thread pool."""
    words = tempfile.TemporaryFile("w+")  # noqa: SIM115 - of the last child only
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            work()
            code = 0
        except BaseException:  # noqa: BLE001 - the child must never return into the parent's code
            words.write(traceback.format_exc())
            words.flush()
        finally:
            os._exit(code)
    _last_words.clear()
    _last_words[pid] = words
    return pid


def last_words(pid: int) -> str:
    """What ended the child that was forked last, as far as it could say."""
    words = _last_words[pid]
    words.seek(0)
    return words.read()
