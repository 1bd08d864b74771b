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
HOLES = """
import random, torch
def peak():
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmPeak"))
def main(_):
    random.seed(1)
    before, blocks, most = peak(), [torch.empty(0)] * 16, 0
    for _ in range(600):
        slot = random.randrange(16)
        blocks[slot] = torch.empty(0)
        blocks[slot] = torch.empty(random.randrange(1 << 20, 300 << 20), dtype=torch.uint8)
        most = max(most, sum(map(len, blocks)))
    print(100 * (peak() - before) // most)
"""
PAGES = NUM_ROUNDS * BLOCK_MIB * 256
"""Of 4 KiB, when each round takes new ones, as it does by default: glibc returns blocks of more than 32 MiB at once."""


BEGIN = "from eyas import console\nconsole.run_main(main)"


def run(work: str) -> int:
    found = subprocess.run([sys.executable, "-c", work + BEGIN], capture_output=True, text=True, check=True)
    return int(found.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left as they are")
def test_a_stage_s_process_touches_new_pages_a_few_times():
    """Up to nine places of a block, whatever the rounds: those that it freed before lie side by side and are one again."""
    assert run(WORK) < 0.1 * PAGES


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left as they are")
def test_blocks_of_changing_sizes_leave_few_holes():
    """In percent of the bytes that were alive at once: 107 by default; 181 when blocks up to a GiB lay in the heap."""
    assert run(HOLES) < 140
