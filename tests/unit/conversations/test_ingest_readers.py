"""Streaming readers: any JSON text back, any cut named, constant memory. Expected values: the json module and
arithmetic on the bytes."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eyas.conversations import readers
from eyas.conversations.readers import DamageError, read_json_records, read_parquet_records

SCALARS = st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.text(max_size=20)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
RECORDS = st.lists(st.dictionaries(st.text(max_size=5), VALUES, max_size=4), min_size=1, max_size=8)
SHARED_TMP = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def read(path: Path, content: bytes) -> tuple[list, DamageError | None]:
    path.write_bytes(content)
    values = []
    try:
        for record in read_json_records(path):
            values.append(record.value)
    except DamageError as damage:
        return values, damage
    return values, None


def as_jsonl(records: list, ascii_only: bool) -> bytes:
    return "".join(json.dumps(r, ensure_ascii=ascii_only) + "\n" for r in records).encode("utf-8", "surrogatepass")


@SHARED_TMP
@given(records=RECORDS, ascii_only=st.booleans(), indent=st.none() | st.integers(0, 2), zipped=st.booleans())
def test_whole_files_come_back(tmp_path, monkeypatch, records, ascii_only, indent, zipped):
    monkeypatch.setattr(readers, "CHUNK_BYTES", 7)  # every boundary falls inside something
    pack = gzip.compress if zipped else bytes
    array = json.dumps(records, ensure_ascii=ascii_only, indent=indent).encode()
    assert read(tmp_path / "a", pack(array)) == (records, None)
    assert read(tmp_path / "b", pack(as_jsonl(records, ascii_only))) == (records, None)


@SHARED_TMP
@given(records=RECORDS, data=st.data())
def test_a_cut_array_names_its_byte_and_the_whole_records(tmp_path, records, data):
    """Case 7, at every place: the whole records before the cut are exactly those whose text is complete."""
    texts = [json.dumps(r, ensure_ascii=False) for r in records]
    whole = ("[" + ", ".join(texts) + "]").encode()
    keep = data.draw(st.integers(1, len(whole) - 1))
    values, damage = read(tmp_path / "x", whole[:keep])
    ends, position = [], 1
    for text in texts:
        position += len(text.encode())
        ends.append(position)
        position += 2
    expected = sum(end <= keep for end in ends)
    assert values == records[:expected]
    assert damage.num_whole == expected
    assert f"byte {keep:,}" in damage.where or "UTF-8" in damage.reason


@SHARED_TMP
@given(records=RECORDS, data=st.data())
def test_a_cut_line_names_line_and_byte(tmp_path, records, data):
    lines = [json.dumps(r, ensure_ascii=False).encode() for r in records]
    keep = data.draw(st.integers(1, len(lines[-1]) - 1))
    start = sum(len(line) + 1 for line in lines[:-1])
    values, damage = read(tmp_path / "x", b"\n".join([*lines[:-1], lines[-1][:keep]]))
    assert values == records[:-1]
    assert damage.num_whole == len(records) - 1
    assert damage.where.startswith(f"line {len(records):,}, byte ")
    assert f"byte {start + keep:,}" in damage.where or "UTF-8" in damage.reason


@pytest.mark.parametrize("as_array", [True, False])
def test_a_cut_gzip_keeps_the_whole_records_before_it(tmp_path, as_array):
    records = [{"n": i, "text": str(i**7) * 20} for i in range(2000)]
    plain = json.dumps(records).encode() if as_array else as_jsonl(records, True)
    packed = gzip.compress(plain)
    values, damage = read(tmp_path / "x.gz", packed[: len(packed) // 2])
    assert 500 < len(values) < 1500
    assert values == records[: len(values)]
    assert damage.num_whole == len(values)
    values, damage = read(tmp_path / "x.gz", packed[:-4])  # the trailer alone is cut
    assert (values, damage.reason) == (records, "the gzip stream is cut")
    assert read(tmp_path / "x.gz", packed + gzip.compress(b" " if as_array else b'{"n":1}'))[1] is None


@pytest.mark.parametrize(
    ("content", "where", "reason", "num_whole"),
    [
        (b'[{"a": 1}, {"a" 2}, {"a": 3}]' + b" " * 100, "byte 16 ", "no JSON", 1),
        (b'[{"a": 1}, {"a": "\xff"}]', "byte 18 ", "no UTF-8", 1),
        (b'[{"a": 1}] x' + b" " * 100, "byte 11", "text after the array's end", 1),
        (b'[{"a": 1} {"a": 2}]', "byte 10", "expected , or ]", 1),
        (b'{"a": 1}\n{"a" 2}\n{"a": 3}\n', "line 2, byte 14", "no JSON", 1),
        (b'{"a": 1}\n{"a": "\xff"}\n', "line 2, byte 16", "no UTF-8", 1),
        (b'{\n "a": 1\n}\n', "line 1, byte ", "no JSON", 0),
    ],
)
def test_damage_in_the_middle(tmp_path, content, where, reason, num_whole):
    _, damage = read(tmp_path / "x", content)
    assert damage.where.startswith(where.rstrip())
    assert damage.reason.startswith(reason)
    assert damage.num_whole == num_whole


def test_early_damage_does_not_read_the_rest_of_the_file(tmp_path):
    path = tmp_path / "x.json"
    path.write_bytes(b'[{"a" 1}, ' + b'{"a": 1}, ' * 3_000_000)  # 30 MB
    tracemalloc.start()
    with pytest.raises(DamageError):
        list(read_json_records(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8e6


@pytest.mark.parametrize("as_array", [True, False])
def test_memory_is_constant(tmp_path, as_array):
    """20 MB of records through less than 8 MB."""
    path = tmp_path / "x.json"
    record = json.dumps({"text": "x" * 1000}).encode()
    path.write_bytes(b"[" + b",".join([record] * 20_000) + b"]" if as_array else (record + b"\n") * 20_000)
    tracemalloc.start()
    assert sum(1 for _ in read_json_records(path)) == 20_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8e6


def test_byte_order_mark_blank_lines_and_empty_files(tmp_path):
    assert read(tmp_path / "x", b"\xef\xbb\xbf[1]") == ([1], None)
    assert read(tmp_path / "x", b'\xef\xbb\xbf{"a":1}\r\n\r\n{"a":2}') == ([{"a": 1}, {"a": 2}], None)
    assert read(tmp_path / "x", b"") == ([], None)
    assert read(tmp_path / "x", b" [ ] ") == ([], None)


def test_parquet_text_that_is_no_utf8_is_damage(tmp_path):
    offsets, data = pa.py_buffer(b"\0\0\0\0\x02\0\0\0"), pa.py_buffer(b"\xff\xfe")
    pq.write_table(pa.table({"messages": pa.Array.from_buffers(pa.string(), 1, [None, offsets, data])}), tmp_path / "x")
    with pytest.raises(DamageError, match="after row 0"):
        list(read_parquet_records(tmp_path / "x"))


def test_parquet_rows_and_damage(tmp_path):
    path = tmp_path / "x.parquet"
    rows = [{"messages": [{"role": "user", "content": str(i)}]} for i in range(1000)]
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, path, row_group_size=300, write_page_checksum=True, compression="none")
    assert [r.value for r in read_parquet_records(path)] == rows
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    with pytest.raises(DamageError, match="after row 0"):
        list(read_parquet_records(path))
    flipped = bytearray(whole)
    flipped[whole.index(b"\x03\x00\x00\x00999")] ^= 1  # inside the last row group
    path.write_bytes(flipped)
    with pytest.raises(DamageError) as caught:
        list(read_parquet_records(path))
    assert caught.value.num_whole == 900
