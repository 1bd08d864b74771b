"""The draft vocab and its file."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from eyas.errors import ConfigError, DataError
from eyas.tokens.draft_vocab import DraftVocab, build_draft_vocab


def test_fewer_distinct_tokens_than_the_draft_vocab():
    """Case 14: 6,054 distinct tokens, V 163,840, W 32,000: filled, rising, bijective, under a second."""
    rng = np.random.default_rng(0)
    counts_V = np.zeros(163_840, dtype=np.int64)
    used = rng.choice(163_840, 6_054, replace=False)
    counts_V[used] = rng.integers(1, 1000, 6_054)
    start_s = time.perf_counter()
    vocab = build_draft_vocab(counts_V, 32_000)
    assert time.perf_counter() - start_s < 1
    targets = vocab.target_ids_W.numpy()
    assert len(targets) == 32_000 == int(vocab.t2d_V.sum())
    assert (np.diff(targets) > 0).all()
    assert set(used) <= set(targets)
    unused = [i for i in range(163_840) if counts_V[i] == 0][: 32_000 - 6_054]
    assert set(targets) == set(used) | set(unused)
    assert vocab.draft_ids_V[vocab.target_ids_W].tolist() == list(range(32_000))
    assert vocab.coverage(counts_V) == 1.0


@given(st.lists(st.integers(0, 5), min_size=4, max_size=60), st.data())
def test_most_frequent_first_and_lower_ids_among_equals(counts, data):
    """The same choice as sorting by (count falling, id rising)."""
    draft_vocab_size = data.draw(st.integers(1, len(counts)))
    vocab = build_draft_vocab(np.asarray(counts), draft_vocab_size)
    ranked = sorted(range(len(counts)), key=lambda i: (-counts[i], i))
    assert vocab.target_ids_W.tolist() == sorted(ranked[:draft_vocab_size])
    inside = Counter({i: counts[i] for i in ranked[:draft_vocab_size]})
    assert vocab.coverage(np.asarray(counts)) == (inside.total() / sum(counts) if sum(counts) else 0.0)


def test_end_tokens_are_always_inside():
    counts_V = np.asarray([9, 8, 7, 6, 0, 0])
    assert build_draft_vocab(counts_V, 3, always=[5]).target_ids_W.tolist() == [0, 1, 5]
    with pytest.raises(ConfigError, match="end-of-turn"):
        build_draft_vocab(counts_V, 1, always=[4, 5])


def test_the_whole_vocab_is_the_identity():
    vocab = build_draft_vocab(np.zeros(7, dtype=np.int64), 7)
    assert vocab.d2t_W.tolist() == [0] * 7
    assert vocab.t2d_V.all()


def test_a_draft_vocab_larger_than_the_vocab_is_refused():
    with pytest.raises(ConfigError, match=r"draft_vocab_size: 8, expected at most 7[\s\S]*hint"):
        build_draft_vocab(np.zeros(7, dtype=np.int64), 8)


def test_another_size_is_built_anew(tmp_path, monkeypatch):
    """Case 15: 512, then 256, with a stale map of another kind in the working directory."""
    monkeypatch.chdir(tmp_path)
    stale = build_draft_vocab(np.arange(1024), 700)
    save_file({"d2t": stale.d2t_W, "t2d": stale.t2d_V}, tmp_path / "draft_vocab.safetensors")
    counts_V = np.random.default_rng(1).integers(0, 50, 1024)
    for size in (512, 256):
        build_draft_vocab(counts_V, size).write(tmp_path / "map")
        vocab = DraftVocab.read(tmp_path / "map")
        assert (vocab.draft_vocab_size, vocab.vocab_size) == (size, 1024)
        assert torch.equal(vocab.target_ids_W, build_draft_vocab(counts_V, size).target_ids_W)


def test_equal_maps_are_equal_bytes(tmp_path):
    for name in "ab":
        build_draft_vocab(np.arange(100), 30).write(tmp_path / name)
    files = [(tmp_path / name / "draft_vocab.safetensors").read_bytes() for name in "ab"]
    assert files[0] == files[1]


def test_no_map_is_an_error_even_with_a_stale_one_nearby(tmp_path, monkeypatch):
    """Case 16: ids 0..W-1 are not assumed."""
    monkeypatch.chdir(tmp_path)
    build_draft_vocab(np.arange(10), 5).write(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="missing; draft ids are not assumed to be target ids"):
        DraftVocab.read(tmp_path / "map")


@pytest.mark.parametrize(
    ("d2t", "t2d"),
    [
        (torch.tensor([0, 0]), torch.tensor([True, False, True])),
        (torch.tensor([1, -1]), torch.tensor([True, True, False])),
        (torch.tensor([0, 0], dtype=torch.int32), torch.tensor([True, True, False])),
    ],
)
def test_a_map_whose_sides_differ_is_refused(tmp_path, d2t, t2d):
    (tmp_path / "map").mkdir()
    save_file({"d2t": d2t, "t2d": t2d}, tmp_path / "map" / "draft_vocab.safetensors")
    with pytest.raises(DataError, match="d2t"):
        DraftVocab.read(tmp_path / "map")


def test_a_cut_file_is_refused(tmp_path):
    build_draft_vocab(np.arange(100), 30).write(tmp_path / "map")
    path = tmp_path / "map" / "draft_vocab.safetensors"
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(DataError, match="no safetensors file"):
        DraftVocab.read(tmp_path / "map")
