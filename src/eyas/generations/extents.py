"""Blocks that several files share: what a reflink is, seen through FIEMAP.

A reflink has an inode of its own with blocks of its own by ``stat``, but its bytes lie where the other file's lie.
Deleting one of the two frees nothing. The kernel says of every extent where it lies and whether anybody shares it,
not with whom: so all files that are known are asked, and an extent counts as freed once every known file that has it
goes. One that is shared although a single known file has it is shared with a stranger, and is not counted.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import itertools
import os
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

Key = tuple[int, int]
"""Device and inode."""
SHARING_FILE_SYSTEMS = ("xfs", "btrfs", "bcachefs", "ocfs2")
"""Those that share extents and answer FIEMAP. On others every inode has its blocks for itself."""
_FIEMAP = 0xC020660B
_HEAD, _EXTENT = struct.Struct("=QQLLLL"), struct.Struct("=QQQQQLLLL")
_NUM_EXTENTS = 64
_LAST, _UNKNOWN, _ENCODED, _SHARED = 0x1, 0x2, 0x8, 0x2000
_WHOLE = (1 << 64) - 1


@dataclass(frozen=True)
class SharedBlocks:
    """Which files share which blocks; empty where nothing is shared."""

    blocks: Mapping[Key, tuple[int, ...]] = field(default_factory=dict)
    """Numbers of the shared pieces of a file."""
    piece_bytes: tuple[int, ...] = ()
    num_files: tuple[int, ...] = ()
    """Known files per piece."""
    has_encoded: bool = False
    """Whether the file system compresses: then the blocks of a file are not known."""

    def shared_bytes(self, key: Key) -> int:
        """Bytes of a file that others have too."""
        return sum(self.piece_bytes[piece] for piece in self.blocks.get(key, ()))

    def is_same(self, one: Key, other: Key) -> bool:
        """Whether two files are reflinks of each other and nothing was written to either since."""
        mine = self.blocks.get(one, ())
        return bool(mine) and mine == self.blocks.get(other, ())

    def freed(self, gone: Iterable[Key]) -> Counter[Key]:
        """Bytes of shared blocks that become free when these inodes go; each piece is put down to the first."""
        order: dict[int, Key] = {}
        going: Counter[int] = Counter()
        for key in gone:
            for piece in dict.fromkeys(self.blocks.get(key, ())):
                order.setdefault(piece, key)
                going[piece] += 1
        freed: Counter[Key] = Counter()
        for piece, key in order.items():
            if going[piece] == self.num_files[piece] > 1:
                freed[key] += self.piece_bytes[piece]
        return freed


Place = tuple[str, int]
"""Volume and byte on it."""


def read_shared(files: Mapping[Key, tuple[str, str]]) -> SharedBlocks:
    """Ask where every file lies.

    Args:
        files: Volume and a path per inode; what cannot be opened is left out.
    """
    runs: dict[Key, list[tuple[Place, Place]]] = {}
    has_encoded = False
    for key, (volume, path) in files.items():
        with contextlib.suppress(OSError):
            shared, encoded = _shared_extents(path)
            has_encoded |= encoded
            if shared:
                runs[key] = [((volume, start), (volume, end)) for start, end in shared]
    return _pieces(runs, has_encoded)


def _pieces(runs: Mapping[Key, list[tuple[Place, Place]]], has_encoded: bool) -> SharedBlocks:
    """Cut all extents at each other's ends, so that two files have a piece whole or not at all."""
    cuts = sorted({end for extents in runs.values() for extent in extents for end in extent})
    number = {start: index for index, start in enumerate(cuts)}
    blocks = {
        key: tuple(piece for start, end in extents for piece in range(number[start], number[end]))
        for key, extents in runs.items()
    }
    counted = Counter(piece for pieces in blocks.values() for piece in set(pieces))
    return SharedBlocks(
        blocks=blocks,
        # Between two volumes lies no piece, and nobody asks for it.
        piece_bytes=tuple(end[1] - start[1] for start, end in itertools.pairwise(cuts)),
        num_files=tuple(counted[index] for index in range(len(cuts))),
        has_encoded=has_encoded,
    )


def _shared_extents(path: str) -> tuple[list[tuple[int, int]], bool]:
    """Begin and end on the device of every extent that somebody shares, and whether any is compressed."""
    shared: list[tuple[int, int]] = []
    has_encoded, start, is_last = False, 0, False
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        while not is_last:
            request = array.array("B", _HEAD.pack(start, _WHOLE - start, 0, 0, _NUM_EXTENTS, 0))
            request.frombytes(bytes(_EXTENT.size * _NUM_EXTENTS))
            fcntl.ioctl(fd, _FIEMAP, request)
            num_extents = _HEAD.unpack_from(request)[3]
            is_last = num_extents == 0
            for index in range(num_extents):
                logical, physical, length, _, _, flags, *_ = _EXTENT.unpack_from(
                    request, _HEAD.size + index * _EXTENT.size
                )
                start, is_last = logical + length, bool(flags & _LAST)
                has_encoded |= bool(flags & _ENCODED)
                if flags & _SHARED and not flags & _UNKNOWN:
                    shared.append((physical, physical + length))
    finally:
        os.close(fd)
    return shared, has_encoded
