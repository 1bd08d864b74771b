"""Shared blocks: the account of pieces against one that counts single bytes, and real reflinks of real file systems."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.generations.extents import _pieces, _shared_extents, read_shared
from eyas.generations.freed import freed_by_inode
from eyas.generations.objects import CachedObject

sys.path.append(os.fspath(Path(__file__).parents[1] / "ops"))

extents = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 15)).map(lambda run: (run[0], run[0] + run[1])), min_size=1, max_size=2
).filter(lambda runs: len(runs) < 2 or runs[0][1] <= runs[1][0] or runs[1][1] <= runs[0][0])


@given(files=st.lists(extents, min_size=1, max_size=5), data=st.data())
def test_freed_is_what_counting_bytes_gives(files, data):
    """A byte comes free when two or more known files have it and all of them go."""
    gone = data.draw(st.sets(st.integers(0, len(files) - 1)))
    volume = {(1, index): [(("v", a), ("v", b)) for a, b in runs] for index, runs in enumerate(files)}
    shared = _pieces(volume, False)
    users = Counter(byte for runs in files for a, b in runs for byte in range(a, b))
    going = Counter(byte for index in gone for a, b in files[index] for byte in range(a, b))
    expected = sum(1 for byte, count in going.items() if count == users[byte] > 1)
    assert sum(shared.freed([(1, index) for index in sorted(gone)]).values()) == expected
    for index, runs in enumerate(files):
        assert shared.shared_bytes((1, index)) == sum(b - a for a, b in runs)


def test_two_volumes_have_nothing_in_common():
    shared = _pieces({(1, 1): [(("a", 0), ("a", 10))], (2, 1): [(("b", 0), ("b", 10))]}, False)
    assert shared.freed([(1, 1), (2, 1)]) == {}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["xfs", "btrfs"])
def test_reflinks_of_a_real_file_system(tmp_path, kind):
    """Two reflinks of one file, then a third that is not told of; one written to in part."""
    from gc_cases import mounted

    size = 1 << 20
    with mounted(tmp_path, kind) as point:
        one, two, part = point / "one", point / "two", point / "part"
        one.write_bytes(os.urandom(size))
        for copy in (two, part):
            subprocess.run(["cp", "--reflink=always", one, copy], check=True)
        with part.open("r+b") as handle:
            handle.write(os.urandom(size // 2))
        subprocess.run(["sync", "-f", point], check=True)
        assert sum(end - start for start, end in _shared_extents(os.fspath(part))[0]) == size // 2
        stats = {path: cached(path) for path in (one, two, part)}

        def freed(gone, known):
            shared = read_shared({(stats[p].device, stats[p].inode): (kind, os.fspath(p)) for p in known})
            return sum(freed_by_inode([stats[p] for p in gone], shared).values())

        everything = [one, two, part]
        assert freed(everything, everything) == size + size // 2
        assert freed([one], everything) == 0
        assert freed([one, two], everything) == size // 2, "the second half is the third file's too"
        assert freed([part], [part]) == size // 2, "what a stranger shares is not counted"
        before = free_bytes(point)
        part.unlink()
        end_s = time.monotonic() + 10  # XFS frees in the background
        while free_bytes(point) - before < size // 2 and time.monotonic() < end_s:
            time.sleep(0.1)
        assert abs(free_bytes(point) - before - size // 2) <= 2 * 4096


def cached(path: Path) -> CachedObject:
    stat = path.stat()
    return CachedObject(stat.st_size, stat.st_blocks * 512, stat.st_dev, stat.st_ino, stat.st_nlink)


def free_bytes(point: Path) -> int:
    subprocess.run(["sync", "-f", point], check=True)
    stat = os.statvfs(point)
    return stat.f_bavail * stat.f_frsize
