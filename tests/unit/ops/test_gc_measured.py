"""Promised bytes are the bytes that the volume gets back, on real file systems with links of every kind."""

from __future__ import annotations

import os
import subprocess

import pytest
from gc_cases import STATES, Project, mounted

BLOCK_BYTES = 4096
SIZES = (1_000_000, 3_000_000, 40_000, 70_000, 2_500_000)


def free_bytes(point) -> int:
    subprocess.run(["sync", "-f", os.fspath(point)], check=True)
    stat = os.statvfs(point)
    return stat.f_bavail * stat.f_frsize


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "cache_type"),
    [
        ("ext4", "hardlink"),
        ("xfs", "hardlink"),
        ("btrfs", "hardlink"),
        ("xfs", "reflink"),
        ("btrfs", "reflink"),
        ("tmpfs", "hardlink"),
        ("ext4", "copy"),
    ],
)
def test_promise_is_what_the_volume_says(tmp_path, kind, cache_type):
    """Case 82: hard-linked (or reflinked, or copied) names in the workspace are counted, and go with their objects."""
    with mounted(tmp_path, kind) as point:
        project = Project(point / "repo", cache_type)
        project.generation(1, *SIZES)
        project.retire_all()
        before = free_bytes(point)
        plan = project.plan()
        payload = sum(SIZES)
        copies = 2 if cache_type == "copy" else 1
        # Rounded up to blocks, and the list and the manifest beside the states.
        assert copies * payload <= plan["freed_bytes"] <= copies * (payload + (len(SIZES) + 4) * BLOCK_BYTES)
        event = project.gc(plan["plan_id"])
        assert not (project.root / STATES).exists()
        assert project.objects == set()
        num_objects = copies * (len(SIZES) + 2)
        assert abs(event["measured_bytes"] - event["promised_bytes"]) <= num_objects * BLOCK_BYTES
        assert event["promised_bytes"] == event["expected_bytes"] == plan["freed_bytes"]
        # What a person would find: the ledger's line is one small file more than before.
        assert abs(free_bytes(point) - before - plan["freed_bytes"]) <= (num_objects + 16) * BLOCK_BYTES
