"""A volume of a fixed size that this process alone sees: a tmpfs in a mount namespace of its own.

The mount ends with the last process that sees it, however that ends. Root makes the namespace as root; everybody
else through a user namespace, where the kernel allows one.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from eyas.errors import DiskError

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
MS_REMOUNT = 0x20
MS_PRIVATE_EVERYWHERE = 0x4000 | 0x40000
HINT = (
    "run it as root, or let users make namespaces: `sysctl kernel.apparmor_restrict_unprivileged_userns=0` (Ubuntu), "
    "`sysctl kernel.unprivileged_userns_clone=1` (Debian); in a container: --cap-add SYS_ADMIN"
)


def enter_namespace() -> None:
    """Give this process a mount namespace of its own; its mounts are seen by it and its children alone.

    Raises:
        DiskError: The kernel allows neither root's way nor the users' one; says what each answered.
    """
    uid, gid = os.geteuid(), os.getegid()
    libc = ctypes.CDLL(None, use_errno=True)
    refusals = []
    for name, flags in (("mount namespace", CLONE_NEWNS), ("user namespace", CLONE_NEWUSER | CLONE_NEWNS)):
        if libc.unshare(flags) == 0:
            if flags & CLONE_NEWUSER:
                _map_root(uid, gid)
            _mount(Path("/"), MS_PRIVATE_EVERYWHERE, "")
            return
        refusals.append(f"{name}: {os.strerror(ctypes.get_errno())}")
    raise DiskError(f"a volume of fixed size cannot be mounted here ({'; '.join(refusals)}), expected one way", HINT)


def _map_root(uid: int, gid: int) -> None:
    """Be root inside the user namespace; files stay the caller's outside."""
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    Path("/proc/self/gid_map").write_text(f"0 {gid} 1")


def mount_memory(folder: Path, size_bytes: int) -> None:
    """Mount an empty tmpfs; to be called inside ``enter_namespace``'s namespace.

    Raises:
        DiskError: The kernel refused.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _mount(folder, 0, f"size={size_bytes}")


def resize_memory(folder: Path, size_bytes: int) -> None:
    """Give a mounted tmpfs another size; it may not be smaller than what lies there.

    Raises:
        DiskError: The kernel refused.
    """
    _mount(folder, MS_REMOUNT, f"size={size_bytes}")


def _mount(folder: Path, flags: int, options: str) -> None:
    """mount(2) itself: mount(8) repeats options of the mount that a user namespace does not allow."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"eyas", os.fsencode(folder), b"tmpfs", ctypes.c_ulong(flags), options.encode()):
        why = os.strerror(ctypes.get_errno())
        raise DiskError(f"{folder}: mounting a tmpfs with {options or 'no option'} failed: {why}", HINT)
