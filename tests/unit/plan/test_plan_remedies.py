"""Whether a capture fits, and what would make it fit: the story's figures, and rules that hold for any figures."""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_plan_build import capture, named

from eyas.errors import DiskError
from eyas.plan.budget import Budget, Done, Need, Ratio, Reclaim, Retirable, best_ratio, default_ratio, measured_ratio
from eyas.plan.build import build_plan
from eyas.plan.remedies import check_fits, remedies, with_gc, with_retired
from eyas.plan.volume import Volume

GB = 10**9
FREE, RESERVE, OLD = 1_900 * GB, 1 * GB, 828 * GB
PAYLOAD = 21_033_536 * 4 * 7168 * 2
# 2 GiB hold 37,449 tokens of 57,344 bytes: 17 samples of 2,103 or 2,104 tokens, so 10,000 samples are 589 shards.
BESIDE = 21_033_536 * 5 + 10_000 * 1024 + 589 * 4096
BLOSC2 = 832_241_490_985 + BESIDE
"""0.69 x 1,206,147,088,384 = 832,241,490,984.96, rounded up."""


def story(codec: str, *cache_types: str, reclaim: Reclaim | None = None) -> Budget:
    """10,000 samples, 21,033,536 tokens, four streams of 7168; 1.9 TB are free."""
    capture_ = capture(boundaries=(3, 31, 59), codec=codec, shard_bytes=1 << 31, batch_tokens=32_768)
    plan = build_plan(named([2104] * 3_536 + [2103] * 6_464), capture_, 7168)
    return Budget(
        need=Need.of(plan),
        ratio=default_ratio(codec),
        free_bytes=FREE,
        reserve_bytes=RESERVE,
        cache_types=cache_types or ("hardlink",),
        reclaim=reclaim or Reclaim(),
    )


def test_golden_bytes_of_the_story():
    """Case 19: 1,206.1 GB before the codec, about 830 GB after it."""
    found = story("blosc2")
    assert (found.need.num_samples, found.need.num_tokens) == (10_000, 21_033_536)
    assert found.need.payload_bytes == PAYLOAD == 1_206_147_088_384
    assert found.total_bytes == BLOSC2 == 832_359_311_209
    assert story("raw").total_bytes == PAYLOAD + BESIDE == 1_206_264_908_608
    assert story("int8").total_bytes == 621_889_438_771 + BESIDE  # 0.5156 x 1,206,147,088,384 = ...438,770.79


STORY = {
    # codec, cache.type: (headroom without the 828 GB, with them, samples that fit without them)
    ("blosc2", "hardlink"): (1_899 * GB - BLOSC2, 2_727 * GB - BLOSC2, 10_000),
    ("raw", "hardlink"): (692_735_091_392, 1_520_735_091_392, 10_000),
    ("blosc2", "copy"): (1_899 * GB - 2 * BLOSC2, 2_727 * GB - 2 * BLOSC2, 10_000),
    # 2 x 1,206,264,908,608 = 2,412,529,817,216; 1,899 GB / 241,252,981.7 bytes a sample = 7,871.4 samples
    ("raw", "copy"): (-513_529_817_216, 314_470_182_784, 7_871),
}


@pytest.mark.parametrize("setting", STORY)
def test_golden_verdicts_of_the_story(setting):
    """Case 86: with what gc frees now, with what it frees after the old states are retired, and without either."""
    without, with_old, fitting = STORY[setting]
    for reclaim, gc_helps in ((Reclaim(OLD), True), (Reclaim(0, (Retirable("ab" * 16, "old", OLD),)), False)):
        found = story(*setting, reclaim=reclaim)
        assert found.headroom_bytes == without
        assert found.fits == (without >= 0)
        assert found.num_samples_that_fit == fitting
        assert with_gc(found).headroom_bytes == (with_old if gc_helps else without)
        assert with_gc(found).fits == (gc_helps or without >= 0)
        assert with_retired(found).headroom_bytes == with_old
        assert with_retired(found).fits


def test_the_story_on_a_copying_cache_names_every_way_out_with_its_number():
    """Cases 18, 21, 86: raw states, twice: 513.5 GB lack."""
    old = Reclaim(2 * GB, (Retirable("ab" * 16, "vllm-old", OLD),))
    found = story("raw", "reflink", "copy", reclaim=old)
    volumes = [
        Volume(path=f"/{n}", total_bytes=n, used_bytes=0, free_bytes=n, free_files=None) for n in (3 * 10**12, 9)
    ]
    ways = {way.name: way for way in remedies(found, volumes)}
    twice = 2 * (PAYLOAD + BESIDE)
    expected = {
        "gc": (2 * GB, False),
        "retire": (830 * GB, True),
        "hardlink": (twice // 2, True),
        "trained_rows": (0, False),
        "int8": (twice - 2 * (621_889_438_771 + BESIDE), True),
        "fewer_samples": (513_529_817_216, True),
        "other_volume": (twice + RESERVE, True),
    }
    assert {name: (way.num_bytes, way.closes_gap) for name, way in ways.items()} == expected
    assert ways["fewer_samples"].num_samples == 7_871
    assert "/3000000000000 (3,000.0 GB free)" in ways["other_volume"].how
    assert "/9" not in ways["other_volume"].how
    assert "abababab (vllm-old, 828.0 GB)" in ways["retire"].how
    with pytest.raises(DiskError) as caught:
        check_fits(found, volumes)
    text = str(caught.value)
    assert "7,871 of 10,000 samples would; 513.5 GB lack" in text
    assert "`make budget`" in caught.value.hint
    for way in ways.values():
        judged = "enough" if way.closes_gap else "not enough"
        assert re.search(rf"^{way.name} +{re.escape(way.figure)} +{judged} +{re.escape(way.how)}$", text, re.MULTILINE)


def test_what_is_done_does_not_count_for_another_capture():
    """A codec or rows are changed: another identity, and the bytes of the old one stay where they are."""
    found = dataclasses.replace(story("blosc2"), done=Done(num_shards=300, num_bytes=400 * GB), free_bytes=400 * GB)
    assert found.gap_bytes == BLOSC2 - 400 * GB + RESERVE - 400 * GB
    ways = {way.name: way for way in remedies(found)}
    assert ways["int8"].num_bytes == BLOSC2 - 400 * GB - (621_889_438_771 + BESIDE) < 0
    assert not ways["int8"].closes_gap
    assert ways["fewer_samples"].num_samples == 399 * GB * 10_000 // BLOSC2 == 4_793
    assert found.num_samples_that_fit == 799 * GB * 10_000 // BLOSC2 == 9_599
    assert ways["other_volume"].num_bytes == BLOSC2 + RESERVE


def test_trained_rows_close_a_gap_that_their_share_covers():
    plan = build_plan(named([100] * 1000), capture(codec="raw"), 1024, (60_000, 20_000))
    need = Need.of(plan)
    assert (need.payload_bytes, need.trained_payload_bytes) == (819_200_000, 409_600_000)
    found = Budget(need=need, ratio=default_ratio("raw"), free_bytes=500_000_000, reserve_bytes=0)
    ways = {way.name: way for way in remedies(found)}
    assert (ways["trained_rows"].num_bytes, ways["trained_rows"].closes_gap) == (409_600_000, True)
    trained = dataclasses.replace(found, need=dataclasses.replace(need, last_rows="trained"))
    assert trained.fits
    assert trained.payload_ratio == 0.5
    assert "trained_rows" not in {way.name for way in remedies(dataclasses.replace(trained, free_bytes=0))}


def test_too_few_files_left_is_no_fit_although_the_bytes_are_there():
    """589 shards and folders; a volume can be out of inodes with all its bytes free."""
    found = dataclasses.replace(story("blosc2"), free_files=589 + 1024)
    assert found.fits
    full = dataclasses.replace(found, free_files=589 + 1023)
    assert (full.fits, full.gap_bytes, full.num_missing_files) == (False, 0, 1)
    with pytest.raises(DiskError, match=r"1,613 files are to be made and the volume has room for 1,612 .*shard_bytes"):
        check_fits(full)
    twice = dataclasses.replace(found, cache_types=("copy",))
    assert twice.num_needed_files == 2 * 589 + 1024


def test_a_finished_capture_needs_nothing_on_a_full_volume():
    done = Done(num_shards=589, num_bytes=840 * GB, is_cached=True)
    for types in (("hardlink",), ("copy",)):
        found = dataclasses.replace(story("blosc2", *types), done=done, free_bytes=RESERVE - 1, free_files=0)
        assert (found.needed_bytes, found.total_bytes, found.fits) == (0, 840 * GB, True)
    uncommitted = dataclasses.replace(found, done=dataclasses.replace(done, is_cached=False))
    assert (uncommitted.needed_bytes, uncommitted.fits, uncommitted.gap_bytes) == (840 * GB, False, 840 * GB + 1)


def test_the_ratio_is_measured_on_the_nearest_states():
    """Ids and masks do not count as states; 1,000 tokens of 57,344 bytes stored in 40 MB and 5,000 bytes."""
    need = story("blosc2").need
    own = best_ratio(need, Done(num_shards=3, num_bytes=40_005_000), 1_000, Ratio(0.5, "earlier"))
    assert own == Ratio(40_000_000 / 57_344_000, "measured on 3 shards of this capture")
    assert best_ratio(need, Done(), 0, Ratio(0.5, "earlier")) == Ratio(0.5, "earlier")
    assert best_ratio(need, Done(), 0, None).value == 0.69
    assert "not measured" in best_ratio(need, Done(), 0, None).source
    assert measured_ratio(story("raw").need, 40_005_000, 1_000, "") is None


# ── any figures ───────────────────────────────────────────────────────────────────────────────

sizes = st.integers(0, 10**15)
counts = st.integers(1, 10**7)


@st.composite
def budgets(draw) -> Budget:
    payload = draw(st.integers(1, 10**15))
    num_shards = draw(counts)
    need = Need(
        num_samples=draw(counts),
        num_tokens=draw(counts),
        num_shards=num_shards,
        payload_bytes=payload,
        trained_payload_bytes=draw(st.integers(1, payload)),
        token_bytes=draw(sizes),
        codec=draw(st.sampled_from(["raw", "blosc2", "int8"])),
        last_rows=draw(st.sampled_from(["all", "trained"])),
    )
    stale = st.builds(Retirable, st.just("ab" * 16), st.text(max_size=5), sizes)
    return Budget(
        need=need,
        ratio=Ratio(draw(st.floats(0.01, 1.5)), "x"),
        free_bytes=draw(sizes),
        reserve_bytes=draw(sizes),
        done=Done(num_shards=draw(st.integers(0, num_shards)), num_bytes=draw(sizes), is_cached=draw(st.booleans())),
        cache_types=draw(st.sampled_from([(), ("hardlink",), ("copy",), ("reflink", "copy")])),
        free_files=draw(st.none() | st.integers(0, 10**8)),
        reclaim=Reclaim(draw(sizes), tuple(draw(st.lists(stale, max_size=3)))),
    )


@given(budgets(), sizes)
def test_more_free_bytes_never_turn_a_yes_into_a_no(found, more):
    richer = dataclasses.replace(found, free_bytes=found.free_bytes + more)
    assert richer.fits >= found.fits
    assert richer.num_samples_that_fit >= found.num_samples_that_fit
    assert richer.gap_bytes == max(found.gap_bytes - more, 0)
    assert with_retired(found).fits >= with_gc(found).fits >= found.fits


@given(budgets())
def test_exactly_the_gap_makes_it_fit(found):
    if found.gap_bytes:
        enough = dataclasses.replace(found, free_bytes=found.free_bytes + found.gap_bytes, free_files=None)
        assert enough.fits
        assert not dataclasses.replace(enough, free_bytes=enough.free_bytes - 1).fits


@given(budgets())
def test_the_samples_that_fit_do_and_one_more_does_not(found):
    """In samples of average size: n of N take n/N of the peak, less what lies there already."""
    num, fitting = found.need.num_samples, found.num_samples_that_fit
    there = found.done.num_bytes * (found.copies if found.done.is_cached else 1)

    def fits(count: int) -> bool:
        in_bytes = count * found.peak_bytes <= (found.free_bytes - found.reserve_bytes + there) * num
        files = found.need.num_shards * found.copies + 1024
        in_files = found.free_files is None or count * files <= (found.free_files + found.done.num_shards) * num
        return in_bytes and in_files

    if found.fits:
        assert fitting == num
        return
    assert 0 <= fitting <= num
    assert fitting == 0 or fits(fitting)
    assert not fits(fitting + 1) or fitting == num


@given(budgets())
def test_a_remedy_that_is_enough_really_makes_it_fit(found):
    ways = {way.name: way for way in remedies(found)}
    assert (not ways) == found.fits
    if found.fits:
        assert check_fits(found) is found
        return
    gained = {"gc": found.reclaim.free_now_bytes, "retire": with_retired(found).free_bytes - found.free_bytes}
    for name, num_bytes in gained.items():
        if name in ways:
            assert ways[name].closes_gap == (num_bytes >= found.gap_bytes and not found.num_missing_files)
    fitting = ways["fewer_samples"].num_samples
    assert (
        fitting == 0 or fitting * found.peak_bytes <= (found.free_bytes - found.reserve_bytes) * found.need.num_samples
    )
    with pytest.raises(DiskError, match="does not fit"):
        check_fits(found)
