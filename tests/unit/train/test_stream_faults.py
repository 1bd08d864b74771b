"""What goes wrong while a training is streamed: kills, hangs, damage, full disks; it ends in the same bytes or says why."""

# ruff: noqa: F811 - fixtures

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import processes
import pytest
import stream_world as world
from stream_place import (  # noqa: F401 - fixtures
    ONCE,
    allocated_bytes,
    least,
    little_calibration,
    patched,
    place,
    project,
    ring_of,
)

from eyas import config, fs
from eyas.errors import ConfigError, DiskError, ServerError, StoreError, TrainError
from eyas.generations.working import read_working


def start(root, *arguments, **environment):
    own = {**os.environ, "OMP_NUM_THREADS": "1", **{key: str(value) for key, value in environment.items()}}
    command = [sys.executable, str(Path(world.__file__)), str(root), *arguments]
    with (root / "told").open("a") as told:
        return subprocess.Popen(command, cwd=root, env=own, stderr=told)


def saved_step(root):
    states = list((root / "from_stream/runs").glob("*/state.json"))
    return fs.read_json(states[0])["step"] if states else -1


@pytest.mark.slow
def test_a_killed_training_goes_on_to_the_same_bytes(place):
    """SIGKILL of the training while it starts, while it waits and while it trains; of its capturing process too."""
    root, expected = place
    ring_bytes = least(root)
    for step in (-1, 2, 5, 9):
        process = start(root, EYAS_RING_BYTES=ring_bytes)
        if step < 0:
            processes.until(lambda: any(ring_of(root).folder.rglob("*.safetensors")))
        else:
            processes.until(lambda step=step, process=process: saved_step(root) > step or process.poll() is not None)
        assert process.poll() is None, (root / "told").read_text()
        process.kill()
        process.wait()
        assert allocated_bytes(ring_of(root).folder) <= ring_bytes
        processes.until(lambda: not read_working(root).rings[0].holder)  # its capturing process lives a moment longer
        [ring] = read_working(root).rings
        assert (ring.identity, ring.problem, ring.is_idle) == (ring_of(root).identity, "", True)
        assert ring.disk_bytes == sum(p.stat().st_blocks * 512 for p in ring.folder.rglob("*") if p.is_file())
    process = start(root, EYAS_RING_BYTES=ring_bytes)
    assert process.wait(120) == 0, (root / "told").read_text()
    assert world.weights(root / "from_stream") == expected


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["os._exit(9)", "time.sleep(1000)"])
def test_a_capturing_process_that_dies_or_hangs_is_started_again(place, monkeypatch, tmp_path, fault, capsys):
    root, expected = place
    monkeypatch.setenv("EYAS_WATCHDOG_S", "5")
    found, _ = world.run_stream(root, worker=patched(tmp_path, ONCE.format(fault=fault)))
    assert found == expected
    assert (root / "happened").exists()
    assert "started again" in capsys.readouterr().err


RESTARTS = """
    import pathlib, time
    from eyas.engines import registry, streamed
    from eyas.engines.fake import FakeEngine
    capture, make, mark, told = FakeEngine.capture, registry.make_engine, pathlib.Path("happened"), []

    def made(name, *, on_wait=lambda: None, **how):
        told.append(on_wait)
        return make(name, **how)

    def changed(self, batch, counts=[0]):
        counts[0] += 1
        if counts[0] == 15 and not mark.exists():
            mark.touch()
            end_s = time.monotonic() + 12
            while time.monotonic() < end_s:
                told[0]()
                time.sleep(0.1)
            {then}
        yield from capture(self, batch)

    registry.make_engine, FakeEngine.capture = made, changed
"""


@pytest.mark.slow
@pytest.mark.parametrize(("then", "num_starts"), [("pass", 1), ("time.sleep(1000)", 2)])
def test_an_engine_that_restarts_its_server_for_long_is_waited_for(
    place, monkeypatch, tmp_path, capsys, then, num_starts
):
    """Minutes, with a large target: its process says that it lives. One that then hangs is found none the less."""
    root, expected = place
    monkeypatch.setenv("EYAS_WATCHDOG_S", "5")
    found, _ = world.run_stream(root, worker=patched(tmp_path, RESTARTS.format(then=then)))
    assert found == expected
    assert (root / "happened").exists()
    assert capsys.readouterr().err.count("started again") == num_starts - 1


def test_one_that_never_starts_ends_the_training(place, tmp_path):
    root, _ = place
    with pytest.raises(ServerError, match=r"ended with code 7 and no word of why; it was the third in a row"):
        world.run_stream(root, worker=["-c", "raise SystemExit(7)"])


@pytest.mark.slow
def test_ctrl_c_while_states_are_awaited_saves_and_goes_on(place, tmp_path):
    """The capture hangs; the training is told to stop and does, at once, with what it has."""
    root, expected = place
    hanging = patched(tmp_path, ONCE.format(fault="time.sleep(1000)"))
    process = start(root, f'worker=["{hanging[0]}"]', "checkpoint_every=1000", EYAS_RING_BYTES=least(root))
    processes.until((root / "happened").exists, 180)
    time.sleep(3)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130, (root / "told").read_text()
    assert "is saved" in (root / "told").read_text()
    found, outcome = world.run_stream(root)
    assert outcome.resumed_at > 0
    assert found == expected


def damage_in_ring(ring, num_times, stop):
    """Flip a byte in the middle of every shard that appears, up to so often per shard."""
    seen = {}
    while not stop.is_set():
        for path in list((ring.folder / "states").rglob("*.safetensors")):
            record = ring.record("states", path.relative_to(ring.folder / "states").as_posix())
            if record is None or record.serial in seen.get(path, ()) or len(seen.get(path, ())) >= num_times:
                continue
            seen.setdefault(path, []).append(record.serial)
            with path.open("r+b") as handle:
                handle.seek(record.entry.size_bytes - 40)
                byte = handle.read(1)
                handle.seek(-1, 1)
                handle.write(bytes([byte[0] ^ 255]))
        time.sleep(0.001)


@pytest.mark.slow
def test_damage_in_the_ring_is_captured_once_more_then_it_is_an_error(place, monkeypatch, capsys):
    root, expected = place
    stop = threading.Event()
    thread = threading.Thread(target=damage_in_ring, args=(ring_of(root), 1, stop))
    thread.start()
    found, _ = world.run_stream(root)
    stop.set()
    thread.join()
    assert found == expected
    assert "damaged in the ring and captured once more" in capsys.readouterr().err

    shutil.rmtree(root / "from_stream")
    stop = threading.Event()
    thread = threading.Thread(target=damage_in_ring, args=(ring_of(root), 1000, stop))
    thread.start()
    with pytest.raises(StoreError, match="checksum"):
        world.run_stream(root)
    stop.set()
    thread.join()


@pytest.mark.slow
def test_samples_that_fail_are_listed_counted_and_left_out(place, tmp_path, capsys):
    root, _ = place
    lost = next(s.sample_id for s in world.stream_samples(root) if s.split == "train")
    worker = patched(
        tmp_path,
        f"""
        from eyas.engines import streamed
        from eyas.engines.fake import FakeEngine
        capture = FakeEngine.capture
        FakeEngine.capture = lambda self, batch: (one for one in capture(self, batch) if one.sample_id != "{lost}")
        """,
    )
    with pytest.raises(StoreError, match=f"sample {lost}: the engine ended without its states"):
        world.run_stream(root, worker=worker)
    _, outcome = world.run_stream(root, worker=worker, max_damaged_samples=1)
    assert list(outcome.damaged) == [lost]
    for epoch in outcome.stream["epochs"]:
        told = [epoch[name][0] for name in ("captured", "kept", "failed", "unneeded")]
        assert sum(told) <= epoch["planned"][0] == 90
    first = outcome.stream["epochs"][0]
    assert (first["failed"][0], sum(first[name][0] for name in ("captured", "kept", "unneeded"))) == (1, 89)
    assert f"not captured: sample {lost}" in capsys.readouterr().err


@pytest.mark.slow
def test_a_full_disk_ends_the_training_and_the_same_command_goes_on(place, tmp_path):
    root, expected = place
    worker = patched(
        tmp_path,
        """
        from eyas import fs
        from eyas.engines import streamed
        free = [200]

        def shrinking(folder):
            free[0] -= 1
            return 10**12 if free[0] > 190 else 0

        fs.free_bytes = shrinking
        """,
    )
    with pytest.raises(DiskError, match="a shard of the ring still needs"):
        world.run_stream(root, worker=worker)
    found, _ = world.run_stream(root)
    assert found == expected


def test_what_cannot_be_streamed_is_refused_before_an_engine_starts(place, monkeypatch):
    root, _ = place
    never = ["-c", "raise SystemExit('an engine was started')"]
    monkeypatch.setenv("EYAS_RING_BYTES", str(least(root) - 1))
    with pytest.raises(ConfigError, match=rf"EYAS_RING_BYTES: {least(root) - 1}, expected {least(root)} or more"):
        world.run_stream(root, worker=never)
    monkeypatch.setenv("EYAS_RING_BYTES", str(1 << 60))
    with pytest.raises(DiskError, match=r"the ring takes 1,152,921,504.6 GB"):
        world.run_stream(root, worker=never)
    monkeypatch.delenv("EYAS_RING_BYTES")
    other = ring_of(root).root / ("f" * 64)
    other.mkdir(parents=True)
    (other / "ended.json").touch()
    with pytest.raises(
        StoreError, match=rf"{'f' * 64} is the ring of another capture, expected {ring_of(root).identity}"
    ):
        world.run_stream(root, worker=never)
    shutil.rmtree(other)
    with pytest.raises(TrainError, match="stored states are those of a whole set"):
        world.run_stream(root, worker=never, part="store")


def test_the_room_for_the_tokens_of_a_stream_is_counted(place, monkeypatch):
    """Ids and masks lie on the disk while states are captured, five bytes a token, beside the ring."""
    root, _ = place
    size, tokens_bytes = least(root), 5 * world.num_tokens(root)
    monkeypatch.setenv("EYAS_RING_BYTES", str(size))
    room = size + config.load().extract.reserve_bytes + tokens_bytes
    monkeypatch.setattr(fs, "free_bytes", lambda _: room - 1)
    with pytest.raises(DiskError, match=r"the ring takes .* tokens"):
        world.run_stream(root, worker=["-c", "raise SystemExit(7)"])
    monkeypatch.setattr(fs, "free_bytes", lambda _: room)
    with pytest.raises(ServerError, match="ended with code 7"):
        world.run_stream(root, worker=["-c", "raise SystemExit(7)"])


@pytest.mark.slow
def test_a_ring_that_turns_out_too_small_says_what_it_needs(place, monkeypatch):
    """States compress worse than the stored part foretold: the next step can never be read."""
    root, _ = place
    for name, value in (("SPREAD", 0.01), ("HEADER_BYTES_PER_SAMPLE", 0), ("HEADER_BYTES_PER_SHARD", 0)):
        monkeypatch.setattr(f"eyas.batches.streamed_set.{name}", value)
    monkeypatch.setenv("EYAS_RING_BYTES", str(least(root)))
    with pytest.raises(DiskError, match=r"the next step needs .* of shards at once"):
        world.run_stream(root)


@pytest.mark.slow
def test_two_processes_read_one_ring(place, monkeypatch):
    """The first feeds; both read, agree how far they are, and end where two that read stored states end."""
    root, _ = place
    for source in ("store", "stream"):
        codes = processes.finish(processes.start_streaming(root, source, EYAS_RING_BYTES=str(least(root))), 180)
        assert codes == [0, 0], processes.errors(root)
    assert world.weights(root / "two_stream") == world.weights(root / "two_store")
