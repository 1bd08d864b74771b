"""Codecs: what comes back, what the bytes are, which rows are stored."""

import hashlib
import random
import struct
from pathlib import Path
from typing import Any

import blosc2
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from shard_cases import make_capture, make_plan, make_states, make_tokens, store

from eyas import fs
from eyas.contracts import ShardManifest
from eyas.errors import ConfigError, StoreError
from eyas.rows import stored_rows
from eyas.shards.blosc import Blosc2Codec, tensor_bytes
from eyas.shards.codecs import RawCodec, decode_block, make_codec, pieces
from eyas.shards.encode import Encoder
from eyas.shards.reader import ShardReader
from eyas.shards.verify import verify

GOLDEN = Path(__file__).parents[2] / "golden"
ANY_BF16 = st.lists(st.integers(-(1 << 15), (1 << 15) - 1), min_size=1, max_size=400)


@settings(deadline=None, max_examples=100)
@given(values=ANY_BF16, codec=st.sampled_from([RawCodec(), Blosc2Codec()]))
def test_lossless_codecs_give_back_every_bit_pattern(values, codec):
    """NaN payloads, infinities, denormals and both zeros included."""
    rows_RD = torch.tensor([values], dtype=torch.int16).view(torch.bfloat16)
    data, back_RD = codec.encode(rows_RD, 0), torch.zeros_like(rows_RD)
    assert codec.decode(memoryview(bytes(data) + b"next piece"), back_RD, 0) == len(data)
    assert torch.equal(back_RD.view(torch.int16), rows_RD.view(torch.int16))


def test_a_piece_is_a_chunk_that_blosc2_itself_reads():
    """Whoever has the shard and blosc2 needs nothing of ours."""
    rows_RD = torch.randn(300, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    data = bytes(Blosc2Codec().encode(rows_RD, 0))
    assert blosc2.decompress2(data) == rows_RD.view(torch.int16).numpy().tobytes()
    num_bytes, _, size = struct.unpack("<3i", data[4:16])
    assert (num_bytes, size) == (300 * 64 * 2, len(data))


@pytest.mark.parametrize("num_rows", [3, 700])
@pytest.mark.parametrize("name", ["raw", "blosc2", "int8"])
def test_rows_that_lie_apart_give_the_bytes_of_rows_side_by_side(name, num_rows):
    """A stream is a slice of all streams of a sample; an engine may have its own order of axes."""
    states_TAD = torch.randn(num_rows, 3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    codec = make_codec(name, torch.ones(3, 64))
    across_RD = states_TAD[:, 1].t().contiguous().t()
    for rows_RD in (states_TAD[:, 1], across_RD):
        assert not rows_RD.is_contiguous()
        assert bytes(codec.encode(rows_RD, 1)) == bytes(codec.encode(states_TAD[:, 1].contiguous(), 1))


@pytest.mark.parametrize("items", [2049, 40_000, 400_001])
@pytest.mark.parametrize("kind", ["gaussian", "noise", "integers", "constant", "ramp"])
def test_any_blosc2_reads_a_piece_of_any_content(kind, items):
    """Halves that are noise, that compress, that are one value; odd numbers of items; never more than a header longer."""
    generator = torch.Generator().manual_seed(items)
    values = {
        "gaussian": lambda: torch.randn(items, generator=generator).bfloat16().view(torch.int16),
        "noise": lambda: torch.randint(-(1 << 15), 1 << 15, (items,), generator=generator).to(torch.int16),
        "integers": lambda: torch.randint(-5, 6, (items,), generator=generator).bfloat16().view(torch.int16),
        "constant": lambda: torch.full((items,), 0x3F80, dtype=torch.int16),
        "ramp": lambda: torch.arange(items).to(torch.int16),
    }[kind]()
    rows_RD = values.view(torch.bfloat16)[None]
    data = bytes(Blosc2Codec().encode(rows_RD, 0))
    assert blosc2.decompress2(data) == values.numpy().tobytes()
    assert len(data) <= 2 * items + 32


def test_the_bytes_of_a_piece_are_those_of_its_revision():
    """Of ``extract.revision`` 3, by zstandard 0.25.0: the golden capture's pieces are smaller than those that eyas writes."""
    dice = random.Random(4)
    rows_RD = torch.tensor([dice.gauss(0, 1) for _ in range(1 << 17)]).bfloat16().view(64, 2048)
    assert (
        hashlib.sha256(Blosc2Codec().encode(rows_RD, 0)).hexdigest()
        == "e1935fb0ab277fe77076075125ea50dbf89d8f4cbeda2b962f3124c8baf342dc"
    ), "pieces have other bytes: see test_the_bytes_of_a_capture_are_those_of_its_revision for what to do"


def test_a_piece_is_no_larger_than_the_one_that_blosc2_writes():
    """By zstd's level 1 and the same split; the Gaussian's high half has no repetition worth a match."""
    rows_RD = torch.randn(128, 4096, generator=torch.Generator().manual_seed(2)).bfloat16()
    settings_of: dict[str, Any] = {"codec": blosc2.Codec.ZSTD, "clevel": 1, "filters": [blosc2.Filter.SHUFFLE]}
    settings_of |= {"filters_meta": [0], "splitmode": blosc2.SplitMode.ALWAYS_SPLIT, "typesize": 2, "nthreads": 1}
    settings_of |= {"blocksize": rows_RD.nbytes}
    theirs = blosc2.compress2(rows_RD.view(torch.int16).numpy(), **settings_of)
    assert len(Blosc2Codec().encode(rows_RD, 0)) < 0.985 * len(theirs)


@pytest.mark.parametrize("std", [0.02, 1.0, 40.0])
def test_gaussian_states_come_near_their_entropy(std):
    """A Gaussian in bf16 holds 10.54 of 16 bits (arithmetic); zstd and headers cost a few percent."""
    rows_RD = (torch.randn(512, 1024, generator=torch.Generator().manual_seed(1)) * std).bfloat16()
    ratio = len(Blosc2Codec().encode(rows_RD, 0)) / rows_RD.nbytes
    assert 10.54 / 16 < ratio < 0.72


@pytest.mark.parametrize("cut", [0, 16, 31, 200, -1])
def test_a_short_piece_is_refused(cut):
    rows_RD = torch.randn(8, 64).bfloat16()
    data = bytes(Blosc2Codec().encode(rows_RD, 0))
    with pytest.raises(ValueError, match="chunk"):
        Blosc2Codec().decode(memoryview(data[:cut]), rows_RD.clone(), 0)


def test_a_block_of_another_shape_is_refused():
    rows_RD = torch.randn(8, 64).bfloat16()
    data = bytes(Blosc2Codec().encode(rows_RD, 0))
    with pytest.raises(ValueError, match="expected 1,152"):
        decode_block(Blosc2Codec(), memoryview(data), torch.empty(1, 9, 64, dtype=torch.bfloat16), 0)
    with pytest.raises(ValueError, match="its pieces take"):
        decode_block(Blosc2Codec(), memoryview(data + data), torch.empty(1, 8, 64, dtype=torch.bfloat16), 0)


def test_pieces_cover_every_row_once_in_order():
    hidden_size = 7168  # 73 rows to a mebibyte
    found = list(pieces(3, 200, hidden_size))
    assert found == [(n, first, last) for n in range(3) for first, last in ((0, 73), (73, 146), (146, 200))]
    assert list(pieces(2, 0, hidden_size)) == []
    assert list(pieces(1, 2, 1 << 20)) == [(0, 0, 1), (0, 1, 2)]


def test_an_unknown_codec_is_refused():
    with pytest.raises(StoreError, match="raw, blosc2, int8"):
        make_codec("zip")


def test_threads_do_not_change_the_bytes(monkeypatch):
    generator = torch.Generator().manual_seed(3)
    aux_TAD, last_TD = torch.randn(50, 3, 4096, generator=generator), torch.randn(50, 4096, generator=generator)
    found = []
    for threads in ("1", "5"):
        monkeypatch.setenv("EYAS_ENCODE_THREADS", threads)
        with Encoder(Blosc2Codec()) as encoder:
            encoded = encoder.encode(aux_TAD.bfloat16(), last_TD.bfloat16(), stored_rows([1] * 50, "all"))
            found.append([bytes(piece) for kind in ("aux", "last") for piece in encoded.block(kind)])
    assert found[0] == found[1]
    monkeypatch.setenv("EYAS_ENCODE_THREADS", "none")
    with pytest.raises(ConfigError, match="EYAS_ENCODE_THREADS: 'none'"):
        Encoder(Blosc2Codec())


def slow_rule(mask):
    """Trained rows by the definition in the design: row t, step k, tokens t+1 … t+k+2 in one span."""
    teachers, aux = set(), 0
    for t in range(len(mask)):
        for k in range(len(mask)):
            if t + k + 2 < len(mask) and all(mask[t + 1 : t + k + 3]):
                teachers.add(t + k + 1)
                aux = max(aux, t + 1)
    return aux, sorted(teachers)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 1), max_size=14))
def test_stored_rows_are_those_that_some_step_reads(mask):
    rows = stored_rows(mask, "trained")
    assert (rows.num_aux, rows.last_L.tolist()) == slow_rule(mask)
    everything = stored_rows(mask, "all")
    assert (everything.num_aux, everything.last_L.tolist()) == (len(mask), list(range(len(mask))))


@pytest.mark.parametrize("codec", ["raw", "blosc2"])
@pytest.mark.parametrize("last_rows", ["all", "trained"])
def test_every_stored_row_comes_back_and_no_other(tmp_path, codec, last_rows):
    """Also a sample that no training reads: it has ids and a mask, and no row of states."""
    tokens = make_tokens([1, 2, 3, 40, 17, 5])
    plan = make_plan(tokens, make_capture(codec=codec, last_rows=last_rows), 24)
    states = make_states(tokens, 3, 24)
    manifest = store(tmp_path, plan, tokens, states)
    reader = ShardReader(tmp_path, manifest)
    assert verify(tmp_path, manifest, tokens) == []
    for sample_id, (aux_TAD, last_TD) in states.items():
        stored, rows = reader.read(sample_id), stored_rows(tokens[sample_id].loss_mask, last_rows)
        assert stored.num_aux_rows == rows.num_aux
        assert stored.has_last_T.nonzero().flatten().tolist() == rows.last_L.tolist()
        assert torch.equal(stored.aux_TAD[: rows.num_aux], aux_TAD[: rows.num_aux])
        assert not stored.aux_TAD[rows.num_aux :].any()
        assert torch.equal(stored.last_TD[rows.last_L], last_TD[rows.last_L])
        assert torch.isnan(stored.last_TD[~stored.has_last_T]).all()
    assert any(not stored_rows(s.loss_mask, "trained").num_aux for s in tokens.values())


@pytest.mark.parametrize(("share", "saved"), [(0.75, 0.0625), (0.3, 0.175)])
def test_trained_rows_save_what_arithmetic_says(tmp_path, share, saved):
    """A quarter of the bytes is ``last``; of it, the untrained rows go."""
    length, hidden_size = 2000, 16
    masks = np.zeros(length, dtype=int)
    masks[length - int(share * length) :] = 1
    aux, last = stored_rows(masks, "trained").counts
    assert 1 - (3 * aux + last) / (4 * length) == pytest.approx(saved, abs=0.002)
    tokens = make_tokens([300])
    sample = next(iter(tokens.values()))
    sizes = {}
    for last_rows in ("all", "trained"):
        plan = make_plan(tokens, make_capture(codec="raw", last_rows=last_rows), hidden_size)
        sizes[last_rows] = store(tmp_path / last_rows, plan, tokens, make_states(tokens, 3, hidden_size)).stored_bytes
    aux, last = stored_rows(sample.loss_mask, "trained").counts
    assert abs(sizes["all"] - sizes["trained"] - (4 * 300 - 3 * aux - last) * 2 * hidden_size) <= 64  # headers differ


def test_encoded_blocks_open_with_safetensors_and_blosc2(tmp_path):
    tokens = make_tokens([30, 20])
    plan = make_plan(tokens, make_capture(codec="blosc2"), 64)
    states = make_states(tokens, 3, 64)
    manifest = store(tmp_path, plan, tokens, states)
    foreign = load_file(tmp_path / manifest.shards[0].path)
    aux_TAD = states[plan.shards[0].samples[0].sample_id][0]
    rest, found = bytes(foreign["000000.aux"].tolist()), []
    while rest:
        size = struct.unpack("<i", rest[12:16])[0]
        found.append(blosc2.decompress2(rest[:size]))
        rest = rest[size:]
    assert b"".join(found) == bytes(tensor_bytes(aux_TAD.transpose(0, 1).contiguous()))


def test_a_set_of_version_1_is_still_read():
    """Written by the first version of the format: raw, every row, aux token by token."""
    folder = GOLDEN / "store_v1"
    manifest = fs.read_record(ShardManifest, folder / "manifest.json")
    assert manifest.schema_version == 1
    tokens = make_tokens([5, 9, 3])
    assert verify_but_for_the_manifest(folder, manifest, tokens) == []
    reader = ShardReader(folder, manifest)
    for sample_id, (aux_TAD, last_TD) in make_states(tokens, 3, 8).items():
        stored = reader.read(sample_id)
        assert torch.equal(stored.aux_TAD, aux_TAD)
        assert torch.equal(stored.last_TD, last_TD)
        assert bool(stored.has_last_T.all())


def verify_but_for_the_manifest(folder, manifest, tokens):
    return [finding for finding in verify(folder, manifest, tokens) if finding.shard != "manifest.json"]


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6))
def test_any_flipped_bit_of_an_encoded_set_is_refused_by_the_reader(encoded_set, seed):
    """Case 29, for every codec: what touches a sample's blocks or a header is never handed out."""
    folder, manifest = encoded_set
    rng = random.Random(seed)
    path = folder / rng.choice(manifest.shards).path
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    path.write_bytes(damaged)
    try:
        with pytest.raises(StoreError):
            read_all(folder, manifest)
    finally:
        path.write_bytes(whole)


def read_all(folder, manifest):
    reader = ShardReader(folder, manifest)
    for sample in reader.samples:
        reader.read(sample.sample_id)


@pytest.fixture(scope="module")
def encoded_set(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoded")
    tokens = make_tokens([9, 4, 12, 7])
    plan = make_plan(tokens, make_capture(codec="blosc2", last_rows="trained"), 16)
    return folder, store(folder, plan, tokens, make_states(tokens, 3, 16))
