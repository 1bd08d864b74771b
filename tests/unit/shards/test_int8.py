"""The codec int8 against an implementation in numpy, its calibration, its effect on distributions."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_cases import make_capture, make_plan, make_states, make_tokens, store

from eyas.errors import CaptureError, StoreError
from eyas.ops.bench.int8 import measure, spread
from eyas.shards.calibration import (
    Calibration,
    calibration_samples,
    make_calibration,
    read_calibration,
    write_calibration,
)
from eyas.shards.codecs import make_codec
from eyas.shards.effect import Rows, measure_effect
from eyas.shards.int8 import Int8Codec, num_groups, piece_bytes
from eyas.shards.reader import ShardReader

BF16_EPS = 2.0**-8


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Upper 16 bits of float32 after rounding half to even, as uint16: bf16 by its definition."""
    bits = values.astype("<f4").view("<u4").astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def from_bf16(halves: np.ndarray) -> np.ndarray:
    return (halves.astype("<u4") << 16).view("<f4")


def reference_encode(rows: np.ndarray, channels: np.ndarray) -> bytes:
    """The docstring's layout in numpy, group by group."""
    inverse = np.float32(1) / channels
    values, scales = [], []
    for row in rows:
        scaled = row * inverse
        for begin in range(0, len(row), 64):
            group = scaled[begin : begin + 64]
            scale = np.maximum(np.abs(group).max() / np.float32(127), np.float32(2.0**-80))
            half = to_bf16(np.array([scale]))
            scales.append(half)
            values.append(np.rint(group * (np.float32(1) / from_bf16(half))).astype(np.int8))
    return np.concatenate(values).tobytes() + np.concatenate(scales).tobytes()


def reference_decode(data: bytes, num_rows: int, channels: np.ndarray) -> np.ndarray:
    D = len(channels)
    G = math.ceil(D / 64)
    values = np.frombuffer(data, np.int8, num_rows * D).reshape(num_rows, D).astype(np.float32)
    scales = from_bf16(np.frombuffer(data, "<u2", num_rows * G, num_rows * D)).reshape(num_rows, G)
    return from_bf16(to_bf16(values * scales.repeat(64, axis=1)[:, :D] * channels))


def heavy_tailed(num_rows: int, hidden_size: int, seed: int, spread: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_rows, hidden_size, generator=generator)
    return (rows * torch.exp(spread * torch.randn(hidden_size, generator=generator))).bfloat16()


def channel_scales(rows_RD: torch.Tensor) -> torch.Tensor:
    return make_calibration([(rows_RD.unsqueeze(1)[:, :0], rows_RD)])


@settings(max_examples=60, deadline=None)
@given(
    num_rows=st.integers(1, 40),
    hidden_size=st.sampled_from([1, 2, 63, 64, 65, 100, 128, 576]),
    seed=st.integers(0, 2**32 - 1),
    spread=st.floats(0, 6),
)
def test_bytes_and_states_equal_numpy(num_rows, hidden_size, seed, spread):
    rows_RD = heavy_tailed(num_rows, hidden_size, seed, spread)
    scales_ND = channel_scales(rows_RD)
    data = Int8Codec(scales_ND).encode(rows_RD, 0)
    assert bytes(data) == reference_encode(rows_RD.float().numpy(), scales_ND[0].numpy())
    found_RD = torch.full_like(rows_RD, math.nan)
    assert (
        Int8Codec(scales_ND).decode(data, found_RD, 0)
        == len(data)
        == num_rows * (hidden_size + 2 * math.ceil(hidden_size / 64))
    )
    expected = reference_decode(bytes(data), num_rows, scales_ND[0].numpy())
    assert np.array_equal(found_RD.float().numpy(), expected)


def test_bytes_of_one_row_by_hand():
    """254 over scale 2 is 127: group scale 1, which is 0x3f80 as bf16."""
    codec = Int8Codec(torch.tensor([[1.0, 2.0, 1.0]]))
    data = codec.encode(torch.tensor([[-127.0, 254.0, 0.5]]).bfloat16(), 0)
    assert bytes(data) == bytes([0x81, 0x7F, 0x00, 0x80, 0x3F])  # 0.5 goes to the even neighbour


def test_pieces_larger_than_a_chunk_equal_row_by_row_encoding():
    rows_RD = heavy_tailed(700, 576, 3)
    codec = Int8Codec(channel_scales(rows_RD))
    whole = bytes(codec.encode(rows_RD, 0))
    single = [bytes(codec.encode(row_1D, 0)) for row_1D in rows_RD.split(1)]
    assert whole == b"".join(s[:576] for s in single) + b"".join(s[576:] for s in single)
    found_RD = torch.empty_like(rows_RD)
    codec.decode(memoryview(whole), found_RD, 0)
    assert np.array_equal(found_RD.float().numpy(), reference_decode(whole, 700, channel_scales(rows_RD)[0].numpy()))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), hidden_size=st.sampled_from([5, 64, 130]))
def test_error_is_half_a_step_of_the_group(seed, hidden_size):
    rows_RD = heavy_tailed(20, hidden_size, seed)
    scales_ND = channel_scales(rows_RD)
    codec, found_RD = Int8Codec(scales_ND), torch.empty_like(rows_RD)
    codec.decode(codec.encode(rows_RD, 0), found_RD, 0)
    scaled = rows_RD.double() / scales_ND.double()
    for begin in range(0, hidden_size, 64):
        group = slice(begin, begin + 64)
        step_R1 = scaled[:, group].abs().amax(1, keepdim=True) / 127 * (1 + BF16_EPS)
        limit = step_R1 / 2 * scales_ND[:, group].double() + rows_RD[:, group].double().abs() * 2 * BF16_EPS
        assert ((found_RD - rows_RD)[:, group].double().abs() <= limit * 1.001).all()


def test_zeros_stay_zeros_beside_large_values():
    rows_RD = torch.zeros(3, 200, dtype=torch.bfloat16)
    rows_RD[1, 70] = 24960.0
    rows_RD[2, 130:] = 2.0
    codec, found_RD = Int8Codec(torch.ones(1, 200)), torch.empty_like(rows_RD)
    codec.decode(codec.encode(rows_RD, 0), found_RD, 0)
    assert torch.equal(found_RD == 0, rows_RD == 0)
    # as large as a group's largest magnitude is, it comes back within the bf16 rounding of its scale
    assert float(found_RD[1, 70]) == pytest.approx(24960, rel=2 * BF16_EPS)


@pytest.mark.parametrize("scale", [2.0**-30, 1.0, 2.0**30])
@pytest.mark.parametrize("value", [1e-38, 1e-30, 1e-6, 25000.0, 1e20])
def test_any_magnitude_comes_back_finite(scale, value):
    rows_RD = torch.full((2, 70), value, dtype=torch.bfloat16)
    codec, found_RD = Int8Codec(torch.full((1, 70), scale)), torch.empty_like(rows_RD)
    if value / scale > 127 * 2.0**90:
        with pytest.raises(StoreError, match="too large"):
            codec.encode(rows_RD, 0)
        return
    codec.decode(codec.encode(rows_RD, 0), found_RD, 0)
    assert torch.isfinite(found_RD).all()
    if value / scale > 1e-20:
        assert torch.allclose(found_RD.float(), rows_RD.float(), rtol=2 * BF16_EPS)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38])
def test_values_that_would_not_come_back_are_refused(value):
    rows_RD = torch.ones(3, 130, dtype=torch.bfloat16)
    rows_RD[2, 129] = value
    with pytest.raises(StoreError, match="stream 1"):
        Int8Codec(torch.ones(2, 130)).encode(rows_RD, 1)


def test_decode_reads_its_piece_only():
    rows_RD = heavy_tailed(7, 100, 1)
    codec = Int8Codec(channel_scales(rows_RD))
    data = bytes(codec.encode(rows_RD, 0))
    odd = memoryview(b"x" + data + b"rest")[1:]  # read-only, and not aligned
    found_RD, expected_RD = torch.empty_like(rows_RD), torch.empty_like(rows_RD)
    assert codec.decode(odd, found_RD, 0) == len(data) == piece_bytes(7, 100)
    codec.decode(memoryview(bytearray(data)), expected_RD, 0)
    assert torch.equal(found_RD, expected_RD)
    with pytest.raises(ValueError, match="728 bytes"):
        codec.decode(memoryview(data)[:-1], found_RD, 0)


def test_every_stream_has_its_own_scales():
    rows_RD = torch.ones(1, 64, dtype=torch.bfloat16)
    rows_RD[0, 0] = 1000.0
    found = []
    for scales in (torch.ones(64), rows_RD[0].float()):
        codec, found_RD = Int8Codec(torch.stack([torch.full((64,), 9.0), scales])), torch.empty_like(rows_RD)
        codec.decode(codec.encode(rows_RD, 1), found_RD, 1)
        found.append(float(found_RD[0, 5]))
    assert found[0] == 0.0, "without channel scales one large channel takes the range of its group"
    assert found[1] == pytest.approx(1.0, rel=BF16_EPS)


def test_threads_share_a_codec():
    rows = [heavy_tailed(300, 576, seed) for seed in range(8)]
    codec = Int8Codec(channel_scales(torch.cat(rows)))
    with ThreadPoolExecutor(4) as pool:
        together = [bytes(data) for data in pool.map(lambda rows_RD: codec.encode(rows_RD, 0), rows)]
    assert together == [bytes(codec.encode(rows_RD, 0)) for rows_RD in rows]


@pytest.mark.parametrize(
    ("scales", "match"),
    [
        (torch.tensor([[1.0, 0.0]]), "scale 0.0 of channel 1 of stream 0"),
        (torch.tensor([[1.0], [math.nan]]), "scale nan of channel 0 of stream 1"),
        (torch.tensor([[-1.0]]), "scale -1.0"),
        (torch.ones(4), "expected float32"),
        (torch.ones(2, 2, dtype=torch.float64), "expected float32"),
        (torch.ones(0, 2), "expected float32"),
    ],
)
def test_scales_that_are_none_are_refused(scales, match):
    with pytest.raises(StoreError, match=match):
        make_codec("int8", scales)


def test_a_codec_without_scales_is_refused():
    with pytest.raises(StoreError, match="without its channel scales"):
        make_codec("int8")


def test_groups():
    assert [num_groups(d) for d in (1, 64, 65, 576, 7168)] == [1, 1, 2, 9, 112]
    assert piece_bytes(2103, 7168) / (2103 * 7168 * 2) == 0.515625


# Calibration


def test_calibration_is_the_mean_magnitude_and_one_for_silent_channels():
    aux_TAD = torch.tensor([[[1.0, 0.0]], [[-3.0, 0.0]]]).bfloat16()
    last_TD = torch.tensor([[0.5, -8.0], [0.25, 8.0]]).bfloat16()
    more = (torch.tensor([[[8.0, -0.0]]]).bfloat16(), torch.tensor([[0.0, 2.0]]).bfloat16())
    scales_ND = make_calibration([(aux_TAD, last_TD), more])
    assert scales_ND.dtype == torch.float32
    assert scales_ND.tolist() == [[4.0, 1.0], [0.25, 6.0]]
    with pytest.raises(CaptureError, match="no states"):
        make_calibration([])


def test_one_token_a_thousand_times_larger_leaves_the_others_their_range():
    """An attention sink: one token of 4,096 with 25,000 in a channel whose other values are about 2."""
    rows_RD = torch.randn(4096, 64, generator=torch.Generator().manual_seed(0)).mul_(2).bfloat16()
    rows_RD[0, 3] = 25000.0
    codec, found_RD = Int8Codec(channel_scales(rows_RD)), torch.empty_like(rows_RD)
    codec.decode(codec.encode(rows_RD, 0), found_RD, 0)
    error = (found_RD[1:, 3] - rows_RD[1:, 3]).float().norm() / rows_RD[1:, 3].float().norm()
    assert error < 0.03


def test_calibration_slice_spreads_over_the_lengths():
    lengths = [10 + 7 * i for i in range(200)]
    plan = make_plan(make_tokens(lengths), make_capture(batch_tokens=2048), 8)
    chosen = calibration_samples(plan)
    found = [sample.num_tokens for sample in chosen]
    assert len(set(chosen)) == len(chosen) == 8
    assert sum(found) >= 4096
    assert found == [lengths[(2 * i + 1) * 200 // 16] for i in range(8)]
    shuffled = dataclasses.replace(plan, shards=plan.shards[::-1])
    assert calibration_samples(shuffled) == chosen


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(2, 400), min_size=1, max_size=120))
def test_calibration_slice_has_enough_tokens_or_all_samples(lengths):
    plan = make_plan(make_tokens(lengths), make_capture(batch_tokens=2048), 8)
    chosen = calibration_samples(plan)
    assert len(set(chosen)) == len(chosen)
    assert sum(s.num_tokens for s in chosen) >= 4096 or len(chosen) == plan.num_samples


def test_calibration_file_holds_what_was_made(tmp_path):
    scales_ND = torch.rand(4, 6) + 0.5
    effect = measure_effect(Int8Codec(scales_ND), [Rows(*two_rows(3, 6))], torch.rand(5, 6))
    for name in ("a", "b"):
        write_calibration(tmp_path / name, Calibration(scales_ND, effect), "c" * 64)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    found = read_calibration(tmp_path / "a", "c" * 64, (4, 6))
    assert torch.equal(found.scales_ND, scales_ND)
    assert found.effect == effect
    write_calibration(tmp_path / "a", Calibration(scales_ND), "c" * 64)
    assert read_calibration(tmp_path / "a", "c" * 64, (4, 6)).effect is None


def test_digest_is_of_shape_and_bytes():
    scales_ND = torch.rand(4, 6) + 0.5
    changed_ND = scales_ND.clone()
    changed_ND[3, 5] += 1e-6
    digests = {Calibration(scales).digest for scales in (scales_ND, changed_ND, scales_ND.reshape(6, 4))}
    assert len(digests) == 3
    plain = b'{"dtype":"F32","shape":[4,6]}' + scales_ND.numpy().astype("<f4").tobytes()
    assert Calibration(scales_ND).digest == hashlib.sha256(plain).hexdigest()


def two_rows(num_aux: int, hidden_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_aux)
    aux_TAD = torch.randn(2, num_aux, hidden_size, generator=generator).bfloat16()
    return aux_TAD, torch.randn(2, hidden_size, generator=generator).bfloat16()


def test_foreign_and_damaged_calibrations_are_refused(tmp_path):
    path = tmp_path / "calibration.safetensors"
    write_calibration(path, Calibration(torch.rand(2, 3) + 0.5), "c" * 64)
    with pytest.raises(StoreError, match=f"identity {'c' * 64}, expected {'d' * 64}"):
        read_calibration(path, "d" * 64, (2, 3))
    with pytest.raises(StoreError, match=r"expected float32 \(2, 4\)"):
        read_calibration(path, "c" * 64, (2, 4))
    whole = path.read_bytes()
    for cut in (0, 4, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(StoreError, match="is no calibration"):
            read_calibration(path, "c" * 64, (2, 3))
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(StoreError, match="digest"):
        read_calibration(path, "c" * 64, (2, 3))


# Effect


def test_effect_equals_its_definition():
    """KL and agreement row by row in float64, from the decoded states."""
    generator = torch.Generator().manual_seed(5)
    head_VD = torch.randn(50, 70, generator=generator)
    aux_TAD = torch.randn(9, 2, 70, generator=generator).bfloat16()
    last_RD = torch.randn(6, 70, generator=generator).bfloat16()
    codec = Int8Codec(torch.ones(3, 70))
    effect = measure_effect(codec, [Rows(aux_TAD[:4], last_RD[:2]), Rows(aux_TAD[4:], last_RD[2:])], head_VD)
    decoded_RD = torch.empty_like(last_RD)
    codec.decode(codec.encode(last_RD, 2), decoded_RD, 2)
    true = torch.softmax(last_RD.double() @ head_VD.double().T, -1)
    found = torch.softmax(decoded_RD.double() @ head_VD.double().T, -1)
    assert effect.kl == pytest.approx(float((true * (true / found).log()).sum(-1).mean()), rel=1e-2)
    assert effect.top1 == float((true.argmax(-1) == found.argmax(-1)).double().mean())
    error = (decoded_RD.double() - last_RD.double()).norm() / last_RD.double().norm()
    assert effect.relative_error[2] == pytest.approx(float(error))
    assert effect.ratio == (70 + 4) / 140
    assert (effect.num_aux_rows, effect.num_judged_rows) == (9, 6)
    with pytest.raises(StoreError, match="no row to judge"):
        measure_effect(codec, [Rows(aux_TAD, last_RD[:0])], head_VD)


def test_spread_takes_every_sample_once():
    assert sorted(spread(range(1000))) == list(range(1000))  # type: ignore[arg-type]
    assert list(spread(range(200)))[:5] == [0, 64, 128, 192, 1]  # type: ignore[arg-type]


def test_measure_reads_a_set_that_was_captured(tmp_path):
    tokens = make_tokens([30 + i for i in range(20)])
    plan = make_plan(tokens, make_capture(shard_bytes=100_000), 64)
    manifest = store(tmp_path, plan, tokens, make_states(tokens, 3, 64))
    head_VD = torch.randn(300, 64, generator=torch.Generator().manual_seed(1)) / 8
    figures = measure(ShardReader(tmp_path, manifest), plan, head_VD, max_rows=100)
    calibration_bytes = 4 * 64 * 4 * len(plan.shards)
    assert figures["int8_ratio"] == pytest.approx(66 / 128 + calibration_bytes / plan.payload_bytes)
    assert figures["num_judged_rows"] == 100
    assert 0 < figures["int8_kl"] < 1e-3
    assert figures["int8_top1"] > 0.9
    assert list(figures["relative_error"]) == ["aux 1", "aux 2", "aux 3", "last"]
    assert all(0 < error < 0.01 for error in figures["relative_error"].values())


def test_measure_wants_every_row_lossless(tmp_path):
    tokens = make_tokens([30])
    plan = make_plan(tokens, make_capture(last_rows="trained"), 64)
    manifest = store(tmp_path, plan, tokens, make_states(tokens, 3, 64))
    with pytest.raises(StoreError, match="rows trained, expected every row"):
        measure(ShardReader(tmp_path, manifest), plan, torch.ones(5, 64))
