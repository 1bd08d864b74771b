"""Locks say what their .in files ask for, by hash, and name no host."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
REQUIREMENTS = ROOT / "requirements"
ENTRY = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^]]*\])?==([^\s;]+)")


def pins(path: Path) -> dict[str, str]:
    found = (ENTRY.match(line) for line in path.read_text().splitlines())
    return {match[1].lower().replace("_", "-").replace(".", "-"): match[2] for match in found if match}


@pytest.mark.parametrize("asked", sorted(REQUIREMENTS.glob("*.in")), ids=lambda path: path.stem)
def test_a_lock_is_that_of_its_requirements(asked):
    """What is pinned by hand is locked at that version: otherwise `make lock` was forgotten."""
    locked = pins(asked.with_suffix(".lock"))
    assert {name: locked.get(name) for name in pins(asked)} == pins(asked)


@pytest.mark.parametrize("lock", sorted(REQUIREMENTS.glob("*.lock")), ids=lambda path: path.stem)
def test_every_package_has_hashes_and_no_host(lock):
    text = lock.read_text()
    assert "://" not in text
    entries = re.split(r"\n(?=[A-Za-z0-9])", text.strip())
    assert [entry.splitlines()[0] for entry in entries if "--hash=sha256:" not in entry] == []


def test_torch_is_outside_of_the_locks_of_cpus_and_inside_the_one_of_cuda():
    """Its CPU build has another hash than the one of the package index."""
    assert "torch" in pins(REQUIREMENTS / "cuda.lock")
    assert not [p.name for p in REQUIREMENTS.glob("*.lock") if p.stem != "cuda" and "torch" in pins(p)]


def test_the_cuda_lock_is_for_a_libc_that_sglang_has_wheels_for():
    """Case 88: for manylinux_2_28, the default, there is none."""
    assert "--python-platform x86_64-manylinux_2_34" in (ROOT / "Makefile").read_text()
