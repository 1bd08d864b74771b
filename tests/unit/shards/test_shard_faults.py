"""Damage: what the reader refuses and what verify names."""

import dataclasses
import random
import resource
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from shard_cases import make_capture, make_manifest, make_plan, make_states, make_tokens, store

from eyas.errors import DiskError, EyasError, StoreError
from eyas.shards.reader import ShardReader
from eyas.shards.verify import verify

HIDDEN_SIZE = 8


@pytest.fixture
def stored(tmp_path):
    tokens = make_tokens([7, 7, 7, 7, 3, 3], seed=1)
    plan = make_plan(tokens, make_capture(shard_bytes=14 * 64), HIDDEN_SIZE)
    assert len(plan.shards) == 3
    states = make_states(tokens, 3, HIDDEN_SIZE)
    manifest = store(tmp_path, plan, tokens, states)
    assert verify(tmp_path, manifest, tokens) == []
    return tmp_path, manifest, tokens, plan, states


def read_all(folder, manifest):
    reader = ShardReader(folder, manifest)
    return [reader.read(sample.sample_id) for sample in reader.samples]


def test_every_flipped_bit_is_found_by_reader_and_verify(stored):
    """Case 29: a bit anywhere in the file, header and padding included."""
    folder, manifest, *_ = stored
    path = folder / manifest.shards[0].path
    whole = path.read_bytes()
    rng = random.Random(3)
    for _ in range(150):
        bit = rng.randrange(8 * len(whole))
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(StoreError, match=manifest.shards[0].path):
            read_all(folder, manifest)
        findings = verify(folder, manifest)
        assert findings, f"bit {bit}"
        assert {finding.shard for finding in findings} == {manifest.shards[0].path}
    path.write_bytes(whole)
    assert len(read_all(folder, manifest)) == 6


def test_a_flip_inside_a_sample_names_that_sample_alone(stored):
    folder, manifest, *_ = stored
    entry = manifest.shards[1]
    data = bytearray((folder / entry.path).read_bytes())
    reader = ShardReader(folder, manifest)
    bad, good = (s.sample_id for s in reader.samples[2:4])
    data[data.find(reader.read(bad).last_TD.view(torch.uint8).numpy().tobytes()) + 5] ^= 4
    (folder / entry.path).write_bytes(data)
    assert reader.read(good).aux_TAD.shape == (7, 3, HIDDEN_SIZE)
    with pytest.raises(StoreError, match=rf"{entry.path}: sample {bad}: last: checksum"):
        reader.read(bad)
    assert reader.read_tokens(bad)[0].shape == (7,)
    assert {f.sample_id for f in verify(folder, manifest)} == {"", bad}  # the file's md5, and the sample


def test_a_zeroed_tail_of_the_same_size_is_found(stored):
    """Case 29: the last bytes zeroed, size kept."""
    folder, manifest, *_ = stored
    entry = manifest.shards[0]
    data = (folder / entry.path).read_bytes()
    (folder / entry.path).write_bytes(data[:-300] + bytes(300))
    with pytest.raises(StoreError, match="checksum"):
        read_all(folder, manifest)
    named = {f.sample_id for f in verify(folder, manifest)} - {""}
    assert named == {s.sample_id for s in ShardReader(folder, manifest).samples[:2]}


def test_every_truncation_is_found(stored):
    """Case 28: cut anywhere, also to nothing and with bytes to spare."""
    folder, manifest, *_ = stored
    path = folder / manifest.shards[2].path
    whole = path.read_bytes()
    for size in [*range(0, len(whole), 37), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(StoreError, match=manifest.shards[2].path):
            ShardReader(folder, manifest)
        assert verify(folder, manifest)
    path.write_bytes(whole + b"\0")
    with pytest.raises(StoreError, match=manifest.shards[2].path):
        ShardReader(folder, manifest)
    path.unlink()
    with pytest.raises(StoreError, match="cannot be opened: No such file"):
        ShardReader(folder, manifest)
    assert [f.shard for f in verify(folder, manifest)] == [manifest.shards[2].path]


def test_a_file_cut_after_it_was_opened_is_an_error_and_no_crash(stored):
    folder, manifest, *_ = stored
    reader = ShardReader(folder, manifest)
    for sample in reader.samples:
        reader.read(sample.sample_id)  # where its blocks lie is known from here on
    path = folder / manifest.shards[2].path
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(StoreError, match="ends 3 bytes early"):
        reader.read(reader.samples[-1].sample_id)


def test_a_process_that_may_open_no_more_files_finds_no_damage(stored):
    """A whole sample would be left out of a training, or captured again."""
    folder, manifest, *_ = stored
    reader = ShardReader(folder, manifest)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        reader.read(reader.samples[0].sample_id)
    except EyasError as error:
        found = error
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert isinstance(found, DiskError)
    assert "cannot be opened: Too many open files" in found.message
    assert len(read_all(folder, manifest)) == 6


def test_shards_that_changed_places_are_found(stored):
    """Equal sizes, equal counts, whole content: only the place is wrong."""
    folder, manifest, *_ = stored
    first, second = (folder / e.path for e in manifest.shards[:2])
    assert first.stat().st_size == second.stat().st_size
    spare = folder / "spare"
    first.rename(spare)
    second.rename(first)
    spare.rename(second)
    with pytest.raises(StoreError, match="files changed places"):
        ShardReader(folder, manifest)
    assert {f.shard for f in verify(folder, manifest)} == {e.path for e in manifest.shards[:2]}


def test_states_of_two_samples_swapped_and_shifted_by_a_row_are_found(stored):
    """Case 31: blocks that are whole but another sample's, or one row late."""
    folder, manifest, *_ = stored
    entry = manifest.shards[0]
    whole = (folder / entry.path).read_bytes()
    reader = ShardReader(folder, manifest)
    one, two = (
        reader.read(s.sample_id).aux_TAD.transpose(0, 1).view(torch.uint8).numpy().tobytes() for s in reader.samples[:2]
    )
    row = len(one) // 7
    swapped = whole.replace(one, b"?" * len(one)).replace(two, one).replace(b"?" * len(one), two)
    shifted = whole.replace(one, one[:row] + one[:-row])
    for damaged in (swapped, shifted):
        assert len(damaged) == len(whole)
        assert damaged != whole
        (folder / entry.path).write_bytes(damaged)
        with pytest.raises(StoreError, match="aux: checksum"):
            reader.read(reader.samples[0].sample_id)
        assert reader.samples[0].sample_id in {f.sample_id for f in verify(folder, manifest)}


def test_a_shard_of_another_capture_is_refused_with_both_identities(stored, tmp_path_factory):
    """Case 35: one parameter of the capture differs."""
    folder, manifest, tokens, _, states = stored
    other_plan = make_plan(tokens, make_capture(shard_bytes=14 * 64, revision=2), HIDDEN_SIZE)
    other_folder = tmp_path_factory.mktemp("other")
    other = store(other_folder, other_plan, tokens, states)
    (folder / other.shards[1].path).write_bytes((other_folder / other.shards[1].path).read_bytes())
    with pytest.raises(StoreError) as caught:
        ShardReader(folder, manifest)
    assert manifest.identity in caught.value.message
    assert other.identity in caught.value.message


def test_a_shard_beyond_the_manifest_is_never_read_but_reported(stored):
    """Case 42: ten shards, then eleven, then ten again in a kept folder. Case 37: temp names."""
    folder, manifest, *_ = stored
    fewer = make_manifest(_without_last(stored), manifest.shards[:2])
    (folder / "000/shard-00009.safetensors.part").write_bytes(b"half")
    reader = ShardReader(folder, fewer)
    assert len(reader.samples) == 4
    with pytest.raises(StoreError, match="is not among the 4 stored"):
        reader.read(ShardReader(folder, manifest).samples[-1].sample_id)
    assert {f.shard for f in verify(folder, fewer)} == {
        manifest.shards[2].path,
        "000/shard-00009.safetensors.part",
    }


def _without_last(stored):
    plan = stored[3]
    lost = plan.shards[-1].samples
    return dataclasses.replace(
        plan,
        num_samples=plan.num_samples - len(lost),
        num_tokens=plan.num_tokens - sum(s.num_tokens for s in lost),
    )


@pytest.mark.parametrize("field", ["num_stored_tokens", "num_planned_samples", "stored_bytes", "identity"])
def test_a_manifest_whose_account_does_not_close_is_refused(stored, field):
    """Case 59: planned = stored + failed."""
    folder, manifest, *_ = stored
    wrong = "0" * 64 if field == "identity" else getattr(manifest, field) + 1
    manifest = dataclasses.replace(manifest, **{field: wrong})
    with pytest.raises(StoreError, match=str(wrong)):
        ShardReader(folder, manifest)
    assert verify(folder, manifest)[0].shard == ""


def test_values_that_no_target_gives_are_named_with_stream_and_position(tmp_path):
    """Case 30: verify gives shard, sample, layer and position; an all-zero stream is no capture."""
    tokens = make_tokens([6, 6, 6])
    plan = make_plan(tokens, make_capture(boundaries=(3, 31, 59), shard_bytes=1 << 20), HIDDEN_SIZE)
    states = make_states(tokens, 3, HIDDEN_SIZE)
    nan, inf, zero = (s.sample_id for s in plan.shards[0].samples)
    states[nan][0][4, 1, 5] = float("nan")
    states[inf][1][2, 7] = float("-inf")
    states[zero][0][:, 2] = 0
    manifest = store(tmp_path, plan, tokens, states)
    problems = {f.sample_id: f.problem for f in verify(tmp_path, manifest, tokens)}
    assert problems.keys() == {nan, inf, zero}
    assert "aux boundary 31: nan at token 4, channel 5" in problems[nan]
    assert "last: -inf at token 2, channel 7" in problems[inf]
    assert "aux boundary 59: 6 of 6 rows are zero, the first is token 0" in problems[zero]
    assert all(problem.startswith("000/shard-00000.safetensors: sample") for problem in problems.values())


def test_ids_and_facts_are_compared_with_the_token_dataset(stored):
    """Case 33: one id differs at index 5."""
    folder, manifest, tokens, *_ = stored
    sample_id, sample = next(iter(tokens.items()))
    edited = (*sample.input_ids[:5], sample.input_ids[5] + 1, *sample.input_ids[6:])
    changed = {**tokens, sample_id: dataclasses.replace(sample, input_ids=edited)}
    [finding] = verify(folder, manifest, changed)
    assert finding.sample_id == sample_id
    assert f"input_ids differs at token 5: {sample.input_ids[5]}, the token dataset says {edited[5]}" in finding.problem
    changed = {**tokens, sample_id: dataclasses.replace(sample, split="held_out")}
    assert "held_out" in verify(folder, manifest, changed)[0].problem
    del changed[sample_id]
    assert "not in the token dataset" in verify(folder, manifest, changed)[0].problem


def test_a_sample_stored_twice_is_refused(stored, tmp_path_factory):
    folder, manifest, tokens, plan, states = stored
    twice = dataclasses.replace(plan.shards[2], batches=(plan.shards[0].samples,))
    double = dataclasses.replace(plan, shards=(*plan.shards[:2], twice))
    manifest = store(folder, double, tokens, states)
    manifest = dataclasses.replace(
        manifest, num_planned_samples=manifest.num_stored_samples, num_planned_tokens=manifest.num_stored_tokens
    )
    with pytest.raises(StoreError, match="occurs twice"):
        ShardReader(folder, manifest)
    assert any("also stored in" in f.problem for f in verify(folder, manifest))


def test_reading_in_threads_gives_what_reading_in_turn_gives(stored):
    folder, manifest, *_, states = stored
    reader = ShardReader(folder, manifest)
    wanted = [sample.sample_id for sample in reader.samples] * 50
    with ThreadPoolExecutor(8) as pool:
        for sample_id, read in zip(wanted, pool.map(reader.read, wanted), strict=True):
            assert read.sample.sample_id == sample_id
            assert torch.equal(read.aux_TAD, states[sample_id][0])
            assert torch.equal(read.last_TD, states[sample_id][1])
