"""Runs in vLLM's interpreter: ``python -m eyas.engines.vllm.worker FD``, one engine, requests over a socket.

    parent ── settings, then {"submit": id, "ids": [...], ...} ──▶ reader thread ─▶ the engine's loop
    parent ◀─ {"ready"}, {"done"}, {"failed"}, {"beat"}, {"fatal"} ─────────────────

One JSON object a line. The engine runs in this process (TP 1) or in children of this process group (TP > 1), never as
a service beside it: when this process dies, the parent sees the socket close, and when the parent dies, the reader sees
it and kills the whole group, so that nobody keeps writing files that nobody reads.
"""

from __future__ import annotations

import json
import os
import queue
import select
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Any

BEAT_EVERY_S = 1.0
LOOK_FOR_PARENT_S = 1.0


class Link:
    """The socket to the parent."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.set_inheritable(False)  # the engine's own children must not hold it open
        self._parent = os.getppid()
        self._beat_s = 0.0
        self.folder = ""
        """Where states are left, as the settings say; removed when the parent is gone, for nobody else would."""
        self._ending = threading.Lock()
        self.inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True, name="requests").start()

    def say(self, **message: Any) -> None:
        """Send one message."""
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def beat(self) -> None:
        """Tell now and then that the engine moves."""
        if time.monotonic() - self._beat_s >= BEAT_EVERY_S:
            self._beat_s = time.monotonic()
            self.say(beat=1)

    def _read(self) -> None:
        rest = b""
        while True:
            ready, _, _ = select.select([self._socket], [], [], LOOK_FOR_PARENT_S)
            data = self._receive() if ready else None
            *lines, rest = (rest + (data or b"")).split(b"\n")
            for line in lines:
                message = json.loads(line)
                self.folder = message.get("folder", self.folder)  # here: this thread may end all before the other looks
                self.inbox.put(message)
            if data == b"" or self._is_alone():
                self.end()

    def end(self) -> None:
        """End this process and all that it started; states that nobody will read go first. Whichever thread is second waits."""
        with self._ending:
            if self.folder and self._is_alone():
                remove_folder(self.folder)
            end_group()

    def _is_alone(self) -> bool:
        """Whether the parent is gone; its socket closes a moment before it has another parent's number."""
        look = select.poll()
        look.register(self._socket, 0)
        return bool(look.poll(0)) or os.getppid() != self._parent

    def _receive(self) -> bytes:
        try:
            return self._socket.recv(1 << 20)
        except OSError:
            return b""


def remove_folder(folder: str) -> None:
    """Remove the states that nobody will read; under another name first, so that no writer adds a file meanwhile."""
    gone = f"{folder}.gone"
    try:
        os.replace(folder, gone)
    except OSError:
        gone = folder  # it is not ours to rename, or gone already
    shutil.rmtree(gone, ignore_errors=True)


def end_group() -> None:
    """End this process and every process that it started."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def start_engine(engine_args: dict[str, Any]) -> Any:
    """The engine, inside this process."""
    from vllm import EngineArgs  # pyright: ignore[reportMissingImports]
    from vllm.v1.engine.llm_engine import LLMEngine  # pyright: ignore[reportMissingImports]

    return LLMEngine.from_engine_args(EngineArgs(**engine_args))


def submit(engine: Any, message: dict[str, Any]) -> None:
    """Give one request to the engine.

    Raises:
        ValueError: vLLM refuses it.
    """
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]
    from vllm.exceptions import VLLMClientError  # pyright: ignore[reportMissingImports]

    ids, name = message["ids"], message["submit"]
    config = engine.model_config
    vocab_size, limit = config.get_vocab_size(), config.max_model_len - message["max_new_tokens"]
    # vLLM refuses these too, but an id beyond the vocab only in some of its ways in.
    if not 1 <= len(ids) <= limit:
        raise ValueError(f"{len(ids)} tokens, expected 1 to {limit}")
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise ValueError(f"token ids {min(ids)} to {max(ids)}, expected 0 to {vocab_size - 1}")
    extra = {"kv_transfer_params": {"hidden_states_path": message["path"]}} if "path" in message else None
    params = SamplingParams(
        max_tokens=message["max_new_tokens"],
        temperature=message.get("temperature", 0.0),
        top_p=message.get("top_p", 1.0),
        seed=message.get("seed"),
        stop_token_ids=message.get("stop", []),
        detokenize=False,
        extra_args=extra,
    )
    try:
        engine.add_request(name, {"prompt_token_ids": ids}, params)
    except VLLMClientError as error:  # an Exception of its own kind
        raise ValueError(str(error)) from error


class Serving:
    """Requests in, answers out, continuous batching between them."""

    def __init__(self, engine: Any, link: Link) -> None:
        self._engine, self._link = engine, link
        # Counts finished requests too until their states are copied: those are copied in the step after their last,
        # so an engine that only looked at unfinished ones would keep the last request's states for itself.
        self._has_work = engine.engine_core.engine_core.scheduler.has_requests

    def run(self) -> None:
        """Serve until the parent goes."""
        while True:
            self._take(wait=not self._has_work())
            if self._has_work():
                self._step()

    def _take(self, wait: bool) -> None:
        while True:
            try:
                message = self._link.inbox.get(block=wait)
            except queue.Empty:
                return
            wait, name = False, message["submit"]
            try:
                submit(self._engine, message)
            except (ValueError, TypeError) as error:
                self._link.say(failed=name, reason=str(error))

    def _step(self) -> None:
        for output in self._engine.step():
            if output.finished:
                answer = output.outputs[0]
                finish = answer.finish_reason or "abort"
                self._link.say(done=output.request_id, ids=list(answer.token_ids), finish=finish)
        self._link.beat()


def main() -> None:
    """Take the settings, start, serve; what goes wrong is told before the end."""
    link = Link(int(sys.argv[1]))
    try:
        settings = link.inbox.get()
        engine = start_engine(settings["engine"])
        config, device = engine.model_config, engine.vllm_config.device_config.device_type
        link.say(ready=True, vocab_size=config.get_vocab_size(), model_len=config.max_model_len, device=device)
        Serving(engine, link).run()
    except BaseException as error:
        traceback.print_exc()
        link.say(fatal=f"{type(error).__name__}: {error}"[:2000])
        raise
    finally:
        link.end()


if __name__ == "__main__":
    main()
