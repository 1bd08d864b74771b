"""The plugin's socket: who may attach, and that the server's process is alive; imported inside the server alone."""

from __future__ import annotations

import atexit
import logging
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from eyas.engines.sglang import wire
from eyas.engines.sglang.tap import Refusal, Tap

_LOG = logging.getLogger(__name__)
_ATTACH_WITHIN_S = 30
_MAX_LINE_BYTES = 1 << 16


class Listener:
    """Answers on a Unix socket that only this user may open, until the process ends.

    Args:
        path: Of the socket; what a dead server left there is replaced.
        hello: What runs here, asked for at each connection: a server knows its KV pool only once it is up.
        tap: Where collectors attach.
        fault: Why there is no capture; told to everybody instead of a ``Hello``.

    Raises:
        OSError: The path cannot be bound, or another server listens there.
    """

    def __init__(self, path: str, hello: Callable[[], wire.Hello], tap: Tap | None, fault: str = "") -> None:
        self._hello = hello
        self._tap = tap
        self._fault = fault
        self._socket = _bound(Path(path))
        atexit.register(Path(path).unlink, missing_ok=True)
        threading.Thread(target=self._accept, name="eyas-listener", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:  # too many open files: serving goes on, and a later collector may succeed
                _LOG.warning("eyas: no connection accepted: %s", error)
                time.sleep(1)
                continue
            threading.Thread(target=self._serve, args=(connection,), name="eyas-collector", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, connection.makefile("rb") as lines:
                _Session(connection, lines.readline).run(self._hello, self._tap, self._fault)
        except (OSError, wire.WireError) as error:
            _LOG.warning("eyas: a collector's connection ended: %s", error)


class _Session:
    def __init__(self, connection: socket.socket, read_line: Callable[[int], bytes]) -> None:
        self._connection = connection
        self._read_line = read_line
        self._sending = threading.Lock()

    def run(self, hello: Callable[[], wire.Hello], tap: Tap | None, fault: str) -> None:
        if tap is None or fault:
            self._send(wire.Refused(reason=fault))
            return
        self._send(hello())
        # Whoever says nothing takes no place.
        self._connection.settimeout(_ATTACH_WITHIN_S)
        request = self._next()
        if request is None:
            return
        try:
            attachment = tap.attach(request, self._send)
        except Refusal as refusal:
            self._send(wire.Refused(reason=str(refusal)))
            return
        try:
            self._connection.settimeout(None)
            self._send(wire.Attached(pinned=attachment.arena.pinned))
            while isinstance(request := self._next(), wire.Ping):
                waiting = attachment.num_pieces - attachment.num_told
                self._send(wire.Pong(number=request.number, num_pieces=attachment.num_pieces, num_waiting=waiting))
        finally:
            tap.detach(attachment)
            _shut(self._connection)

    def _next(self) -> wire.Message | None:
        line = self._read_line(_MAX_LINE_BYTES)
        return wire.from_line(line) if line else None

    def _send(self, message: wire.Message) -> None:
        line = wire.to_line(message)
        with self._sending:
            self._connection.sendall(line)


def _shut(connection: socket.socket) -> None:
    # Wakes a notifier that is stuck in a send.
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


def _bound(path: Path) -> socket.socket:
    if path.is_socket():
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            else:
                raise OSError(f"{path}: another server listens there")
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    path.chmod(0o600)  # nobody can connect before listen
    listening.listen(8)
    return listening
