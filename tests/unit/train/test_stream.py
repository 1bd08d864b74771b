"""A streamed training ends in the bytes of one from stored states, within its ring, whatever happens on the way."""

import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import processes
import pytest
import stream_world as world
import yaml

from eyas import config, fs
from eyas.batches.stream import StreamReader
from eyas.engines import streamed
from eyas.errors import ConfigError, DiskError, ServerError, StoreError, TrainError
from eyas.shards.ring import Ring

SRC = str(Path(__file__).parents[3] / "src")


class Watched:
    """Looks at what a folder takes on the disk, as ``du`` does, as often as it can."""

    def __init__(self, folder):
        self.folder, self.peak_bytes, self._ended = folder, 0, threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        self._thread.join()

    def _look(self):
        while not self._ended.wait(0.001):
            self.peak_bytes = max(self.peak_bytes, allocated_bytes(self.folder))


def allocated_bytes(folder):
    total = 0
    for place, _, names in os.walk(folder):
        for path in (place, *(f"{place}/{name}" for name in names)):
            with contextlib.suppress(FileNotFoundError):
                total += Path(path).stat().st_blocks * 512
    return total


@pytest.fixture(scope="module", autouse=True)
def little_calibration():
    """For this file alone."""
    with pytest.MonkeyPatch.context() as patch:
        for module in world.CALIBRATED:
            patch.setattr(module, "CALIBRATION_ROWS", world.CALIBRATION_ROWS)
        yield


@pytest.fixture(scope="module")
def project(tmp_path_factory, little_calibration):
    """A project with its stored part, and the drafter that a training from stored states gives."""
    root = tmp_path_factory.mktemp("project")
    world.make_project(root)
    before = Path.cwd()
    os.chdir(root)
    expected = world.run_store(root)
    world.capture_set(root, "stream")
    os.chdir(before)
    return root, expected


@pytest.fixture
def place(project, tmp_path, monkeypatch):
    """A copy of the project, and what must come out."""
    root = tmp_path / "project"
    shutil.copytree(project[0], root)
    monkeypatch.chdir(root)
    monkeypatch.setenv("PYTHONPATH", f"{SRC}{os.pathsep}{Path(__file__).parent}")
    return root, project[1]


def least(root):
    """The smallest ring that trains."""
    manifest = world.manifest_of(root)
    config = world.inputs_of(root, world.stored_part(root), source="stream").config
    return world.part_of(root / "data/tokens", manifest, config).need.least_bytes


def ring_of(root):
    return Ring(root / ".eyas", world.make_plan(root, "store").identity)


def patched(tmp_path, code):
    """A capturing process with something changed in it."""
    script = tmp_path / "worker.py"
    script.write_text(textwrap.dedent(code) + "\nfrom eyas import console\nconsole.run_main(streamed.main)\n")
    return [str(script)]


ONCE = """
    import os, pathlib, time
    from eyas.engines import streamed
    from eyas.engines.fake import FakeEngine
    capture, mark = FakeEngine.capture, pathlib.Path("happened")

    def changed(self, batch, counts=[0]):
        counts[0] += 1
        if counts[0] == 15 and not mark.exists():
            mark.touch()
            {fault}
        yield from capture(self, batch)

    FakeEngine.capture = changed
"""


def test_the_smallest_ring_gives_the_drafter_of_the_store(place, monkeypatch):
    """Same order, same bytes, on the CPU to the bit; the disk never holds more than the ring; every sample is counted."""
    root, expected = place
    monkeypatch.setenv("EYAS_RING_BYTES", str(least(root)))
    with Watched(root / ".eyas/ring") as watched:
        found, outcome = world.run_stream(root)
    assert found == expected
    assert 0 < watched.peak_bytes <= least(root)
    assert watched.peak_bytes >= outcome.stream["peak_bytes"] > least(root) / 2, "the look missed what was there"
    first, second = outcome.stream["epochs"]
    assert first["captured"] == first["planned"] == (90, world.num_tokens(root))
    assert second["captured"][0] > 0, "the set fits the ring, so nothing was captured twice"
    assert not (root / ".eyas/ring").exists() or not any((root / ".eyas/ring").iterdir())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_of_eyas_own_in_the_feed_ends_the_training(place, monkeypatch):
    """Or every process would wait for ever for states that nobody captures."""
    root, _ = place
    monkeypatch.setenv("EYAS_RING_BYTES", str(least(root)))

    def broken(*_):
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(Ring, "publish", broken)
    with pytest.raises(ServerError, match="ended by an error of eyas' own"):
        world.run_stream(root)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codec", "last_rows", "changes"),
    [
        ("raw", "trained", {"validation_share": 0.2, "validate_every": 5, "keep": "best"}),
        ("int8", "all", {"anchors": 4, "loss": "lk", "optimizer": "muon"}),
    ],
)
def test_other_codecs_rows_and_trainings(tmp_path, monkeypatch, codec, last_rows, changes):
    """Validation reads the same conversations again and again: they are pinned."""
    root = tmp_path / "project"
    world.make_project(root, last_rows=last_rows, codec=codec)
    monkeypatch.chdir(root)
    monkeypatch.setenv("PYTHONPATH", SRC)
    expected = world.run_store(root, **changes)
    world.capture_set(root, "stream")
    monkeypatch.setenv("EYAS_RING_BYTES", str(10**6 if codec == "raw" else 400_000))
    found, _ = world.run_stream(root, **changes)
    assert found == expected
    metrics = [(root / name / "metrics/metrics.json").read_bytes() for name in ("from_store", "from_stream")]
    assert metrics[0] == metrics[1]


@pytest.mark.slow
def test_a_ring_that_holds_the_set_captures_it_once(place, monkeypatch):
    root, expected = place
    monkeypatch.setenv("EYAS_RING_BYTES", str(10**7))
    found, outcome = world.run_stream(root)
    assert found == expected
    assert [epoch["captured"][0] for epoch in outcome.stream["epochs"]] == [90, 0]


NOTING = """
    from eyas.engines import streamed

    def noted(word):
        with open("noted", "a") as file:
            file.write(word)

    class Noting(streamed.Parent):
        def take(self, *, wait):
            found = super().take(wait=wait)
            noted("c" * len(found))
            return found

        def say(self, **message):
            if "written" in message:
                noted("w")
            super().say(**message)

    streamed.Parent = Noting
"""


def most_under_way(root):
    """Shards that were asked of the capturing process and not yet written, at most."""
    noted, under_way, most = (root / "noted").read_text(), 0, 0
    for word in noted:
        under_way += 1 if word == "c" else -1
        most = max(most, under_way)
    return most


def test_pinned_shards_wait_in_memory_no_more_than_others(place, monkeypatch, tmp_path):
    """However many samples are read again and again: a few shards are asked for at a time, and no more than fit."""
    root, _ = place
    changes = {"validation_share": 0.5, "num_steps": 2}
    streaming = world.part_of(
        root / "data/tokens", world.manifest_of(root), world.inputs_of(root, world.stored_part(root), **changes).config
    )
    assert len(streaming.pinned) > 6
    monkeypatch.setenv("EYAS_RING_BYTES", str(streaming.need.least_bytes))
    with Watched(root / ".eyas/ring") as watched:
        world.run_stream(root, worker=patched(tmp_path, NOTING), **changes)
    assert most_under_way(root) <= 2
    assert 0 < watched.peak_bytes <= streaming.need.least_bytes


def test_the_target_runs_as_it_ran_for_the_stored_part(place, monkeypatch):
    """Dtype and device decide the bytes and stand in the plan: what params.yaml says by now is not asked."""
    root, _ = place
    capture = world.manifest_of(root).capture
    assert (capture.engine_options["dtype"], capture.engine_options["device"]) == ("bfloat16", "cpu")
    params = yaml.safe_load((root / "params.yaml").read_text())
    params["target"] |= {"dtype": "float32", "device": "cuda"}
    (root / "params.yaml").write_text(yaml.safe_dump(params))
    run_as, make = [], streamed.make_engine

    def noted(name, **how):
        run_as.append((how["dtype"], how["device"]))
        return make(name, **how)

    def judged(*_, dtype, **__):
        run_as.append((dtype, ""))
        raise ServerError("seen")

    for name, other in (("make_engine", noted), ("check_start", judged), ("SERVER_ENGINES", ("fake",))):
        monkeypatch.setattr(streamed, name, other)
    monkeypatch.setattr(streamed, "ensure", lambda *_: root)
    parent = streamed.Parent(io.StringIO(), io.StringIO())
    parent.commands.put({"capture": 0, "shard": world.make_plan(root, "store").shards[0].path, "only": None})
    (root / "ring").mkdir()
    with pytest.raises(ServerError, match="seen"):
        streamed.serve(
            parent, root / "models/target.json", root / "data/tokens", root / "stream/hidden_states.json", root / "ring"
        )
    assert run_as == [("bfloat16", "cpu"), ("bfloat16", "")]


def test_a_ring_that_an_earlier_run_left_larger_shrinks(place, monkeypatch):
    """Its shards are used as far as they fit, also when every one that is needed lies there."""
    root, expected = place
    monkeypatch.setenv("EYAS_RING_BYTES", str(10**7))
    monkeypatch.setattr(StreamReader, "give_back", StreamReader.end)
    found, _ = world.run_stream(root)
    left = allocated_bytes(ring_of(root).folder)
    monkeypatch.setenv("EYAS_RING_BYTES", str(least(root)))
    assert left > least(root)
    shutil.rmtree(root / "from_stream")
    seen = []
    follow = StreamReader.follow
    monkeypatch.setattr(
        StreamReader, "follow", lambda *rest: (seen.append(allocated_bytes(ring_of(root).folder)), follow(*rest))[1]
    )
    again, outcome = world.run_stream(root)
    assert found == again == expected
    assert max(seen[0], allocated_bytes(ring_of(root).folder), outcome.stream["peak_bytes"]) <= least(root)


# ── faults ────────────────────────────────────────────────────────────────────────────────────


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
    from eyas.engines import streamed
    from eyas.engines.fake import FakeEngine
    capture, make, mark, told = FakeEngine.capture, streamed.make_engine, pathlib.Path("happened"), []

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

    streamed.make_engine, FakeEngine.capture = made, changed
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
    with pytest.raises(
        StoreError, match=rf"{'f' * 64} is the ring of another capture, expected {ring_of(root).identity}"
    ):
        world.run_stream(root, worker=never)
    other.rmdir()
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
