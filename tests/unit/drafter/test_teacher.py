"""The target's choice over the whole vocab when the head comes by in pieces, as a GPU has it."""

import pytest
import torch

from eyas.drafter import teacher
from eyas.drafter.teacher import TargetHead, cut_head, streamed_ids, teacher_ids

CPU = torch.device("cpu")


def small_integers(*shape, seed):
    """Products of these are exact in any dtype, and equal logits are common."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def first_of_the_highest(last_TD, head_VD):
    """Argmax counted in integers: the first id whose logit no other exceeds."""
    logits = (last_TD.long()[:, None] * head_VD.long()[None]).sum(-1).tolist()
    return [row.index(max(row)) for row in logits]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("piece", [1, 7, 64, 200])
def test_of_equal_logits_the_first_id_is_chosen_across_pieces(piece, dtype, monkeypatch):
    monkeypatch.setattr(teacher, "PIECE_LOGITS", 64 * piece)  # and several chunks of rows a piece
    last_TD, head_VD = small_integers(150, 3, seed=1), small_integers(100, 3, seed=2)
    expected = first_of_the_highest(last_TD, head_VD)
    pieces = list(head_VD.to(dtype).split(piece))
    assert streamed_ids(last_TD.to(dtype), pieces, CPU).tolist() == expected
    assert teacher_ids(last_TD, head_VD).tolist() == expected
    logits_TV = last_TD @ head_VD.T
    ties_T = (logits_TV == logits_TV.amax(1, keepdim=True)).sum(1)
    assert int((ties_T > 1).sum()) > 50, "the case has ties"


def test_logits_of_bfloat16_factors_are_not_rounded():
    """256 and 257 are one number in bfloat16, and the first of them would win."""
    head_VD = torch.tensor([[256.0, 0.0], [256.0, 1.0]]).bfloat16()
    last_TD = torch.ones(1, 2).bfloat16()
    assert streamed_ids(last_TD, [head_VD], CPU).tolist() == [1]
    assert streamed_ids(last_TD, list(head_VD.split(1)), CPU).tolist() == [1]


def test_negative_logits_and_no_rows():
    head_VD = -torch.tensor([[3.0], [1.0], [2.0]])
    assert streamed_ids(torch.ones(2, 1), list(head_VD.split(1)), CPU).tolist() == [1, 1]
    assert streamed_ids(torch.ones(0, 1), [head_VD], CPU).tolist() == []


def test_pieces_are_the_head_and_small(monkeypatch):
    monkeypatch.setattr(teacher, "PIECE_BYTES", 1000)
    head_VD = torch.randn(100, 4).bfloat16()
    pieces = cut_head(head_VD)
    assert torch.equal(torch.cat(pieces), head_VD)
    assert [len(piece) for piece in pieces] == [100]
    monkeypatch.setattr(teacher, "PIECE_BYTES", 256)
    assert [len(piece) for piece in cut_head(head_VD)] == [32, 32, 32, 4]
    monkeypatch.setattr(teacher, "PIECE_LOGITS", 64 * 20)
    assert max(len(piece) for piece in cut_head(head_VD)) == 20


def test_a_cpu_is_asked_as_before_to_the_bit():
    head_VD, last = torch.randn(300, 8), [torch.randn(T, 8).bfloat16() for T in (5, 0, 70)]
    for found, last_TD in zip(TargetHead(head_VD, CPU).ids(last), last, strict=True):
        assert torch.equal(found, teacher_ids(last_TD, head_VD))


@pytest.mark.gpu
@pytest.mark.parametrize("exact", [True, False])
def test_a_gpu_streams_the_head_and_keeps_none_of_it(exact, monkeypatch):
    """The same ids as a float32 head gives; 64 MiB of head never lie on the device at a time."""
    monkeypatch.setattr(teacher, "PIECE_BYTES", 1 << 20)
    monkeypatch.setattr(teacher, "PIECE_LOGITS", 1 << 20)
    V, D = 1 << 18, 64
    last = [small_integers(T, D, seed=T) for T in (100, 1, 333)]
    head_VD = small_integers(V, D, seed=5) + (0 if exact else 2.0**-12)  # not in bfloat16, yet exact in float32
    head = TargetHead(head_VD, torch.device("cuda", torch.cuda.current_device()))
    head.ids([last[1].bfloat16()])  # libraries take their workspaces
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = head.ids([last_TD.bfloat16() for last_TD in last])
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() - before < V * D * 2 // 2
    for ids_T, last_TD in zip(found, last, strict=True):
        assert torch.equal(ids_T, teacher_ids(last_TD, head_VD))
