"""A target too large for a second copy: last states are judged by final norm and head alone, every fault by name."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from eyas.contracts import FinalNorm, TokenSample
from eyas.engines import check_start as start
from eyas.engines.base import CapturedSample
from eyas.errors import CaptureError
from eyas.target.load import TargetEnds
from fake_target import make_target

D, V, NUM_SAMPLES, T = 64, 400, 3, 40
SHARE_NEGATIVE = 0.35


@pytest.fixture
def ends(monkeypatch):
    """A head of unlike rows, a final norm with an outlier, a dead channel and negative ones."""
    generator = torch.Generator().manual_seed(0)
    head_VD = torch.randn(V, D, generator=generator)
    scale_D = 1 + 0.3 * torch.rand(D, generator=generator)
    scale_D[torch.rand(D, generator=generator) < SHARE_NEGATIVE] *= -1  # SmolLM2 has such channels too
    scale_D[3], scale_D[7] = 4.0, 0.0
    found = TargetEnds(embedding_VD=head_VD, head_VD=head_VD, final_norm_D=scale_D)
    monkeypatch.setattr(start, "read_ends", lambda folder: found)
    return found


def normed(rows_TD, scale_D):
    return rows_TD / rows_TD.pow(2).mean(dim=1, keepdim=True).sqrt() * scale_D


def inverted(scale_D):
    """What can be divided by."""
    return torch.where(scale_D == 0, 1.0, scale_D)


def captured(ends, shift=1):
    """States whose head reads token t + shift at row t, normed and scaled as a model does it."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for index in range(NUM_SAMPLES):
        ids_T = torch.randint(0, V, (T,), generator=generator)
        wanted_TD = ends.head_VD[torch.roll(ids_T, -shift)]
        rows_TD = wanted_TD / inverted(ends.final_norm_D)
        last_TD = normed(rows_TD, ends.final_norm_D).bfloat16()
        made.append(CapturedSample(f"s{index}", ids_T.int(), torch.ones(T, 3, D).bfloat16(), last_TD))
    return made


def changed(samples, change):
    return [dataclasses.replace(got, last_TD=change(got.last_TD.float()).bfloat16()) for got in samples]


@pytest.fixture
def target():
    norm = FinalNorm(kind="rms_norm", eps=1e-5, weight_offset=0.0, num_zero_scales=1)
    return dataclasses.replace(make_target(), hidden_size=D, vocab_size=V, final_norm=norm)


def test_states_after_the_norm_that_tell_the_next_token_pass(ends, target, tmp_path):
    assert start.check_by_head(target, tmp_path, captured(ends)) > 0.9


def test_a_scale_stored_less_one_is_added_to(ends, target, tmp_path, monkeypatch):
    """Gemma's norms: weight + 1."""
    samples = captured(ends)
    stored = dataclasses.replace(ends, final_norm_D=ends.final_norm_D - 1)
    monkeypatch.setattr(start, "read_ends", lambda folder: stored)
    offset = dataclasses.replace(target, final_norm=dataclasses.replace(target.final_norm, weight_offset=1.0))
    assert start.check_by_head(offset, tmp_path, samples) > 0.9
    with pytest.raises(CaptureError, match="not the last state after the final norm"):
        start.check_by_head(target, tmp_path, samples)


@pytest.mark.parametrize(
    "change",
    [
        lambda last_TD, scale_D: last_TD * 3,
        lambda last_TD, scale_D: last_TD / inverted(scale_D) * 7,
    ],
    ids=["longer", "before the norm"],
)
def test_a_wrong_norm_is_refused(ends, target, tmp_path, change):
    samples = changed(captured(ends), lambda last_TD: change(last_TD, ends.final_norm_D))
    with pytest.raises(CaptureError, match=r"has length \d+\.\d+, expected 1 within 0.05"):
        start.check_by_head(target, tmp_path, samples)


def test_a_state_normed_twice_has_the_right_length_and_is_refused(ends, target, tmp_path):
    """Its head still reads a quarter of SmolLM2's tokens; without the scale it reads what the right state tells."""
    samples = changed(captured(ends), lambda last_TD: normed(last_TD, ends.final_norm_D))
    with pytest.raises(CaptureError, match=r"last is normed twice"):
        start.check_by_head(target, tmp_path, samples)


@pytest.mark.parametrize(("shift", "found"), [(0, "t+0"), (-1, "t-1"), (2, "t+2")])
def test_rows_that_belong_to_a_neighbour_are_told_by_the_token_they_name(ends, target, tmp_path, shift, found):
    with pytest.raises(CaptureError, match=f"it reads token {found.replace('+', '[+]')} at row t"):
        start.check_by_head(target, tmp_path, captured(ends, shift))


def test_another_models_states_read_nothing(ends, target, tmp_path):
    generator = torch.Generator().manual_seed(2)

    def strangers(last_TD):
        return normed(torch.randn(last_TD.shape, generator=generator), ends.final_norm_D)

    with pytest.raises(CaptureError, match=r"expected 20% or more: it reads nothing else either"):
        start.check_by_head(target, tmp_path, changed(captured(ends), strangers))


class Given:
    """An engine that gives what it was made with."""

    def __init__(self, samples):
        self.samples = samples

    def capture(self, batch):
        assert [sample.sample_id for sample in batch] == [got.sample_id for got in self.samples]
        yield from reversed(self.samples)


def test_a_target_too_large_for_a_second_copy_is_judged_by_its_head(ends, target, tmp_path, monkeypatch, capsys):
    """The fallback is taken by size, and the samples' own checks come before it."""
    monkeypatch.setattr(start, "weight_bytes", lambda target: 60 << 30)
    monkeypatch.setattr(start, "available_bytes", lambda: 100 << 30)
    monkeypatch.setattr(start, "load_model", lambda *_: pytest.fail("a second copy was loaded"))
    got = captured(ends)
    samples = [
        TokenSample(
            sample_id=each.sample_id, conversation_id="c", source="x", split="train", variant="given",
            input_ids=tuple(each.input_ids_T.tolist()), loss_mask=(1,) * T,
        )
        for each in got
    ]  # fmt: skip

    def check(given):
        start.check_start(Given(given), samples, target, tmp_path, (1, 2, 3), dtype="bfloat16")

    check(got)
    assert "next tokens; the target is too large for more" in capsys.readouterr().err
    with pytest.raises(CaptureError, match="length"):
        check(changed(got, lambda last_TD: last_TD * 2))
    with pytest.raises(CaptureError, match="sample s0"):
        check([dataclasses.replace(got[0], last_TD=got[0].last_TD[1:]), *got[1:]])


@pytest.mark.parametrize(
    ("limit", "current", "expected"),
    [("max", 5 << 30, 8 << 30), (6 << 30, 5 << 30, 3 << 30), (1 << 40, 5 << 30, 8 << 30), (4 << 30, 7 << 30, 0)],
)
def test_memory_is_what_the_container_has_left(tmp_path, limit, current, expected):
    """8 GiB are free on the machine; of what the container uses 2 GiB are cached files, which give way."""
    (tmp_path / "meminfo").write_text(f"MemTotal: {16 << 20} kB\nMemAvailable: {8 << 20} kB\n")
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{current}\n")
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {2 << 30}\n")
    assert start.available_bytes(tmp_path, tmp_path) == expected


def test_without_a_container_the_machine_decides(tmp_path):
    (tmp_path / "meminfo").write_text(f"MemAvailable: {8 << 20} kB\n")
    assert start.available_bytes(tmp_path, tmp_path / "absent") == 8 << 30
