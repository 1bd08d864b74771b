"""``eyas train-from``: a drafter from states that others captured, by the pipeline's own stages.

``imports/<name>/dvc.yaml`` is written once: ``import`` (the adopted files into a set of ours), ``draft_vocab``, and the
repository's own ``train``, ``evaluate`` and ``export`` with their paths moved below ``imports/<name>/``. Its ``wdir`` is
the repository, so that commands, paths and ``params.yaml`` mean what they mean everywhere else. DVC does the rest.
"""

from __future__ import annotations

import io
import json
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas import console, fs
from eyas.contracts import FinalHidden
from eyas.errors import DataError, EyasError, StoreError
from eyas.generations.listing import find
from eyas.generations.trees import ADOPTED
from eyas.ops.adopt_source import OTHER
from eyas.plan.cache import locked_stage, read_yaml

IMPORTS = Path("imports")
PIPELINE = "dvc.yaml"
TAKEN_OVER = ("train", "evaluate", "export")
TARGET = "models/target.json"
IGNORED = "/*/reports/\n"
"""As the pipeline's own reports; what DVC keeps, it ignores by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions:
    """What the files do not say."""

    boundaries: tuple[int, ...] = ()
    final_hidden: FinalHidden | None = None
    max_failed: int = 0

    @property
    def arguments(self) -> list[str]:
        """As ``eyas import-states`` takes them."""
        return [
            *(["--boundaries", ",".join(map(str, self.boundaries))] if self.boundaries else []),
            *(["--final-hidden", self.final_hidden] if self.final_hidden else []),
            *(["--max-failed", str(self.max_failed)] if self.max_failed else []),
        ]


def train_from(root: Path, generation: str, options: ImportOptions) -> int:
    """Import an adopted generation, train, evaluate and export from it; whatever is up to date is not run again.

    Args:
        root: The repository.
        generation: Name or hash of an adopted generation, or the name of a set below ``imports/``.
        options: Replace those of an earlier call; none keeps them.

    Returns:
        DVC's exit code.

    Raises:
        StoreError: There is no such generation, or nothing can be trained from it.
        DataError: Nothing says which layers its states come from.
    """
    name = _name(root, generation)
    adopted = root / ADOPTED / f"{name}.dvc"
    made = read_yaml(root / IMPORTS / name / PIPELINE).get("stages", {}).get("import", {})
    if not adopted.is_file():
        _check_files(root, made, name)
    else:
        hashed = str(read_yaml(adopted)["outs"][0]["md5"])
        _check_source(made, name)
        # What was said of an earlier generation of this name says nothing of this one.
        if options.arguments or _generation(made) != hashed:
            layout = _layout(adopted, name, options)
            _write(root, name, import_stage(layout, (ADOPTED / name).as_posix(), name, options, hashed))
    _record_import(root, name)
    return _dvc(root, "repro", (IMPORTS / name / PIPELINE).as_posix())


def _generation(stage: Mapping[str, Any]) -> str:
    return str(stage.get("meta", {}).get("eyas", {}).get("generation", ""))


def _check_source(made: Mapping[str, Any], name: str) -> None:
    """Refuse to take one set for another that has its name.

    Raises:
        StoreError: ``imports/<name>`` was imported by hand, from another folder than ``adopted/<name>``.
    """
    if made and (ADOPTED / name).as_posix() not in made.get("deps", ()):
        raise StoreError(
            f"{IMPORTS / name} was imported by hand and is not of {ADOPTED / name}: `{made.get('cmd')}`",
            f"move it to another name: git mv, or away: rm -r {IMPORTS / name}; or adopt the folder under another NAME=",
        )


def _check_files(root: Path, made: Mapping[str, Any], name: str) -> None:
    """Refuse before DVC does when the adopted files were deleted since they were imported.

    Raises:
        StoreError: They are gone; says how to train from what was imported all the same.
    """
    files = ADOPTED / name
    if files.as_posix() in made.get("deps", ()) and not made.get("frozen") and not (root / files).exists():
        raise StoreError(
            f"{files}, from which {IMPORTS / name} was imported, is gone",
            f"to go on with what was imported: dvc freeze {IMPORTS / name / PIPELINE}:import, then the same command",
        )


def _name(root: Path, generation: str) -> str:
    if (root / ADOPTED / f"{generation}.dvc").is_file() or (root / IMPORTS / generation / PIPELINE).is_file():
        return generation
    found = find(root, generation)
    path = Path(found.path)
    if path.parts[0] == IMPORTS.name:
        return path.parts[1]
    if found.kind != "adopted":
        raise StoreError(
            f"generation {found.name} is the pipeline's own, expected an adopted or imported one",
            "check its revision out and train there: git checkout REVISION && dvc checkout && make train",
        )
    raise StoreError(
        f"adopted generation {found.name} was retired: {ADOPTED}/{found.name}.dvc is gone", "git checkout it"
    )


def _layout(adopted: Path, name: str, options: ImportOptions) -> str:
    meta = read_yaml(adopted).get("meta", {}).get("eyas", {}).get("adopted", {})
    layout = str(meta.get("layout", ""))
    if layout in ("", OTHER):
        raise StoreError(
            f"{name} was adopted as {layout or 'a folder that DVC added'}: nothing says how to read its files",
            "retire it, then adopt the folder again with FORMAT=speculators_v1, speculators or specforge",
        )
    if not meta.get("boundaries") and not options.boundaries:
        raise DataError(
            f"the {layout} files of {name} do not say which layers their states come from",
            "give the boundaries (states entering layer b): BOUNDARIES=2,15,27 (`--boundaries`)",
        )
    return layout


def import_stage(layout: str, source: str, name: str, options: ImportOptions, generation: str = "") -> dict[str, Any]:
    """The stage that makes the set; a folder outside DVC is no dependency, and its stage never runs by itself.

    Args:
        layout: Of the files.
        source: Their folder.
        name: Of the set below ``imports/``.
        options: What the files do not say.
        generation: Hash of the adopted generation that the options were said of.
    """
    to = (IMPORTS / name).as_posix()
    words = ["--format", layout, "--from", source, "--to", to, *options.arguments]
    is_tracked = source.startswith(f"{ADOPTED}/")
    return {
        "desc": "Another project's states into a set of ours.",
        "cmd": f"python -m eyas.cli import-states {shlex.join(words)}",
        "wdir": "../..",
        **({"meta": {"eyas": {"generation": generation}}} if is_tracked else {"frozen": True}),
        "deps": [TARGET, *([source] if is_tracked else [])],
        "params": ["target", "data.held_out_share", "extract"],
        "outs": [
            f"{to}/tokens",
            f"{to}/hidden_states",
            f"{to}/hidden_states.json",
            {f"{to}/import.json": {"cache": False}},
        ],
    }


def write_pipeline(root: Path, layout: str, source: Path, out: Path, options: ImportOptions) -> None:
    """Make a set that was imported by hand one that can be trained from; nothing where it lies elsewhere."""
    below = out.resolve().relative_to(root.resolve()) if out.resolve().is_relative_to(root.resolve()) else Path()
    if len(below.parts) != 2 or below.parts[0] != IMPORTS.name or not (root / ".dvc").is_dir():
        return
    if not (out / PIPELINE).exists():
        _write(root, below.name, import_stage(layout, str(source), below.name, options))


def _write(root: Path, name: str, imported: dict[str, Any]) -> None:
    from ruamel.yaml import YAML

    to = (IMPORTS / name).as_posix()
    stages = read_yaml(root / PIPELINE).get("stages", {})
    missing = [stage for stage in TAKEN_OVER if stage not in stages]
    if missing:
        raise StoreError(f"{PIPELINE} has no stage {missing[0]}", f"git checkout {PIPELINE}")
    vocab = {
        "desc": "The draft vocab of the imported tokens.",
        "cmd": f"python -m eyas.cli draft-vocab {shlex.join([f'{to}/tokens', f'{to}/draft_vocab'])}",
        "wdir": "../..",
        "deps": [TARGET, f"{to}/tokens"],
        "params": ["tokenize.draft_vocab_size"],
        "outs": [f"{to}/draft_vocab"],
    }
    moved = {stage: {**_moved(stages[stage], to), "wdir": "../.."} for stage in TAKEN_OVER}
    text, yaml = io.BytesIO(), YAML()
    yaml.width = 1 << 16  # a command stays on its line
    yaml.dump({"stages": {"import": imported, "draft_vocab": vocab, **moved}}, text)
    fs.write_text(root / IMPORTS / ".gitignore", IGNORED)
    fs.write_bytes(root / IMPORTS / name / PIPELINE, text.getvalue())


def _moved(stage: Any, to: str) -> Any:
    """A stage's text with everything but the target moved below the set's folder."""
    text = json.dumps(stage)
    for old in ("data/draft_vocab", "data/hidden_states", "models/drafter", "models/export", "reports/"):
        text = text.replace(old, f"{to}/{old.removeprefix('data/').removeprefix('models/')}")
    return json.loads(text)


def _record_import(root: Path, name: str) -> None:
    """Tell DVC of a set that was imported by hand; it would make it again otherwise."""
    home = IMPORTS / name
    if not (root / home / PIPELINE).is_file():
        raise StoreError(f"{home / PIPELINE} is missing", f"import again: make import-states FORMAT=… FROM=… TO={home}")
    if (root / home / "import.json").is_file() and not locked_stage(root / home, "import"):
        code = _dvc(root, "commit", "--force", f"{home / PIPELINE}:import")
        if code:
            raise EyasError(f"`dvc commit` ended with {code}, expected 0", "read DVC's message above")


def _dvc(root: Path, *arguments: str) -> int:
    console.log(f"train-from: dvc {shlex.join(arguments)}")
    return subprocess.run([sys.executable, "-m", "dvc", *arguments], cwd=root, check=False).returncode
