"""The shard file: any sizes, exact bytes, readable by safetensors' own loader."""

import hashlib
import json
import struct
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from shard_cases import ids_of, make_capture, make_plan, make_states, make_tokens, store

from eyas.errors import CaptureError, EyasError, StoreError
from eyas.plan.budget import stored_bytes
from eyas.shards.codecs import make_codec
from eyas.shards.encode import Encoder
from eyas.shards.format import parse_header
from eyas.shards.reader import ShardReader
from eyas.shards.writer import ShardAssembly

LAYOUTS = {
    "lengths": st.lists(st.integers(1, 40), min_size=1, max_size=12),
    "boundaries": st.lists(st.integers(0, 60), min_size=1, max_size=5, unique=True).map(lambda b: tuple(sorted(b))),
    "hidden_size": st.integers(1, 33),
}


@settings(deadline=None, max_examples=60)
@given(**LAYOUTS, seed=st.integers(0, 1000))
def test_any_layout_comes_back_bit_for_bit_and_opens_with_safetensors(lengths, boundaries, hidden_size, seed):
    tokens = make_tokens(lengths, seed)
    plan = make_plan(tokens, make_capture(boundaries=boundaries, shard_bytes=4096), hidden_size)
    states = make_states(tokens, len(boundaries), hidden_size, seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        manifest = store(folder, plan, tokens, states, seed)
        reader = ShardReader(folder, manifest)
        assert [s.sample_id for s in reader.samples] == [s.sample_id for shard in plan.shards for s in shard.samples]
        for planned, entry in zip(plan.shards, manifest.shards, strict=True):
            foreign = load_file(folder / entry.path)
            for i, sample in enumerate(planned.samples):
                stored, expected = reader.read(sample.sample_id), tokens[sample.sample_id]
                aux_TAD, last_TD = states[sample.sample_id]
                for key, ours, wanted in (
                    ("aux", stored.aux_TAD, aux_TAD),
                    ("last", stored.last_TD, last_TD),
                    ("input_ids", stored.input_ids_T, torch.tensor(expected.input_ids, dtype=torch.int32)),
                    ("loss_mask", stored.loss_mask_T, torch.tensor(expected.loss_mask, dtype=torch.uint8)),
                ):
                    assert ours.dtype == wanted.dtype
                    assert torch.equal(ours, wanted)
                    assert torch.equal(foreign[f"{i:06d}.{key}"], wanted.transpose(0, 1) if key == "aux" else wanted)
            assert len(foreign) == 4 * len(planned.samples)


@settings(deadline=None, max_examples=30)
@given(**LAYOUTS)
def test_bytes_do_not_depend_on_arrival_and_md5_and_size_are_those_of_the_file(lengths, boundaries, hidden_size):
    """Cases 34, 56: named by sample id, same bytes whatever came first."""
    tokens = make_tokens(lengths)
    plan = make_plan(tokens, make_capture(boundaries=boundaries), hidden_size)
    states = make_states(tokens, len(boundaries), hidden_size)
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        manifests = [store(Path(f), plan, tokens, states, seed) for f, seed in ((first, 1), (second, 2))]
        assert manifests[0] == manifests[1]
        for entry, planned in zip(manifests[0].shards, plan.shards, strict=True):
            data = (Path(first) / entry.path).read_bytes()
            assert data == (Path(second) / entry.path).read_bytes()
            assert (len(data), hashlib.md5(data).hexdigest()) == (entry.size_bytes, entry.md5)
            header_bytes = 8 + struct.unpack("<Q", data[:8])[0]
            assert header_bytes % 8 == 0
            assert len(data) == header_bytes + planned.payload_bytes + 5 * entry.num_tokens
            assert header_bytes <= 1024 * (len(planned.samples) + 1)


def test_packed_and_listed_aux_give_the_same_bytes(tmp_path):
    """Case 56: aux as a view into one padded batch, and as tensors of their own."""
    tokens = make_tokens([5, 5])
    plan = make_plan(tokens, make_capture(), 8)
    states = make_states(tokens, 3, 8)
    views = {}
    for sample_id, (aux_TAD, last_TD) in states.items():
        padded = torch.full((9, 3, 8), 7.0).bfloat16()
        padded[:5] = aux_TAD
        separate = torch.stack([aux_TAD[:, a] for a in range(3)], dim=1)
        assert torch.equal(separate, padded[:5])
        views[sample_id] = (padded[:5], last_TD.t().contiguous().t())
    assert store(tmp_path / "a", plan, tokens, states) == store(tmp_path / "b", plan, tokens, views)


def test_bytes_on_the_disk_are_those_of_the_plan(tmp_path):
    """Cases 19 and 20: what lies on the disk is within 2 % of plan and budget, rows of unequal length included."""
    tokens = make_tokens([16, 1024, 300, 90, 700, 33])
    plan = make_plan(tokens, make_capture(shard_bytes=1 << 22), 576)
    assert plan.num_tokens == 2163
    assert plan.payload_bytes == 2163 * 4 * 576 * 2
    manifest = store(tmp_path, plan, tokens, make_states(tokens, 3, 576))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    du_bytes = sum(path.stat().st_blocks * 512 for path in files)
    assert len(files) == len(manifest.shards) > 1
    assert manifest.stored_bytes == sum(path.stat().st_size for path in files)
    for expected in (plan.payload_bytes, stored_bytes(plan)):
        assert abs(manifest.stored_bytes / expected - 1) < 0.02
        assert du_bytes == 0 or abs(du_bytes / expected - 1) < 0.02  # some file systems count late


def test_golden_bytes(tmp_path):
    """The format by hand: a shard of one two-token sample, written out byte by byte."""
    tokens = make_tokens([2])
    sample = next(iter(tokens.values()))
    plan = make_plan(tokens, make_capture(boundaries=(3,)), 1)
    states = {sample.sample_id: (torch.tensor([[[1.0]], [[2.0]]]).bfloat16(), torch.tensor([[-1.0], [0.5]]).bfloat16())}
    entry = store(tmp_path, plan, tokens, states).shards[0]
    data = (tmp_path / entry.path).read_bytes()
    length = int.from_bytes(data[:8], "little")
    ids = struct.pack("<2i", *sample.input_ids)
    states_bytes = bytes.fromhex("803f0040" + "80bf003f")  # bf16 1, 2, -1, 0.5, low byte first
    assert data[8 + length :] == ids + states_bytes + bytes(sample.loss_mask)
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__")
    assert header == {
        "000000.input_ids": {"dtype": "I32", "shape": [2], "data_offsets": [0, 8]},
        "000000.aux": {"dtype": "BF16", "shape": [1, 2, 1], "data_offsets": [8, 12]},
        "000000.last": {"dtype": "BF16", "shape": [2, 1], "data_offsets": [12, 16]},
        "000000.loss_mask": {"dtype": "U8", "shape": [2], "data_offsets": [16, 18]},
    }
    assert metadata["identity"] == plan.identity
    assert metadata["shard"] == entry.path == "000/shard-00000.safetensors"
    assert (metadata["format"], metadata["version"], metadata["codec"]) == ("eyas-shard", "2", "raw")
    assert (metadata["boundaries"], metadata["final_hidden"]) == ("[3]", "post_norm")
    assert (metadata["hidden_size"], metadata["last_rows"], metadata["rows"]) == ("1", "all", "[[2,2]]")
    with safe_open(tmp_path / entry.path, "pt") as foreign:
        assert foreign.metadata() == metadata


SHAPES = {
    "short": (slice(0, 4), slice(None), slice(None)),
    "long": ([0, 1, 2, 3, 4, 4], slice(None), slice(None)),
    "two streams for three": (slice(None), slice(0, 2), slice(None)),
    "narrow": (slice(None), slice(None), slice(0, 7)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_states_of_another_shape_are_refused(name):
    """Cases 31, 32: rows, streams and width are those of the plan, or nothing is taken."""
    tokens = make_tokens([5, 9])
    plan = make_plan(tokens, make_capture(), 8)
    states = make_states(tokens, 3, 8)
    sample_id = next(s for s in tokens if len(tokens[s].input_ids) == 5)
    aux_TAD, last_TD = states[sample_id]
    assembly = ShardAssembly(plan.shards[0], plan.capture, 8, tokens, Encoder(make_codec("raw")))
    with pytest.raises(CaptureError, match=rf"{sample_id}.*expected.*5, 3, 8") as caught:
        assembly.add(sample_id, ids_of(tokens[sample_id]), aux_TAD[SHAPES[name]], last_TD)
    assert str(tuple(aux_TAD[SHAPES[name]].shape)) in str(caught.value)
    assert sample_id in assembly.missing


def test_other_ids_other_dtype_foreign_and_repeated_samples_are_refused():
    """Cases 33, 46: the ids the engine ran are the sample's; one answer per sample."""
    tokens = make_tokens([9])
    plan = make_plan(tokens, make_capture(), 8)
    (sample_id, sample), (aux_TAD, last_TD) = next(iter(tokens.items())), make_states(tokens, 3, 8).popitem()[1]
    assembly = ShardAssembly(plan.shards[0], plan.capture, 8, tokens, Encoder(make_codec("raw")))
    ids_T = ids_of(sample)
    ids_T[7] += 1
    with pytest.raises(CaptureError, match="other tokens"):
        assembly.add(sample_id, ids_T, aux_TAD, last_TD)
    with pytest.raises(CaptureError, match="float32"):
        assembly.add(sample_id, ids_of(sample), aux_TAD.float(), last_TD)
    with pytest.raises(CaptureError, match="does not await"):
        assembly.add("0" * 16, ids_of(sample), aux_TAD, last_TD)
    assembly.add(sample_id, ids_of(sample), aux_TAD, last_TD)
    with pytest.raises(CaptureError, match="does not await"):
        assembly.add(sample_id, ids_of(sample), aux_TAD, last_TD)


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200) | st.text(max_size=60).map(str.encode))
def test_no_bytes_make_the_header_parser_crash(raw):
    with pytest.raises(StoreError):
        parse_header(raw, "here")


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_an_edited_header_is_refused(header_raw, data):
    edited = bytearray(header_raw)
    for _ in range(data.draw(st.integers(1, 3))):
        edited[data.draw(st.integers(0, len(edited) - 1))] = data.draw(st.integers(0, 255))
    if bytes(edited) != header_raw:
        with pytest.raises(StoreError):
            parse_header(bytes(edited), "here")


@pytest.mark.parametrize(("old", "new"), [('"version":"2"', '"version":"3"'), ('"codec":"raw"', '"codec":"zip"')])
def test_a_later_version_or_codec_is_named(header_raw, old, new):
    with pytest.raises(EyasError, match=r"this eyas reads versions 1 and 2 with raw, blosc2, int8"):
        parse_header(header_raw.decode().replace(old, new).encode(), "here")


@pytest.fixture(scope="module")
def header_raw(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shard")
    tokens = make_tokens([3, 5])
    entry = store(folder, make_plan(tokens, make_capture(), 4), tokens, make_states(tokens, 3, 4)).shards[0]
    data = (folder / entry.path).read_bytes()
    raw = data[8 : 8 + int.from_bytes(data[:8], "little")]
    assert parse_header(raw, "here").samples[0].num_tokens == 5
    return raw
