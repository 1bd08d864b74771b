"""python elastic_world.py FOLDER: one process of the training that torchrun starts in FOLDER."""

import os
import sys
from pathlib import Path

import train_world as world

from eyas import console
from eyas.train.distributed import open_world, told_once

CHANGES = {"num_steps": 250, "checkpoint_every": 10, "packs_per_step": 2, "log_every": 100}


def main(argv):
    """Train; leave this process's id where the test finds it, by rank."""
    folder = Path(argv[0])
    with told_once():
        inputs = world.make_inputs(folder, **CHANGES)
        with open_world("cpu", inputs.config.packs_per_step) as processes:
            (folder / f"pid-{processes.rank}").write_text(str(os.getpid()))
            world.run(folder, inputs, processes)


if __name__ == "__main__":
    console.run_main(lambda _: main(sys.argv[1:]))
