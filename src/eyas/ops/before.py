"""What must hold before DVC runs the first stage of a goal: told in a second, not after the hours of earlier stages."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from eyas.config import Params
from eyas.errors import DataError, EyasError
from eyas.plan.cache import read_yaml

BEFORE_STATES = ("fetch", "ingest", "respond", "tokenize", "plan")
"""Stages that can wipe no hidden states, in the pipeline's order."""


def ends_before_states(command: Sequence[str]) -> bool:
    """Whether a ``dvc repro`` names stages, and none from ``extract`` on."""
    return len(command) > 2 and set(command[2:]) <= set(BEFORE_STATES)


def check_before(root: Path, params: Params, command: Sequence[str]) -> None:
    """Look for the data and for the engines' programs that the stages of a ``dvc repro`` will ask for.

    Raises:
        DataError: There is no file or folder at ``data.path``, and DVC makes none.
        EyasError: SGLang or vLLM is missing, or of a version that eyas does not know, and a stage would call for it.
    """
    last = BEFORE_STATES[-1]
    if ends_before_states(command):
        last = max(command[2:], key=BEFORE_STATES.index)
    stages = BEFORE_STATES[: BEFORE_STATES.index(last) + 1]
    if "ingest" in stages and _must_be_there(root, params.data.path):
        check_data(root, params)
    if "respond" in stages and params.respond.enabled:
        _check_engine(root, "respond", params.respond.engine)
    if "plan" in stages:
        _check_engine(root, "plan", params.extract.engine)


def check_data(root: Path, params: Params) -> None:
    """Refuse a ``data.path`` at which nothing lies.

    Raises:
        DataError: There is no file or folder.
    """
    if not (root / params.data.path).exists():
        raise DataError(f"data.path: {params.data.path} is missing", "put your data there; see data/raw/README.md")


def is_changed(root: Path, *stage: str) -> bool:
    """Whether DVC would run a stage again; ``--with-deps`` before its name: or one that it depends on."""
    command = [sys.executable, "-m", "dvc", "status", "--json", *stage]
    done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=False)
    try:
        return done.returncode != 0 or json.loads(done.stdout) != {}
    except ValueError:
        return True


def _must_be_there(root: Path, path: str) -> bool:
    """Whether stage ``ingest`` reads a path that neither a ``.dvc`` file nor another stage brings."""
    stages = read_yaml(root / "dvc.yaml").get("stages") or {}
    outs = {
        out if isinstance(out, str) else next(iter(out)) for stage in stages.values() for out in stage.get("outs") or ()
    }
    above = (Path(path), *Path(path).parents)
    return "ingest" in stages and not any((root / f"{p}.dvc").is_file() or p.as_posix() in outs for p in above)


def _check_engine(root: Path, stage: str, name: str) -> None:
    from eyas.engines.registry import check_installed

    try:
        check_installed(name)
    except EyasError:
        if is_changed(root, "--with-deps", stage):  # what is up to date needs no engine
            raise
