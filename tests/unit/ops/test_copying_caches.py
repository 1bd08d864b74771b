"""Whether a commit needs the disk twice: what the budget says, and what the installed DVC does on real file systems."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from adopt_cases import make_repository, ok
from test_adopt_faults import make_image, mount

from eyas.plan.cache import copying_types

__all__ = ["mount"]
NUM_BYTES = 20_000_000


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs"])
def test_the_disk_is_needed_twice_where_dvc_takes_it_twice(tmp_path: Path, mount, kind: str) -> None:
    volume = mount("-o", "loop", str(make_image(tmp_path / "image", kind, 400_000_000)))
    root = make_repository(volume / "repository")
    for number, types in enumerate(("reflink", "reflink,hardlink", "copy", "hardlink,reflink")):
        ok(root, "dvc", "config", "cache.type", types)
        copies = copying_types(root)
        assert copies in ((), tuple(types.split(",")))
        (root / f"d{number}").mkdir()
        (root / f"d{number}/file").write_bytes(os.urandom(NUM_BYTES))
        os.sync()
        before = os.statvfs(volume).f_bavail
        ok(root, "dvc", "add", "-q", f"d{number}")
        os.sync()
        taken = (before - os.statvfs(volume).f_bavail) * os.statvfs(volume).f_frsize
        assert (taken > NUM_BYTES / 2) == bool(copies), (types, taken)
    assert not list(volume.rglob("*probe*"))
