"""The disk gate: pure arithmetic over plan and free bytes."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from test_plan_build import capture, named

from eyas import fs
from eyas.errors import DiskError
from eyas.plan.budget import Done, budget, peak_copies, stored_bytes
from eyas.plan.remedies import check_fits

GB = 10**9


def big_model_plan():
    """120 B type: hidden 2880, four streams of 50,776 tokens a sample: 53 samples are 62 GB."""
    from eyas.plan.build import build_plan

    return build_plan(named([50_776] * 30_000), capture(shard_bytes=1 << 31, batch_tokens=65_536), 2880)


def test_too_many_samples_are_refused_with_how_many_fit():
    """Case 18: 53 samples are 62 GB, 30,000 wanted."""
    plan = big_model_plan()
    assert stored_bytes(plan) / 30_000 * 53 == pytest.approx(62 * GB, rel=0.001)
    with pytest.raises(DiskError) as caught:
        check_fits(budget(plan, free_bytes=63 * GB, reserve_bytes=1 * GB))
    assert "35,1" in caught.value.message
    assert "63.0 GB free, 1.0 GB in reserve" in caught.value.message
    assert "52 of 30,000 samples would" in caught.value.message
    assert "max_conversations" in caught.value.hint


def test_exact_edge_of_the_disk():
    plan = big_model_plan()
    needed = stored_bytes(plan)
    assert check_fits(budget(plan, needed + 5, reserve_bytes=5)).num_samples_that_fit == 30_000
    with pytest.raises(DiskError):
        check_fits(budget(plan, needed + 4, reserve_bytes=5))


def test_what_is_stored_is_not_needed_again():
    plan = big_model_plan()
    needed = stored_bytes(plan)
    assert (
        check_fits(budget(plan, needed // 2 + 10, reserve_bytes=0, done=Done(num_bytes=needed // 2))).needed_bytes
        <= needed // 2 + 1
    )


@pytest.mark.parametrize(
    "types", [("copy",), ("symlink",), ("reflink", "copy"), ("symlink", "hardlink"), ("reflink", "hardlink")]
)
def test_copying_caches_need_the_disk_twice(types):
    """Case 21: payload over half of the free space; the hint names hardlink."""
    plan = big_model_plan()
    free = int(stored_bytes(plan) * 1.5)
    assert check_fits(budget(plan, free, 0, cache_types=("hardlink", "reflink", "copy"))).fits
    with pytest.raises(DiskError) as caught:
        check_fits(budget(plan, free, 0, cache_types=types))
    assert "twice" in caught.value.message
    assert caught.value.hint.endswith("`dvc config cache.type hardlink,reflink`")
    assert check_fits(budget(plan, 2 * stored_bytes(plan), 0, cache_types=types)).copies == 2


def test_a_copying_cache_is_not_blamed_when_nothing_would_fit():
    with pytest.raises(DiskError) as caught:
        check_fits(budget(big_model_plan(), 10 * GB, 0, cache_types=("copy",)))
    assert "max_conversations" in caught.value.hint


def test_no_sample_fits_and_none_is_not_the_advice():
    """0 would keep them all."""
    with pytest.raises(DiskError, match="0 of 30,000 samples would") as caught:
        check_fits(budget(big_model_plan(), free_bytes=GB, reserve_bytes=GB))
    assert "max_conversations" not in caught.value.hint
    assert "free space" in caught.value.hint


def test_budget_never_counts_below_nothing():
    found = budget(big_model_plan(), free_bytes=5, reserve_bytes=100)
    assert (found.num_samples_that_fit, found.fits) == (0, False)


def test_no_cache_and_links_count_once():
    assert [peak_copies(types) for types in ((), ("hardlink",), ("hardlink", "reflink"))] == [1, 1, 1]


def test_link_probe_really_links(tmp_path):
    """Case 22: two folders of one volume; nothing is left behind, missing folders are no problem."""
    (tmp_path / "a").mkdir()
    assert fs.can_hardlink(tmp_path / "a", tmp_path / "not" / "yet")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a"]


def test_link_probe_over_two_mounts(tmp_path):
    """Case 22: workspace and cache under two mounts cannot be linked."""
    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second volume here")
    assert not fs.can_hardlink(tmp_path, other)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("number", "raised"), [(errno.EXDEV, False), (errno.EPERM, False), (errno.EIO, True)])
def test_link_probe_errors(tmp_path, monkeypatch, number, raised):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    if raised:
        with pytest.raises(OSError, match="Input/output"):
            fs.can_hardlink(tmp_path, tmp_path)
    else:
        assert not fs.can_hardlink(tmp_path, tmp_path)
    assert list(tmp_path.iterdir()) == []
