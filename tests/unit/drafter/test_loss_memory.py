"""What a step holds in memory, from the allocator's own account."""

import dataclasses

import pytest
import torch
from drafter_world import SHAPE
from torch.profiler import ProfilerActivity, profile

from eyas.drafter import loss, spans
from eyas.drafter.loss import ttt_loss
from eyas.drafter.model import Drafter
from eyas.drafter.objective import Objective
from eyas.drafter.rows import Document, pack_documents

T, W, S = 256, 4096, 3
CHUNK_POSITIONS = 8
ALL_LOGITS_BYTES = 4 * T * W  # of one step, or of the teacher


def peak_bytes(step):
    """Most bytes allocated at a time while ``step`` runs, above what was there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        step()
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def make_step(chosen, measure=True):
    torch.manual_seed(0)
    drafter = Drafter(dataclasses.replace(SHAPE, vocab_size=W, draft_vocab_size=W))
    drafter.set_target(torch.randn(W, 16).bfloat16(), torch.zeros(W), torch.ones(W))
    drafter.lm_head.weight.requires_grad_(False)
    document = Document(torch.zeros(T, dtype=torch.int64), torch.ones(T), torch.randn(T, 3, 16), torch.randn(T, 16))
    pack, teacher_WD = pack_documents([document], S), torch.randn(W, 16)

    def step():
        drafter.zero_grad()
        ttt_loss(drafter, pack, teacher_WD, 0.8, measure=measure, objective=chosen)[0].backward()

    return step


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(loss, "CHUNK_LOGITS", (S + 1) * CHUNK_POSITIONS * W)
    monkeypatch.setattr(spans, "TILE_ROWS", 32)
    monkeypatch.setattr(spans, "TILE_KEYS", 32)


ROW_BYTES = 4 * S * (12 * 16 + 4 * 24 + 3 * 64)
"""What the layer keeps of a row at all steps: about a dozen times the width, the MLP, queries, keys and values."""


@pytest.mark.parametrize(
    "chosen", [Objective(), Objective("ce"), Objective("lk"), Objective(top_k=8), Objective("lk", 8)], ids=str
)
def test_peak_memory_stays_under_the_computed_bound(small_chunks, chosen):
    """Case 72: three copies of a chunk's logits and the layer's rows, far below logits of all tokens."""
    bound_bytes = 3 * 4 * (S + 1) * CHUNK_POSITIONS * W + T * ROW_BYTES
    assert bound_bytes < ALL_LOGITS_BYTES
    assert peak_bytes(make_step(chosen)) < bound_bytes


def test_chunks_of_all_tokens_would_show(monkeypatch, small_chunks):
    """The negative control of the measurement."""
    monkeypatch.setattr(loss, "CHUNK_LOGITS", 1 << 30)
    assert peak_bytes(make_step(Objective(), measure=False)) > (S + 1) * ALL_LOGITS_BYTES
