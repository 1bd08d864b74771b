"""Headers and manifests made to do harm, under valid checksums, and disks that cannot be read: refused, never a crash."""

import dataclasses
import errno
import json
import os

import pytest
from shard_cases import make_capture, make_plan, make_states, make_tokens, store

from eyas import fs
from eyas.canonical import canonical_json
from eyas.contracts import ShardManifest
from eyas.errors import StoreError
from eyas.shards.format import NO_CHECKSUM, checksum, parse_header
from eyas.shards.opening import read_header
from eyas.shards.reader import ShardReader
from eyas.shards.verify import verify

HIDDEN_SIZE = 8


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    folder, tokens = tmp_path_factory.mktemp("hostile"), make_tokens([3, 5, 9])
    plan = make_plan(tokens, make_capture(codec="blosc2", shard_bytes=10**6), HIDDEN_SIZE)
    return folder, store(folder, plan, tokens, make_states(tokens, 3, HIDDEN_SIZE))


def header_of(stored) -> tuple[dict, bytes]:
    """The only shard's header, and what follows it."""
    folder, manifest = stored
    data = (folder / manifest.shards[0].path).read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def signed(header: dict) -> bytes:
    """The header with a checksum that agrees, as any writer can make it."""
    metadata = header["__metadata__"]
    metadata["header_xxh3"] = NO_CHECKSUM
    metadata["header_xxh3"] = checksum(padded(header))
    return padded(header)


def padded(header: dict) -> bytes:
    text = canonical_json(header).encode()
    return text + b" " * (-len(text) % 8)


def test_the_signature_of_these_tests_is_the_format_s(stored):
    header, _ = header_of(stored)
    assert parse_header(signed(header), "here").facts.shard == "000/shard-00000.safetensors"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("boundaries", "[1e999]"),
        ("rows", "[[1e999,1]]"),
        ("hidden_size", str(2**60)),
        ("hidden_size", "1" + "0" * 4200),
        ("identity", "../../../../../../tmp/away"),
        ("identity", "/tmp/away"),
        ("shard", "../../away.safetensors"),
        ("shard", "/000/shard-00000.safetensors"),
    ],
)
def test_a_signed_header_with_an_absurd_value_is_refused(stored, key, value):
    header, _ = header_of(stored)
    header["__metadata__"][key] = value
    with pytest.raises(StoreError):
        parse_header(signed(header), "here")


def test_a_shard_without_samples_is_refused(stored, tmp_path):
    header, _ = header_of(stored)
    header = {"__metadata__": header["__metadata__"] | {"samples": "[]", "rows": "[]", "xxh3": "{}"}}
    raw = signed(header)
    (tmp_path / "shard").write_bytes(len(raw).to_bytes(8, "little") + raw)
    with pytest.raises(StoreError, match="lists no samples"):
        read_header(tmp_path / "shard", "here")


@pytest.mark.parametrize("path", ["../outside.safetensors", "/outside/shard-00000.safetensors", "000/notes.txt"])
def test_a_manifest_that_leads_out_of_the_folder_is_refused(stored, path):
    folder, manifest = stored
    edited = dataclasses.replace(manifest, shards=(dataclasses.replace(manifest.shards[0], path=path),))
    refused(folder, edited, "as a shard's path")


def test_a_shard_listed_twice_is_refused_although_the_sums_agree(stored):
    folder, manifest = stored
    names = ("num_planned_samples", "num_planned_tokens", "num_stored_samples", "num_stored_tokens", "stored_bytes")
    doubled = {name: 2 * getattr(manifest, name) for name in names}
    refused(folder, dataclasses.replace(manifest, shards=manifest.shards * 2, **doubled), "listed twice")


def test_a_manifest_of_a_later_version_is_refused(stored):
    folder, manifest = stored
    refused(folder, dataclasses.replace(manifest, schema_version=3), "schema version 3, this eyas reads 1 and 2")


def refused(folder, manifest: ShardManifest, why: str) -> None:
    """By reader and by verify."""
    with pytest.raises(StoreError, match=why):
        ShardReader(folder, manifest)
    assert [why in finding.problem for finding in verify(folder, manifest) if not finding.shard] == [True]


def test_a_folder_under_a_shard_s_name_is_a_finding(stored, tmp_path):
    _, manifest = stored
    (tmp_path / manifest.shards[0].path).mkdir(parents=True)
    assert [finding.shard for finding in verify(tmp_path, manifest)] == [manifest.shards[0].path]


def test_a_bad_sector_names_its_sample_and_the_others_are_still_read(stored, monkeypatch):
    """What the disk says there is EIO; sample 1 of 3 lies on it, and a flipped byte in sample 2 is found as well."""
    folder, manifest = stored
    path = folder / manifest.shards[0].path
    header, _ = read_header(path, manifest.shards[0].path)
    data, names = path.read_bytes(), [sample.sample_id for sample in header.samples]
    bad = header.data_start + header.blocks["000001.aux"].begin
    flipped = bytearray(data)
    flipped[header.data_start + header.blocks["000002.last"].begin] ^= 1
    path.write_bytes(flipped)
    real = os.preadv

    def preadv(fd, buffers, offset):
        if offset <= bad < offset + sum(len(buffer) for buffer in buffers):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    found = verify(folder, manifest)
    assert {finding.sample_id for finding in found} == {"", names[1], names[2]}
    assert any("Input/output error" in finding.problem for finding in found if finding.sample_id == names[1])
    reader = ShardReader(folder, manifest)
    assert reader.read(names[0]).sample.sample_id == names[0]
    with pytest.raises(StoreError, match="Input/output error"):
        reader.read(names[1])
    path.write_bytes(data)


def test_states_that_no_memory_holds_are_refused(stored, tmp_path):
    """Manifest and header agree on rows of a gibibyte: 9 tokens of 30,000 streams are more than any machine can address."""
    header, rest = header_of(stored)
    metadata = header["__metadata__"]
    metadata["hidden_size"], metadata["boundaries"] = str(1 << 29), canonical_json(list(range(30_000)))
    _, manifest = stored
    capture = dataclasses.replace(manifest.capture, boundaries=tuple(range(30_000)))
    metadata["identity"] = capture.digest
    raw = signed(header)
    path = tmp_path / manifest.shards[0].path
    path.parent.mkdir()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + rest)
    entry = dataclasses.replace(manifest.shards[0], size_bytes=path.stat().st_size, md5=fs.hash_file(path, "md5"))
    changes = {"hidden_size": 1 << 29, "shards": (entry,), "stored_bytes": entry.size_bytes}
    reader = ShardReader(tmp_path, dataclasses.replace(manifest, capture=capture, identity=capture.digest, **changes))
    with pytest.raises(StoreError, match="do not fit memory"):
        reader.read(max(reader.samples, key=lambda sample: sample.num_tokens).sample_id)
