"""The keys of params.yaml are public: people's files and dvc.lock hold them."""

from __future__ import annotations

from pathlib import Path

from eyas.config.structure import dotted_names

FROZEN = Path(__file__).with_name("params_keys.txt")


def test_public_keys_are_frozen() -> None:
    """On purpose? Then write the new list into params_keys.txt and say so in CHANGELOG.md."""
    assert list(dotted_names()) == FROZEN.read_text().split()
