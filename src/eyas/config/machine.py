"""What this machine is, for records of runs and benches."""

from __future__ import annotations

import contextlib
import os
import platform
import re
from pathlib import Path
from typing import Any

SETTINGS = (
    "CUDA_", "EYAS_", "FLASHINFER_", "NCCL_", "NVIDIA_TF32", "OMP_", "PYTORCH_", "SGLANG_", "SGL_", "TORCH", "VLLM_",
)  # fmt: skip
"""Beginnings of variables by which engines, collectives and kernels behave otherwise."""
SECRETS = ("KEY", "PASSWORD", "SECRET", "TOKEN")
USER_INFO = re.compile(r"://[^/@\s]*@")
"""Name and password in an address."""


def settings() -> dict[str, str]:
    """Environment variables that decide how engines run, without what is secret; for records of runs."""
    return {
        name: USER_INFO.sub("://", value)
        for name, value in sorted(os.environ.items())
        if name.startswith(SETTINGS) and not any(word in name.upper() for word in SECRETS)
    }


def machine() -> dict[str, Any]:
    """Processor name, cores and memory of this machine."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"cpu": cpu, "cores": len(os.sched_getaffinity(0)), "memory_bytes": memory_bytes}
