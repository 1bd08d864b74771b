"""The quality bench: every trainer gets the same packs, every drafter the same judge, every budget its steps."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from test_train_from import make_project, write_peer, write_target

from eyas.batches.loader import BatchLoader, order_of
from eyas.batches.order import Cursor
from eyas.config.schema import TrainConfig
from eyas.drafter.model import Drafter
from eyas.errors import ConfigError, EyasError, StoreError
from eyas.ops.bench import quality
from eyas.ops.bench.quality_ours import Setup
from eyas.ops.bench.quality_peers import SCRIPTS, Peer, PeerRun, to_drafter, train_all, variants
from eyas.ops.bench.run import run
from eyas.ops.exchange.draft_vocab import make_draft_vocab
from eyas.ops.exchange.states import ImportRequest, import_states
from eyas.stages import fetch
from eyas.tokens.draft_vocab import DraftVocab
from eyas.train.checkpoint import drafter_tensors
from eyas.train.run import new_drafter
from eyas.train.schedule import learning_rate

STAND_IN = """#!{python}
import json, shutil, sys
from pathlib import Path
job = json.loads(Path(sys.argv[2]).read_text())
if job["runs"][0]["settings"].get("lr") == 13.0:
    sys.exit("out of luck")
for run in job["runs"]:
    out = Path(run["out"])
    out.mkdir(parents=True, exist_ok=True)
    shutil.copy("{weights}", out / "drafter.safetensors")
    facts = {{"losses": [1.0], "package": "stand-in 1", "settings": run["settings"], "seconds_per_step": 0.01}}
    (out / "facts.json").write_text(json.dumps(facts))
"""
"""Answers a job as a peer's interpreter does, with weights that lie ready."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quality")
    write_target(folder / "target")
    root, peer = make_project(folder / "project", folder / "target"), write_peer(folder / "peer")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        fetch.main(["models/target.json"])
        request = ImportRequest(
            layout="specforge", source=peer, out=root / "set", boundaries=(1, 2, 3), final_hidden="post_norm"
        )
        import_states(root, request)
        make_draft_vocab(root, root / "set/tokens", root / "set/draft_vocab")
    (root / "set").rename(root / "data")
    return root


@pytest.fixture
def in_root(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(root)
    return root


def raw_drafter(setup: Setup) -> Drafter:
    """First weights of an EAGLE-3 drafter: what a peer's would be made of."""
    plain = dataclasses.replace(setup.params.drafter, fc_norm=False, norm_output=False)
    vocab = DraftVocab.read(setup.vocab_folder)
    return new_drafter(setup.inputs(setup.params.train, plain), setup.ends, vocab).eval()


def stand_in(folder: Path, drafter: Drafter) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: t.clone() for name, t in drafter_tensors(drafter).items() if name not in ("d2t", "t2d")}
    save_file(weights, folder / "weights.safetensors")
    script = folder / "python"
    script.write_text(STAND_IN.format(python=sys.executable, weights=folder / "weights.safetensors"))
    script.chmod(0o755)
    return str(script)


def test_a_peer_gets_the_packs_of_our_trainer_in_the_same_order(in_root: Path, tmp_path: Path) -> None:
    setup = Setup(in_root)
    peer = Peer("speculators", "unused", setup, (0, 5), tmp_path)
    files = json.loads((tmp_path / "speculators/states/eyas-export.json").read_text())["samples"]
    for seed in (0, 5):
        samples = [sample for sample in setup.reader.samples if sample.split == "train"]
        order = order_of(setup.reader, samples, setup.params.train.batch_tokens, seed)
        with BatchLoader(setup.reader, order.plan(Cursor())) as loader:
            ours = [[d.sample.sample_id for d in batch.documents] for batch in islice(loader, 12)]
        theirs = [[files[number]["sample_id"] for number in pack] for pack in peer._job["batches"][str(seed)][:12]]
        assert theirs == ours
    assert peer._job["batches"]["0"] != peer._job["batches"]["5"]
    setup.params.train.packs_per_step = 2
    double = Peer("speculators", "unused", setup, (0,), tmp_path / "double")._job["batches"]["0"]
    first, second, *_ = peer._job["batches"]["0"]
    assert double[0] == [*first, *second]
    weights = json.loads((tmp_path / "speculators/target/model.safetensors.index.json").read_text())["weight_map"]
    assert peer._job["embedding_key"] in weights
    assert peer._job["head_key"] in weights


def test_a_peers_drafter_is_judged_as_the_same_weights_of_ours_are(
    in_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Setup(in_root)
    drafter = raw_drafter(setup)
    pythons = {name: stand_in(tmp_path / name, drafter) for name in ("speculators", "specforge")}
    for name, python in pythons.items():
        monkeypatch.setenv(f"EYAS_PEER_{name.upper()}", python)
    figures = run(in_root, "train-quality", peers="speculators,specforge", num_seeds=2, jobs=3)
    expected = setup.judge(drafter)
    peers = [row for row in figures["rows"] if row["trainer"] != "eyas"]
    assert {(row["trainer"], row["budget"], row["seed"]) for row in peers} == {
        (name, budget, seed) for name in pythons for budget in ("steps", "time") for seed in (0, 1)
    }
    for row in peers:
        if not row["settings"].get("norm_before_residual"):
            assert {key: row[key] for key in expected} == expected
        steps = 3 if row["budget"] == "steps" else max(1, int(figures["ours_seconds"] / 0.01))
        assert row["num_steps"] == steps
    ours = [row for row in figures["rows"] if row["trainer"] == "eyas"]
    assert [(row["seed"], row["num_steps"]) for row in ours] == [(0, 3), (1, 3)]
    assert figures["tau"]["eyas, params.yaml, steps"] == {str(row["seed"]): row["tau"] for row in ours}
    assert json.loads((in_root / "reports/bench/train_quality.json").read_text()) == figures
    assert len(quality.table(figures).splitlines()) == 2 + 2 * len(variants(setup.params.train))


def test_the_residual_a_drafter_was_trained_with_decides_its_drafts(in_root: Path) -> None:
    setup = Setup(in_root)
    tensors = {name: t for name, t in drafter_tensors(raw_drafter(setup)).items() if name not in ("d2t", "t2d")}
    by_name = {variant.name: variant for variant in variants(setup.params.train) if variant.peer == "speculators"}
    runs = [PeerRun(variant=variant, budget="steps", seed=0, num_steps=1) for variant in by_name.values()]
    switches = {run.variant.name: to_drafter(tensors, run, setup).shape.norm_before_residual for run in runs}
    assert switches == {
        "its defaults": True,
        "its defaults, raw residual": False,
        "our AdamW": False,
        "our Muon": False,
    }


@pytest.mark.parametrize(
    ("ours", "adamw", "muon"),
    [
        (TrainConfig(), 1e-3, 2e-3),
        (TrainConfig(lr=3e-3), 1e-3, 3e-3),
        (TrainConfig(optimizer="adamw", lr=5e-4), 5e-4, 2e-3),
    ],
)
def test_a_peer_gets_the_rate_of_the_optimizer_it_has(ours: TrainConfig, adamw: float, muon: float) -> None:
    """Muon's rate costs AdamW 0.055 tau: a peer that has AdamW alone never gets it."""
    settings = {(variant.peer, variant.name): variant.settings for variant in variants(ours)}
    assert settings["specforge", "our AdamW rate and TTT"]["lr"] == adamw
    assert settings["specforge", "our AdamW rate and TTT"]["lr"] == adamw
    plain, beside = (settings["speculators", f"our {name}"]["ours"] for name in ("AdamW", "Muon"))
    assert plain["adamw_lr"] == beside["adamw_lr"] == adamw
    assert beside["muon_lr"] == muon
    assert "muon_lr" not in plain


def test_what_cannot_be_measured_is_said(in_root: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="peer 'other', expected some of speculators, specforge, or none"):
        run(in_root, "train-quality", peers="other", num_seeds=1, jobs=1)
    with pytest.raises(StoreError, match="nothing to train on"):
        Setup(tmp_path)
    setup = Setup(in_root)
    peer = Peer("specforge", stand_in(tmp_path / "bin", raw_drafter(setup)), setup, (0,), tmp_path)
    (first, *_) = [variant for variant in variants(setup.params.train) if variant.peer == "specforge"]
    unlucky = dataclasses.replace(first, settings={**first.settings, "lr": 13.0})
    with pytest.raises(EyasError, match="specforge ended with 1, expected 0:\nout of luck"):
        peer.train([PeerRun(variant=unlucky, budget="steps", seed=0, num_steps=1)])
    runs = [
        PeerRun(variant=v, budget="steps", seed=s, num_steps=1) for v, s in ((unlucky, 0), (first, 2), (unlucky, 1))
    ]
    given = []
    with pytest.raises(EyasError, match=r"(?s)out of luck.*out of luck") as caught:
        given.extend(train_all({"specforge": peer}, runs, jobs=1))
    assert [run.variant for run, _, _ in given] == [first], "what the others trained"
    assert str(caught.value.hint).count("see ") == 2


@pytest.fixture
def job_module(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("quality_job")


@pytest.mark.parametrize(("num_steps", "warmup_steps"), [(100, 20), (10, 20), (21, 20), (50, 0)])
def test_the_peers_schedule_is_ours(job_module, num_steps: int, warmup_steps: int) -> None:
    share = job_module.cosine(num_steps, warmup_steps, 0.02)
    for step in range(num_steps):
        assert share(step) * 2.0 == pytest.approx(learning_rate(step, num_steps, 2.0, warmup_steps, 0.02))


class Quadratic:
    """A peer that fits one number; its dataset are numbers."""

    def __init__(self, settings: dict, num_steps: int) -> None:
        self.value, self.settings, self.seen = torch.randn(()), settings, []

    def step(self, batch: list[int]) -> torch.Tensor:
        self.seen.append(batch)
        return self.value - len(self.seen)

    def weights(self) -> dict[str, torch.Tensor]:
        return {"value": self.value, "seen": torch.tensor([sum(batch) for batch in self.seen])}


def test_a_job_trains_its_steps_from_its_seed_on_its_packs(
    job_module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file

    runs = [
        {"name": str(i), "seed": seed, "num_steps": 5, "settings": {"a": i}, "out": str(tmp_path / str(i))}
        for i, seed in enumerate([0, 0, 1])
    ]
    job = {
        "device": "cpu",
        "num_workers": 0,
        "warm_steps": 2,
        "batches": {"0": [[1, 2], [3]], "1": [[0], [4]]},
        "runs": runs,
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    monkeypatch.setattr(sys, "argv", ["driver", str(tmp_path / "job.json")])
    job_module.run_job("torch", lambda _: (Quadratic, list(range(10)), list))
    done = [load_file(tmp_path / str(i) / "drafter.safetensors") for i in range(3)]
    assert [d["seen"].tolist() for d in done] == [[3, 3, 3, 3, 3], [3, 3, 3, 3, 3], [0, 4, 0, 4, 0]]
    assert torch.equal(done[0]["value"], done[1]["value"])
    assert not torch.equal(done[0]["value"], done[2]["value"])
    facts = json.loads((tmp_path / "2/facts.json").read_text())
    assert (facts["num_steps"], facts["settings"], len(facts["losses"])) == (5, {"a": 2}, 5)
    assert facts["losses"][4] == pytest.approx(float(done[2]["value"]) - 5, abs=1e-4)
    assert facts["seconds_per_step"] > 0


def test_drivers_import_nothing_of_eyas() -> None:
    for script in SCRIPTS.glob("*_quality.py"):
        assert "eyas." not in "".join(line for line in script.read_text().splitlines() if "import" in line)
