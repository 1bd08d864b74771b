"""A real SGLang server and the smallest collector that the protocol allows."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from eyas.engines.sglang import versions, wire

SHIM = Path(versions.__file__).parent / "cpu_shim"
START_S = 240


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    url: str
    socket_path: Path
    log: Path
    group: int

    def post(self, path: str, body: Mapping[str, Any], timeout: float = 900) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            text = answer.read()
        return json.loads(text) if text.strip().startswith((b"{", b"[")) else text.decode()

    def generate(self, ids: Sequence[int], rid: str, new_tokens: int = 1) -> Any:
        return self.post(
            "/generate",
            {"input_ids": list(ids), "rid": rid, "sampling_params": {"max_new_tokens": new_tokens, "temperature": 0}},
        )

    def cpu_seconds(self) -> float:
        """Of all processes of the server so far."""
        ticks = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = stat.read_text().rpartition(")")[2].split()
                if int(fields[2]) == self.group:
                    ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def server(
    python: Path,
    folder: Path,
    options: versions.ServerOptions,
    layers: Sequence[int] | None,
    plugin: bool = True,
) -> Iterator[Server]:
    """A server with the CPU shim that is ready; its whole process group ends with the block."""
    socket_path = folder / "eyas.sock"
    environment = dict(os.environ) | versions.cpu_environment(str(SHIM), tp_size=options.tp_size)
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if plugin:
        environment |= {wire.SOCKET_VARIABLE: str(socket_path), wire.LAYERS_VARIABLE: json.dumps(layers)}
    log = folder / "server.log"
    command = [str(python), "-m", "sglang.launch_server", *versions.server_arguments("0.5.23", options)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True, cwd=folder
        )
    running = Server(process, f"http://127.0.0.1:{options.port}", socket_path, log, process.pid)
    try:
        wait_ready(running)
        yield running
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_ready(running: Server) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if running.process.poll() is not None:
            break
        with (
            contextlib.suppress(OSError, urllib.error.URLError),
            urllib.request.urlopen(running.url + "/health", timeout=20) as answer,
        ):
            if answer.status == 200:
                return
        time.sleep(0.3)
    raise AssertionError(f"the server did not start:\n{running.log.read_text()[-4000:]}")


@dataclass
class Sample:
    """What one request left in the arena."""

    slot: wire.Slot
    pieces: list[wire.Piece] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        return [piece.problem for piece in self.pieces if piece.problem]

    @property
    def covered(self) -> bool:
        """Whether rows 0 to T came, each once."""
        at = 0
        for piece in sorted(self.pieces, key=lambda piece: piece.prefix):
            if piece.problem or piece.prefix != at:
                return False
            at += piece.rows
        return at == self.slot.num_tokens


class Collector:
    """Attaches, gives out slots one after the other, and notes every piece."""

    def __init__(self, socket_path: Path, arena_path: Path, arena_bytes: int, nonce: str = "0123456789abcdef") -> None:
        self.nonce = nonce
        self.arena_path = arena_path
        with arena_path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, arena_bytes)
        self.arena = np.memmap(arena_path, np.uint8, "r+")
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.connect(str(socket_path))
        self.lines = self.connection.makefile("rb")
        self.samples: dict[str, Sample] = {}
        self.foreign: list[str] = []
        self.pongs: list[wire.Pong] = []
        self._free_at = 0
        self._changed = threading.Condition()
        hello = wire.from_line(self.lines.readline())
        assert isinstance(hello, wire.Hello), hello
        self.hello = hello
        self.layout = wire.Layout(len(hello.boundaries), hello.hidden_size, hello.dtype)
        self.send(wire.Attach(protocol=wire.PROTOCOL, arena=str(arena_path), arena_bytes=arena_bytes, nonce=nonce))
        self.attached = wire.from_line(self.lines.readline())
        if isinstance(self.attached, wire.Attached):
            threading.Thread(target=self._read, daemon=True).start()

    def send(self, message: wire.Message) -> None:
        self.connection.sendall(wire.to_line(message))

    def slot(self, num_tokens: int) -> wire.Slot:
        slot = wire.Slot(self.nonce, self._free_at, num_tokens, len(self.samples))
        self._free_at += self.layout.slot_bytes(num_tokens)
        assert self._free_at <= len(self.arena), "the test's arena is too small"
        self.samples[slot.rid] = Sample(slot)
        return slot

    def wait(self, condition: Any, timeout: float = 60) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, timeout), "nothing more came"

    def states(self, slot: wire.Slot) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Aux [T,A,D], last [T,D] and ids [T] of a slot."""
        aux, last, ids = self.layout.ranges(slot.offset, slot.num_tokens, 0, slot.num_tokens)
        dtype, width = getattr(torch, self.layout.dtype), self.layout.hidden_size
        whole = torch.from_numpy(self.arena)
        return (
            whole[slice(*aux)].view(dtype).view(slot.num_tokens, self.layout.num_aux, width),
            whole[slice(*last)].view(dtype).view(slot.num_tokens, width),
            whole[slice(*ids)].view(torch.int32),
        )

    def hashes_hold(self) -> bool:
        for sample in self.samples.values():
            for piece in sample.pieces:
                state = xxhash.xxh3_64()
                slot = sample.slot
                for begin, end in self.layout.ranges(slot.offset, slot.num_tokens, piece.prefix, piece.rows):
                    state.update(self.arena[begin:end].data)
                if state.hexdigest() != piece.xxh3:
                    return False
        return True

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.lines.close()
        self.connection.close()
        self.arena_path.unlink(missing_ok=True)

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in self.lines:
                message = wire.from_line(line)
                with self._changed:
                    if isinstance(message, wire.Pong):
                        self.pongs.append(message)
                    elif isinstance(message, wire.Piece) and message.rid in self.samples:
                        self.samples[message.rid].pieces.append(message)
                    else:
                        self.foreign.append(repr(message))
                    self._changed.notify_all()


def capture_all(
    running: Server, collector: Collector, prompts: Sequence[Sequence[int]], at_once: int = 16
) -> list[wire.Slot]:
    """One request for each prompt; returns when each row lies in the arena."""
    slots = [collector.slot(len(ids)) for ids in prompts]
    with ThreadPoolExecutor(at_once) as pool:
        answers = list(pool.map(lambda pair: running.generate(pair[0], pair[1].rid), zip(prompts, slots, strict=True)))
    for ids, answer in zip(prompts, answers, strict=True):
        assert answer["meta_info"]["prompt_tokens"] == len(ids)
        assert answer["meta_info"]["cached_tokens"] == 0
    collector.wait(lambda: all(collector.samples[slot.rid].covered for slot in slots))
    return slots
