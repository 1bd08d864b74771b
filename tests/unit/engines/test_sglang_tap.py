"""The tap, fed with batches as a scheduler would, against a collector at a real socket with a real arena."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from eyas.engines.sglang import wire
from eyas.engines.sglang.arena import SHM
from eyas.engines.sglang.listener import Listener
from eyas.engines.sglang.tap import Prefill, Tap
from sglang_harness import Collector

A, D, VOCAB = 3, 8, 100
LAYOUT = wire.Layout(A, D, "float32")
ARENA_BYTES = 1 << 20
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Scheduler:
    """A server's scheduler, reduced to its tap and socket."""

    def __init__(self, folder: Path, device: str = "cpu", layout: wire.Layout = LAYOUT) -> None:
        self.folder = folder
        self.device = torch.device(device, 0) if device == "cuda" else torch.device(device)
        self.path = folder / "tap.sock"
        self.tap = Tap(layout, self.device)
        self.listener = Listener(str(self.path), self.hello, self.tap)

    def hello(self) -> wire.Hello:
        return wire.Hello(
            protocol=wire.PROTOCOL, pid=1, sglang="0.5.23", torch="", device=str(self.device), model_path="m", model_class="M",
            hidden_size=D, num_layers=6, vocab_size=VOCAB, dtype="float32", boundaries=[1, 2, 3],
        )  # fmt: skip

    def prefill(self, *requests: tuple[str, Sample, int, int], packed: bool = False) -> None:
        """One batch: (rid, sample, prefix, rows) for each request."""
        parts = [sample.rows(prefix, rows) for _, sample, prefix, rows in requests]
        aux_NAD, last_ND, ids_N = (torch.cat(tensors).to(self.device) for tensors in zip(*parts, strict=True))
        aux = aux_NAD.flatten(1) if packed else list(aux_NAD.unbind(1))
        rids, prefixes, num_rows = [r[0] for r in requests], [r[2] for r in requests], [r[3] for r in requests]
        self.tap.capture(Prefill(rids, num_rows, prefixes, ids_N, aux, last_ND))
        # What the next batch would do to buffers that a server uses again.
        last_ND.fill_(-1)
        ids_N.fill_(-1)


class Sample:
    def __init__(self, num_tokens: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed * 1000 + num_tokens)
        self.aux_TAD = torch.randn(num_tokens, A, D, generator=generator)
        self.last_TD = torch.randn(num_tokens, D, generator=generator)
        self.ids_T = torch.randint(VOCAB, (num_tokens,), generator=generator)

    def rows(self, prefix: int, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        span = slice(prefix, prefix + rows)
        return self.aux_TAD[span], self.last_TD[span].clone(), self.ids_T[span].clone()

    def is_in(self, collector: Collector, slot: wire.Slot) -> bool:
        aux, last, ids = collector.states(slot)
        return (
            torch.equal(aux, self.aux_TAD) and torch.equal(last, self.last_TD) and torch.equal(ids.long(), self.ids_T)
        )


@pytest.fixture
def folder() -> Iterator[Path]:
    # In memory, as the collector's arena: CUDA pins no page of a disk's file. A socket's path has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="eyas", dir=SHM) as name:
        yield Path(name)


@pytest.fixture
def scheduler(folder: Path) -> Scheduler:
    return Scheduler(folder)


@contextlib.contextmanager
def attached(
    scheduler: Scheduler, name: str = "arena", nonce: str = "0" * 16, num_bytes: int = ARENA_BYTES
) -> Iterator[Collector]:
    collector = Collector(scheduler.path, scheduler.folder / name, num_bytes, nonce)
    try:
        yield collector
    finally:
        collector.close()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def is_mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("packed", [False, True])
def test_chunks_of_mixed_batches_land_in_their_slots(folder: Path, device: str, packed: bool) -> None:
    """Cases 44, 51 and 56: pieces 16 + 16 + 8; other clients' rows between them are nobody's; a list or one tensor of
    aux states leaves the same bytes."""
    scheduler, long, short, other = Scheduler(folder, device), Sample(40), Sample(5), Sample(7)
    with attached(scheduler) as collector:
        assert collector.attached == wire.Attached(pinned=device == "cuda")
        slot, second = collector.slot(40), collector.slot(5)
        scheduler.prefill(("HEALTH_CHECK_1", other, 0, 7), (slot.rid, long, 0, 16), packed=packed)
        scheduler.prefill((slot.rid, long, 16, 16), packed=packed)
        scheduler.prefill(
            ("x", other, 0, 3), (slot.rid, long, 32, 8), ("y", other, 1, 1), (second.rid, short, 0, 5), packed=packed
        )
        collector.wait(lambda: all(sample.covered for sample in collector.samples.values()))
        assert [(piece.prefix, piece.rows) for piece in collector.samples[slot.rid].pieces] == [
            (0, 16),
            (16, 16),
            (32, 8),
        ]
        assert long.is_in(collector, slot)
        assert short.is_in(collector, second)
        assert collector.hashes_hold()
        assert not collector.foreign


def test_a_bfloat16_model(folder: Path) -> None:
    scheduler, sample = Scheduler(folder, layout=wire.Layout(A, D, "bfloat16")), Sample(6)
    scheduler.hello = lambda: wire.Hello(**{**vars_of(Scheduler.hello(scheduler)), "dtype": "bfloat16"})
    scheduler.listener = Listener(str(folder / "b.sock"), scheduler.hello, scheduler.tap)
    scheduler.path = folder / "b.sock"
    with attached(scheduler) as collector:
        slot = collector.slot(6)
        aux = [stream.bfloat16() for stream in sample.aux_TAD.unbind(1)]
        scheduler.tap.capture(Prefill([slot.rid], [6], [0], sample.ids_T, aux, sample.last_TD.bfloat16()))
        collector.wait(lambda: collector.samples[slot.rid].covered)
        assert torch.equal(collector.states(slot)[0], sample.aux_TAD.bfloat16())
        assert torch.equal(collector.states(slot)[1], sample.last_TD.bfloat16())
        assert collector.hashes_hold()


def vars_of(hello: wire.Hello) -> dict[str, object]:
    return {name: getattr(hello, name) for name in wire.Hello.__slots__}


def wrong_batches(slot: wire.Slot) -> dict[str, Prefill]:
    sample, rids = Sample(9), [slot.rid]
    aux, last, ids = list(sample.aux_TAD.unbind(1)), sample.last_TD, sample.ids_T
    return {
        "2 aux streams": Prefill(rids, [9], [0], ids, aux[:2], last),
        "0 aux streams": Prefill(rids, [9], [0], ids, None, last),
        "[9, 16]": Prefill(rids, [9], [0], ids, sample.aux_TAD.flatten(1)[:, : 2 * D], last),
        "[8, 8]": Prefill(rids, [9], [0], ids, aux, last[:8]),
        "[9, 8], expected [8, 8]": Prefill(rids, [8], [0], ids, aux, last),
        "[8], expected [9]": Prefill(rids, [9], [0], ids[:8], aux, last),
        "torch.float64": Prefill(rids, [9], [0], ids, aux, last.double()),
        "1 requests, 2 lengths": Prefill(rids, [5, 4], [0], ids, aux, last),
    }


@pytest.mark.parametrize("reason", wrong_batches(wire.Slot("0" * 16, 0, 9, 0)))
def test_a_batch_of_another_shape_is_a_problem_and_no_byte(scheduler: Scheduler, reason: str) -> None:
    """Cases 32 and 57, and rows that are sharded or padded: nothing is guessed."""
    with attached(scheduler) as collector:
        slot = collector.slot(9)
        scheduler.tap.capture(wrong_batches(slot)[reason])
        collector.wait(lambda: collector.samples[slot.rid].pieces)
        assert reason in collector.samples[slot.rid].problems[0]
        assert not collector.arena.any()


@pytest.mark.parametrize(
    ("slot", "prefix"),
    [
        (wire.Slot("0" * 16, 0, 8, 0), 0),  # nine rows for a sample of eight
        (wire.Slot("0" * 16, 0, 12, 0), 4),
        (wire.Slot("0" * 16, ARENA_BYTES, 9, 0), 0),
        (wire.Slot("0" * 16, ARENA_BYTES - wire.ALIGN, 4000, 0), 0),
        (wire.Slot("0" * 16, 0xFFFFFFFFFFFFFFF, 9, 0), 0),
        (wire.Slot("0" * 16, 64, 9, 0), 0),
    ],
)
def test_nothing_is_written_outside_of_a_slot(scheduler: Scheduler, slot: wire.Slot, prefix: int) -> None:
    sample = Sample(20)
    with attached(scheduler) as collector:
        sound = collector.slot(9)
        collector.samples[slot.rid] = type(collector.samples[sound.rid])(slot)
        scheduler.prefill((slot.rid, sample, prefix, 9))
        collector.wait(lambda: collector.samples[slot.rid].pieces)
        assert collector.samples[slot.rid].problems
        assert not collector.arena.any()


def test_a_request_of_an_earlier_attachment_is_nobodys(scheduler: Scheduler) -> None:
    sample = Sample(9)
    with attached(scheduler, nonce="1" * 16) as collector:
        late, slot = wire.Slot("0" * 16, 0, 9, 0), collector.slot(9)
        scheduler.prefill((late.rid, sample, 0, 9))
        assert not collector.arena.any()
        scheduler.prefill((slot.rid, sample, 0, 9))
        collector.wait(lambda: collector.samples[slot.rid].covered)
        assert not collector.foreign


def test_a_collector_that_disappears_is_unmapped_and_another_may_attach(scheduler: Scheduler) -> None:
    sample = Sample(9)
    with attached(scheduler, "first") as collector:
        slot = collector.slot(18)
        scheduler.prefill((slot.rid, sample, 0, 9))
        collector.wait(lambda: collector.samples[slot.rid].pieces)
        del collector.arena  # the mapping of the test itself
        assert is_mapped(scheduler.folder / "first")
    until(lambda: not is_mapped(scheduler.folder / "first"))
    scheduler.prefill((slot.rid, sample, 0, 9))
    with attached(scheduler, "second", nonce="2" * 16) as collector:
        slot = collector.slot(9)
        scheduler.prefill((slot.rid, sample, 0, 9))
        collector.wait(lambda: collector.samples[slot.rid].covered)
        assert sample.is_in(collector, slot)


def test_an_arena_stays_mapped_while_a_copy_is_outstanding(scheduler: Scheduler) -> None:
    """And the server answers pings meanwhile."""
    done = threading.Event()
    with attached(scheduler) as collector:
        del collector.arena
        attachment = scheduler.tap._attachment
        assert attachment is not None
        attachment.hand([], Copying(done))  # type: ignore[arg-type]
        collector.send(wire.Ping(number=7))
        collector.wait(lambda: collector.pongs)
        assert collector.pongs[0].number == 7
    until(lambda: scheduler.tap._attachment is None)
    assert is_mapped(scheduler.folder / "arena")
    done.set()
    until(lambda: not is_mapped(scheduler.folder / "arena"))


class Copying:
    """An event of a device that is still at work."""

    def __init__(self, done: threading.Event) -> None:
        self.synchronize = lambda: done.wait(20)


def test_pongs_count(scheduler: Scheduler) -> None:
    """A piece waits until its line is wholly sent, so a pong right after it may still count it."""
    sample = Sample(4)
    with attached(scheduler) as collector:
        slots = [collector.slot(4) for _ in range(5)]
        scheduler.prefill(*[(slot.rid, sample, 0, 4) for slot in slots])
        collector.wait(lambda: all(sample.covered for sample in collector.samples.values()))

        def all_told() -> bool:
            num_pongs = len(collector.pongs)
            collector.send(wire.Ping(number=num_pongs))
            collector.wait(lambda: len(collector.pongs) > num_pongs)
            assert collector.pongs[-1].num_pieces == 5
            return collector.pongs[-1].num_waiting == 0

        until(all_told)


def test_a_collector_that_does_not_read_stops_nobody(scheduler: Scheduler) -> None:
    sample, arena = Sample(1), scheduler.folder / "arena"
    arena.write_bytes(b"\0" * ARENA_BYTES)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(scheduler.path))
        attach = wire.Attach(protocol=wire.PROTOCOL, arena=str(arena), arena_bytes=ARENA_BYTES, nonce="0" * 16)
        connection.sendall(wire.to_line(attach))
        lines = connection.makefile("rb")
        assert isinstance(wire.from_line(lines.readline()), wire.Hello)
        assert isinstance(wire.from_line(lines.readline()), wire.Attached)
        rids = [wire.Slot("0" * 16, 0, 1, attempt).rid for attempt in range(6000)]  # more than a socket holds
        for rid in rids:
            scheduler.prefill((rid, sample, 0, 1))
        heard = [wire.from_line(lines.readline()) for _ in rids]
        assert [piece.rid for piece in heard if isinstance(piece, wire.Piece)] == rids
        lines.close()


def test_a_second_collector_is_refused_and_harms_nobody(scheduler: Scheduler) -> None:
    sample = Sample(9)
    with attached(scheduler, "first") as first:
        with attached(scheduler, "second", nonce="2" * 16) as second:
            assert isinstance(second.attached, wire.Refused)
            assert "another collector" in second.attached.reason
        slot = first.slot(9)
        scheduler.prefill((slot.rid, sample, 0, 9))
        first.wait(lambda: first.samples[slot.rid].covered)


def refusal(scheduler: Scheduler, line: bytes) -> str:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(scheduler.path))
        connection.sendall(line)
        lines = connection.makefile("rb").read().splitlines()
    answer = wire.from_line(lines[-1])
    assert isinstance(answer, wire.Refused)
    return answer.reason


def attach_line(path: Path, num_bytes: int, protocol: int = wire.PROTOCOL) -> bytes:
    return wire.to_line(wire.Attach(protocol=protocol, arena=str(path), arena_bytes=num_bytes, nonce="0" * 16))


def test_an_unusable_arena_is_refused(scheduler: Scheduler) -> None:
    """A hole in it would become a bus error in the server once /dev/shm is full."""
    small, holes = scheduler.folder / "small", scheduler.folder / "holes"
    small.write_bytes(b"x" * 4096)
    with holes.open("wb") as file:
        file.truncate(1 << 20)
    assert "expected a file of 8192" in refusal(scheduler, attach_line(small, 8192))
    assert "holes" in refusal(scheduler, attach_line(holes, 1 << 20))
    assert "cannot be mapped" in refusal(scheduler, attach_line(scheduler.folder / "none", 4096))
    assert "cannot be mapped" in refusal(scheduler, attach_line(scheduler.folder, 4096))
    assert "expected a file of" in refusal(scheduler, attach_line(small, 0))
    assert "two versions of eyas" in refusal(scheduler, attach_line(small, 4096, protocol=wire.PROTOCOL + 1))
    assert "Ping before Attach" in refusal(scheduler, wire.to_line(wire.Ping(number=1)))
    assert scheduler.tap._attachment is None


def test_another_programs_words_end_its_connection_alone(scheduler: Scheduler) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(scheduler.path))
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert connection.makefile("rb").read().count(b"\n") == 1  # Hello
    with attached(scheduler) as collector:
        assert isinstance(collector.attached, wire.Attached)


def test_the_socket_is_this_users_alone_and_a_dead_servers_is_replaced(scheduler: Scheduler) -> None:
    assert scheduler.path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(OSError, match="another server listens"):
        Listener(str(scheduler.path), scheduler.hello, scheduler.tap)
    stale = scheduler.folder / "stale.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(stale))
    Listener(str(stale), scheduler.hello, scheduler.tap)
    scheduler.path = stale
    with attached(scheduler) as collector:
        assert isinstance(collector.attached, wire.Attached)


def test_a_failing_copy_is_a_problem(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no memory left")

    sample = Sample(9)
    with attached(scheduler) as collector:
        slot = collector.slot(9)
        monkeypatch.setattr(torch, "stack", out_of_memory)
        scheduler.prefill((slot.rid, sample, 0, 9))
        collector.wait(lambda: collector.samples[slot.rid].pieces)
        assert "no memory left" in collector.samples[slot.rid].problems[0]


@pytest.mark.gpu
def test_the_scheduler_does_not_wait_for_the_device(folder: Path) -> None:
    """The tap returns while the computation that it copies from is still running."""
    scheduler, rows = Scheduler(folder, "cuda", wire.Layout(A, 4096, "bfloat16")), 4096
    scheduler.hello = lambda: wire.Hello(
        **{**vars_of(Scheduler.hello(scheduler)), "dtype": "bfloat16", "hidden_size": 4096}
    )
    path = folder / "g.sock"
    scheduler.listener, scheduler.path = Listener(str(path), scheduler.hello, scheduler.tap), path
    with attached(scheduler, num_bytes=512 << 20) as collector:
        slot, warm = collector.slot(rows), collector.slot(rows)
        square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        for each in (warm, slot):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            for _ in range(100):  # about 150 ms on an H200
                square = (square @ square).clamp_(-1, 1)
            last = square[:rows, :4096] + 1
            aux = [square[:rows, :4096] + layer for layer in range(A)]
            scheduler.tap.capture(Prefill([each.rid], [rows], [0], torch.arange(rows, device="cuda"), aux, last))
            queued_s = time.perf_counter() - begun
            expected = torch.stack(aux, 1).cpu(), last.cpu()
            computed_s = time.perf_counter() - begun
            collector.wait(lambda each=each: collector.samples[each.rid].covered)
            assert torch.equal(collector.states(each)[0], expected[0])
            assert torch.equal(collector.states(each)[1], expected[1])
        assert queued_s < computed_s / 2
