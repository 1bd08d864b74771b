"""docs/cases.md and the tests name each other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS_ROOT = ROOT / "tests"
UNIT = TESTS_ROOT / "unit"
ROWS = re.findall(r"^\| (\d+)(?:-(\d+))? \| (.+?) \| (.+) \|$", (ROOT / "docs/cases.md").read_text(), re.MULTILINE)
FAULTS = re.findall(r"^\| ([SV]\d+) \| (.+?) \| (.+) \|$", (ROOT / "docs/cases.md").read_text(), re.MULTILINE)
TESTS = re.findall(r"`([\w/]+\.py)::(\w+)`", " ".join([*(row[3] for row in ROWS), *(row[2] for row in FAULTS)]))


def numbers(row: tuple[str, ...]) -> range:
    return range(int(row[0]), int(row[1] or row[0]) + 1)


def functions(path: Path) -> dict[str, str]:
    """Test functions of a file by name, with their text."""
    source = path.read_text()
    defined = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    return {node.name: ast.get_source_segment(source, node) or "" for node in defined}


def test_every_number_has_one_row_with_a_test_or_a_reason() -> None:
    assert [number for row in ROWS for number in numbers(row)] == list(range(1, 91))
    assert [row[0] for row in ROWS if "::" not in row[3] and not re.match(r"later: \w+", row[3])] == []


def test_every_fault_that_a_real_server_showed_has_a_test() -> None:
    """What is named in brackets is a part of that test, or a fault of the bench."""
    assert [row[0] for row in FAULTS] == [*(f"S{n}" for n in range(1, 14)), *(f"V{n}" for n in range(1, 9))]
    bench = (ROOT / "src/eyas/ops/bench/faults.py").read_text()
    for number, _, text in FAULTS:
        assert "::" in text, number
        for path, parts in re.findall(r"`(servers/[\w/]+\.py)::\w+` \(([^)]*)\)", text):
            for part in re.findall(r"\b[a-z_]+_[a-z_]+\b|^\w+$", parts):
                assert f'"{part}"' in bench or part in (TESTS_ROOT / path).read_text(), (number, part)


@pytest.mark.parametrize(("path", "name"), sorted(set(TESTS)))
def test_named_test_exists(path: str, name: str) -> None:
    assert name in functions(TESTS_ROOT / path if path.startswith("servers/") else UNIT / path)


def test_cases_that_tests_claim_are_covered_in_the_table() -> None:
    later = {number for row in ROWS if row[3].startswith("later:") for number in numbers(row)}
    claimed = set()
    for path in (*UNIT.rglob("test_*.py"), *(TESTS_ROOT / "servers").glob("test_*.py")):
        for listed in re.findall(r"[Cc]ases? (\d+(?:(?:, | and )\d+)*)", path.read_text()):
            claimed |= {int(number) for number in re.findall(r"\d+", listed)}
    assert claimed & later == set()
