"""A server with all that hangs on it, opened and closed as one, and made anew when it fails.

    Keeper ── Session ── Server (process)        or a running one, named by EYAS_SGLANG_URL
                      ├─ Client (HTTP)
                      └─ Link (plugin), Arena    for captures only

What happens arrives as events in one queue, with its time, and is worked on by the one thread that asks for it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from eyas import config, console
from eyas.engines.base import LOOK_S, OnWait, nobody, wait
from eyas.engines.sglang import attached, preflight, wire
from eyas.engines.sglang.arena import Arena, arena_bytes, free_shm_bytes
from eyas.engines.sglang.client import Client, Reply, is_url
from eyas.engines.sglang.collector import Closed, Link, Pulse
from eyas.engines.sglang.launch import URL_VARIABLE, Wanted, command, environment, key_arguments
from eyas.engines.sglang.server import LOGS, PluginFolder, Server, free_port, reserve
from eyas.errors import ServerError
from eyas.plan.interpreter import sglang_python

KEY_VARIABLE = "EYAS_SGLANG_API_KEY"
BACKOFF_S = (1.0, 5.0, 15.0)
"""Before each restart without a finished request between; then the run ends."""
PLUGIN_S = 120.0
"""For a server of ours to open its plugin's socket, or to end, while /health is answered already."""
END_S = 30.0
"""For a server to end, or to answer, after a connection broke; a killed one may take seconds to be gone."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A reply to one request, and when it came."""

    number: int
    reply: Reply
    at_s: float


Event = Answered | wire.Message | Closed


class Session:
    """One server, open.

    Args:
        wanted: What it is for.
        num_log: Number of its log.
        longest: Tokens of the longest request.
        total_bytes: Slots of all samples; bounds the arena.
        on_wait: Called while it starts, or is asked whether it lives.

    Raises:
        ServerError: It does not come up, or is not as the plan expects.
        DiskError: There is too little shared memory.
    """

    def __init__(self, wanted: Wanted, num_log: int, longest: int, total_bytes: int, on_wait: OnWait = nobody) -> None:
        self.wanted, self.num_log, self.longest, self._on_wait = wanted, num_log, longest, on_wait
        self.events: queue.SimpleQueue[tuple[float, Event]] = queue.SimpleQueue()
        self.server: Server | None = None
        self.hello: wire.Hello | None = None
        self.nonce = secrets.token_hex(8)
        self.closed_reason = self._silence = ""
        self._alive_s = 0.0
        self._stack = contextlib.ExitStack()
        try:
            self._open(total_bytes)
        except BaseException:
            self.close(at_once=True)
            raise

    def _open(self, total_bytes: int) -> None:
        url = os.environ.get(URL_VARIABLE, "")
        socket_path = Path(os.environ.get(wire.SOCKET_VARIABLE, ""))
        key = os.environ.get(KEY_VARIABLE, "")
        if not url:
            url, key, socket_path = self._start()
        elif not is_url(url):
            raise ServerError(f"{URL_VARIABLE}: {url!r}, expected http://HOST:PORT", f"unset {URL_VARIABLE}")
        elif self.wanted.boundaries and not os.environ.get(wire.SOCKET_VARIABLE):
            raise ServerError(
                f"{URL_VARIABLE} is {url}, but {wire.SOCKET_VARIABLE} does not name its plugin's socket",
                "`eyas sglang-command` prints how to start a server that captures",
            )
        self.client = Client(url, key, lambda number, reply: self._put(Answered(number, reply, time.monotonic())))
        self._stack.callback(self.client.close)
        self.link = Link(socket_path, self._put)
        self._stack.callback(self.link.close)
        self.pulse = Pulse(self.link)
        self._wait_until_ready(url)
        if self.server is not None and self.wanted.boundaries:
            self._wait_for_plugin(self.server, socket_path)
        if self.wanted.boundaries:
            self._attach(url, socket_path, total_bytes)

    def _start(self) -> tuple[str, str, Path]:
        wanted, python = self.wanted, sglang_python()
        capability = preflight.check_machine(wanted.device, int(wanted.options.get("tp_size", 1)))
        folder = PluginFolder()
        self._stack.callback(folder.close)
        key, socket_path, port = secrets.token_hex(16), folder.path / "capture.sock", free_port()
        while (held := reserve(port)) is None:
            port = free_port()
        self._stack.callback(held.close)
        arguments = [*command(wanted, python, port, self.longest, capability), *key_arguments(key, folder.path)]
        variables = os.environ | environment(wanted, folder.path, socket_path)
        self.server = Server(arguments, variables, LOGS / f"{wanted.label}server-{self.num_log}.log")
        console.log(f"sglang: {wanted.version} starts (process {self.server.pid}), log {self.server.log}")
        return f"http://127.0.0.1:{port}", key, socket_path

    def _wait_until_ready(self, url: str) -> None:
        limit_s = config.start_s() if self.server is not None else 10.0
        start_s = time.monotonic()
        while not self.client.is_healthy():
            if self.server is not None and self.server.exit:
                raise self.server.fault(f"the server did not start: {self.server.exit}")
            if time.monotonic() - start_s > limit_s:
                raise self._never_ready(url, limit_s)
            wait(LOOK_S, self._on_wait)
        if self.server is not None:
            console.log(f"sglang: ready after {console.human_seconds(time.monotonic() - start_s)}")

    def _wait_for_plugin(self, server: Server, socket_path: Path) -> None:
        """The socket is there before ours is healthy; if not, somebody else has taken the port, and ours will end."""
        start_s = time.monotonic()
        while not socket_path.exists():
            if server.exit:
                raise server.fault(f"the server did not start: {server.exit}")
            if time.monotonic() - start_s > PLUGIN_S:
                raise server.fault(f"the server is up, but eyas' plugin in it opened no socket in {PLUGIN_S:.0f} s")
            wait(LOOK_S, self._on_wait)

    def _never_ready(self, url: str, limit_s: float) -> ServerError:
        if self.server is not None:
            hint = "EYAS_SGLANG_START_S=3600 waits longer"
            return self.server.fault(f"the server was not ready after {limit_s:.0f} s", hint)
        return ServerError(f"{url}/health does not answer", "is the server up, and does the URL name it?")

    def _attach(self, url: str, socket_path: Path, total_bytes: int) -> None:
        wanted, context = self.wanted, self.wanted.target.max_position_embeddings
        longest_bytes = wanted.layout.slot_bytes(self.longest or context)
        self.arena = Arena(arena_bytes(longest_bytes, total_bytes, free_shm_bytes()))
        self._stack.callback(self.arena.close)
        self.hello = self.link.connect()
        if self.hello is None:
            raise ServerError(
                f"{url}: nobody listens at {socket_path}: that server runs without eyas' plugin",
                "start it by what `eyas sglang-command` prints, or unset EYAS_SGLANG_URL: eyas starts one itself",
            )
        expected = preflight.Expected(
            target=wanted.target,
            boundaries=wanted.boundaries,
            dtype=wanted.dtype,
            version=wanted.version,
            options=wanted.options,
        )
        preflight.check_hello(self.hello, expected)
        if self.server is None:
            attached.check(self.hello, wanted.target, wanted.folder)
        preflight.check_longest(self.longest, self.hello.server_args, context)
        self.longest_prompt = preflight.longest_prompt(self.hello.server_args, context)
        self.link.attach(self.arena, self.nonce)
        self.arena.hide()

    def _put(self, event: Event) -> None:
        if isinstance(event, Closed):
            self.closed_reason = event.reason
        self.events.put((time.monotonic(), event))

    @property
    def is_attached_to_another(self) -> bool:
        """The server is not ours to end."""
        return self.server is None

    @property
    def end(self) -> str:
        """How the server or the plugin's connection ended; empty while both live."""
        if self.server is not None and self.server.exit:
            return f"the server: {self.server.exit}"
        return f"the scheduler's process is gone: {self.closed_reason}" if self.closed_reason else self._silence

    def outlives(self, lost_at_s: float) -> bool:
        """Whether a connection that broke at this time was that request's own loss, since the server lives: it answers.

        Waits until it does, or has ended; what does neither counts as ended.
        """
        deadline_s = time.monotonic() + END_S
        while lost_at_s >= self._alive_s and not self.end:
            asked_s = time.monotonic()
            if self.client.answers():
                self._alive_s = asked_s
            elif asked_s > deadline_s:
                self._silence = f"the server broke a connection and has answered nothing for {END_S:.0f} s"
            else:
                wait(0.05, self._on_wait)
        return not self.end

    def close(self, *, at_once: bool = False) -> None:
        """End all of it; safe to call twice."""
        if self.server is not None:
            self.server.stop(at_once=at_once)
        self._stack.close()


class Keeper:
    """Keeps a session open: watches it, and opens another when it fails.

    Args:
        wanted: What it is for.
        on_wait: Called while it waits for a server: to start, or for what one gives.
    """

    def __init__(self, wanted: Wanted, on_wait: OnWait = nobody) -> None:
        self.wanted, self._on_wait = wanted, on_wait
        self.longest, self.total_bytes = 0, 1 << 62
        self.num_restarts = 0
        self.lost_at_s: list[float] = []
        """When each failure was noticed, for measurements."""
        self.watchdog_s = config.watchdog_s()
        self._in_a_row = 0
        self._session: Session | None = None
        self._progress_s = 0.0
        self._listened_s = time.monotonic()

    @property
    def session(self) -> Session:
        """The open one."""
        assert self._session is not None, "engine is not open"
        return self._session

    @property
    def is_open(self) -> bool:
        """Whether there is one."""
        return self._session is not None

    def open(self) -> None:
        """Open the first one."""
        self._session = Session(self.wanted, self.num_restarts + 1, self.longest, self.total_bytes, self._on_wait)
        self.progressed()

    def close(self) -> None:
        """End it; safe to call twice."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def progressed(self) -> None:
        """Something is under way from now on."""
        self._progress_s = self._listened_s = time.monotonic()

    def finished(self) -> None:
        """A request was finished: restarts are counted anew."""
        self._in_a_row = 0

    def next_events(self) -> list[Event]:
        """What happened; waits a moment when nothing did. Ends at once when the server does."""
        session, found = self.session, []
        self._on_wait()
        # A caller that was long away (a slow disk) let the server run dry: silence counts only while somebody listens.
        self._progress_s += time.monotonic() - self._listened_s
        with contextlib.suppress(queue.Empty):
            while True:
                at_s, event = session.events.get(timeout=0 if found else LOOK_S)
                if isinstance(event, wire.Pong):
                    session.pulse.heard(event)
                elif not isinstance(event, Closed):
                    self._progress_s = max(self._progress_s, at_s)
                found.append(event)
        self._listened_s = time.monotonic()
        return found

    def fault(self, *, is_busy: bool) -> str:
        """Why the session must be given up; empty while it need not be."""
        session = self.session
        if session.end:
            return session.end
        if session.hello is not None:
            session.pulse.beat()
            if session.pulse.silent_s > Pulse.LIMIT_S:
                return f"the scheduler has not answered for {session.pulse.silent_s:.0f} s"
        idle_s = time.monotonic() - self._progress_s
        if is_busy and idle_s > self.watchdog_s:
            return f"no request went on for {idle_s:.0f} s (EYAS_WATCHDOG_S)"
        return ""

    def renew(self, reason: str) -> None:
        """Give the session up and open another.

        Raises:
            ServerError: It failed too often without a finished request between; one that does not come up counts.
        """
        old = self.session
        self.lost_at_s.append(time.monotonic())
        while True:
            self.num_restarts += 1
            old.close(at_once=True)
            if self._in_a_row == len(BACKOFF_S):
                problem = f"the server failed {self._in_a_row + 1} times without a finished request between: {reason}"
                raise ServerError(problem) if old.server is None else old.server.fault(problem)
            console.log(f"sglang: {reason}; starts again in {BACKOFF_S[self._in_a_row]:.0f} s")
            wait(BACKOFF_S[self._in_a_row], self._on_wait)
            self._in_a_row += 1
            try:
                self.open()
            except ServerError as error:  # of the former one memory or a port may still be taken
                reason = error.message
            else:
                return
