"""Random damage to a complete params file: always a one-line ConfigError that names the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from eyas.config.structure import check_structure, dotted_names
from eyas.errors import ConfigError

COMPLETE: Any = OmegaConf.to_container(OmegaConf.load(Path(__file__).parents[3] / "params.yaml"))
KEYS = [(section, key) for section, values in COMPLETE.items() if section != "defaults" for key in values]
JUNK = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers()))


def copy_of(content: Any) -> Any:
    return OmegaConf.to_container(OmegaConf.create(content))


def test_complete_file_passes() -> None:
    check_structure(COMPLETE, "params.yaml")


@given(where=st.sampled_from(KEYS), suffix=st.text(st.characters(categories=["Ll"]), min_size=1, max_size=3))
def test_renamed_key_is_named(where: tuple[str, str], suffix: str) -> None:
    section, key = where
    if f"{key}{suffix}" in COMPLETE[section]:
        return
    content = copy_of(COMPLETE)
    content[section][f"{key}{suffix}"] = content[section].pop(key)
    with pytest.raises(ConfigError) as caught:
        check_structure(content, "params.yaml")
    assert caught.value.message == f"{section}.{key}{suffix}: unknown key"
    assert caught.value.hint


@given(where=st.sampled_from(KEYS), junk=JUNK)
def test_value_of_another_kind_is_named(where: tuple[str, str], junk: Any) -> None:
    """Whatever stands there, it is either of the kind of the value before, or refused by name."""
    section, key = where
    old = COMPLETE[section][key]
    content = copy_of(COMPLETE)
    content[section][key] = junk
    if isinstance(old, float):
        fits = type(junk) in (int, float) and junk == junk and abs(junk) != float("inf")
    elif isinstance(old, list):
        fits = isinstance(junk, list) and (junk == [] or (section, key) in {("extract", "boundaries"), *FLOAT_LISTS})
    else:
        fits = type(junk) is type(old) and not (isinstance(junk, str) and "${" in junk)
    for number in junk if isinstance(junk, list) else [junk]:
        if type(number) is int and abs(number) >= 2**63:
            fits = False
    if fits:
        if junk != "???":
            check_structure(content, "params.yaml")
        return
    with pytest.raises(ConfigError) as caught:
        check_structure(content, "params.yaml")
    assert caught.value.message.startswith(f"{section}.{key}")
    assert "expected" in caught.value.message
    assert "\n" not in caught.value.message


FLOAT_LISTS = (("train", "curriculum"), ("train", "betas"))


def test_dotted_names_are_those_of_a_complete_file() -> None:
    names = set(dotted_names())
    assert {f"{section}.{key}" for section, key in KEYS} <= names | {"target.shape", "data.prompt_sets"}
    assert {"target.shape.num_layers", "data.prompt_sets[].num_prompts"} <= names
