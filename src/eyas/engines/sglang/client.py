"""Requests to a server: many at a time over kept connections, every reply told apart by what must follow from it."""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

CONNECTIONS = 256
"""Requests at a time. A server forms its batches from those that wait, so short samples need many."""
IDLE_S = 2.0
"""A connection that lay idle for longer is not used again: servers close theirs after five seconds."""
ANSWER_S = 5.0
"""For a server that lives to answer a question about itself."""
OF_ONE_REQUEST = ("context length", "too long", "exceed", "longer than", "duplicate request", "maximum allowed")
"""In refusals that concern one request; any other refusal would meet every request alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What became of one request."""

    kind: Literal["done", "aborted", "refused", "unusable", "lost"]
    """``refused``: this request alone. ``unusable``: the server refuses every request of ours. ``lost``: no answer."""
    message: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_ids: tuple[int, ...] = ()
    finish: Mapping[str, Any] | None = None
    """``finish_reason`` as the server says it."""
    num_verifications: int = 0
    """Forwards of the target that checked drafts, as the server counts them; 0 without a drafter."""


class Client:
    """Sends bodies to ``/generate`` in threads.

    Args:
        url: ``http://127.0.0.1:31000``.
        api_key: Of the server; empty for none.
        answered: Called with a request's number and its reply, from any thread.
        num_connections: Requests at a time.
    """

    def __init__(
        self, url: str, api_key: str, answered: Callable[[int, Reply], None], num_connections: int = CONNECTIONS
    ) -> None:
        self.url, self._address = url, urlsplit(url)
        self.headers = {"Content-Type": "application/json"}
        if api_key:
            self.headers["Authorization"] = f"Bearer {api_key}"
        self._answered, self._num_connections = answered, num_connections
        self._waiting: queue.SimpleQueue[tuple[int, Mapping[str, Any]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._open: set[http.client.HTTPConnection] = set()
        self._num_sent, self._num_answered, self._closed = 0, 0, False

    def send(self, number: int, body: Mapping[str, Any]) -> None:
        """Queue one request; ``answered`` is called with its number. From one thread only."""
        self._num_sent += 1
        self._waiting.put((number, body))
        if self._num_sent - self._num_answered > len(self._threads) < self._num_connections:
            thread = threading.Thread(target=self._work, name="sglang-request", daemon=True)
            self._threads.append(thread)
            thread.start()

    def is_healthy(self, timeout_s: float = 5.0) -> bool:
        """Whether ``/health`` says so, and the server is the one that has our key: another may have taken the port."""
        if self._status("/health", self.headers, timeout_s) != 200:
            return False
        if "Authorization" not in self.headers:
            return True
        # Health is told to everybody, the models to whoever has the key.
        with_key, without = (self._status("/v1/models", headers, timeout_s) for headers in (self.headers, {}))
        return with_key == 200 and without == 401

    def answers(self) -> bool:
        """Whether the server's process answers, whatever its scheduler does."""
        return self._status("/v1/models", self.headers, ANSWER_S) == 200

    def _status(self, path: str, headers: Mapping[str, str], timeout_s: float) -> int:
        """Of the answer; 0 for none."""
        connection = self._connection(timeout_s)
        try:
            connection.request("GET", path, headers=dict(headers))
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            connection.close()

    def hang_up(self) -> None:
        """Shut every connection; the replies that were awaited are ``lost``."""
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                if connection.sock is not None:
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give up what is under way; its replies are ``lost``. Safe to call twice."""
        self._closed = True
        for _ in self._threads:
            self._waiting.put(None)
        self.hang_up()
        for thread in self._threads:
            thread.join(timeout=5.0)

    def _connection(self, timeout_s: float | None = None) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._address.scheme == "https" else http.client.HTTPConnection
        return kind(self._address.hostname or "", self._address.port, timeout=timeout_s)

    def _work(self) -> None:
        connection, used_s = self._connection(), 0.0
        self._open.add(connection)
        while (task := self._waiting.get()) is not None:
            number, body = task
            if time.monotonic() - used_s > IDLE_S:
                connection.close()
            reply = Reply(kind="lost", message="given up") if self._closed else self._post(connection, body)
            used_s = time.monotonic()
            self._num_answered += 1
            self._answered(number, reply)
        connection.close()
        self._open.discard(connection)

    def _post(self, connection: http.client.HTTPConnection, body: Mapping[str, Any]) -> Reply:
        try:
            connection.request("POST", "/generate", json.dumps(body, separators=(",", ":")), self.headers)
            response = connection.getresponse()
            return classify(response.status, response.read())
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            return Reply(kind="lost", message=f"{type(error).__name__}: {error}")


def is_url(text: str) -> bool:
    """Whether it names a server: scheme, host, and a port that is none or a number."""
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def classify(status: int, text: bytes) -> Reply:
    """The reply that an answer of ``/generate`` is."""
    plain: Any = None
    with contextlib.suppress(ValueError):
        plain = json.loads(text)
    if status != 200:
        return _refusal(status, plain, text)
    try:
        meta = plain["meta_info"]
        finish = meta.get("finish_reason") or {}
        if finish.get("type") == "abort":  # in the queue already: without any count
            return Reply(kind="aborted", message=str(finish.get("message") or "it says no more"), finish=finish)
        return Reply(
            kind="done",
            prompt_tokens=int(meta["prompt_tokens"]),
            cached_tokens=int(meta.get("cached_tokens") or 0),
            output_ids=tuple(plain.get("output_ids") or ()),
            finish=finish,
            num_verifications=int(meta.get("spec_verify_ct") or 0),
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return Reply(kind="unusable", message=f"{text[:300]!r} is no answer of SGLang's /generate")


def _refusal(status: int, plain: Any, text: bytes) -> Reply:
    error = plain.get("error", plain) if isinstance(plain, dict) else text.decode(errors="replace")
    said = str(error.get("message", error) if isinstance(error, dict) else error)[:500]
    if status >= 500 or status == 429:
        return Reply(kind="refused", message=f"HTTP {status}: {said}")
    of_one = any(words in said.lower() for words in OF_ONE_REQUEST)
    return Reply(kind="refused" if of_one else "unusable", message=f"HTTP {status}: {said}")
