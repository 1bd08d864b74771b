"""Which GPU architectures compiled libraries hold, read from themselves: a wheel says nothing about it in its name.

A CUDA library carries fat binaries: a header, then one entry for each architecture, machine code (a cubin) or PTX, which
the driver compiles for newer ones. Layout as in NVIDIA's ``fatbinary_section.h`` and seen in libraries: magic
0xBA55ED50, version 1, header of 16 bytes, size; entries: kind (1 PTX, 2 cubin), header size at 4, size at 8,
architecture at 28.
"""

from __future__ import annotations

import struct
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from mmap import ACCESS_READ, mmap
from pathlib import Path

MAGIC = (0xBA55ED50).to_bytes(4, "little")
HEADER, ENTRY = struct.Struct("<IHHQ"), struct.Struct("<HHIQIIHHI")
PTX, CUBIN = 1, 2

Kernels = tuple[frozenset[int], frozenset[int]]
"""Architectures with machine code, and those with PTX: 90 is SM90."""


def architectures(data: mmap | bytes) -> Kernels:
    """Of one library's fat binaries; empty sets when it has none."""
    found: dict[int, set[int]] = {CUBIN: set(), PTX: set()}
    at = data.find(MAGIC)
    while at >= 0:
        for kind, architecture in _entries(data, at):
            found[kind].add(architecture)
        at = data.find(MAGIC, at + 4)
    return frozenset(found[CUBIN]), frozenset(found[PTX])


def _entries(data: mmap | bytes, at: int) -> Iterator[tuple[int, int]]:
    if at + HEADER.size > len(data):
        return
    _, version, header_size, size = HEADER.unpack_from(data, at)
    end = at + header_size + size
    if version != 1 or header_size != HEADER.size or end > len(data):
        return  # the four bytes by chance
    at += header_size
    while at + ENTRY.size <= end:
        kind, _, entry_size, num_bytes, *_, architecture = ENTRY.unpack_from(data, at)
        if kind not in (PTX, CUBIN) or entry_size < ENTRY.size:
            return
        yield kind, architecture
        at += entry_size + num_bytes


def libraries(path: Path) -> Iterator[tuple[str, Kernels]]:
    """Libraries with kernels in a wheel or below a folder, by name."""
    if path.is_dir():
        for library in sorted(path.rglob("*.so*")):
            if library.is_file() and library.stat().st_size:
                yield from _named(str(library.relative_to(path)), library)
        return
    with zipfile.ZipFile(path) as wheel, tempfile.TemporaryDirectory() as folder:
        for name in sorted(name for name in wheel.namelist() if ".so" in Path(name).name):
            library = Path(wheel.extract(name, folder))
            yield from _named(name, library)
            library.unlink()


def _named(name: str, library: Path) -> Iterator[tuple[str, Kernels]]:
    with library.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
        found = architectures(data)
    if found[0] or found[1]:
        yield name, found


def runs_on(kernels: Kernels, architecture: int) -> bool:
    """Machine code of the same major number up to it, or PTX of any older one."""
    cubins, ptx = kernels
    same = any(each // 10 == architecture // 10 and each <= architecture for each in cubins)
    return same or any(each <= architecture for each in ptx)


def table(paths: Sequence[Path], wanted: Sequence[int]) -> tuple[str, list[str]]:
    """A line for each library, and those that lack a wanted architecture."""
    lines, lacking = [], []
    for path in paths:
        for name, kernels in libraries(path):
            cubins, ptx = (" ".join(map(str, sorted(each))) or "-" for each in kernels)
            missing = [architecture for architecture in wanted if not runs_on(kernels, architecture)]
            lacks = f"  lacks {' '.join(map(str, missing))}" if missing else ""
            lines.append(f"{name}  machine code {cubins}  PTX {ptx}{lacks}")
            if missing:
                lacking.append(name)
    return "\n".join(lines), lacking
