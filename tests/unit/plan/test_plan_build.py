"""The capture plan: every sample once, sums that close, little padding, the same plan for any order."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.canonical import canonical_json, digest
from eyas.contracts import CaptureIdentity, CapturePlan
from eyas.errors import PlanError
from eyas.fs import read_record, write_record
from eyas.plan.build import build_plan, check_context, padding_share, shard_path
from eyas.plan.summary import plan_table


def capture(**changes) -> CaptureIdentity:
    facts = {
        "target": "t",
        "tokens": "x",
        "boundaries": (2, 15, 27),
        "final_hidden": "post_norm",
        "dtype": "bfloat16",
        "codec": "raw",
        "engine": "hf",
        "engine_version": "1",
        "engine_options": {},
        "image": "",
        "shard_bytes": 67_108_864,
        "batch_tokens": 4096,
        "revision": 1,
    }
    return CaptureIdentity(**{**facts, **changes})


def named(lengths: list[int]) -> list[tuple[str, int]]:
    return [(digest(i)[:16], n) for i, n in enumerate(lengths)]


def test_golden_ten_thousand_samples_of_kimi():
    """Case 19: 21,033,536 tokens, hidden 7168, three aux streams and the last: the bytes of the story."""
    rng = random.Random(0)
    lengths = [rng.randint(1000, 3000) for _ in range(9_990)]
    rest = 21_033_536 - sum(lengths)
    lengths += [rest // 10 + (i < rest % 10) for i in range(10)]
    plan = build_plan(named(lengths), capture(boundaries=(3, 31, 59), shard_bytes=1 << 31, batch_tokens=32_768), 7168)
    assert (plan.num_samples, plan.num_tokens, plan.num_streams) == (10_000, 21_033_536, 4)
    assert plan.payload_bytes == 1_206_147_088_384
    assert sum(shard.payload_bytes for shard in plan.shards) == 1_206_147_088_384
    assert plan.token_bytes == 105_167_680


def test_short_and_long_rows_are_stored_without_padding():
    """Case 20: rows of 16 and 4,096 tokens are 4,112 planned tokens, and never share a forward."""
    plan = build_plan(named([16, 4096]), capture(), 576)
    assert plan.num_tokens == 4_112
    assert plan.payload_bytes == 4_112 * 4 * 576 * 2
    assert [[s.num_tokens for s in batch] for batch in plan.shards[0].batches] == [[4096], [16]]


lengths_lists = st.lists(st.integers(1, 300), min_size=1, max_size=80)


@given(lengths_lists, st.integers(1024, 200_000), st.integers(1, 600), st.randoms())
@settings(max_examples=80)
def test_every_sample_once_and_sums_close(lengths, shard_bytes, batch_tokens, rng):
    samples = named(lengths)
    facts = capture(shard_bytes=shard_bytes, batch_tokens=batch_tokens)
    plan = build_plan(samples, facts, hidden_size=8)
    placed = [(s.sample_id, s.num_tokens) for shard in plan.shards for s in shard.samples]
    assert Counter(placed) == Counter(samples)
    assert plan.num_tokens == sum(lengths)
    assert plan.payload_bytes == sum(lengths) * 64 == sum(shard.payload_bytes for shard in plan.shards)
    for shard in plan.shards:
        assert shard.payload_bytes == sum(s.num_tokens for s in shard.samples) * 64
        assert shard.payload_bytes <= shard_bytes or len(shard.samples) == 1
        for batch in shard.batches:
            assert len(batch) * max(s.num_tokens for s in batch) <= batch_tokens or len(batch) == 1
    shuffled = samples.copy()
    rng.shuffle(shuffled)
    assert build_plan(iter(shuffled), facts, hidden_size=8) == plan


@given(lengths_lists)
@settings(max_examples=30)
def test_shards_are_filled(lengths):
    """A shard is closed only when the next sample does not fit."""
    plan = build_plan(named(lengths), capture(shard_bytes=20_000), hidden_size=8)
    for shard, following in itertools.pairwise(plan.shards):
        assert shard.payload_bytes + following.samples[0].num_tokens * 64 > 20_000


def test_paths_have_at_most_64_shards_a_folder():
    plan = build_plan(named([100] * 200), capture(shard_bytes=1024), hidden_size=8)
    paths = [shard.path for shard in plan.shards]
    assert len(set(paths)) == 200
    assert max(Counter(path.split("/")[0] for path in paths).values()) == 64
    assert paths[0] == "000/shard-00000.safetensors"
    assert paths == sorted(paths)
    assert shard_path(64 * 12 + 5) == "012/shard-00773.safetensors"


def sharegpt_lengths(count: int, limit: int) -> list[int]:
    """Lengths between the known percentiles 10, 25, 50, 75, 90, 95, 99 of ShareGPT answers."""
    knots = [
        (0, 20),
        (0.1, 332),
        (0.25, 706),
        (0.5, 1559),
        (0.75, 2081),
        (0.9, 2396),
        (0.95, 2603),
        (0.99, 3478),
        (1, 27_569),
    ]
    rng, lengths = random.Random(1), []
    for _ in range(count):
        share = rng.random()
        (a, low), (b, high) = next((p, q) for p, q in itertools.pairwise(knots) if share <= q[0])
        lengths.append(min(int(low + (high - low) * (share - a) / (b - a)), limit))
    return lengths


@pytest.mark.parametrize(
    ("lengths", "hidden_size", "facts"),
    [
        ([min(int(random.Random(i).lognormvariate(4.9, 0.5)) + 10, 300) for i in range(900)], 576, {}),
        (sharegpt_lengths(1000, 2048), 576, {}),
        (sharegpt_lengths(10_000, 2048), 7168, {"shard_bytes": 1 << 31, "batch_tokens": 32_768}),
        (sharegpt_lengths(2_000, 16_384), 4096, {"shard_bytes": 1 << 30, "batch_tokens": 32_768}),
    ],
    ids=["short answers", "sharegpt 1k", "sharegpt kimi", "sharegpt long"],
)
def test_padding_stays_under_five_percent(lengths, hidden_size, facts):
    plan = build_plan(named(lengths), capture(**facts), hidden_size)
    assert padding_share(plan) < 0.05


def test_padding_share_by_hand():
    plan = build_plan(named([10, 6, 4]), capture(batch_tokens=30), hidden_size=8)
    assert padding_share(plan) == pytest.approx(1 - 20 / 30)


def test_a_hundred_thousand_samples_plan_in_seconds():
    samples = named(sharegpt_lengths(1000, 4096) * 120)
    start_s = time.perf_counter()
    plan = build_plan(samples, capture(shard_bytes=1 << 30), 4096)
    assert time.perf_counter() - start_s < 10
    assert plan.num_samples == 120_000


def test_plan_file_is_canonical_and_strict(tmp_path):
    plan = build_plan(named([5, 7, 4]), capture(), 576)
    write_record(tmp_path / "plan.json", plan)
    assert read_record(CapturePlan, tmp_path / "plan.json") == plan
    assert (tmp_path / "plan.json").read_text() == canonical_json(plan) + "\n"


@pytest.mark.parametrize(
    ("samples", "message"),
    [([], "no sample"), ([("a", 3), ("a", 4)], "comes twice"), ([("a", 0)], "0 tokens")],
)
def test_impossible_plans_are_refused(samples, message):
    with pytest.raises(PlanError, match=message):
        build_plan(samples, capture(), 576)


def test_longest_sample_needs_one_position_more():
    """Case 25: 2,047 tokens fit a context of 2,048, 2,048 do not; both numbers are named."""
    check_context([("a", 2047), ("b", 5)], 2048)
    with pytest.raises(
        PlanError, match=r"b has 2,048 tokens and needs 2,049 .* at most 2,048[\s\S]*max_tokens to 2047"
    ):
        check_context([("a", 7), ("b", 2048)], 2048)


def test_summary_says_how_the_last_states_are_taken():
    """Case 24: the final boundary is planned as itself, and its norm is said."""
    plan = build_plan(named([5, 7]), capture(boundaries=(0, 15, 30)), 576)
    assert plan.capture.boundaries == (0, 15, 30)
    text = plan_table(plan)
    assert "b0, b15, b30 without norm, last after the final norm" in text
    assert "padding" in text


def test_planning_imports_no_model_code():
    code = (
        "import sys, eyas.plan.build, eyas.plan.budget, eyas.plan.identity, eyas.plan.summary, eyas.stages.plan\n"
        "print([m for m in ('torch', 'transformers', 'datasets') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
