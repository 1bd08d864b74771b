"""The peers' own readers, from PyPI, give back what eyas holds: speculators 0.3, 0.4, 0.9 and SpecForge 0.2.

Each peer gets a venv of its own that borrows torch and the like from the running one; skipped when PyPI is out of reach.
"""

from __future__ import annotations

import os
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch
from layout_cases import World
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

OLD_TRANSFORMERS = ("transformers==4.57.1", "tokenizers==0.22.1", "huggingface-hub==0.36.0")
PEERS = {
    # Packages without their dependencies, then packages with them.
    "speculators-0.3.0": (("speculators==0.3.0", *OLD_TRANSFORMERS), ("loguru", "pydantic-settings")),
    "speculators-0.4.0": (("speculators==0.4.0", *OLD_TRANSFORMERS), ("loguru", "pydantic-settings")),
    "speculators-0.9.0": (("speculators==0.9.0", "hs-connectors==0.9.0"), ("loguru", "openai", "pydantic-settings")),
    "specforge-0.2.0": (("specforge==0.2.0",), ()),
}
READ_V1 = """
import sys, torch
from pathlib import Path
from safetensors.torch import save_file
from speculators.train import data
data_class = data.Eagle3SampleFileDataset
options = dict(max_len=4096, datapath=sys.argv[1], hidden_states_dtype=torch.bfloat16)
dataset = data_class(**options)
lengths = list(dataset.approx_lengths)
for place, path in enumerate(dataset.data):
    item = dataset[place]
    item["approx_length"] = torch.tensor([lengths[place]])
    save_file({k: v.contiguous() for k, v in item.items()}, Path(sys.argv[2]) / f"{Path(path).stem[5:]}.safetensors")
"""
READ_SPECULATORS = """
import sys, torch
from pathlib import Path
from safetensors.torch import save_file
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import ArrowDataset
for split in ("train", "val"):
    dataset = ArrowDataset(4096, sys.argv[1], on_missing="raise", train_ratio=float(sys.argv[3]), split=split)
    for place in range(len(dataset)):
        item = shift_batch(dataset[place])
        item["approx_length"] = torch.tensor([dataset.approx_lengths[place]])
        item["is_train"] = torch.tensor([split == "train"])
        name = f"{place + dataset.start_file_idx}.safetensors"
        save_file({k: v.contiguous() for k, v in item.items()}, Path(sys.argv[2]) / name)
"""
READ_SPECFORGE = """
import sys, torch
from pathlib import Path
from safetensors.torch import save_file
from specforge.data.preprocessing import build_offline_eagle3_dataset, process_offline_eagle3_sample
from specforge.runtime.data_plane import LocalFeatureStore, OfflineManifestReader
dataset = build_offline_eagle3_dataset(sys.argv[1], max_len=4096)
store = LocalFeatureStore()
refs = OfflineManifestReader(sys.argv[1], validate_files=True).read()
assert len(refs) == len(dataset)
for place, path in enumerate(dataset.datapaths):
    item = dataset[place]
    raw = next(part for part in store.get(refs[place]) if isinstance(part, dict))
    again = process_offline_eagle3_sample(raw, 4096)
    assert all(torch.equal(item[key], again[key]) for key in item), path
    save_file({k: v.contiguous() for k, v in item.items()}, Path(sys.argv[2]) / f"{Path(path).stem[5:]}.safetensors")
"""


@pytest.fixture(scope="module")
def peer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("peers")


def python_of(folder: Path, peer: str) -> Path:
    """A venv with the peer in it, made once per run."""
    python = folder / peer / "bin/python"
    if python.exists():
        return python
    venv.create(folder / peer, with_pip=False)
    (own,) = (folder / peer).glob("lib/python*/site-packages")
    (own / "borrowed.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    alone, with_needs = PEERS[peer]
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--disable-pip-version-check"]
    for options in (["--no-deps", "--ignore-installed", *alone], list(with_needs)):
        done = subprocess.run([*pip, *options], capture_output=True, text=True, check=False) if options else None
        if done is not None and done.returncode:
            python.unlink()
            pytest.skip(f"{peer} cannot be installed from PyPI here: {done.stderr.strip().splitlines()[-1]}")
    return python


def read_by(folder: Path, peer: str, script: str, *arguments: str) -> None:
    python = python_of(folder, peer)
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environment = kept | {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [python, "-c", script, *arguments], env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    (tmp_path / "read").mkdir()
    return World(tmp_path, monkeypatch, [5, 7, 4, 30, 12, 9, 15, 22])


def normed(pre_TD: torch.Tensor, scale_D: torch.Tensor) -> torch.Tensor:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm = LlamaRMSNorm(len(scale_D), eps=1e-5)
    norm.weight.data = scale_D.float()
    return norm(pre_TD.float()).detach()


def check_shifted(world: World, index: int, item: dict[str, torch.Tensor], *, pre_norm: bool) -> None:
    """The peer's row j holds token j+1, aux j, last j+1, mask j+1."""
    stored = world.stored()[index]
    assert torch.equal(item["input_ids"], stored.input_ids_T[1:].long())
    assert torch.equal(item["hidden_states"], stored.aux_TAD[:-1].flatten(1))
    assert torch.equal(item["loss_mask"].long(), stored.loss_mask_T[1:].long())
    assert item["position_ids"].tolist() == list(range(1, stored.sample.num_tokens))
    assert item["lengths"].tolist() == [stored.sample.num_tokens - 1]
    last_TD = item["verifier_last_hidden_states"]
    if pre_norm:
        again_TD, expected_TD = normed(last_TD, world.scale_D), stored.last_TD[1:].float()
        assert torch.allclose(again_TD, expected_TD, rtol=2**-7, atol=1e-3)
        assert not torch.equal(last_TD, stored.last_TD[1:])
    else:
        assert torch.equal(last_TD, stored.last_TD[1:])


@pytest.mark.parametrize("version", ["0.3.0", "0.4.0"])
def test_speculators_v1_reader(world: World, peer_folder: Path, version: str) -> None:
    """Cases 40 and 41 with the peer's own class."""
    world.export("speculators_v1", version)
    read_by(peer_folder, f"speculators-{version}", READ_V1, str(world.root / "out"), str(world.root / "read"))
    items = {int(path.stem): load_file(path) for path in (world.root / "read").iterdir()}
    assert sorted(items) == list(range(8))
    for index, item in items.items():
        check_shifted(world, index, item, pre_norm=version == "0.4.0")
        if version != "0.3.0":  # which guesses from file sizes
            assert int(item["approx_length"]) == world.stored()[index].sample.num_tokens


def test_speculators_reader(world: World, peer_folder: Path) -> None:
    record = world.export("speculators").record
    ratio = str(record.num_train_samples / record.num_samples)
    out, read = str(world.root / "out"), str(world.root / "read")
    read_by(peer_folder, "speculators-0.9.0", READ_SPECULATORS, out, read, ratio)
    items = {int(path.stem): load_file(path) for path in (world.root / "read").iterdir()}
    assert sorted(items) == list(range(8))
    for index, item in items.items():
        check_shifted(world, index, item, pre_norm=True)
        stored = world.stored()[index].sample
        assert int(item["approx_length"]) == stored.num_tokens
        assert bool(item["is_train"]) == (stored.split == "train")


def test_specforge_readers(world: World, peer_folder: Path) -> None:
    world.export("specforge")
    read_by(peer_folder, "specforge-0.2.0", READ_SPECFORGE, str(world.root / "out"), str(world.root / "read"))
    items = {int(path.stem): load_file(path) for path in (world.root / "read").iterdir()}
    assert sorted(items) == list(range(8))
    for index, item in items.items():
        stored = world.stored()[index]
        assert torch.equal(item["input_ids"][0], stored.input_ids_T.long())
        assert torch.equal(item["hidden_state"][0], stored.aux_TAD.flatten(1))
        assert torch.equal(item["target"][0], stored.last_TD)
        expected_T = stored.loss_mask_T.long().clone()
        expected_T[-1] = 0  # the peer never trains its last row
        assert torch.equal(item["loss_mask"][0], expected_T)
