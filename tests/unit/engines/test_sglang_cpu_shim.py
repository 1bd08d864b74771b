"""The stand-ins for a CPU server, in an interpreter of their own as a server would start it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from eyas.engines.sglang import versions

SHIM = Path(versions.__file__).parent / "cpu_shim"


def run(code: str) -> str:
    environment = dict(os.environ) | versions.cpu_environment(str(SHIM), os.environ.get("PYTHONPATH", ""))
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("from sgl_kernel.gemm import scaled as s; print(s.__name__)", "sgl_kernel.gemm.scaled"),
        ("import sgl_kernel; print(sgl_kernel.__version__)", "0.4.10"),
        ("import importlib.util as u; print(u.find_spec('sgl_kernel'))", "None"),  # who asks hears no
        (
            "from sgl_kernel import Thing\nclass Ours(Thing): pass\nprint(Ours(1, a=2).__class__.__mro__[1].__name__)",
            "Thing",
        ),
        ("import soundfile\n@soundfile.jit\ndef f(): return 3\nprint(f())", "3"),
        ("import soundfile\n@soundfile.jit(fast=True)\ndef f(): return 3\nprint(f())", "3"),
        ("import yaml, xxhash; print(yaml.__file__ is not None)", "True"),  # what is installed stays what it is
        ("import no_such_package_at_all", ""),
    ],
)
def test_imports(code: str, expected: str) -> None:
    if not expected:
        with pytest.raises(AssertionError, match="ModuleNotFoundError"):
            run(code)
        return
    assert run(code) == expected


def test_a_kernel_that_moves_integers_is_torch() -> None:
    code = "from sgl_kernel import fill_bonus_tokens_cpu as f; print(f.__module__)"
    assert run(code) == "eyas_cpu_kernels"


def test_a_call_into_a_kernel_raises() -> None:
    with pytest.raises(AssertionError, match=r"NotImplementedError: sgl_kernel\.rmsnorm was called"):
        run("import sgl_kernel; sgl_kernel.rmsnorm(1)")
