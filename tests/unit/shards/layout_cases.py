"""A small repository with a published set whose ``last`` states really predict the next token, and its target."""

from __future__ import annotations

import atexit
import copy
import dataclasses
import functools
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from extract_cases import HIDDEN_SIZE, make_target
from safetensors.torch import save_file
from shard_cases import make_capture, make_plan, make_tokens, store

from eyas import config, fs
from eyas.contracts import CaptureIdentity, TokenSample
from eyas.ops.exchange import states as exchange
from eyas.ops.exchange.states import ImportReport, ImportRequest, export_states, import_states
from eyas.shards.layouts.export import ExportResult
from eyas.shards.reader import ShardReader, StoredStates
from eyas.tokens.draft_vocab import build_draft_vocab

REPOSITORY = Path(__file__).parents[3]
VOCAB = 1000
COMPOSE = config.load
LAYOUTS = (("speculators_v1", "0.3.0"), ("speculators_v1", "0.4.0"), ("speculators", ""), ("specforge", ""))
QUICK_LAYOUTS = [it if i in (1, 2) else pytest.param(*it, marks=pytest.mark.slow) for i, it in enumerate(LAYOUTS)]
"""Every layout, two of them in the quick room."""


@functools.cache
def load_params(text: str) -> config.Params:
    """Composing parameters takes longer than a small export: once per text."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "params.yaml"
        path.write_text(text)
        return COMPOSE(path)


def layout_tokens(lengths: list[int], seed: int = 0) -> dict[str, TokenSample]:
    """Every third sample is held out."""
    tokens = list(make_tokens(lengths, seed).values())
    split = ["held_out" if i % 3 == 2 else "train" for i in range(len(tokens))]
    return {s.sample_id: dataclasses.replace(s, split=where) for s, where in zip(tokens, split, strict=True)}


class World:
    """Below ``root``: params.yaml, models/target.json, data/hidden_states and its manifest, data/draft_vocab."""

    def __init__(
        self,
        root: Path,
        monkeypatch: pytest.MonkeyPatch,
        lengths: list[int] | None = None,
        *,
        scale_D: torch.Tensor | None = None,
        tokens: dict[str, TokenSample] | None = None,
        **capture_changes,
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        uniform_D = torch.rand(HIDDEN_SIZE, generator=generator)
        self.root = root
        self.scale_D = (8 ** (2 * uniform_D - 1) if scale_D is None else scale_D).bfloat16()
        head_VD = torch.nn.functional.normalize(torch.randn(VOCAB, HIDDEN_SIZE, generator=generator), dim=1)
        self.head_VD = head_VD.bfloat16()
        self.target = make_target()
        self.tokens = tokens or layout_tokens(lengths or [5, 7, 4, 30, 12, 9])
        self.capture: CaptureIdentity = make_capture(target=self.target.digest, **capture_changes)
        self.plan = make_plan(self.tokens, self.capture, HIDDEN_SIZE)
        states = {s: (self._aux(t, generator), self._last(t)) for s, t in self.tokens.items()}
        manifest = store(root / "data/hidden_states", self.plan, self.tokens, states)
        fs.write_record(root / "data/hidden_states.json", manifest)
        self.reader = ShardReader(root / "data/hidden_states", manifest)
        fs.write_record(root / "models/target.json", self.target)
        params = (REPOSITORY / "params.yaml").read_text()
        for old, new in (
            ("boundaries: []", "boundaries: [1, 2, 3]"),
            ("extract:\n  engine: hf", "extract:\n  engine: fake"),
        ):
            assert old in params
            params = params.replace(old, new)
        (root / "params.yaml").write_text(params)
        counts_V = torch.zeros(VOCAB).long().numpy()
        build_draft_vocab(counts_V, 100).write(root / "data/draft_vocab")
        self.folder = root / "target"
        self.folder.mkdir()
        save_file(
            {"model.norm.weight": self.scale_D, "lm_head.weight": self.head_VD}, self.folder / "model.safetensors"
        )
        self._patch(monkeypatch)

    def _patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(exchange, "ensure", lambda *_: self.folder)
        monkeypatch.setattr(exchange.config, "load", lambda path: load_params(path.read_text()))
        # Nobody cuts the power here; waiting for the disk would be a third of these tests' time.
        monkeypatch.setattr(os, "fsync", lambda _: None)

    def copied(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> World:
        """The same below another root."""
        world = copy.copy(self)
        shutil.copytree(self.root, root, dirs_exist_ok=True, ignore=shutil.ignore_patterns("exported-*"))
        world.root, world.folder = root, root / "target"
        world.reader = ShardReader(root / "data/hidden_states", self.reader.manifest)
        world._patch(monkeypatch)
        return world

    def _aux(self, sample: TokenSample, generator: torch.Generator) -> torch.Tensor:
        num_aux = len(self.capture.boundaries)
        return torch.randn(len(sample.input_ids), num_aux, HIDDEN_SIZE, generator=generator).bfloat16()

    def _last(self, sample: TokenSample) -> torch.Tensor:
        """Along the head's row of the next token, at the length that an RMSNorm gives."""
        following_T = torch.tensor([*sample.input_ids[1:], 0])
        last_TD = self.head_VD[following_T].float()
        rms_T1 = (last_TD / self.scale_D.float()).square().mean(dim=1, keepdim=True).sqrt()
        return (last_TD / rms_T1).bfloat16()

    def export(self, layout: str, version: str = "", name: str = "out") -> ExportResult:
        return export_states(self.root, layout, self.root / name, version)

    def copy_export(self, layout: str, version: str = "") -> None:
        """What ``export`` of the default world would write, out of one made before."""
        world, name = default_world(), f"exported-{layout}{version}"
        if not (world.root / name).exists():
            with pytest.MonkeyPatch.context() as patch:
                world._patch(patch)
                world.export(layout, version, name)
        shutil.copytree(world.root / name, self.root / "out")

    def enter(self, layout: str, name: str = "out", to: str = "in", **request) -> ImportReport:
        return import_states(
            self.root, ImportRequest(layout=layout, source=self.root / name, out=self.root / to, **request)
        )

    def stored(self) -> list[StoredStates]:
        """In the order of an export, which is stated in docs/formats/layouts.md: training split first, then by id."""
        samples = sorted(self.reader.samples, key=lambda s: (s.split == "held_out", s.sample_id))
        return [self.reader.read(sample.sample_id) for sample in samples]

    def imported(self, to: str = "in") -> ShardReader:
        from eyas.contracts import ShardManifest

        manifest = fs.read_record(ShardManifest, self.root / to / "hidden_states.json")
        return ShardReader(self.root / to / "hidden_states", manifest)


@functools.cache
def default_world() -> World:
    """Made once; tests work on copies."""
    folder = Path(tempfile.mkdtemp(prefix="eyas-world-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with pytest.MonkeyPatch.context() as patch:
        return World(folder, patch)


def tree(folder: Path) -> dict[str, str]:
    return {digest.path: digest.sha256 for digest in fs.tree_digests(folder)}
