"""The arena: slots never overlap, everything comes back, left-overs of the dead go, the living keep theirs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.contracts import TokenSample
from eyas.engines.sglang import wire
from eyas.engines.sglang.arena import PREFIX, Arena, Slots, arena_bytes, remove_leftovers
from eyas.engines.sglang.client import Reply, classify
from eyas.engines.sglang.flight import Flight
from eyas.errors import DiskError

PAGE = wire.ALIGN


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9 * PAGE)), max_size=80))
def test_slots_never_overlap_and_everything_comes_back(steps):
    slots, taken = Slots(40 * PAGE), {}
    for takes, number in steps:
        if takes:
            offset = slots.take(number)
            if offset is not None:
                size = -(-number // PAGE) * PAGE
                assert offset % PAGE == 0
                assert offset + size <= 40 * PAGE
                assert all(offset + size <= begin or begin + length <= offset for begin, length in taken.items())
                taken[offset] = size
        elif taken:
            offset = sorted(taken)[number % len(taken)]
            slots.give_back(offset)
            del taken[offset]
        assert slots.free_bytes == 40 * PAGE - sum(taken.values())
    for offset in taken:
        slots.give_back(offset)
    assert slots.take(40 * PAGE) == 0


def test_the_arena_is_ours_alone_and_gone_when_closed(tmp_path):
    arena = Arena(8 * PAGE, tmp_path)
    assert arena.path.stat().st_mode & 0o777 == 0o600
    assert arena.path.stat().st_blocks * 512 >= 8 * PAGE, "every page is there before anybody writes"
    remove_leftovers(tmp_path)
    assert arena.path.exists()
    arena.close()
    arena.close()
    assert not list(tmp_path.iterdir())


def test_a_left_over_of_a_killed_process_is_removed(tmp_path):
    script = (
        "import os, signal, sys; from pathlib import Path; from eyas.engines.sglang.arena import Arena;"
        "Arena(4096, Path(sys.argv[1])); os.kill(os.getpid(), signal.SIGKILL)"
    )
    source = Path(__file__).parents[3] / "src"
    subprocess.run([sys.executable, "-c", script, tmp_path], env=os.environ | {"PYTHONPATH": str(source)}, check=False)
    assert [path.name.startswith(PREFIX) for path in tmp_path.iterdir()] == [True]
    Arena(4096, tmp_path).close()
    assert not list(tmp_path.iterdir())


def test_shared_memory_that_is_full_is_refused_with_the_way_to_more(monkeypatch):
    with pytest.raises(DiskError, match="shared memory for hidden states") as raised:
        Arena(1 << 50)
    assert "--shm-size" in (raised.value.hint or "")
    assert not list(Path("/dev/shm").glob(f"{PREFIX}{os.getpid()}-*"))
    with pytest.raises(DiskError, match=r"has .* free, the capture needs"):
        arena_bytes(1000 * PAGE, 1 << 40, 10 * PAGE)
    monkeypatch.setenv("EYAS_SHM_BYTES", "4096")
    with pytest.raises(DiskError, match="two of the longest samples"):
        arena_bytes(10 * PAGE, 1 << 40, 1 << 40)


@pytest.mark.parametrize(
    ("status", "text", "kind"),
    [
        (200, '{"output_ids":[1],"meta_info":{"prompt_tokens":3,"cached_tokens":0,"finish_reason":{"type":"length"}}}', "done"),
        (200, '{"output_ids":[],"meta_info":{"finish_reason":{"type":"abort","message":"Abort in waiting queue"}}}', "aborted"),
        (400, '{"error":{"message":"The input (9000 tokens) is longer than the model\'s context length"}}', "refused"),
        (400, '{"error":{"message":"Duplicate request ID detected: x"}}', "refused"),
        (400, '{"error":{"message":"Either text, input_ids or input_embeds should be provided."}}', "unusable"),
        (401, '{"error":"Unauthorized"}', "unusable"),
        (503, "busy", "refused"),
        (200, "<html>", "unusable"),
        (200, "null", "unusable"),
    ],
)  # fmt: skip
def test_replies_are_told_apart(status, text, kind):
    """Case 52 among them."""
    assert classify(status, text.encode()).kind == kind


@given(st.lists(st.tuples(st.sampled_from(["done", "aborted", "lost", "nothing"]), st.integers(0, 10)), max_size=60))
def test_a_slot_of_a_failed_request_is_not_used_before_a_later_one_is_done(steps):
    """Whatever the order of ends: no slot is under way twice, and the slot of a failed request waits for a later one."""
    layout = wire.Layout(1, 8, "bfloat16")
    samples = [
        TokenSample(sample_id=f"s{n}", conversation_id="c", source="x", split="train", variant="given",
                    input_ids=(1,) * (100 + 30 * (n % 5)), loss_mask=(1,) * (100 + 30 * (n % 5)))
        for n in range(12)
    ]  # fmt: skip
    flight = Flight(layout)
    flight.announce(samples)
    flight.attach("0" * 16, 6 * layout.slot_bytes(220), 1000, 10)
    flight.ask(samples)
    poisoned: dict[int, int] = {}  # offset → first attempt that was sent after the failure
    for kind, which in steps:
        while (attempt := flight.next_to_send()) is not None:
            assert attempt.slot.offset not in poisoned
        under_way = sorted(flight.under_way)
        if not under_way or kind == "nothing":
            continue
        number = under_way[which % len(under_way)]
        attempt = flight.under_way[number]
        if kind == "done":
            rows = attempt.slot.num_tokens
            flight.piece(wire.Piece(rid=attempt.slot.rid, prefix=0, rows=rows))
        flight.answered(number, Reply(kind=kind, prompt_tokens=attempt.slot.num_tokens), 1)
        if kind == "done":
            if number == under_way[0]:
                poisoned = {offset: first for offset, first in poisoned.items() if number < first}
            for outcome in flight.take_outcomes():
                if outcome.attempt is not None:
                    flight.slots.give_back(outcome.attempt.slot.offset)
        else:
            poisoned[attempt.slot.offset] = flight.next_attempt


def test_what_may_have_ended_a_server_is_not_sent_beside_what_is_wanted():
    """A poisoned sample sent ahead would end one server after another, under samples that are none the worse."""
    layout = wire.Layout(1, 8, "bfloat16")
    samples = [
        TokenSample(sample_id=f"s{n}", conversation_id="c", source="x", split="train", variant="given",
                    input_ids=(1,) * 10, loss_mask=(1,) * 10)
        for n in range(8)
    ]  # fmt: skip
    flight = Flight(layout)

    def new_server():
        flight.attach("0" * 16, 20 * layout.slot_bytes(10), 1000, 10)

    def sent():
        started = iter(flight.next_to_send, None)
        return [attempt.sample.sample_id for attempt in started if attempt.sample is not None]

    flight.announce(samples[:4])
    new_server()
    flight.ask(samples[:2])
    assert sent() == ["s0", "s1", "s2", "s3"]
    new_server()
    assert sent() == ["s0", "s1"]  # nobody waits for the others: they are sent when somebody does
    new_server()
    assert [outcome.sample.sample_id for outcome in flight.take_outcomes()] == ["s0", "s1"]
    flight.announce(samples[4:])
    flight.ask(samples[:1])
    assert sent() == ["s0"]  # alone: if this server ends too, it is the one
    number = next(iter(flight.under_way))
    flight.ask(samples[1:2])
    assert sent() == []
    flight.answered(number, Reply(kind="aborted"), 1)
    assert sent() == ["s1"]
