"""``imports/<name>/dvc.yaml``: an imported set's own pipeline, and what git passes over beside it.

It has ``import`` (a folder's files into a set of ours), ``draft_vocab``, and the repository's own ``train``, ``evaluate``
and ``export`` with their paths moved below ``imports/<name>/``. Its ``wdir`` is the repository, so that commands, paths
and ``params.yaml`` mean what they mean everywhere else.

An import that is done is frozen, as ``dvc import`` does it: DVC neither runs it again, which would begin by deleting
its outputs, nor misses the files that it came from.
"""

from __future__ import annotations

import io
import json
import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas import fs
from eyas.config import tracked_extract_keys
from eyas.contracts import FinalHidden
from eyas.errors import StoreError
from eyas.generations.trees import ADOPTED, IMPORTS
from eyas.plan.cache import read_yaml

PIPELINE = "dvc.yaml"
IMPORT = "import"
TAKEN_OVER = ("train", "evaluate", "export")
TARGET = "models/target.json"
NOT_GITS = ("tokens", "hidden_states", "hidden_states.json", "draft_vocab", "drafter", "export", "reports")
"""Below ``imports/<name>/``: DVC's, or made anew at any time."""


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


def imported_by(root: Path, name: str) -> dict[str, Any]:
    """The stage ``import`` of a set; empty where there is none."""
    stage = read_yaml(root / IMPORTS / name / PIPELINE).get("stages", {}).get(IMPORT, {})
    return stage if isinstance(stage, dict) else {}


def generation_of(stage: Mapping[str, Any]) -> str:
    """Hash of the adopted generation that a stage imports; empty for a folder outside DVC."""
    return str(stage.get("meta", {}).get("eyas", {}).get("generation", ""))


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
        "params": ["target", "data.held_out_share", *tracked_extract_keys()],
        "outs": [
            f"{to}/tokens",
            f"{to}/hidden_states",
            f"{to}/hidden_states.json",
            # Git has it: DVC does not delete it before it runs the stage, and the import replaces it in one step.
            {f"{to}/import.json": {"cache": False, "persist": True}},
        ],
    }


def below_imports(root: Path, out: Path) -> str:
    """Name of a set that lies in ``imports/<name>`` of a repository with DVC; empty when it lies elsewhere."""
    below = out.resolve().relative_to(root.resolve()) if out.resolve().is_relative_to(root.resolve()) else Path()
    is_set = len(below.parts) == 2 and below.parts[0] == IMPORTS.name and (root / ".dvc").is_dir()
    return below.name if is_set else ""


def write_pipeline(root: Path, layout: str, source: Path, out: Path, options: ImportOptions) -> None:
    """Make a set that was imported by hand one that can be trained from; nothing where it lies elsewhere.

    What an earlier import by hand was told is replaced; the stages of an adopted generation stay as they are.
    """
    name = below_imports(root, out)
    if name and not generation_of(imported_by(root, name)):
        write(root, name, import_stage(layout, str(source), name, options))


def write(root: Path, name: str, imported: dict[str, Any]) -> None:
    """Write a set's pipeline.

    Raises:
        StoreError: The repository's own pipeline lacks a stage.
    """
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
    _dump(root, name, {IMPORT: imported, "draft_vocab": vocab, **moved})


def freeze(root: Path, name: str, *, without_source: bool = False) -> None:
    """Freeze the import of a set.

    Args:
        root: The repository.
        name: Of the set.
        without_source: Let go of the adopted files, which DVC could not record any more.
    """
    stages = read_yaml(root / IMPORTS / name / PIPELINE)["stages"]
    imported = stages[IMPORT] | {"frozen": True}
    if without_source:
        imported["deps"] = [TARGET]
    if imported != stages[IMPORT]:
        _dump(root, name, stages | {IMPORT: imported})


def _dump(root: Path, name: str, stages: dict[str, Any]) -> None:
    from ruamel.yaml import YAML

    text, yaml = io.BytesIO(), YAML()
    yaml.width = 1 << 16  # a command stays on its line
    yaml.dump({"stages": stages}, text)
    fs.write_bytes(root / IMPORTS / name / PIPELINE, text.getvalue())


def _moved(stage: Any, to: str) -> Any:
    """A stage's text with everything but the target moved below the set's folder."""
    text = json.dumps(stage)
    for old in ("data/draft_vocab", "data/hidden_states", "models/drafter", "models/export", "reports/"):
        text = text.replace(old, f"{to}/{old.removeprefix('data/').removeprefix('models/')}")
    return json.loads(text)


# ── git ───────────────────────────────────────────────────────────────────────────────────────


def keep_from_git(root: Path, out: Path) -> None:
    """Before the first byte of a set: let git pass over what is DVC's; nothing where the set lies elsewhere.

    The repository's own ``.gitignore`` says so; a repository that is older, or whose rules were changed, gets them in
    ``imports/.gitignore``. No rule may match a folder as a whole: DVC would not read the ``dvc.yaml`` inside.

    Raises:
        StoreError: Git has some of it already; DVC takes nothing that git tracks.
    """
    name = below_imports(root, out)
    if not name:
        return
    home = (IMPORTS / name).as_posix()
    paths = [f"{home}/{path}" for path in NOT_GITS]
    cached = paths[: NOT_GITS.index("reports")]
    tracked = _git(root, ["ls-files", "-z", "--", *cached])
    if tracked:
        raise StoreError(
            f"git tracks {len(tracked):,} files that are DVC's ({tracked[0]}): DVC takes no output that git has",
            f"git rm -r -q --cached --ignore-unmatch {' '.join(cached)} && git commit -m 'leave {home} to DVC'",
        )
    if set(_git(root, ["check-ignore", "-z", "--stdin"], "\0".join(paths))) != set(paths):
        fs.write_text(root / IMPORTS / ".gitignore", "".join(f"/*/{path}\n" for path in NOT_GITS))


def _git(root: Path, words: list[str], text: str = "") -> list[str]:
    done = subprocess.run(["git", *words], cwd=root, input=text, capture_output=True, text=True, check=False)
    return [path for path in done.stdout.split("\0") if path]
