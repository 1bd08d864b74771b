"""Our side of the worker process: start it in a group of its own, talk to it, end it with everything that it started."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import eyas
from eyas.engines.base import OnWait, nobody
from eyas.errors import ServerError

HOME = Path(".eyas/vllm")
"""Logs, and the folder through which the other interpreter sees this package and nothing else of ours."""
TAIL_LINES = 15
ENVIRONMENT = {
    # One process: when it dies, everything has died and the socket says so; a separate core would leave us waiting.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
}
DEFAULTS = {"VLLM_CPU_KVCACHE_SPACE": "1"}
"""Unless the user's environment says otherwise. GiB; vLLM's own default takes most of a machine."""


class WorkerEndError(Exception):
    """The worker died, or was ended because it did not move; its text says how."""


class Worker:
    """One worker process.

    Args:
        command: What is run; the number of the socket's descriptor is appended.
        settings: First message to it.
        patience_s: Seconds without a word, or a new line in the log, after which it counts as hung.
        on_wait: Called while it starts.
    """

    def __init__(
        self, command: Sequence[str], settings: Mapping[str, Any], patience_s: float, on_wait: OnWait = nobody
    ) -> None:
        self._command, self._settings, self._patience_s = tuple(command), settings, patience_s
        self._on_wait = on_wait
        self._process: subprocess.Popen[bytes] | None = None
        self._rest = b""
        self.log = HOME / f"worker-{os.getpid()}-{os.urandom(3).hex()}.log"
        self.last_word_s = 0.0

    @property
    def pid(self) -> int:
        """Process id, and id of its group."""
        assert self._process is not None, "worker is not started"
        return self._process.pid

    def start(self) -> dict[str, Any]:
        """Start it and wait until it is ready; gives its first word.

        Raises:
            ServerError: It ended or stopped moving before; with its last log lines.
        """
        self.log.parent.mkdir(parents=True, exist_ok=True)
        package, (ours, theirs) = _package_link(), socket.socketpair()
        with theirs, self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*self._command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=package,
                env=DEFAULTS | dict(os.environ) | ENVIRONMENT | {"PYTHONPATH": str(package)},
            )
        self._socket, self._rest, self.last_word_s = ours, b"", time.monotonic()
        ours.settimeout(self._patience_s)
        try:
            self.send(self._settings)
            return self._first_word()
        except WorkerEndError as ended:
            raise ServerError(f"vLLM did not start: {ended}\n{self.tail()}", f"the whole log: {self.log}") from ended
        except BaseException:
            self.kill()
            raise

    def _first_word(self) -> dict[str, Any]:
        size = -1
        while True:
            self._on_wait()
            for message in self.receive(1.0):
                if "ready" in message:
                    return message
            if (grown := self.log.stat().st_size) != size:
                size, self.last_word_s = grown, time.monotonic()
            self.check_moves()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one message.

        Raises:
            WorkerEndError: It is gone, or reads nothing any more.
        """
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except TimeoutError:
            self.end(f"it took no request for {self._patience_s:g} s")
        except OSError:
            while True:  # its last words may still lie in the socket; at its end this raises
                self.receive(1.0)

    def receive(self, timeout_s: float) -> list[dict[str, Any]]:
        """Messages that came, waiting for the first so long.

        Raises:
            WorkerEndError: It is gone.
        """
        if not select.select([self._socket], [], [], timeout_s)[0]:
            if self._process is not None and self._process.poll() is not None:
                self.end(self._how())
            return []
        try:
            data = self._socket.recv(1 << 20)
        except OSError:
            data = b""
        if not data:
            self.end(self._how())
        self.last_word_s = time.monotonic()
        *lines, self._rest = (self._rest + data).split(b"\n")
        messages = [json.loads(line) for line in lines]
        for message in messages:
            if "fatal" in message:
                self.end(message["fatal"])
        return messages

    def check_moves(self) -> None:
        """End it when it has been silent for too long.

        Raises:
            WorkerEndError: It was.
        """
        if time.monotonic() - self.last_word_s > self._patience_s:
            self.end(f"no progress for {self._patience_s:g} s (EYAS_WATCHDOG_S)")

    def end(self, reason: str) -> None:
        """Kill the group and say why.

        Raises:
            WorkerEndError: Always.
        """
        self.kill()
        raise WorkerEndError(reason)

    def kill(self) -> None:
        """Kill the whole group; safe to call twice."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):  # the last of the group has gone by itself
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None
        self._socket.close()

    def tail(self) -> str:
        """The last lines of its log."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(f"  {line[:300]}" for line in lines[-TAIL_LINES:])

    def _how(self) -> str:
        assert self._process is not None
        try:
            status = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "it closed its socket"
        return f"killed by {signal.Signals(-status).name}" if status < 0 else f"it ended with exit code {status}"


def _package_link() -> Path:
    """A folder that holds this package alone: the other interpreter must not see our site-packages."""
    folder = (HOME / "python").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    link, package = folder / "eyas", Path(eyas.__file__).parent.absolute()
    if not link.is_symlink() or link.readlink() != package:
        made = folder / f"eyas-{os.getpid()}"
        made.symlink_to(package)
        os.replace(made, link)
    return folder
