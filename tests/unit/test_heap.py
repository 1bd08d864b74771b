"""Freed memory is used again: counted by the kernel, in processes that begin as every stage does."""

import platform
import subprocess
import sys

import pytest

NUM_ROUNDS, BLOCK_MIB = 200, 48
WORK = f"""
import resource, sys, torch
def main(_):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range({NUM_ROUNDS}):
        torch.ones({BLOCK_MIB} << 18)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = NUM_ROUNDS * BLOCK_MIB * 256
"""Of 4 KiB, when each round takes new ones, as it does by default: glibc returns blocks of more than 32 MiB at once."""


def faults(begin: str) -> int:
    found = subprocess.run([sys.executable, "-c", WORK + begin], capture_output=True, text=True, check=True)
    return int(found.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left as they are")
def test_a_stage_s_process_touches_new_pages_a_few_times():
    """Up to nine places of a block, whatever the rounds: those that it freed before lie side by side and are one again."""
    assert faults("from eyas import console\nconsole.run_main(main)") < 0.1 * PAGES
