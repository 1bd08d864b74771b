"""The token dataset on disk."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import struct

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eyas.errors import DataError, StoreError
from eyas.tokens import dataset
from eyas.tokens.dataset import Reject, make_sample, read_index, read_lengths, read_tokens, tokens_sha256, write_tokens


def sample(*ids: int, split: str = "train"):
    mask = [0] + [1] * (len(ids) - 1)
    return make_sample(ids, mask, conversation_id="c", source="s", split=split, variant="greedy")


def test_sample_id_is_the_hash_of_ids_and_mask():
    expected = hashlib.sha256(struct.pack("<3i", 5, 70000, 2) + bytes([0, 1, 1])).hexdigest()[:16]
    assert sample(5, 70000, 2).sample_id == expected


def test_index_has_exact_lengths(tmp_path):
    """Case 17: samples of 5, 7, 4 tokens, then 4 rows and 4 more in a new run."""
    first = [sample(*range(n)) for n in (5, 7, 4, 9)]
    write_tokens(tmp_path / "tokens", first)
    assert [n for _, n in read_lengths(tmp_path / "tokens")] == [5, 7, 4, 9]
    more = first + [sample(*range(n)) for n in (6, 3, 8, 12)]
    write_tokens(tmp_path / "tokens", more)
    assert [n for _, n in read_lengths(tmp_path / "tokens")] == [5, 7, 4, 9, 6, 3, 8, 12]
    assert read_index(tmp_path / "tokens").num_samples == 8


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20), min_size=1, max_size=8, unique_by=tuple))
@settings(max_examples=30, deadline=None)
def test_written_is_read(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("tokens") / "tokens"
    samples = [sample(*ids) for ids in rows]
    digest = write_tokens(folder, iter(samples))
    assert read_tokens(folder) == samples
    assert tokens_sha256(folder) == digest == read_index(folder).tokens_sha256


def test_content_hash_knows_content_and_not_order(tmp_path):
    samples = [sample(*range(n)) for n in range(3, 40)]
    digest = write_tokens(tmp_path / "a", samples)
    shuffled = samples.copy()
    random.Random(0).shuffle(shuffled)
    assert write_tokens(tmp_path / "b", shuffled) == digest
    assert write_tokens(tmp_path / "c", samples[:-1]) != digest
    other_split = [*samples[:-1], dataclasses.replace(samples[-1], split="held_out")]
    assert write_tokens(tmp_path / "d", other_split) != digest


def test_equal_content_is_equal_bytes_over_several_row_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(dataset, "ROW_GROUP_SAMPLES", 8)
    samples = [sample(*range(n)) for n in range(3, 40)]
    for name in "ab":
        write_tokens(tmp_path / name, samples, [])
    for file in ("tokens.parquet", "index.json", "rejects.jsonl"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert read_tokens(tmp_path / "a") == samples


def test_rejects_are_listed_and_may_be_filled_while_samples_stream(tmp_path):
    rejects: list[Reject] = []

    def stream():
        yield sample(1, 2, 3)
        rejects.append(Reject(conversation_id="c", source="s", variant="given", reason="template", detail="no"))

    write_tokens(tmp_path / "tokens", stream(), rejects)
    (line,) = (tmp_path / "tokens" / "rejects.jsonl").read_text().splitlines()
    assert json.loads(line)["reason"] == "template"


def test_nothing_is_published_when_writing_fails(tmp_path):
    def stream():
        yield sample(1, 2, 3)
        raise DataError("stop")

    write_tokens(tmp_path / "tokens", [sample(4, 5, 6)])
    with pytest.raises(DataError, match="stop"):
        write_tokens(tmp_path / "tokens", stream())
    assert [path.name for path in tmp_path.iterdir()] == ["tokens"]
    assert read_tokens(tmp_path / "tokens") == [sample(4, 5, 6)]


@pytest.mark.parametrize("samples", [[], [sample(1, 2, 3), sample(1, 2, 3)]])
def test_no_sample_and_a_sample_twice_are_refused(tmp_path, samples):
    with pytest.raises(DataError):
        write_tokens(tmp_path / "tokens", samples)


def test_a_sample_under_a_foreign_id_is_refused(tmp_path):
    with pytest.raises(DataError, match="are those of"):
        write_tokens(tmp_path / "tokens", [dataclasses.replace(sample(1, 2, 3), input_ids=(1, 2, 4))])


def test_a_damaged_dataset_is_refused(tmp_path):
    folder = tmp_path / "tokens"
    write_tokens(folder, [sample(*range(n)) for n in range(3, 60)])
    (folder / "tokens.parquet").write_bytes((folder / "tokens.parquet").read_bytes()[:-50])
    for read in (read_tokens, read_lengths):
        with pytest.raises(DataError, match="is damaged"):
            read(folder)


def test_rows_of_another_run_are_refused(tmp_path):
    write_tokens(tmp_path / "a", [sample(1, 2, 3)])
    write_tokens(tmp_path / "b", [sample(4, 5, 6)])
    (tmp_path / "a" / "tokens.parquet").write_bytes((tmp_path / "b" / "tokens.parquet").read_bytes())
    with pytest.raises(DataError, match="content hash"):
        read_tokens(tmp_path / "a")


def test_a_missing_dataset_is_an_error_with_a_hint(tmp_path):
    with pytest.raises(StoreError, match=r"missing[\s\S]*hint"):
        read_tokens(tmp_path / "nothing")


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_changed_byte_is_refused_or_harmless(tmp_path, data):
    """Anywhere in the file, footer included: never other samples or lengths, never another error."""
    samples = [sample(*range(n)) for n in range(3, 40)]
    write_tokens(tmp_path / "tokens", samples)
    path = tmp_path / "tokens" / "tokens.parquet"
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    for read, expected in (
        (read_tokens, samples),
        (read_lengths, [(one.sample_id, len(one.input_ids)) for one in samples]),
    ):
        try:
            found = read(tmp_path / "tokens")
        except DataError:
            continue
        assert found == expected


def test_columns_of_other_types_are_refused(tmp_path):
    write_tokens(tmp_path, [sample(1, 2, 3)])
    table = pq.read_table(tmp_path / "tokens.parquet")
    as_text = table.set_column(5, "num_tokens", pa.array(["3"]))
    pq.write_table(as_text, tmp_path / "tokens.parquet")
    for read in (read_tokens, read_lengths):
        with pytest.raises(DataError, match="num_tokens: string"):
            read(tmp_path)
    mask = table.schema.field("loss_mask")
    pq.write_table(table.set_column(7, mask, pa.array([None], mask.type)), tmp_path / "tokens.parquet")
    with pytest.raises(DataError, match="empty fields"):
        read_tokens(tmp_path)
