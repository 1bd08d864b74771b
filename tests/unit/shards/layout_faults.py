"""Foreign layouts with one thing wrong: what is done to a file, and what must be said of it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import torch
from layout_cases import World
from safetensors.torch import load_file, save_file

Change = Callable[[Path], object]


def forget(world: World, name: str = "out") -> Path:
    """Make an export look like the peer's own folder."""
    (world.root / name / "eyas-export.json").unlink()
    return world.root / name


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def pickled(path: Path) -> None:
    path.write_bytes(pickle.dumps({"input_ids": Path("x")}))


def edited(**changes: Callable) -> Change:
    """Change one entry of a file of any layout and write it back as the peer would."""

    def change(path: Path) -> None:
        if path.suffix == ".safetensors":
            value = load_file(path)
            value |= {key: edit(value[key]).contiguous() for key, edit in changes.items() if key in value}
            save_file(value, path)
        else:
            value = torch.load(path, weights_only=True)
            value |= {key: edit(value[key]) for key, edit in changes.items() if key in value}
            torch.save(value, path)

    return change


def on_states(edit: Callable) -> Change:
    """Change states [T, ...] of any layout."""
    return edited(
        hidden_states=lambda v: [edit(entry) for entry in v] if isinstance(v, list) else edit(v),
        aux_hidden_state=lambda v: edit(v[0])[None],
        hidden_state=lambda v: edit(v[0])[None],
    )


def with_value(value: float) -> Callable:
    def edit(states: torch.Tensor) -> torch.Tensor:
        states = states.clone()
        states[1, ..., 2] = value
        return states

    return edit


def zeroed(states: torch.Tensor) -> torch.Tensor:
    states = states.clone()
    states[2] = 0
    return states


FAULTS: dict[str, tuple[Change, str]] = {
    "case 28: cut in half": (truncated, "no whole|cannot be loaded"),
    "case 28: 0 byte": (emptied, "no whole|cannot be loaded"),
    "case 30: NaN": (on_states(with_value(float("nan"))), "1 rows are not finite, the first is row 1"),
    "case 30: Inf": (on_states(with_value(float("inf"))), "1 rows are not finite, the first is row 1"),
    "case 29: a row of zeros": (on_states(zeroed), "1 rows are all zero, the first is row 2"),
    "case 31: states shorter than the ids": (on_states(lambda s: s[:-1]), r"shape|aux rows"),
    "id outside the vocab": (
        edited(input_ids=lambda v: v.index_fill(0, torch.tensor([0]), 1000), token_ids=lambda v: v + 1000),
        "token ids|token ids are not",
    ),
}
PATHS = {
    "speculators_v1": "data_2.pt",
    "speculators": "hidden_states/hs_2.safetensors",
    "specforge": "rows_0-2000/data_2.ckpt",
}
