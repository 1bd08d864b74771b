"""Commands as a user types them, with what they really print and how they end, kept as Markdown."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyas import console
from eyas.errors import EyasError

TAIL_LINES = 20


class DeviationError(EyasError):
    """A scenario did not go as it has to."""


@dataclass
class Transcript:
    """A shell in one folder; what does not end as expected ends the scenario."""

    folder: Path
    environment: Mapping[str, str]
    lines: list[str] = field(default_factory=list)
    start_s: float = field(default_factory=time.monotonic)

    def heading(self, text: str) -> None:
        """Begin a part."""
        console.log(f"{self.seconds:4.0f}s  {text}")
        self.lines += [f"## {text}", ""]

    def say(self, text: str) -> None:
        """A sentence between commands."""
        self.lines += [text, ""]

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self.start_s

    def run(self, command: str, *, code: int = 0) -> str:
        """Run a command line and keep what it prints.

        Args:
            command: For bash.
            code: How it has to end.

        Raises:
            DeviationError: It ended otherwise.
        """
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        ending = f"(exit code {done.returncode})\n" if done.returncode else ""
        self.lines += ["```", f"$ {command}", *f"{done.stdout}{ending}".splitlines(), "```", ""]
        if done.returncode != code:
            tail = "\n".join(done.stdout.splitlines()[-TAIL_LINES:])
            raise DeviationError(f"`{command}` ended with {done.returncode}, expected {code}; it said:\n{tail}")
        return done.stdout

    def json(self, command: str, *, code: int = 0) -> Any:
        """Run a command that prints JSON; it is not kept, because the table beside it is.

        Raises:
            DeviationError: It ended otherwise, or printed something else.
        """
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode != code:
            raise DeviationError(f"`{command}` ended with {done.returncode}, expected {code}; it said:\n{done.stderr}")
        try:
            return json.loads(done.stdout)
        except ValueError:
            raise DeviationError(f"`{command}` printed no JSON, but:\n{done.stdout[:1000]}") from None

    def expect(self, what: str, found: object, wanted: object) -> None:
        """Compare a finding with what it has to be.

        Raises:
            DeviationError: They differ.
        """
        if found != wanted:
            raise DeviationError(f"{what}: {found!r}, expected {wanted!r}")

    def expect_about(self, what: str, found: int, wanted: int, tolerance: int) -> None:
        """Compare two sizes in bytes.

        Raises:
            DeviationError: They differ by more than ``tolerance``.
        """
        if abs(found - wanted) > tolerance:
            raise DeviationError(f"{what}: {found:,} bytes, expected {wanted:,} within {tolerance:,}")
