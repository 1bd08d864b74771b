"""The bench of ranks: what it calls right. It was run whole against real servers of one and two ranks; that takes minutes."""

from __future__ import annotations

import pytest
import torch

from eyas.ops.bench import ranks
from eyas.ops.bench.random_target import BOUNDARIES, MLA_SHAPES, SHAPES, identity

NAMES = ("aux 2", "last")


@pytest.fixture
def exact():
    torch.manual_seed(0)
    return {name: torch.randn(50, 2, 64) for name in ("a", "b")}


def off_by(states, error, seed):
    """Each row moved by ``error`` of its own length, in a direction of its own."""
    draw = torch.Generator().manual_seed(seed)
    moved = {}
    for name, rows_TND in states.items():
        way_TND = torch.randn(rows_TND.shape, generator=draw)
        way_TND *= rows_TND.norm(dim=-1, keepdim=True) / way_TND.norm(dim=-1, keepdim=True)
        moved[name] = rows_TND + error * way_TND
    return moved


def test_ranks_as_far_from_float32_as_one_rank_are_right(exact):
    """Two errors of .01 in random directions lie .014 apart: a difference above the spread alone says nothing."""
    one = off_by(exact, 0.01, 1)
    found = ranks.verdict({"tp1": one, "again": one, "tp2": off_by(exact, 0.01, 2), "exact": exact}, NAMES, "tp2")
    assert found["right"]
    for stream in found["streams"].values():
        assert stream["rows"] == 100
        assert stream["spread"] == 0
        assert stream["equal_rows_spread"] == 1
        assert stream["error_one_rank"] == pytest.approx(0.01, rel=1e-3)
        assert stream["difference"] == pytest.approx(0.01 * 2**0.5, rel=0.05)


def test_a_stream_that_strays_is_not_right_and_named(exact):
    one, stray = off_by(exact, 0.01, 1), off_by(exact, 0.01, 2)
    for rows_TND in stray.values():
        rows_TND[:, 1] += 0.02 * rows_TND[:, 1]
    found = ranks.verdict({"tp1": one, "again": one, "tp2": stray, "exact": exact}, NAMES, "tp2")
    assert not found["right"]
    assert [name for name, stream in found["streams"].items() if not stream["right"]] == ["last"]


def test_a_partial_sum_is_not_right(exact):
    """What a rank holds before the sum over ranks: half of the state."""
    half = {name: rows_TND / 2 for name, rows_TND in exact.items()}
    found = ranks.verdict({"tp1": exact, "again": exact, "tp2": half, "exact": exact}, NAMES, "tp2")
    assert not found["right"]
    assert found["streams"]["last"]["difference"] == pytest.approx(0.5)


def test_float32_is_judged_by_its_own_rounding(exact):
    one, other = off_by(exact, 1e-8, 1), off_by(exact, 3e-7, 2)
    assert ranks.verdict({"tp1": one, "again": one, "tp2": other, "exact": exact}, NAMES, "tp2")["right"]


def test_every_shape_has_boundaries_inside_of_its_layers():
    for name in (*SHAPES, *MLA_SHAPES):
        target = identity(name)
        assert all(0 < boundary < target.num_layers for boundary in BOUNDARIES[name])
        assert target.model_type == ("llama" if name in SHAPES else "deepseek_v3")


def test_nothing_that_it_starts_uses_nvlink_multicast(monkeypatch, tmp_path):
    """Set for the server before it starts, beside what the user gave it."""

    class StartedError(Exception):
        pass

    seen = {}

    class Engine:
        def __init__(self, *_, **__):
            seen.update(ranks.os.environ)
            raise StartedError

    monkeypatch.setattr(ranks, "SglangEngine", Engine)
    for name in (*ranks.NO_MULTICAST, ranks.ARGUMENTS_VARIABLE):
        monkeypatch.setenv(name, "--mem-fraction-static 0.5" if name == ranks.ARGUMENTS_VARIABLE else "1")
    monkeypatch.setattr("sys.argv", ["ranks", "--device", "cpu", "--tokens", "100", "--work", str(tmp_path)])
    with pytest.raises(StartedError):
        ranks.main()
    assert seen["NCCL_NVLS_ENABLE"] == "0"
    assert seen["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
    arguments = seen[ranks.ARGUMENTS_VARIABLE].split()
    assert arguments == ["--mem-fraction-static", "0.5", "--enforce-disable-flashinfer-allreduce-fusion"]
