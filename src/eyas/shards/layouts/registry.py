"""Layouts by name: which writer for which trainer, which source for which folder."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from eyas import fs
from eyas.errors import ConfigError, DataError
from eyas.shards.layouts.base import RECORD_NAME, ExportRecord, LayoutSource, LayoutWriter
from eyas.shards.layouts.specforge import SpecForgeSource, SpecForgeWriter
from eyas.shards.layouts.speculators import SpeculatorsSource, SpeculatorsWriter
from eyas.shards.layouts.speculators_v1 import SpeculatorsV1Source, SpeculatorsV1Writer

FORMATS = ("speculators_v1", "speculators", "specforge")
DEFAULT_TRAINERS = {"speculators": "0.9.0", "specforge": "0.2.0"}


def make_writer(
    layout: str, trainer_version: str, d2t_W: torch.Tensor | None = None, t2d_V: torch.Tensor | None = None
) -> tuple[LayoutWriter, str]:
    """The writer of a layout and the trainer's version it writes for.

    Args:
        layout: One of ``FORMATS``.
        trainer_version: Of the peer, ``0.4.0``; empty takes the layout's newest known, where that decides nothing.
        d2t_W: Draft vocab, written where the layout has a place for it.
        t2d_V: The same.

    Raises:
        ConfigError: Unknown layout, or a version that does not read it.
    """
    check_format(layout)
    if layout == "specforge":
        return SpecForgeWriter(d2t_W, t2d_V), trainer_version or DEFAULT_TRAINERS[layout]
    if not trainer_version and layout == "speculators_v1":
        raise ConfigError(
            "speculators_v1 needs a trainer version: 0.3 applies the head to the last state as it lies in the file, "
            "0.4 norms it first, and the file does not say which it holds",
            "add TRAINER=0.3.0 or TRAINER=0.4.0 (`--trainer-version`)",
        )
    version = trainer_version or DEFAULT_TRAINERS[layout]
    match = re.fullmatch(r"(\d+)\.(\d+)(?:\.\w+)*", version)
    minor = (int(match[1]), int(match[2])) if match else (0, 0)
    if layout == "speculators_v1" and minor in ((0, 3), (0, 4)):
        return SpeculatorsV1Writer("post_norm" if minor == (0, 3) else "pre_norm"), version
    if layout == "speculators" and minor >= (0, 5):
        return SpeculatorsWriter(d2t_W, t2d_V), version
    expected = "0.3 or 0.4" if layout == "speculators_v1" else "0.5 or later"
    raise ConfigError(
        f"trainer version {version!r} does not read {layout}, expected {expected}",
        f"take FORMAT={'speculators' if layout == 'speculators_v1' else 'speculators_v1'} or another version",
    )


def check_format(layout: str) -> None:
    """Raise ``ConfigError`` unless the layout is known."""
    if layout not in FORMATS:
        raise ConfigError(f"format {layout!r}, expected one of {', '.join(FORMATS)}")


def read_export_record(folder: Path) -> ExportRecord | None:
    """What an export of eyas says of itself; None for any other folder."""
    path = folder / RECORD_NAME
    return fs.read_record(ExportRecord, path) if path.is_file() else None


def open_source(layout: str, folder: Path, num_layers: int) -> LayoutSource:
    """The reader of a foreign folder.

    Raises:
        ConfigError: Unknown layout.
        DataError: No such folder, or no file of that layout in it.
    """
    check_format(layout)
    if not folder.is_dir():
        raise DataError(f"{folder} is no folder", "give the folder that holds the files (FROM=)")
    if layout == "speculators_v1":
        source: LayoutSource = SpeculatorsV1Source(folder, num_layers)
    elif layout == "speculators":
        source = SpeculatorsSource(folder)
    else:
        record = read_export_record(folder)
        source = SpecForgeSource(folder, keep_padding=record is not None)
    if not source.paths:
        raise DataError(f"{folder} holds no file of {layout}", f"expected files as {EXAMPLES[layout]}")
    return source


EXAMPLES = {
    "speculators_v1": "data_0.pt",
    "speculators": "hidden_states/hs_0.safetensors",
    "specforge": "rows_0-2000/data_0.ckpt",
}
