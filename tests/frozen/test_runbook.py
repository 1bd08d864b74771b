"""What the runbook tells people to type exists, and what it says the commands say is what they say."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/runbook.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
BLOCKS = re.findall(r"```(sh)?\n(.*?)```", TEXT, re.DOTALL)
PROSE = re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)
TYPED = sorted(
    {line.split("  #")[0].strip() for kind, block in BLOCKS if kind for line in block.splitlines() if line.strip()}
    | {line[2:] for kind, block in BLOCKS if not kind for line in block.splitlines() if line.startswith("$ ")}
    | {part.strip() for code in re.findall(r"`([^`]+)`", PROSE) for part in code.split("&&") if " " in part.strip()}
)
SOURCES = " ".join(re.sub(r'"\s*\n\s*f?"', "", path.read_text()) for path in sorted((ROOT / "src/eyas").rglob("*.py")))
"""With literals in one piece that are written on two lines."""
REFUSED = [cell for line in PROSE.splitlines() if line.startswith("|") for cell in re.findall(r'"([^"]+)"', line)]


def commands(program: str) -> list[list[str]]:
    return [words[1:] for words in map(shlex.split, TYPED) if words[0] == program]


def test_it_is_short() -> None:
    assert len(TEXT.splitlines()) <= 260


@pytest.mark.parametrize("words", commands("make"), ids=" ".join)
def test_make_knows_target_and_variables(words: list[str]) -> None:
    target, *options = words
    recipe = re.search(rf"^{target}:.*\n(?:\t.*\n?)*", MAKEFILE, re.MULTILINE)
    assert recipe or re.search(rf"^PIPELINE := .*\b{target}\b", MAKEFILE, re.MULTILINE), target
    for option in options:
        name = option.partition("=")[0]
        assert re.search(rf"\b{name}\b", recipe[0] if recipe else "") or f"$({name})" in MAKEFILE, option


@pytest.mark.parametrize("words", commands("dvc"), ids=" ".join)
def test_dvc_takes_the_command(words: list[str]) -> None:
    from dvc.cli.parser import get_main_parser

    get_main_parser().parse_args(words)


@pytest.mark.parametrize("words", commands("git"), ids=" ".join)
def test_git_has_the_command(words: list[str]) -> None:
    listed = subprocess.run(["git", "--list-cmds=main"], capture_output=True, text=True, check=True).stdout.split()
    assert words[0] in listed


@pytest.mark.parametrize("refusal", REFUSED)
def test_refusal_is_what_the_code_says(refusal: str) -> None:
    assert [part for part in refusal.split("…") if part.strip() and part.strip() not in SOURCES] == []


def test_refusals_are_found() -> None:
    """The pattern above would pass an empty table."""
    assert len(REFUSED) >= 20
    assert len(commands("make")) >= 12
