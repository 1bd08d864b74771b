"""The sglang engine against a double of server and plugin that fails on demand; a real server is in tests/servers."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from eyas.contracts import TokenSample
from eyas.conversations.generation import GenerateRequest
from eyas.engines.fake import FakeEngine
from eyas.engines.registry import make_engine
from eyas.engines.sglang import session
from eyas.engines.sglang.flight import Flight
from eyas.engines.sglang.server import Server
from eyas.errors import CaptureError, DiskError, EyasError, ServerError
from eyas.plan import interpreter
from fake_target import make_target

DOUBLE = Path(__file__).parents[2] / "sglang_double"
BOUNDARIES = (1, 2, 3)
OPTIONS = {"chunked_prefill_size": 16, "max_running_requests": 1}


@pytest.fixture(autouse=True)
def surroundings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EYAS_SGLANG_PYTHON", sys.executable)
    monkeypatch.setenv("PYTHONPATH", f"{DOUBLE}:{DOUBLE.parents[1] / 'src'}")
    monkeypatch.setenv("EYAS_DOUBLE_FAULTS", str(tmp_path / "faults.json"))
    monkeypatch.setattr(session, "BACKOFF_S", (0.05, 0.05, 0.05))
    monkeypatch.setenv("EYAS_SHM_BYTES", str(16 << 20))  # pages of 4 GiB take a second to allocate
    monkeypatch.setattr(session.preflight, "LEAST_SHM_BYTES", 0)
    interpreter.installed_versions.cache_clear()
    yield
    interpreter.installed_versions.cache_clear()
    assert not list(Path("/dev/shm").glob(f"eyas-arena-{os.getpid()}-*"))
    assert "eyas-arena-" not in Path("/proc/self/maps").read_text(), "memory of a closed arena is still taken"


@pytest.fixture
def fail(tmp_path):
    def write(**faults):
        (tmp_path / "new").write_text(json.dumps(faults))
        (tmp_path / "new").rename(tmp_path / "faults.json")  # at once: a running double reads it

    return write


@pytest.fixture
def engine(tmp_path):
    opened = make_engine(
        "sglang", target=make_target(), folder=tmp_path, boundaries=BOUNDARIES, dtype="bfloat16", options=OPTIONS
    )
    yield opened
    opened.close()


def make_samples(num_samples: int, seed: int = 0, longest: int = 60) -> list[TokenSample]:
    rng = random.Random(seed)
    made = []
    for index in range(num_samples):
        ids = tuple(rng.randrange(3, 1000) for _ in range(rng.randrange(1, longest)))
        made.append(make_sample(f"s{index:03d}", ids))
    return made


def make_sample(name: str, ids: tuple[int, ...]) -> TokenSample:
    return TokenSample(
        sample_id=name, conversation_id="c", source="x", split="train", variant="given", input_ids=ids,
        loss_mask=(1,) * len(ids),
    )  # fmt: skip


def capture(engine, samples, batch=5):
    """As the loop does: batch by batch, what is missing once more and alone."""
    got, failed = {}, {}
    for begin in range(0, len(samples), batch):
        part = samples[begin : begin + batch]
        for tried in [part, *([sample] for sample in part)]:
            missing = [sample for sample in tried if sample.sample_id not in got]
            if missing:
                try:
                    for captured in engine.capture(missing):
                        got[captured.sample_id] = captured
                except CaptureError as error:
                    for sample in missing:
                        failed[sample.sample_id] = error.message
    return got, {name: reason for name, reason in failed.items() if name not in got}


def check_equal(got, samples):
    expected = {captured.sample_id: captured for captured in FakeEngine(make_target(), BOUNDARIES).capture(samples)}
    assert sorted(got) == sorted(expected)
    for name, captured in got.items():
        for part in ("input_ids_T", "aux_TAD", "last_TD"):
            assert torch.equal(getattr(captured, part), getattr(expected[name], part)), (name, part)


def test_every_sample_comes_in_pieces_and_out_whole(engine):
    """Cases 44, 46, 47 and 59: chunks of 16 joined by (rid, prefix), each answer its own sample's, all of them."""
    samples = make_samples(60)
    engine.announce(samples)
    engine.open()
    got, failed = capture(engine, samples)
    assert not failed
    check_equal(got, samples)
    assert engine.keeper.num_restarts == 0
    assert engine.describe().deterministic


def test_samples_that_nobody_announced_and_samples_asked_twice(engine):
    """A probe asks for some of the announced samples out of order, before and again."""
    samples = make_samples(40)
    engine.announce(samples)
    engine.open()
    check_equal(capture(engine, samples[30:33])[0], samples[30:33])
    others = [make_sample("other", (5, 6, 7))]
    check_equal(capture(engine, others)[0], others)
    check_equal(capture(engine, samples)[0], samples)


SAMPLE_FAULTS = {
    "missing piece": r"sample s000: rows 0 to \d+ of \d+ never came",
    "repeated piece": r"sample s000: rows 0 to \d+ came twice",
    "wrong ids": r"sample s000: token id \d+ at index 0, expected \d+",
    "wrong checksum": r"sample s000: rows 0 to \d+ have checksum",
    "cached": r"sample s000: 3 tokens were not computed: .*--disable-radix-cache",
    "aborted": r"sample s000: the server aborted it: on request",
}


def test_a_fault_of_one_sample_is_tried_again_alone_and_named_when_it_stays(engine, fail):
    """Cases 43 and 44, and the abort that says 200: seen, never stored, made good."""
    engine.open()
    for fault, message in SAMPLE_FAULTS.items():
        fail(**{fault: 7})
        samples = make_samples(12, longest=90)
        engine.announce(samples)
        got, failed = capture(engine, samples)
        assert not failed, fault
        assert not json.loads(Path(os.environ["EYAS_DOUBLE_FAULTS"]).read_text()), "it struck"
        check_equal(got, samples)
        fail(**{fault: -1})
        with pytest.raises(CaptureError, match=message):
            list(engine.capture([make_sample("s000", tuple(range(3, 60)))]))
        fail()
    assert engine.keeper.num_restarts == 0


@pytest.mark.parametrize("fault", ["killed", "dropped", pytest.param("frozen", marks=pytest.mark.slow), "hang"])
def test_a_server_that_dies_or_hangs_is_started_again(engine, fail, fault, monkeypatch):
    """Case 54: what is not complete is sent again; nothing is lost and nothing is stored twice."""
    monkeypatch.setenv("EYAS_WATCHDOG_S", "4")
    engine = make_engine(
        "sglang", target=make_target(), folder=Path(), boundaries=BOUNDARIES, dtype="bfloat16", options=OPTIONS
    )
    fail(**{fault: 9})
    samples = make_samples(30)
    engine.announce(samples)
    engine.open()
    try:
        got, failed = capture(engine, samples)
    finally:
        engine.close()
    assert not failed
    check_equal(got, samples)
    # A loaded machine may look like a hang once more.
    assert (engine.keeper.num_restarts > 0) == (fault != "dropped")


def test_a_scheduler_that_answers_no_ping_is_given_up(engine, fail, monkeypatch):
    monkeypatch.setattr(session.Pulse, "LIMIT_S", 1.0)
    monkeypatch.setattr(session.Pulse, "EVERY_S", 0.1)
    fail(**{"hang": 2, "no pong": 0})
    samples = make_samples(6)
    engine.announce(samples)
    engine.open()
    got, failed = capture(engine, samples)
    assert not failed
    check_equal(got, samples)
    assert engine.keeper.num_restarts == 1


def test_a_server_that_does_not_come_up_again_at_once_is_started_once_more(engine, fail):
    """Of the one before, a GPU's memory or a port may still be taken: a night's run does not end by that."""
    samples = make_samples(6)
    engine.announce(samples)
    engine.open()
    fail(**{"killed": 2, "broken start": 0})
    got, failed = capture(engine, samples)
    assert not failed
    check_equal(got, samples)
    assert engine.keeper.num_restarts == 2


def test_a_caller_that_is_long_away_is_no_hang(engine):
    """A disk that stalls for longer than the watchdog waits ends no server that is well."""
    engine.open()
    keeper = engine.keeper
    keeper.watchdog_s = 1
    keeper.next_events()
    time.sleep(1.5)
    keeper.next_events()
    assert not keeper.fault(is_busy=True)
    for _ in range(10):  # 2 s of listening
        keeper.next_events()
    assert "EYAS_WATCHDOG_S" in keeper.fault(is_busy=True)


def test_a_server_that_dies_of_every_request_ends_the_run_with_its_log(engine, fail):
    fail(killed=-1)
    engine.open()
    with pytest.raises(ServerError, match="4 times without a finished request"):
        capture(engine, make_samples(3) * 3, batch=1)


def test_one_poisoned_sample_is_listed_and_the_others_are_captured(engine, monkeypatch):
    """The whole server dies of one request; it is tried alone in the end, and named."""
    samples = make_samples(12)
    poison = make_sample("poison", (5, 1000, 7))  # the double ends at once, as a real server does
    monkeypatch.setattr(Flight, "_unfit", lambda self, sample: "")
    engine.open()
    got, failed = capture(engine, [*samples[:6], poison, *samples[6:]], batch=13)
    assert list(failed) == ["poison"]
    check_equal(got, samples)


def test_a_sample_that_needs_the_place_of_finished_ones_costs_no_restart(engine, monkeypatch):
    """The arena is full of what was sent ahead: the last of it to end makes room, and is no fault of the server."""
    samples = [make_sample(f"s{n:03d}", (n + 3,) * 120) for n in range(30)]
    monkeypatch.setenv("EYAS_SHM_BYTES", str(3 * session.wire.Layout(3, 16, "bfloat16").slot_bytes(120)))
    engine.announce(samples)
    engine.open()
    for wanted in (samples[28:29], samples[26:27], samples[24:25]):
        check_equal(capture(engine, wanted)[0], wanted)
    assert engine.keeper.num_restarts == 0


def test_a_batch_that_names_a_sample_twice_ends(engine):
    """One outcome for each sample: nobody waits for a second one."""
    samples = make_samples(2)
    engine.open()
    assert len(list(engine.capture([*samples, samples[0]]))) == 2


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ((5, 1000), "sample bad: token ids 5 to 1000, expected 0 to 999"),
        ((-1, 5), "sample bad: token ids -1 to 5, expected 0 to 999"),
        ((5,) * 122, "sample bad: 122 tokens, expected 1 to 121 (what the server takes)"),
        ((), "sample bad: 0 tokens, expected 1 to 121 (what the server takes)"),
    ],
)
def test_what_would_end_the_server_is_never_sent(engine, ids, message):
    """Case 53, and the id that ends a whole server: told with both numbers, the others go on."""
    samples = make_samples(5)
    engine.announce(samples)
    engine.open()
    got, failed = capture(engine, [*samples[:3], make_sample("bad", ids), *samples[3:]])
    assert failed == {"bad": message}
    check_equal(got, samples)
    assert engine.keeper.num_restarts == 0


def test_a_request_that_the_server_does_not_understand_stops_at_once(engine, fail):
    """Case 52: no retries; the keys that were sent are named."""
    fail(unusable=0)
    engine.open()
    with pytest.raises(ServerError, match=r"refuses what eyas sends \(extra_key, input_ids, rid.*should be provided"):
        capture(engine, make_samples(5))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("radix", "disable_radix_cache = False.*--disable-radix-cache"),
        ("another model", "hidden size 17, the plan expects 16"),
        ("broken start", "did not start: it ended with code 1.*no such model"),
    ],
)
def test_a_server_of_another_kind_is_refused(engine, fail, fault, message):
    fail(**{fault: -1})
    with pytest.raises(EyasError) as raised:
        engine.open()
    assert re.search(message, str(raised.value), re.DOTALL), str(raised.value)


def test_a_server_that_never_comes_up_is_given_up(engine, fail, monkeypatch):
    monkeypatch.setenv("EYAS_SGLANG_START_S", "1")
    fail(**{"never up": -1})
    start_s = time.monotonic()
    with pytest.raises(ServerError, match="not ready after 1 s"):
        engine.open()
    assert time.monotonic() - start_s < 20


def test_a_sample_beyond_the_context_is_refused_before_a_server_starts(engine):
    """Case 25: as long as the context is too long."""
    engine.announce([make_sample("long", (5,) * 128)])
    with pytest.raises(ServerError, match="longest sample has 128 tokens, the server takes 121"):
        engine.open()


def test_shared_memory_bounds_what_is_under_way(engine, monkeypatch):
    """Two of the longest samples are enough for any run, with retries."""
    samples = make_samples(50, longest=120)
    layout = session.wire.Layout(3, 16, "bfloat16")
    longest = max(layout.slot_bytes(len(sample.input_ids)) for sample in samples)
    monkeypatch.setenv("EYAS_SHM_BYTES", str(2 * longest + 4096))
    Path(os.environ["EYAS_DOUBLE_FAULTS"]).write_text(json.dumps({"aborted": 9, "missing piece": 20, "dropped": 30}))
    engine.announce(samples)
    engine.open()
    check_equal(capture(engine, samples[40:43])[0], samples[40:43])
    got, failed = capture(engine, samples, batch=3)
    assert not failed
    check_equal(got, samples)


def test_too_little_shared_memory_is_refused_with_the_way_to_more(engine, monkeypatch):
    monkeypatch.setattr(session, "free_shm_bytes", lambda: 4096)
    engine.announce(make_samples(3))
    with pytest.raises(DiskError, match="/dev/shm has") as raised:
        engine.open()
    assert "--shm-size" in (raised.value.hint or "")


@pytest.mark.parametrize(
    "text",
    ["--quantization fp8", "--quant=fp8", "--dtype float16", "--kv-cache-dtype fp8_e5m2", "--schedule-policy lof",
     "--load-format dummy", "--chunked-prefill-size 64", "-tp 2", "--mem-fraction-static 0.9 --model-path /other", "'"],
)  # fmt: skip
def test_further_arguments_that_may_decide_the_states_are_refused(engine, monkeypatch, text):
    """They stand in no identity: states of either kind would be one capture."""
    monkeypatch.setenv("EYAS_SGLANG_ARGS", text)
    with pytest.raises(ServerError, match="EYAS_SGLANG_ARGS"):
        engine.open()


def test_further_arguments_that_change_no_state_are_passed_on(engine, monkeypatch):
    monkeypatch.setenv("EYAS_SGLANG_ARGS", "--mem-fraction-static 0.7 --watchdog-timeout=600")
    found = session.command(engine._wanted, "python", 1)
    assert found[-3:] == ["--mem-fraction-static", "0.7", "--watchdog-timeout=600"]


def test_an_attached_server_is_used_and_left_running(engine, tmp_path, monkeypatch):
    first = make_engine(
        "sglang", target=make_target(), folder=tmp_path, boundaries=BOUNDARIES, dtype="bfloat16", options=OPTIONS
    )
    first.open()
    running = first.keeper.session
    socket_path = running.link._path
    running.link.close()
    monkeypatch.setenv("EYAS_SGLANG_URL", running.client.url)
    monkeypatch.setenv("EYAS_SGLANG_API_KEY", running.client.headers["Authorization"].removeprefix("Bearer "))
    with pytest.raises(ServerError, match="EYAS_CAPTURE_SOCKET does not name"):
        engine.open()
    monkeypatch.setenv("EYAS_CAPTURE_SOCKET", str(tmp_path / "none.sock"))
    with pytest.raises(ServerError, match=r"runs without eyas' plugin\n\nhint: .*sglang-command"):
        engine.open()
    monkeypatch.setenv("EYAS_CAPTURE_SOCKET", str(socket_path))
    samples = make_samples(10)
    engine.announce(samples)
    engine.open()
    check_equal(capture(engine, samples)[0], samples)
    engine.close()
    assert not running.server.exit
    first.close()
    assert running.server.exit


def test_no_orphan_survives_when_we_are_killed(tmp_path):
    """The watcher ends the server's whole group when the pipe to us closes."""
    script = (
        "import sys, time; from pathlib import Path; from eyas.engines.sglang.server import Server;"
        "import os; s = Server(['/bin/sh', '-c', 'trap \"\" TERM; sleep 300 & sleep 300'], os.environ, Path('log'));"
        "print(s.pid, flush=True); time.sleep(300)"
    )
    ours = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    assert ours.stdout is not None
    group = int(ours.stdout.readline())
    os.killpg(group, 0)
    ours.send_signal(signal.SIGKILL)
    ours.wait()
    deadline_s = time.monotonic() + 10
    while time.monotonic() < deadline_s:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        if all("Z" in Path(f"/proc/{p}/stat").read_text().rpartition(")")[2].split()[0] for p in members(group)):
            return  # dead, and waiting for whoever took them over
        time.sleep(0.05)
    raise AssertionError(f"group {group} lives on")


def members(group: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if int((entry / "stat").read_text().rpartition(")")[2].split()[2]) == group:
                found.append(int(entry.name))
        except (OSError, IndexError):
            continue
    return found


def test_answers_are_generated_by_the_server(tmp_path, fail):
    fail(killed=3)
    engine = make_engine("sglang", target=make_target(), folder=tmp_path, boundaries=(), dtype="bfloat16", batch_size=8)
    requests = [
        GenerateRequest(
            request_id=f"r{i}", prompt_ids=(i + 3, 7, 9), max_new_tokens=8, temperature=0.0, top_p=1.0, seed=0
        )
        for i in range(10)
    ]
    engine.open()
    try:
        answers = {answer.request_id: answer for answer in engine.generate(requests)}
    finally:
        engine.close()
    assert sorted(answers) == sorted(request.request_id for request in requests)
    assert answers["r4"].ids == (7, 7, 9, 2)
    assert answers["r4"].finish == "stop"
    assert engine.keeper.num_restarts == 1


def test_a_server_whose_watcher_cannot_start_is_ended(tmp_path, monkeypatch):
    """No more processes: nobody would end this server when we are killed."""
    started, popen = [], subprocess.Popen

    def fails_second(*arguments, **named):
        if started:
            raise BlockingIOError("no more processes")
        started.append(popen(*arguments, **named))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", fails_second)
    with pytest.raises(BlockingIOError):
        Server(["sleep", "100"], os.environ, tmp_path / "log")
    assert started[0].poll() == -signal.SIGKILL


def test_an_interpreter_may_be_named_from_here(tmp_path, monkeypatch):
    """It is started elsewhere."""
    (tmp_path / "mine").symlink_to(sys.executable)
    monkeypatch.setenv("EYAS_SGLANG_PYTHON", "mine")
    assert interpreter.sglang_python() == str(tmp_path / "mine")
