"""What a quality bench stands on: a finished run's inputs, our trainer on them, and one judge for every drafter.

The judge is the exact walk of ``eyas evaluate`` over the same held-out documents for whoever trained the drafter.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from eyas import config, fs
from eyas.config import Params
from eyas.config.schema import DrafterConfig, TrainConfig
from eyas.contracts import SetAcceptance, ShardManifest, TargetIdentity
from eyas.drafter.judged import target_argmax
from eyas.drafter.model import Drafter
from eyas.errors import StoreError
from eyas.evaluate.judge import document_groups, walk_group
from eyas.evaluate.report import HeldOut, held_out
from eyas.evaluate.summary import WalkedDocument, summarise
from eyas.shards.reader import ShardReader, StoredStates
from eyas.target.load import TargetEnds
from eyas.target.locate import ensure
from eyas.train.checkpoint import load_drafter
from eyas.train.distributed import open_world
from eyas.train.run import Inputs, target_ends, train

WARM_STEPS = 30
"""Steps before the clock runs on a GPU: kernels are compiled there, for the peers too."""


@dataclass(frozen=True, slots=True)
class Trained:
    """One drafter of ours."""

    drafter: Drafter
    num_steps: int
    seconds: float
    """Of the whole call: first weights and publishing are in it."""


class Setup:
    """A finished run: parameters, target, states, draft vocab and held-out text.

    Args:
        root: The repository.

    Raises:
        StoreError: It has no states.
    """

    def __init__(self, root: Path) -> None:
        manifest_path = root / "data/hidden_states.json"
        if not manifest_path.is_file():
            raise StoreError(f"{manifest_path} is missing: nothing to train on", "run `make repro` first")
        self.root = root
        self.params: Params = config.load(root / config.PARAMS_PATH)
        self.identity = fs.read_record(TargetIdentity, root / "models/target.json")
        self.target_folder = ensure(self.identity, self.params.target)
        self.manifest = fs.read_record(ShardManifest, manifest_path)
        self.reader = ShardReader(root / "data/hidden_states", self.manifest)

    @property
    def vocab_folder(self) -> Path:
        """Of the draft vocab."""
        return self.root / "data/draft_vocab"

    @cached_property
    def ends(self) -> TargetEnds:
        """The target's embedding, head and final norm."""
        return target_ends(self.inputs(self.params.train, self.params.drafter))

    @cached_property
    def judge(self) -> Judge:
        """Reads the held-out documents once."""
        return Judge(self)

    def inputs(self, train_config: TrainConfig, drafter_config: DrafterConfig) -> Inputs:
        """What our trainer is given."""
        return Inputs(
            identity=self.identity,
            target_folder=self.target_folder,
            vocab_folder=self.vocab_folder,
            manifest=self.manifest,
            reader=self.reader,
            drafter_config=drafter_config,
            config=train_config,
        )

    def train(self, train_config: TrainConfig, drafter_config: DrafterConfig, scratch: Path) -> Trained:
        """Train a drafter of ours; ``scratch`` is emptied."""
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        inputs = self.inputs(train_config, drafter_config)
        runs, output, metrics = (scratch / name for name in ("runs", "drafter", "metrics"))
        start_s = time.perf_counter()
        with open_world(train_config.device, train_config.packs_per_step) as world:
            meta, _ = train(inputs, runs, output, metrics, world)
        seconds = time.perf_counter() - start_s
        drafter, _ = load_drafter(scratch / "drafter", self.ends.embedding_VD)
        return Trained(drafter, meta.num_steps, seconds)

    def warm_up(self, scratch: Path) -> None:
        """Compile what a GPU run compiles, so that the timed run does not."""
        if self.params.train.device != "cpu":
            self.train(dataclasses.replace(self.params.train, num_steps=WARM_STEPS), self.params.drafter, scratch)


class Judge:
    """The exact walk over the held-out documents of a run.

    Args:
        setup: The run; its ``evaluate`` section says chain length, bootstrap and seed.
    """

    def __init__(self, setup: Setup) -> None:
        self._config = setup.params.evaluate
        self._chosen: HeldOut = held_out(setup.reader.samples)
        self._groups: list[tuple[list[StoredStates], list[np.ndarray]]] = [
            (group, [target_argmax(stored, setup.ends.head_VD) for stored in group])
            for group in document_groups(setup.reader, self._chosen)
        ]

    def __call__(self, drafter: Drafter) -> dict[str, Any]:
        """Tau over the sets that were trained on, its interval and alpha; tau of every set."""
        walked: list[WalkedDocument] = []
        for group, argmaxes in self._groups:
            walked += walk_group(drafter.cpu(), group, argmaxes, self._config.chain_length)
        sources = sorted({document.source for document in walked})
        head = self._figures([d for d in walked if d.source in self._chosen.trained_sources])
        return {
            "tau": head.tau,
            "tau_low": head.tau_low,
            "tau_high": head.tau_high,
            "tau_loop_free": head.tau_loop_free,
            "alpha": list(head.alpha),
            "tau_by_set": {s: self._figures([d for d in walked if d.source == s]).tau for s in sources},
        }

    def _figures(self, documents: list[WalkedDocument]) -> SetAcceptance:
        return summarise(documents, self._config.num_bootstrap, self._config.seed)
