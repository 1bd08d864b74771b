"""The volume as an ordinary user sees it: size, used, free bytes and files; and what else is mounted.

Every figure is what ``statvfs`` says: project quotas (XFS, ext4), quotas of CephFS folders and what an NFS server
grants show there and count. Quotas of single users or groups do not: the kernel keeps them apart, and a write
beyond them ends with EDQUOT, which stops a run as a full disk does.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
NETWORK = ("nfs", "nfs4", "ceph", "cifs", "smb3", "9p", "virtiofs", "lustre", "gpfs", "beegfs", "zfs", "glusterfs")
"""File systems that hold data although no device of this machine backs them; ``fuse.*`` counts as well."""
ESCAPES = {"\\040": " ", "\\011": "\t", "\\012": "\n", "\\134": "\\"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """One file system, or the part of it that a quota leaves."""

    path: str
    total_bytes: int
    used_bytes: int
    free_bytes: int
    """What an ordinary user can still write: ``f_bavail``, not the blocks kept for root."""
    free_files: int | None
    """Names an ordinary user can still make; None where the file system sets no number."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A line of the kernel's list of mounts."""

    point: str
    kind: str
    source: str
    device: str
    is_writable: bool

    @property
    def holds_data(self) -> bool:
        """Whether it is a disk or a share: no memory, no image, no view of the kernel."""
        if not self.is_writable or self.source.startswith("/dev/loop"):
            return False
        return self.source.startswith("/dev/") or self.kind in NETWORK or self.kind.startswith("fuse.")


def volume(path: Path) -> Volume:
    """Figures of the volume that holds an existing path."""
    stat = os.statvfs(path)
    return Volume(
        path=os.fspath(path),
        total_bytes=stat.f_blocks * stat.f_frsize,
        used_bytes=(stat.f_blocks - stat.f_bfree) * stat.f_frsize,
        free_bytes=stat.f_bavail * stat.f_frsize,
        free_files=stat.f_favail if stat.f_files else None,
    )


def mounts() -> list[Mount]:
    """What is mounted, in the kernel's order; empty where it does not say."""
    try:
        rows = [line.split() for line in MOUNTS.read_text().splitlines()]
    except OSError:
        return []
    found = []
    for row in rows:
        kind, source, options = row[row.index("-") + 1 :][:3]
        is_writable = not {"ro"} & {*row[5].split(","), *options.split(",")}
        found.append(Mount(_plain(row[4]), kind, _plain(source), row[2], is_writable))
    return found


def holding(path: Path, found: Iterable[Mount]) -> Mount | None:
    """The mount that holds a resolved path; of several at one place the last."""
    there = [mount for mount in found if path.is_relative_to(mount.point)]
    return max(reversed(there), key=lambda mount: len(mount.point), default=None)


def file_system(path: Path) -> tuple[str, str]:
    """Kind and source of the file system that holds a path: ``xfs``, ``/dev/sdb``; ``?`` where nobody says."""
    mount = holding(path.resolve(), mounts())
    return (mount.kind, mount.source) if mount else ("?", "?")


def _plain(text: str) -> str:
    for escape, character in ESCAPES.items():
        text = text.replace(escape, character)
    return text


def others(path: Path) -> list[Volume]:
    """Other mounted volumes where this user can write, each once, the freest first."""
    return sorted(_writable(path.stat().st_dev), key=lambda found: -found.free_bytes)


def _writable(own_device: int) -> Iterator[Volume]:
    seen: set[str] = set()
    for mount in mounts():
        if mount.device in seen or not mount.holds_data:
            continue
        try:
            if Path(mount.point).stat().st_dev == own_device or not os.access(mount.point, os.W_OK | os.X_OK):
                continue
            if Path(mount.point).is_dir():  # containers mount single files
                seen.add(mount.device)
                yield volume(Path(mount.point))
        except OSError:  # a share whose server is gone, or a mount hidden below another
            continue
