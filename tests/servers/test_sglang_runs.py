"""Whole extractions through a real SGLang that end in the middle: killed, interrupted, out of disk, out of memory.

Whatever happened, nobody is left behind, and the same command again gives the bytes of the undisturbed run.
"""

from __future__ import annotations

import dataclasses
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from extract_run import BOUNDARIES, LENGTHS, OPTIONS, Run

from eyas import fs
from eyas.contracts import ShardManifest, TokenSample
from eyas.engines.check_start import check_start
from eyas.engines.sglang import launch, session
from eyas.engines.sglang.client import Client
from eyas.engines.sglang.engine import SglangEngine
from eyas.engines.sglang.server import Server
from eyas.errors import DiskError, ServerError
from eyas.shards.reader import ShardReader
from eyas.shards.verify import verify
from sglang_harness import free_port

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]
SCRIPT = Path(__file__).with_name("extract_run.py")


@pytest.fixture(autouse=True)
def surroundings(python, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EYAS_SGLANG_PYTHON", str(python))
    yield
    assert not list(Path("/dev/shm").glob(f"eyas-arena-{os.getpid()}-*"))


@pytest.fixture(scope="module")
def running(python, models, tmp_path_factory):
    """Variables that attach to a server which ``eyas sglang-command`` started, typed into a shell as it stands."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("running")
        patch.setenv("EYAS_SGLANG_PYTHON", str(python))
        run = Run(models["llama"], folder)
    text = launch.attach_command(run.engine.keeper.wanted, str(python), str(folder / "a.sock"), free_port())
    of_server, _, ours = text.partition("# and then eyas\n")
    variables = dict(word.split("=", 1) for word in shlex.split(ours) if word.startswith("EYAS_"))
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(["bash", "-c", of_server], stdout=log, stderr=log, start_new_session=True)
    try:
        client = Client(variables["EYAS_SGLANG_URL"], "", lambda number, reply: None)
        wait_for(lambda: client.is_healthy() or server.poll() is not None)
        assert server.poll() is None, (folder / "log").read_text()[-3000:]
        yield variables
        assert server.poll() is None, "attaching leaves a server running"
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@pytest.fixture
def attach(running, monkeypatch):
    """What this process runs uses that server."""

    def name_it():
        for name, value in running.items():
            monkeypatch.setenv(name, value)

    return name_it


@pytest.fixture(scope="module")
def undisturbed(python, models, running, tmp_path_factory):
    """Every sample of every length, looked at by the probe first."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("undisturbed")
        patch.chdir(folder)
        patch.setenv("EYAS_SGLANG_PYTHON", str(python))
        for name, value in running.items():
            patch.setenv(name, value)
        run = Run(models["llama"], folder)
        samples = list(run.tokens.values())[-3:]
        run.extract(
            lambda engine: check_start(engine, samples, run.target, models["llama"], BOUNDARIES, dtype="bfloat16")
        )
        assert not Path(".eyas/sglang").exists()
    return run


def test_samples_of_every_length_lie_in_the_store(undisturbed):
    """One token, the edges of each chunk, as long as the context takes; cases 25, 44 and 59."""
    manifest = fs.read_record(ShardManifest, undisturbed.manifest_path)
    assert verify(undisturbed.out, manifest, undisturbed.tokens) == []
    assert len(manifest.shards) > 8
    assert manifest.engine.deterministic
    reader = ShardReader(undisturbed.out, manifest)
    stored = [len(reader.read(name).input_ids_T) for name in undisturbed.tokens]
    assert stored[: len(LENGTHS)] == list(LENGTHS)


def start(model: Path, root: Path) -> subprocess.Popen[str]:
    """The same extraction as a program of its own."""
    return subprocess.Popen(
        [sys.executable, SCRIPT, model, root], cwd=root, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip


def wait_for(condition: Callable[[], object], seconds: float = 400) -> None:
    deadline_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come"
        time.sleep(0.02)


def alive(group: int) -> list[str]:
    """Commands of a process group, without those that are dead and not yet waited for."""
    told = subprocess.run(["ps", "-eo", "pgid=,stat=,args="], capture_output=True, text=True, check=True).stdout
    lines = [line.split(None, 2) for line in told.splitlines()]
    return [line[2] for line in lines if int(line[0]) == group and "Z" not in line[1]]


ENDS = {signal.SIGKILL: -9, signal.SIGINT: 130, signal.SIGTERM: 143}


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGINT, signal.SIGTERM))]
)
def test_killed_or_interrupted_in_mid_run_nobody_is_left_and_it_goes_on(undisturbed, attach, models, tmp_path, number):
    """Our own process dies of kill -9, Ctrl-C or SIGTERM; its server goes with it. Of the arena nothing is left to be found.

    A server of our own and the one that is attached to give the same bytes: half of them come from each.
    """
    run = Run(models["llama"], tmp_path)
    with start(models["llama"], tmp_path) as ours:
        wait_for(lambda: run.num_stored or ours.poll() is not None)
        assert not list(Path("/dev/shm").glob(f"eyas-arena-{ours.pid}-*"))
        ours.send_signal(number)
        _, said = ours.communicate(timeout=60)
    found = re.search(r"starts \(process (\d+)\)", said)
    assert found, said
    assert ours.returncode == ENDS[number], said
    wait_for(lambda: not alive(int(found[1])), 20)
    assert 0 < run.num_stored < len(run.plan.shards)
    stored = run.num_stored
    attach()
    assert run.extract() == stored
    assert run.hashes() == undisturbed.hashes()


@pytest.mark.slow
def test_a_disk_that_falls_to_its_reserve_stops_the_run_and_it_goes_on(undisturbed, models, tmp_path, monkeypatch):
    """Case 61, with a server behind it that is ended as well."""
    run, seen = Run(models["llama"], tmp_path), []
    begin = Server.__init__

    def noted(self, *arguments):
        begin(self, *arguments)
        seen.append(self.pid)

    monkeypatch.setattr(Server, "__init__", noted)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fs, "free_bytes", lambda _: 600 if run.num_stored >= 2 else 1 << 40)
        with pytest.raises(DiskError, match="600 bytes are free") as caught:
            run.extract(reserve_bytes=500)
    assert "run the same command again" in str(caught.value)
    assert not alive(seen[0])
    assert not list(tmp_path.rglob("*.part"))
    stored = run.num_stored
    assert 2 <= stored < len(run.plan.shards)
    assert run.extract() == stored
    assert run.hashes() == undisturbed.hashes()


def test_a_server_started_by_the_printed_command_is_attached_to(running, attach, models, tmp_path, monkeypatch):
    """What it was given otherwise than the plan expects is refused, by name; it is left running."""
    run = Run(models["llama"], tmp_path)
    attach()
    _many_tiny_samples(run.target, models["llama"])
    other = SglangEngine(run.target, models["llama"], BOUNDARIES, dtype="bfloat16", chunked_prefill_size=128)
    with pytest.raises(ServerError, match=r"chunked_prefill_size = 256, extract.engine_options says 128"):
        other.open()
    copied, files = tmp_path / "another model", fs.tree_digests(models["llama"])
    shutil.copytree(models["llama"], copied)
    target = dataclasses.replace(run.target, files=files)
    changed = dataclasses.replace(files[0], sha256="0" * 64)
    same = SglangEngine(target, copied, BOUNDARIES, dtype="bfloat16", **OPTIONS)
    same.open()
    same.close()
    target = dataclasses.replace(run.target, files=(changed, *files[1:]))
    with pytest.raises(ServerError, match=f"has a {changed.path} of SHA-256 .*expected 0000"):
        SglangEngine(target, copied, BOUNDARIES, dtype="bfloat16", **OPTIONS).open()
    monkeypatch.setenv("EYAS_CAPTURE_SOCKET", str(tmp_path / "none.sock"))
    with pytest.raises(ServerError, match="runs without eyas' plugin"):
        run.engine.open()


def _many_tiny_samples(target, folder):
    """More than connections, most of one token: all at once."""
    rng = random.Random(1)
    samples = [
        _tiny(f"t{n:03d}", [rng.randrange(20, 512) for _ in range(rng.choice((1, 1, 2, 5)))]) for n in range(500)
    ]
    engine = SglangEngine(target, folder, BOUNDARIES, dtype="bfloat16", **OPTIONS)
    engine.announce(samples)
    engine.open()
    try:
        found = {got.sample_id: got for got in engine.capture(samples)}
    finally:
        engine.close()
    assert [len(found[sample.sample_id].last_TD) for sample in samples] == [len(s.input_ids) for s in samples]


def _tiny(name, ids):
    return TokenSample(
        sample_id=name, conversation_id=name, source="random", split="train", variant="given", input_ids=tuple(ids),
        loss_mask=(1,) * len(ids),
    )  # fmt: skip


def test_a_server_that_cannot_start_says_why(models, tmp_path, monkeypatch):
    """Its own last lines, and where its log lies; nobody is left."""
    run = Run(models["llama"], tmp_path)
    monkeypatch.setenv("EYAS_SGLANG_ARGS", "--base-gpu-id nonsense")
    said = r"(?s)did not start: it ended with code.*server-1.log ends with.*invalid int value: 'nonsense'"
    with pytest.raises(ServerError, match=said) as caught:
        run.extract()
    assert caught.value.hint == "less .eyas/sglang/server-1.log"


@pytest.mark.slow
def test_a_port_that_is_taken_meanwhile_is_told(models, tmp_path, monkeypatch):
    """Also when what listens there looks like a healthy server."""
    run = Run(models["llama"], tmp_path)
    stranger = ThreadingHTTPServer(("127.0.0.1", 0), Healthy)
    threading.Thread(target=stranger.serve_forever, daemon=True).start()
    monkeypatch.setattr(session, "free_port", lambda: stranger.server_port)
    try:
        with pytest.raises(ServerError, match=r"(?s)the server did not start: .*server-1.log ends with"):
            run.extract()
    finally:
        stranger.shutdown()
        stranger.server_close()


class Healthy(BaseHTTPRequestHandler):
    """Says yes to everything."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        return


@pytest.mark.slow
def test_two_extractions_at_the_same_time_do_not_meet(undisturbed, models, tmp_path):
    """Own ports, sockets, arenas and groups."""
    runs = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        runs.append((Run(models["llama"], tmp_path / name), start(models["llama"], tmp_path / name)))
    for run, process in runs:
        _, said = process.communicate(timeout=600)
        assert process.returncode == 0, said
        assert run.hashes() == undisturbed.hashes()
