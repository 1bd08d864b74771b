"""Fat binaries made by hand, entry by entry as NVIDIA's header describes them."""

from __future__ import annotations

import struct
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.ops.image.__main__ import show_kernels
from eyas.ops.image.kernels import CUBIN, PTX, architectures, libraries, runs_on

entries = st.lists(
    st.tuples(st.sampled_from([PTX, CUBIN]), st.sampled_from([80, 90, 100, 120]), st.binary(max_size=40))
)


def fat(content: list[tuple[int, int, bytes]]) -> bytes:
    """kind, pad, header size 64, size, 12 bytes of what does not matter, minor and major, architecture at 28."""
    body = b"".join(
        struct.pack("<HHIQIIHHI", kind, 0x101, 64, len(code), 0, 0, 7, 8, architecture) + bytes(32) + code
        for kind, architecture, code in content
    )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


@given(before=st.binary(max_size=30), first=entries, between=st.binary(max_size=30), second=entries)
def test_every_entry_of_every_fat_binary_is_found(before, first, between, second):
    data = before + fat(first) + between + fat(second)
    cubins, ptx = architectures(data)
    assert cubins == {a for kind, a, _ in first + second if kind == CUBIN}
    assert ptx == {a for kind, a, _ in first + second if kind == PTX}


@given(data=st.binary(max_size=200), cut=st.integers(0, 200))
def test_damaged_bytes_end_in_nothing_worse_than_less(data, cut):
    whole = fat([(CUBIN, 90, b"x" * 20), (CUBIN, 120, b"y")])
    cubins, ptx = architectures(data + whole[:cut])
    assert len(cubins) <= 2
    assert not ptx


@pytest.mark.parametrize(
    ("cubins", "ptx", "architecture", "runs"),
    [
        ([90], [], 90, True),
        ([90], [], 120, False),  # machine code of another major number
        ([100], [], 103, True),  # of the same, older
        ([103], [], 100, False),  # of the same, newer
        ([80], [90], 120, True),  # the driver compiles PTX
        ([80], [120], 90, False),
    ],
)
def test_what_runs_where(cubins, ptx, architecture, runs):
    """CUDA's rules of binary and PTX compatibility."""
    assert runs_on((frozenset(cubins), frozenset(ptx)), architecture) is runs


def test_a_wheel_that_lacks_an_architecture_fails(tmp_path, capsys):
    """Case 90."""
    wheel = tmp_path / "kernels-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("k/common_ops.abi3.so", fat([(CUBIN, 90, b"a"), (CUBIN, 100, b"b")]))
        file.writestr("k/plain.so", b"\x7fELF no kernels")
    assert [name for name, _ in libraries(wheel)] == ["k/common_ops.abi3.so"]
    assert show_kernels([wheel], [90, 100], "common_ops") == 0
    assert show_kernels([wheel], [90, 120], "common_ops") == 1
    assert show_kernels([wheel], [90], "flash_ops") == 1
    assert "lacks 120" in capsys.readouterr().out
