"""torchrun on two nodes: a worker is lost, both launchers start anew, the run goes on from the exact checkpoint."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import elastic_world
import processes
import pytest
import train_world as world

from eyas import fs

SRC = Path(__file__).parents[3] / "src"


def launch(folder, port, node, num_restarts):
    """One node's launcher, as an operator starts it on every host; the folder is shared."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
        "--node-rank", str(node), "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}",
        "--rdzv-id", "eyas", "--max-restarts", str(num_restarts), elastic_world.__file__, str(folder),
    ]  # fmt: skip
    path = os.pathsep.join([str(SRC), str(Path(__file__).parent)])
    own = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with (folder / f"told-{node}").open("w") as told:
        return subprocess.Popen(command, env=own, stdout=told, stderr=told)


def state(folder):
    return fs.read_json(next((folder / "runs").glob("*/state.json")))


def told(folder):
    return "\n".join(path.read_text() for path in sorted(folder.glob("told-*")))


def run(folder, num_restarts, victims=()):
    """Train on two nodes; each victim (rank, step) is killed once a later step is saved."""
    folder.mkdir()
    world.make_inputs(folder)
    port = processes.free_port()
    nodes = [launch(folder, port, node, num_restarts) for node in range(2)]
    try:
        for rank, step in victims:
            processes.until(
                lambda step=step: list((folder / "runs").glob("*/state.json")) and state(folder)["step"] > step, 120
            )
            os.kill(int((folder / f"pid-{rank}").read_text()), signal.SIGKILL)
        assert [node.wait(240) for node in nodes] == [0, 0], told(folder)
    finally:
        for node in nodes:
            node.kill()
            node.wait()


@pytest.mark.slow
def test_two_launchers_go_on_after_lost_workers_with_the_weights_of_an_unbroken_run(tmp_path):
    clean, broken = tmp_path / "clean", tmp_path / "broken"
    run(clean, 0)
    run(broken, 4, victims=[(1, 20), (0, 100)])
    assert told(broken).count("train: resumed at step") == 2
    assert world.result_bytes(broken) == world.result_bytes(clean)
