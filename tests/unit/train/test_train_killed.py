"""SIGKILL at random moments of real processes: what comes out is what an unbroken run gives."""

import random
import signal
import time

import processes
import pytest
import train_world as world

from eyas import fs

NUM_KILLS = 50
CHANGES = {
    "num_steps": 320, "checkpoint_every": 3, "log_every": 7, "packs_per_step": 2, "validation_share": 0.2,
    "validate_every": 11, "keep": "best", "max_damaged_samples": 1,
}  # fmt: skip


def saved_step(folder):
    states = list((folder / "runs").glob("*/state.json"))
    return fs.read_json(states[0])["step"] if states else 0


@pytest.mark.slow
def test_fifty_kills_end_in_the_bytes_of_the_unbroken_run(tmp_path):
    """Case 69: also while a checkpoint, a best drafter or a metric is written, and while the run starts."""
    dice, clean, killed = random.Random(0), tmp_path / "clean", tmp_path / "killed"
    assert processes.finish(processes.start(clean, **CHANGES)) == [0]
    during_steps = 0
    for number in range(NUM_KILLS):
        (process,) = processes.start(killed, **CHANGES)
        goal = min(saved_step(killed) + 6, 6 * number)
        if number % 5:  # every fifth is killed while it starts
            processes.until(lambda process=process, goal=goal: saved_step(killed) >= goal or not process.is_alive())
            during_steps += 1
        time.sleep(dice.random() * (0.03 if number % 5 else 0.3))
        assert process.is_alive(), f"the run ended before kill {number}"
        process.kill()
        assert processes.finish([process]) == [-signal.SIGKILL]
    assert 0 < saved_step(killed) < CHANGES["num_steps"]
    assert processes.finish(processes.start(killed, **CHANGES)) == [0]
    assert world.result_bytes(killed) == world.result_bytes(clean)
    assert during_steps == 40


@pytest.mark.slow
def test_kills_of_one_rank_of_two_end_where_two_unbroken_ranks_do(tmp_path):
    """Case 69 on two ranks: either of them dies, the other ends, both go on."""
    dice, clean, killed = random.Random(1), tmp_path / "clean", tmp_path / "killed"
    changes = {**CHANGES, "num_steps": 120}
    assert processes.finish(processes.start(clean, 2, **changes)) == [0, 0]
    for number in range(6):
        started = processes.start(killed, 2, **changes)
        goal = saved_step(killed) + 3
        processes.until(lambda goal=goal: saved_step(killed) >= goal)
        time.sleep(dice.random() * 0.05)
        started[number % 2].kill()
        codes = processes.finish(started, 30)
        assert codes[number % 2] == -signal.SIGKILL
        assert codes[1 - number % 2] != 0
    assert processes.finish(processes.start(killed, 2, **changes)) == [0, 0]
    assert world.result_bytes(killed) == world.result_bytes(clean)
