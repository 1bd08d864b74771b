"""Captured samples are checked in threads while the engine gives the next ones.

Looking at every value of a sample takes a third of the time in which a fast engine computes it; in the loop's own
thread the engine would wait for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from eyas import config
from eyas.contracts import TokenSample
from eyas.engines.base import CapturedSample
from eyas.engines.checks import check_captured
from eyas.errors import CaptureError

MAX_THREADS = 4
"""As many samples are being checked, and wait in memory, at most."""


class Checks:
    """Threads that check samples. Use as a context manager: leaving it ends them.

    Args:
        num_aux: A of the plan.
        hidden_size: D of the target.
    """

    def __init__(self, num_aux: int, hidden_size: int) -> None:
        self._num_aux, self._hidden_size = num_aux, hidden_size
        self._num_threads = min(MAX_THREADS, config.cores())
        self._pool = ThreadPoolExecutor(self._num_threads, "sample-check")

    def __enter__(self) -> Checks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def of(
        self, captures: Iterator[CapturedSample], wanted: Mapping[str, TokenSample]
    ) -> Iterator[tuple[CapturedSample, str]]:
        """Every captured sample with what is wrong with it, in the order in which they came; nothing if it is unwanted.

        Raises:
            CaptureError: The engine's, after the samples that it gave before.
        """
        under_way: deque[tuple[CapturedSample, Future[str]]] = deque()
        ended: CaptureError | None = None
        try:
            for captured in captures:
                under_way.append((captured, self._pool.submit(self._problem, captured, wanted)))
                if len(under_way) == self._num_threads:
                    yield _result(under_way)
        except CaptureError as error:
            ended = error
        while under_way:
            yield _result(under_way)
        if ended is not None:
            raise ended

    def _problem(self, captured: CapturedSample, wanted: Mapping[str, TokenSample]) -> str:
        sample = wanted.get(captured.sample_id)
        try:
            if sample is not None:
                check_captured(captured, sample, self._num_aux, self._hidden_size)
        except CaptureError as error:
            return error.message
        return ""


def _result(under_way: deque[tuple[CapturedSample, Future[str]]]) -> tuple[CapturedSample, str]:
    captured, problem = under_way.popleft()
    return captured, problem.result()
