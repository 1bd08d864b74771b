"""The interpreter that holds SGLang, and which versions lie there, without importing any of it."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from eyas.errors import PlanError

VARIABLE = "EYAS_SGLANG_PYTHON"
OWN = Path(".venv-sglang/bin/python")
SCRIPT = """
import importlib.metadata, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def sglang_python() -> str:
    """Path of the interpreter: ``EYAS_SGLANG_PYTHON``, else ours if it has sglang, else ``.venv-sglang/bin/python``.

    Raises:
        PlanError: There is none.
    """
    named = os.environ.get(VARIABLE, "")
    if named:
        if not os.access(named, os.X_OK):
            raise PlanError(f"{VARIABLE}: {named!r} is no program, expected a python with sglang", f"unset {VARIABLE}")
        return named
    if importlib.util.find_spec("sglang") is not None:
        return sys.executable
    if os.access(OWN, os.X_OK):
        return str(OWN.absolute())
    raise PlanError(
        f"engine sglang: neither this python nor {OWN} has sglang",
        f"`make setup-sglang`, or name a python that has it: {VARIABLE}=/path/bin/python",
    )


@functools.lru_cache(maxsize=8)
def installed_versions(python: str, packages: tuple[str, ...]) -> dict[str, str]:
    """Versions of those packages that an interpreter has, build tags left out.

    Raises:
        PlanError: It is no python.
    """
    try:
        done = subprocess.run(
            [python, "-c", SCRIPT, *packages], capture_output=True, text=True, check=True, timeout=60, cwd="/"
        )
        # The build tag (2.13.0+cpu) is left out: a plan made on one machine is captured on another.
        return {name: version.partition("+")[0] for name, version in json.loads(done.stdout).items()}
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise PlanError(f"{python} cannot say what is installed there: {error}", f"look at {VARIABLE}") from error


def sglang_versions(packages: Sequence[str] = ("sglang", "sglang-kernel", "torch")) -> dict[str, str]:
    """Versions in the interpreter that holds SGLang.

    Raises:
        PlanError: There is no such interpreter, or it has no sglang.
    """
    python = sglang_python()
    found = installed_versions(python, tuple(packages))
    if "sglang" not in found:
        raise PlanError(f"{python} has no sglang", f"{python} -m pip install sglang, or another {VARIABLE}")
    return found
