"""Whole trainings on a GPU: the numbers of a CPU, in the memory of a step."""

import gc
import json

import pytest
import torch
import train_world as world
from safetensors.torch import load_file, save_file
from test_train_objective import crash_at
from test_train_validation import rows_of

from eyas.config.schema import DrafterConfig
from eyas.drafter import teacher
from eyas.drafter.teacher import TargetHead
from eyas.drafter.weights import FlatWeights
from eyas.target.load import read_ends
from eyas.tokens.draft_vocab import DraftVocab
from eyas.train.data import Packer
from eyas.train.distributed import World
from eyas.train.loop import Trainer, teacher_of
from eyas.train.packs import Placer
from eyas.train.run import new_drafter

VALIDATED = {"validation_share": 0.25, "validate_every": 3, "keep": "best", "num_steps": 12}
KINDS = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "a head that trains": {"train_head": True},
    "muon": {"optimizer": "muon"},
    "two packs a step": {"packs_per_step": 2},
}


def inputs_of(folder, **changes):
    return world.make_inputs(folder, drafter=DrafterConfig(head_dim=16), **(VALIDATED | changes))


@pytest.fixture
def large_vocab(monkeypatch):
    """A head of 256 MB in float32 beside which everything else is small; ids past 60 are seldom the choice."""
    monkeypatch.setattr(world, "V", 250_000)
    monkeypatch.setattr(world, "D", 256)
    monkeypatch.setattr(teacher, "PIECE_BYTES", 1 << 20)
    monkeypatch.setattr(teacher, "PIECE_LOGITS", 1 << 20)
    real = world.make_target

    def make_target(folder):
        if not folder.exists():
            real(folder)
            tensors = load_file(folder / "model.safetensors")
            tensors["model.embed_tokens.weight"][60:] *= 0.01
            save_file(tensors, folder / "model.safetensors")

    monkeypatch.setattr(world, "make_target", make_target)


def workspaces():
    """Bytes that products have of the device, 32 MiB a stream and thread on a large one; they are given back."""
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    return before - torch.cuda.memory_allocated()


def run_measured(monkeypatch, folder, **changes):
    """A run on the GPU: bytes it held before its first step, and the most it held, both without workspaces."""
    real, held = Trainer.run, []
    workspaces()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()

    def run(trainer):
        held.append(torch.cuda.memory_allocated() - before)
        return real(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "run", run)
        world.run(folder, inputs_of(folder, device="cuda", **changes))
    most = torch.cuda.max_memory_allocated() - before
    return held[0], most - workspaces()


def losses_of(folder):
    return json.loads((folder / "metrics" / "metrics.json").read_text())["loss"]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_trains_as_a_cpu_does_and_holds_no_head(kind, tmp_path, large_vocab, monkeypatch):
    """Cases 65 and 72: with validation and the best kept; a run that broke off ends like one that did not."""
    pytest.importorskip("triton")
    changes, head_bytes = KINDS[kind], world.V * world.D * 4
    cpu, gpu, broken = (tmp_path / name for name in ("cpu", "gpu", "broken"))
    world.run(cpu, inputs_of(cpu, **changes))
    held, peak = run_measured(monkeypatch, gpu, **changes)
    assert held < head_bytes // 16
    assert peak < head_bytes // 2, "not even in bfloat16"
    tolerance = 2e-3 if kind == "float32" else 5e-2
    # a loss near 0, as Muon reaches it here, is rounding
    assert losses_of(gpu) == pytest.approx(losses_of(cpu), rel=tolerance, abs=1e-3)
    assert rows_of(gpu, "tau").keys() == rows_of(cpu, "tau").keys()
    assert rows_of(gpu, "tau")[3] == pytest.approx(rows_of(cpu, "tau")[3], abs=0.1)
    with monkeypatch.context() as patch:
        crash_at(patch, 10 if kind == "two packs a step" else 6)
        with pytest.raises(RuntimeError, match="power cut"):
            world.run(broken, inputs_of(broken, device="cuda", **changes))
    world.run(broken, inputs_of(broken, device="cuda", **changes))
    assert losses_of(broken) == pytest.approx(losses_of(gpu), rel=1e-4, abs=1e-5)
    whole, resumed = (load_file(folder / "drafter" / "drafter.safetensors") for folder in (gpu, broken))
    for name, tensor in whole.items():
        torch.testing.assert_close(resumed[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


# ── what makes that so, on any machine ────────────────────────────────────────────────────────


class CountedHead(TargetHead):
    """Remembers how many documents came at a time."""

    calls: list[int]

    def ids(self, documents):
        self.calls = [*getattr(self, "calls", []), len(documents)]
        return super().ids(documents)


def test_the_head_is_asked_once_for_a_whole_pack_and_never_again(tmp_path):
    inputs = world.make_inputs(tmp_path)
    ends, vocab = read_ends(inputs.target_folder), DraftVocab.read(inputs.vocab_folder)
    head = CountedHead(ends.head_VD, torch.device("cpu"))
    packer = Packer(head, vocab.t2d_V, ends.embedding_VD)
    documents = [inputs.reader.read(sample.sample_id) for sample in inputs.reader.samples]
    packer(documents[:4], 3)
    packer(documents[2:6], 3)
    packer(documents[:6], 3)
    assert head.calls == [4, 2]
    packer(documents[6:8], 3, mask_oov=False)
    assert head.calls == [4, 2]
    packer.argmaxes(documents[6:8])
    packer(documents[6:8], 3)
    assert head.calls == [4, 2, 2]


def test_validations_ask_once_a_run(tmp_path, monkeypatch):
    calls = []
    real = TargetHead.ids
    monkeypatch.setattr(TargetHead, "ids", lambda head, last: (calls.append(len(last)), real(head, last))[1])
    inputs = world.make_inputs(tmp_path, **(VALIDATED | {"validate_every": 1}))
    world.run(tmp_path, inputs)
    # every sample that is not held out, be it trained on or validated with
    assert sum(calls) == sum(sample.split == "train" for sample in inputs.reader.samples)


def test_a_head_in_pieces_trains_the_same_to_the_bit(tmp_path, monkeypatch):
    """The choice is all that the head is for; here through the way of a GPU."""
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    world.run(whole, world.make_inputs(whole, **VALIDATED))
    head_VD = read_ends(whole / "target").head_VD

    def ids(head, documents):
        found = teacher.streamed_ids(torch.cat(documents), head_VD.split(7), head.device)
        return found.split([len(last_TD) for last_TD in documents])

    monkeypatch.setattr(TargetHead, "ids", ids)
    world.run(pieces, world.make_inputs(pieces, **VALIDATED))
    assert world.result_bytes(pieces) == world.result_bytes(whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_teacher_is_the_frozen_head_when_it_holds_the_targets_rows(tmp_path, dtype):
    inputs = world.make_inputs(tmp_path)
    ends, vocab = read_ends(inputs.target_folder), DraftVocab.read(inputs.vocab_folder)
    rows_WD = ends.head_VD[torch.arange(world.W) * 2].to(dtype)

    def teacher_and_head(change=0.0, trains=False):
        drafter = new_drafter(inputs, ends, vocab)
        drafter.lm_head.weight.requires_grad_(False)[3, 5] += change
        drafter.lm_head.weight.requires_grad_(trains)
        weights = FlatWeights(drafter, dtype)
        return teacher_of(drafter, weights, ends.head_VD), weights.products().head.value

    for change, trains, shared in ((0.0, False, True), (1.0, False, False), (0.0, True, False)):
        teacher_WD, head_WE = teacher_and_head(change, trains)
        assert torch.equal(teacher_WD, rows_WD)
        assert teacher_WD.dtype == dtype
        assert (teacher_WD.data_ptr() == head_WE.data_ptr()) is shared


def test_a_worlds_device_has_an_index(monkeypatch):
    """``torch.cuda.set_device``, which the packing thread calls, takes no device without one."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert World(0, 1, torch.device("cuda")).device == torch.device("cuda", 3)
    assert World(0, 1, torch.device("cuda", 1)).device == torch.device("cuda", 1)
    assert World(0, 1, torch.device("cpu")).device == torch.device("cpu")


def test_a_placed_pack_is_handed_over(tmp_path):
    """Whoever holds the step does not hold its first pack: with several packs it would stay through all of them."""
    inputs = world.make_inputs(tmp_path)
    ends, vocab = read_ends(inputs.target_folder), DraftVocab.read(inputs.vocab_folder)
    packer = Packer(TargetHead(ends.head_VD, torch.device("cpu")), vocab.t2d_V, ends.embedding_VD)
    pack = packer([inputs.reader.read(inputs.reader.samples[0].sample_id)], 3)
    placed = Placer(torch.device("cpu"))(pack)
    assert placed.take() is pack
    assert placed.pack is None
