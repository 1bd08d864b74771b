"""The capturing process as the training sees it: started, spoken to, watched, ended.

It speaks lines of JSON (``eyas.engines.streamed``). A process that ends without a word, or says nothing for too long
while it has work, is started anew by whoever drives it. The thread that captures says that it lives while it waits for
a server, be it minutes: the engine itself watches that server, and restarts it within limits of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eyas import config, errors
from eyas.errors import EyasError, ServerError

Message = dict[str, Any]
DEVICES = "EYAS_STREAM_DEVICES"
OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT")
"""An engine must not take itself for one of the training's processes."""
END_S = 30.0
"""Until a process that was told to end is killed: servers close their own."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How the process is started.

    Args:
        command: Program and arguments.
        lock: A descriptor that the process holds for as long as it lives.
    """

    command: Sequence[str]
    lock: int


class CapturingProcess:
    """One process.

    Args:
        launch: How to start it.
    """

    def __init__(self, launch: Launch) -> None:
        self._process = subprocess.Popen(
            list(launch.command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=(launch.lock,),
            env=environment(os.environ),
            start_new_session=True,  # Ctrl-C goes to the training, which ends this in its own way
        )
        self._messages: queue.Queue[Message | None] = queue.Queue()
        self._heard_s, self.is_ready = time.monotonic(), False
        self._reader = threading.Thread(target=self._listen, name="ring-messages", daemon=True)
        self._reader.start()

    def say(self, **message: Any) -> None:
        """Send a line; a process that is gone is found by ``hear``."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def hear(self, timeout_s: float) -> Message | None:
        """The next message, None when there is none yet.

        Raises:
            EyasError: As the process told it.
            ServerError: The process ended without a word.
        """
        try:
            message = self._messages.get(timeout=timeout_s)
        except queue.Empty:
            return None
        self._heard_s = time.monotonic()
        if message is None:
            raise ServerError(f"the capturing process ended with code {self._process.wait()} and no word of why")
        self.is_ready = self.is_ready or "ready" in message
        if "error" in message:
            raise _as_told(message)
        return message

    def check(self, *, has_work: bool) -> None:
        """Refuse a process that is silent for too long while it starts or works.

        Raises:
            ServerError: It is.
        """
        name = "EYAS_WATCHDOG_S" if self.is_ready else "EYAS_SGLANG_START_S"
        limit_s = config.watchdog_s() if self.is_ready else config.start_s()
        silent_s = time.monotonic() - self._heard_s
        if not has_work:
            self._heard_s = time.monotonic()
        elif silent_s > limit_s:
            doing = "works" if self.is_ready else "starts"
            raise ServerError(f"the capturing process {doing} and says nothing for {silent_s:.0f} s ({name})")

    def end(self) -> None:
        """Let it close what it has; kill it when it does not."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, OSError):
            self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self.end()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._messages.put(json.loads(line))
        self._messages.put(None)


def environment(of_training: Mapping[str, str]) -> dict[str, str]:
    """Of the process: its own GPUs when ``EYAS_STREAM_DEVICES`` names them, and no place among the training's ranks."""
    own = {k: v for k, v in of_training.items() if k not in OF_TORCHRUN and not k.startswith("TORCHELASTIC_")}
    devices = own.get(DEVICES)
    return own | ({"CUDA_VISIBLE_DEVICES": devices} if devices else {})


def _as_told(message: Message) -> EyasError:
    kind = getattr(errors, message["error"], EyasError)
    return kind(message["message"], message["hint"])
