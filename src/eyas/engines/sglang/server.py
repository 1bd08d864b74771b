"""The supervisor of one server: started, watched, ended, with everything that it started itself.

The server runs in a session of its own. A watcher beside it holds a pipe to this process and ends the whole group
when that pipe closes: also when this process is killed and can do nothing any more, no orphan goes on writing.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from eyas.errors import ServerError

LOGS = Path(".eyas/sglang")
LOG_LINES = 15
GRACE_S = 10.0
FIRST_PORT, NUM_PORTS, PORT_TRIES, GRPC_ABOVE = 20_000, 10_000, 100, 10_000
WATCHER = 'read -r _; kill -s KILL -- "-$0" 2>/dev/null'
"""The pipe's other end is this process; nothing is ever written into it."""


class Server:
    """One running server.

    Args:
        command: Program and arguments.
        environment: All of it.
        log: Its output goes here.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
            self._process = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._watcher = subprocess.Popen(
                ["/bin/sh", "-c", WATCHER, str(self.pid)], stdin=subprocess.PIPE, start_new_session=True
            )
        except BaseException:  # nobody else knows of the server yet
            self._signal(signal.SIGKILL)
            self._process.wait()
            raise

    @property
    def pid(self) -> int:
        """Process and group of the HTTP server."""
        return self._process.pid

    @property
    def exit(self) -> str:
        """How it ended; empty while it runs."""
        code = self._process.poll()
        if code is None:
            return ""
        return f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"it ended with code {code}"

    def last_lines(self) -> str:
        """The end of its log."""
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_LINES:] if self.log.exists() else []
        return "\n".join(f"  {line[:300]}" for line in lines)

    def fault(self, what: str, hint: str | None = None) -> ServerError:
        """An error with the server's own last lines."""
        return ServerError(f"{what}\n{self.log} ends with:\n{self.last_lines()}", hint or f"less {self.log}")

    def stop(self, *, at_once: bool = False) -> None:
        """End the whole group and wait for it: asked first, then killed. Safe to call twice."""
        if not at_once and not self.exit:
            self._signal(signal.SIGTERM)
            deadline_s = time.monotonic() + GRACE_S
            while not self.exit and time.monotonic() < deadline_s:
                time.sleep(0.05)
        self._signal(signal.SIGKILL)
        self._process.wait()
        deadline_s = time.monotonic() + GRACE_S
        while self._has_members() and time.monotonic() < deadline_s:
            time.sleep(0.02)
        self._watcher.kill()  # before its pipe closes: the group's number may be somebody else's by now
        self._watcher.wait()
        if self._watcher.stdin is not None:
            self._watcher.stdin.close()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def _has_members(self) -> bool:
        """Whether anybody of the group is left, zombies that wait for another parent aside."""
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return any(_group_and_state(entry) == (self.pid, True) for entry in Path("/proc").glob("[0-9]*"))


def _group_and_state(process: Path) -> tuple[int, bool]:
    """Process group, and whether it is no zombie."""
    try:
        fields = (process / "stat").read_text().rpartition(")")[2].split()
        return int(fields[2]), fields[0] != "Z"
    except (OSError, ValueError, IndexError):
        return 0, False


def free_port() -> int:
    """A port of this host that nobody has now, nor the one 10,000 above it, where SGLang 0.5.14 puts gRPC.

    Below what systems give to outgoing connections (from 32,768), and so low that the second stays below 65,536.
    """
    for _ in range(PORT_TRIES):
        port = FIRST_PORT + secrets.randbelow(NUM_PORTS)
        with socket.socket() as first, socket.socket() as second:
            try:
                first.bind(("127.0.0.1", port))
                second.bind(("127.0.0.1", port + GRPC_ABOVE))
            except OSError:
                continue
            return port
    raise ServerError(
        f"no free port for a server: {PORT_TRIES} between {FIRST_PORT} and {FIRST_PORT + NUM_PORTS} are taken",
        hint="ss -ltn",
    )


def reserve(port: int) -> socket.socket | None:
    """Keep a port from other servers of eyas: one that was just chosen is listened on only a minute later.

    Gives what holds it, until that is closed or this process ends; None when another one holds it. A name in Linux'
    abstract namespace: one per network namespace, as ports are.
    """
    held = socket.socket(socket.AF_UNIX)
    try:
        held.bind(f"\0eyas-sglang-port-{port}")
    except OSError:
        held.close()
        return None
    return held


class PluginFolder:
    """A folder for PYTHONPATH by which any interpreter has eyas and its plugin, without an installation.

    Named as eyas' own distribution, so that one which is installed there too counts once.
    """

    def __init__(self) -> None:
        import eyas

        self.path = Path(tempfile.mkdtemp(prefix="eyas-sglang-"))
        (self.path / "eyas").symlink_to(Path(eyas.__file__).resolve().parent)
        facts = self.path / "eyas-0.1.0.dist-info"
        facts.mkdir()
        (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: eyas\nVersion: 0.1.0\n")
        (facts / "entry_points.txt").write_text("[sglang.srt.plugins]\neyas = eyas.engines.sglang.plugin:register\n")

    def close(self) -> None:
        """Remove it."""
        shutil.rmtree(self.path, ignore_errors=True)
