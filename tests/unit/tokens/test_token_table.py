"""The dataset on the disk gives the records of the dataset in memory."""

from __future__ import annotations

import tracemalloc

import pytest

from eyas.errors import DataError
from eyas.tokens.dataset import make_sample, read_tokens, write_tokens
from eyas.tokens.table import TokenTable


def samples(num_samples, num_tokens):
    for i in range(num_samples):
        mask = [0] * 3 + [1] * (num_tokens + i % 5 - 3)
        ids = [i, *range(1, num_tokens + i % 5)]
        yield make_sample(ids, mask, conversation_id=f"c{i}", source="s", split="train", variant="given")


def test_every_record_in_stored_order(tmp_path):
    write_tokens(tmp_path / "tokens", samples(2500, 7))  # several row groups
    table = TokenTable(tmp_path / "tokens", tmp_path)
    listed = read_tokens(tmp_path / "tokens")
    assert list(table) == [sample.sample_id for sample in listed]
    assert [table[name] for name in table] == listed
    assert len(table) == 2500
    assert listed[3].sample_id in table
    assert "0" * 16 not in table
    assert table.get("0" * 16) is None
    with pytest.raises(KeyError):
        table["0" * 16]
    assert [path.name for path in tmp_path.iterdir()] == ["tokens"]  # the file has no name


def test_memory_grows_with_samples_and_not_with_tokens(tmp_path):
    def peak(num_tokens):
        write_tokens(tmp_path / f"{num_tokens}", samples(600, num_tokens))
        tracemalloc.start()
        try:
            table = TokenTable(tmp_path / f"{num_tokens}", tmp_path)
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert len(table) == 600
        return held

    peak(8)  # what is imported at the first use
    assert peak(2000) < 1.5 * peak(20)  # as records: a hundred times


def test_a_dataset_that_is_not_its_index_s_is_refused(tmp_path):
    write_tokens(tmp_path / "a", samples(5, 7))
    write_tokens(tmp_path / "b", samples(6, 7))
    (tmp_path / "a/tokens.parquet").write_bytes((tmp_path / "b/tokens.parquet").read_bytes())
    with pytest.raises(DataError, match="content hash"):
        TokenTable(tmp_path / "a", tmp_path)
