"""Real processes of a training, started in a tenth of a second: a server that has imported everything forks them."""

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import socket
import time
from pathlib import Path

import train_world as world

from eyas.errors import EyasError
from eyas.train.distributed import ToldElsewhereError, open_world

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["processes", "dvclive.live"])


def _start_server():
    """The server looks for what it imports beforehand in PYTHONPATH alone."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *([before] if before else [])])
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads of a parent do not survive a fork
    multiprocessing.forkserver.ensure_running()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _rank(folder, environment, changes, make_reader):
    os.environ.update(environment)
    rank = environment.get("RANK", "0")
    inputs = world.make_inputs(folder, reader=make_reader() if make_reader else None, **changes)
    try:
        with open_world("cpu", inputs.config.packs_per_step) as processes:
            (folder / f"pid-{rank}").write_text(str(os.getpid()))
            world.run(folder, inputs, processes)
    except EyasError as error:
        kind = "ToldElsewhere: " if isinstance(error, ToldElsewhereError) else ""
        (folder / f"error-{rank}").write_text(f"{kind}{error}")
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def start(folder, size=1, make_reader=None, environment=None, **changes):
    """Processes of one training in ``folder``."""
    _start_server()
    folder.mkdir(exist_ok=True, parents=True)
    world.make_inputs(folder)  # files first, or two processes would write them at once
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = []
    for rank in range(size):
        own = {**(shared | {"RANK": str(rank)} if size > 1 else {}), "OMP_NUM_THREADS": "1", **(environment or {})}
        process = CONTEXT.Process(target=_rank, args=(folder, own, changes, make_reader))
        process.start()
        started.append(process)
    return started


def _streaming_rank(root, environment, source):
    import stream_world

    stream_world.calibrate_little()

    os.environ.update(environment)
    os.chdir(root)
    rank = environment["RANK"]
    place = root / f"two_{source}"
    if source == "stream":
        inputs = stream_world.stream_inputs(root)
    else:
        inputs = stream_world.inputs_of(root, stream_world.stored_part(root, "store"))
    try:
        with open_world("cpu", inputs.config.packs_per_step) as both:
            world.train(inputs, place / "runs", place / "drafter", place / "metrics", both)
    except EyasError as error:
        (root / f"error-{rank}").write_text(str(error))
        raise SystemExit(2) from None


def start_streaming(root, source, **environment):
    """Two processes of one training from a stream or from the stored states beside it."""
    _start_server()
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **environment}
    started = []
    for rank in range(2):
        own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
        own["PYTHONPATH"] = os.environ["PYTHONPATH"]
        started.append(CONTEXT.Process(target=_streaming_rank, args=(root, own, source)))
        started[-1].start()
    return started


def finish(processes, timeout_s=60):
    """Exit codes; a process that does not end is a failure, not a hanging suite."""
    deadline = time.monotonic() + timeout_s
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    hanging = [process for process in processes if process.is_alive()]
    for process in hanging:
        process.kill()
    assert not hanging, f"{len(hanging)} of {len(processes)} processes did not end in {timeout_s} s"
    return [process.exitcode for process in processes]


def errors(folder):
    """What each rank told, by rank."""
    return {int(path.name.split("-")[1]): path.read_text() for path in folder.glob("error-*")}


def until(condition, timeout_s=60):
    """Wait for something true."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError):
            if condition():
                return
        time.sleep(0.01)
    raise AssertionError("not within the time")
