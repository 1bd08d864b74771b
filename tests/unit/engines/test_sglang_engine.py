"""The sglang engine against a double of server and plugin that fails on demand; a real server is in tests/servers."""

from __future__ import annotations

import itertools
import json
import os
import time
from pathlib import Path

import pytest
from sglang_world import BOUNDARIES, OPTIONS, capture, check_equal, make_sample, make_samples

from eyas.conversations.generation import GenerateRequest
from eyas.engines.registry import make_engine
from eyas.engines.sglang import session
from eyas.engines.sglang.flight import Flight
from eyas.errors import CaptureError, ServerError
from fake_target import make_target

pytestmark = pytest.mark.usefixtures("sglang_double")


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


@pytest.mark.parametrize(
    "fault", ["killed", "dropped", "lingers", pytest.param("frozen", marks=pytest.mark.slow), "hang"]
)
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


@pytest.mark.parametrize("fault", ["killed", "lingers"])
def test_whoever_watches_this_process_learns_that_it_waits_for_a_server(fail, monkeypatch, tmp_path, fault):
    """While one starts for the first time, while one that was killed ends and another follows, and in the pause before it."""
    monkeypatch.setenv("EYAS_SGLANG_START_S", "3")
    monkeypatch.setattr(session, "BACKOFF_S", (3.0,))
    told = []
    engine = make_engine(
        "sglang", target=make_target(), folder=tmp_path, boundaries=BOUNDARIES, dtype="bfloat16", options=OPTIONS,
        on_wait=lambda: told.append(time.monotonic()),
    )  # fmt: skip
    samples = make_samples(6)
    engine.announce(samples)
    fail(**{"never up": 0})
    with pytest.raises(ServerError, match="not ready after 3 s"):
        engine.open()
    assert longest_silence(told, 3) < 2
    engine.open()
    told.clear()
    try:
        fail(**{fault: 2})
        begin_s = time.monotonic()
        capture(engine, samples)
        assert longest_silence([begin_s, *told, time.monotonic()], 3) < 2
    finally:
        engine.close()
    assert engine.keeper.num_restarts == 1


def longest_silence(told, seconds):
    """Between two words of which there are so many seconds."""
    assert told[-1] - told[0] > seconds - 1
    return max(later - earlier for earlier, later in itertools.pairwise(told))


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
