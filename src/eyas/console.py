"""Terminal output: data on stdout, logs and progress on stderr, readable without colour."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from eyas import heap
from eyas.errors import EyasError

PLAIN_PROGRESS_EVERY_S = 15.0
FILE_SYSTEM_FAULTS = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ENOTDIR, errno.EISDIR,
    errno.EEXIST, errno.EMLINK, errno.EMFILE, errno.ENFILE, errno.ENAMETOOLONG, errno.ELOOP, errno.ESTALE,
)  # fmt: skip
"""What permissions, mounts, disks and odd paths cause, wherever a file is touched; never a fault of ours."""


def log(text: str) -> None:
    """Print one line to stderr."""
    print(text, file=sys.stderr, flush=True)


def emit(text: str) -> None:
    """Print data to stdout; ends the process quietly when nobody reads on, as after ``| head``."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # What is left in the buffer must not fail once more when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(128 + signal.SIGPIPE) from None


def table(rows: Sequence[Sequence[object]], headers: Sequence[str] | None = None) -> str:
    """Align rows in columns: numbers to the right, text to the left; a cell of several lines becomes one."""
    cells = [[" ".join(str(cell).splitlines()) for cell in row] for row in rows]
    if headers:
        cells.insert(0, list(headers))
    if not cells:
        return ""
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    numeric = [all(_is_number(row[i]) for row in rows) for i in range(len(widths))]
    lines = []
    for row in cells:
        parts = [cell.rjust(w) if right else cell.ljust(w) for cell, w, right in zip(row, widths, numeric, strict=True)]
        lines.append("  ".join(parts).rstrip())
    return "\n".join(lines)


def _is_number(cell: object) -> bool:
    return str(cell).replace(",", "").replace(".", "").replace("-", "").replace("%", "").strip().isdigit()


def human_bytes(num_bytes: float) -> str:
    """Bytes in decimal units: 1,206.1 GB."""
    for unit in ("B", "kB", "MB"):
        if abs(num_bytes) < 1000:
            return f"{num_bytes:,.0f} {unit}" if unit == "B" else f"{num_bytes:,.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.1f} GB"


def human_seconds(seconds: float) -> str:
    """Seconds as 7s, 3m05s or 2h04m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


class Progress:
    """A progress line on stderr: redrawn on a terminal, one plain line per 15 s otherwise.

    Args:
        what: Verb and object, for example ``extract tokens``.
        total: Units to do in all.
        done: Units already done before (resumed work); not counted in the rate.
    """

    def __init__(self, what: str, total: int, done: int = 0, unit: str = "tok") -> None:
        self.what, self.total, self.done, self.unit = what, total, done, unit
        self._resumed = done
        self._start_s = self._shown_s = time.monotonic()
        self._terminal = sys.stderr.isatty()

    def advance(self, count: int, note: str = "") -> None:
        """Count ``count`` more units and show the line when it is due."""
        self.done += count
        now = time.monotonic()
        if now - self._shown_s >= (0.2 if self._terminal else PLAIN_PROGRESS_EVERY_S):
            self._shown_s = now
            self._show(note)

    def _show(self, note: str) -> None:
        elapsed_s = max(time.monotonic() - self._start_s, 1e-9)
        rate = (self.done - self._resumed) / elapsed_s
        left_s = (self.total - self.done) / rate if rate > 0 else 0.0
        speed = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
        text = (
            f"{self.what}: {self.done:,}/{self.total:,} {self.unit}, {speed} {self.unit}/s, "
            f"{human_seconds(left_s)} left{'  ' + note if note else ''}"
        )
        if self._terminal:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
        else:
            log(text)

    def close(self) -> None:
        """End the line."""
        if self._terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """Lines in which nothing commands a terminal: errors quote names out of files that others wrote."""
    return "".join(c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def style(text: str, code: str) -> str:
    """Wrap text in an ANSI style when stderr is a terminal and ``NO_COLOR`` is not set."""
    if os.environ.get("NO_COLOR") or not sys.stderr.isatty():
        return text
    return f"\033[{code}m{text}\033[0m"


DEFAULT_HANDLERS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
_received: list[int] = []
"""Signals that this process was to end by, since ``user_errors`` began."""


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turn an ``EyasError`` or a fault of the file system into its text and exit code 2, Ctrl-C into 130, SIGTERM into 143.

    Whoever ends us by SIGTERM (a container that is stopped, a job at its time limit) gets what Ctrl-C gets: servers are
    ended, locks and memory given back.
    """

    def interrupt(number: int, _frame: object) -> None:
        _received.append(number)  # Ray, in whose call it may come, raises a KeyboardInterrupt of its own, or loses ours
        raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    ours = {
        number: before for number, before in DEFAULT_HANDLERS.items() if is_main and signal.getsignal(number) == before
    }
    _received.clear()
    for number in ours:
        signal.signal(number, interrupt)
    try:
        yield
    except EyasError as error:
        log(f"{style('error', '31;1')}: {printable(str(error))}")
        raise SystemExit(2) from None
    except OSError as error:
        if error.errno not in FILE_SYSTEM_FAULTS:
            raise
        where = f"{error.filename}: " if error.filename is not None else ""
        hint = "`make doctor` shows disk and memory, `ls -ld` owner and mode; then run the same command again"
        log(f"{style('error', '31;1')}: {EyasError(f'{where}{error.strerror}', hint)}")
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        log("interrupted; the same command goes on where this one stopped")
        raise SystemExit(128 + (_received or [signal.SIGINT])[0]) from None
    finally:
        _received.clear()
        for number, before in ours.items():
            signal.signal(number, before)


def stop_if_interrupted() -> None:
    """Raise the interrupt that came while a library's code ran and was lost there; for loops around such code."""
    if _received:
        raise KeyboardInterrupt


def run_main(main: Callable[[Sequence[str]], None]) -> None:
    """Run a command's main with ``sys.argv`` under ``user_errors``."""
    heap.keep_freed()
    with user_errors():
        main(sys.argv[1:])
