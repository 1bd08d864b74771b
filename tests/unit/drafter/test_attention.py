"""The attention of all steps against torch's own, over one explicit mask."""

import pytest
import torch
import torch.nn.functional as F
from drafter_world import ENDS_OPEN, LONG, TWO_SPANS
from torch.nn.attention import SDPBackend, sdpa_kernel

from eyas.drafter import spans
from eyas.drafter.attention import Keys, attend
from eyas.drafter.rows import Document, pack_documents

H, G, K, S = 4, 2, 8, 3


def make_pack(multiple=1):
    documents = []
    for mask in (TWO_SPANS, [0, 1], LONG, ENDS_OPEN):
        T = len(mask)
        documents.append(Document(torch.zeros(T).long(), torch.tensor(mask), torch.zeros(T, 1, 1), torch.zeros(T, 1)))
    return pack_documents(documents, S, multiple)


def make_tensors(pack):
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return (
        [randn(n, H, K) for n in pack.num_rows],
        randn(len(pack.ids_T), 2 * G, K),
        randn(S - 1, pack.num_rows[1], 2 * G, K),
        [randn(n, H, K) for n in pack.num_rows],
    )


def ours(pack, queries, shared_TCK, own, grads):
    """Mixed values of every step; gradients of queries, step-0 keys and values, own keys and values."""
    keys = Keys(pack, (G, K), shared_TCK)
    queries = [q.clone().requires_grad_() for q in queries]
    keys.shared_TCK = shared = shared_TCK.clone().requires_grad_()
    keys.own.copy_(own)
    mixed = [attend(q, keys, k) for k, q in enumerate(queries)]
    kept = keys.grad_own  # summed here as the backward pass comes by, forgotten at its end
    torch.autograd.backward(mixed, grads)
    return [*mixed, *(q.grad for q in queries), shared.grad, kept]


def theirs(backend, pack, queries, shared_TCK, own, grads):
    """Every key of every row and step side by side, and a mask that says who sees whom."""
    queries = [q.clone().requires_grad_() for q in queries]
    shared, own = shared_TCK.clone().requires_grad_(), own.clone().requires_grad_()
    places = pack.rows_R.tolist()
    begin = {t: span.start for span in pack.documents for t in range(span.start, span.end)}
    padding = len(begin)
    mixed = []
    for k, q_RHK in enumerate(queries):
        R = len(q_RHK)
        both = torch.cat([shared, *(step_RCK[:R] for step_RCK in own[:k])]).repeat_interleave(H // G, 1)
        sees = torch.zeros(R, len(both), dtype=torch.bool)
        for row in range(R):
            sees[row, begin.get(places[row], padding) : places[row] + 1] = True
            sees[row, [len(shared) + step * R + row for step in range(k)]] = True
        with sdpa_kernel(backend):
            mixed.append(
                F.scaled_dot_product_attention(
                    q_RHK.transpose(0, 1)[None],
                    both[:, :H].transpose(0, 1)[None],
                    both[:, H:].transpose(0, 1)[None],
                    attn_mask=sees[None, None],
                )[0].transpose(0, 1)
            )
    torch.autograd.backward(mixed, grads)
    return [*mixed, *(q.grad for q in queries), shared.grad, own.grad]


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], ids=["eager", "flash"])
@pytest.mark.parametrize("tile", [(1, 1), (4, 8), (128, 128)])
@pytest.mark.parametrize("multiple", [1, 8])
def test_every_path_gives_the_same_values_and_gradients(monkeypatch, backend, tile, multiple):
    """Case 65: in tiles of any size, by torch's eager and flash attention over an explicit mask."""
    monkeypatch.setattr(spans, "TILE_ROWS", tile[0])
    monkeypatch.setattr(spans, "TILE_KEYS", tile[1])
    pack = make_pack(multiple)
    tensors = make_tensors(pack)
    for found, expected in zip(ours(pack, *tensors), theirs(backend, pack, *tensors), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("multiple", [1, 8])
def test_plans_of_kernels_say_the_same_as_tiles(multiple):
    """Kernels read intervals, torch reads tiles: both from one plan, which here is counted by hand."""
    pack = make_pack(multiple)
    T = len(pack.ids_T)
    begins, ends = [pack.documents[-1].end] * T, [T] * T
    for span in pack.documents:
        for t in range(span.start, span.end):
            begins[t], ends[t] = span.start, span.end
    for k, plan in enumerate(pack.attention):
        places = pack.rows_R[: pack.num_rows[k]].tolist()
        assert plan.places_R.tolist() == sorted(places)
        assert [places[row] for row in plan.order_R.tolist()] == sorted(places)
        assert plan.begins_R.tolist() == [begins[t] for t in sorted(places)]
        assert plan.ends_T.tolist() == ends
        assert plan.rows_before_X.tolist() == [sum(place < t for place in places) for t in range(T + 1)]
