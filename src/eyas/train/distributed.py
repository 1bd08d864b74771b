"""The processes of one run: ``torchrun --nproc-per-node N -m eyas.stages.train …``, or one process alone.

Tensors are summed over NCCL on CUDA and over gloo on the CPU. Facts about data and decisions travel over gloo as
small objects: in a group of their own for the thread that packs ahead, so that the two never wait for each other.
Every rank takes the same decisions at the same step; rank 0 alone writes.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from eyas.errors import ConfigError, EyasError, TrainError

Value = TypeVar("Value")
EXIT_CODE = 2
"""Of a process that met a user error."""
LAST_WORDS_S = 2.0
"""``torchrun`` ends all processes at the first that ends: whoever has nothing to say goes after the one who has."""


class ToldElsewhereError(TrainError):
    """Another rank tells the user."""


# newer versions of torch name both anew; 2.11 has the old names alone
_reduce_scatter: Callable[[torch.Tensor, torch.Tensor], Any] = (
    dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor
)
_all_gather: Callable[[torch.Tensor, torch.Tensor], Any] = (
    dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
)


class World:
    """How many processes train, and which of them this is; one process needs no group.

    Args:
        rank: From 0.
        size: Processes in all.
        device: Where tensors live.
    """

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        if device.type == "cuda" and device.index is None:  # threads are told their device by its index
            device = torch.device("cuda", torch.cuda.current_device())
        self.rank, self.size, self.device = rank, size, device
        self._control: Any = dist.new_group(backend="gloo") if size > 1 else None
        self._data: Any = dist.new_group(backend="gloo") if size > 1 else None

    @property
    def is_first(self) -> bool:
        """Whether this process writes."""
        return self.rank == 0

    # ── tensors ───────────────────────────────────────────────────────────────────────────────

    def sum_(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by its sum over ranks."""
        if self.size > 1:
            with self._together():
                dist.all_reduce(tensor)

    def sum_on_(self, tensor: torch.Tensor, rank: int) -> None:
        """Replace a tensor of one rank by its sum over ranks; what the others have after is undefined."""
        with self._together():
            dist.reduce(tensor, rank)

    def send_(self, tensor: torch.Tensor, rank: int) -> None:
        """Give every rank the values of one."""
        if self.size > 1:
            with self._together():
                dist.broadcast(tensor, rank)

    def sum_part(self, tensor_X: torch.Tensor, out_Y: torch.Tensor) -> None:
        """Sum over ranks of this rank's part of a tensor: X = ranks · Y."""
        with self._together():
            _reduce_scatter(out_Y, tensor_X)

    def join_parts(self, part_Y: torch.Tensor, out_X: torch.Tensor) -> None:
        """The parts of all ranks one behind another: X = ranks · Y."""
        with self._together():
            _all_gather(out_X, part_Y)

    # ── objects ───────────────────────────────────────────────────────────────────────────────

    def gather(self, value: Value) -> list[Value]:
        """What every rank says, in their order; for the thread that trains."""
        return self._gather(value, self._control)

    def gather_data(self, value: Value) -> list[Value]:
        """What every rank says, in their order; for the thread that packs."""
        return self._gather(value, self._data)

    def _gather(self, value: Value, group: Any) -> list[Value]:
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self._together():
            dist.all_gather_object(values, value, group)
        return values

    def on_first(self, work: Callable[[], Value]) -> Value:
        """Do something on the first rank while the others wait; its result, or its ``EyasError``, is everybody's."""
        if self.size == 1:
            return work()
        result: Value | None = None
        failed: EyasError | None = None
        if self.is_first:
            try:
                result = work()
            except EyasError as error:
                failed = error
        result, told = self.gather((result, None if failed is None else (failed.message, failed.hint)))[0]
        if failed is not None:
            raise failed
        if told is not None:
            raise ToldElsewhereError(f"rank 0: {told[0]}", told[1])
        return result  # type: ignore[return-value]

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # what both backends raise when a peer is gone
            first_line = str(error).splitlines()[0][:200]
            raise TrainError(
                f"rank {self.rank} of {self.size} lost another rank: {first_line}",
                "that rank's own message says why it ended; the same command goes on from the last checkpoint",
            ) from None


@contextlib.contextmanager
def open_world(device: str, packs_per_step: int) -> Iterator[World]:
    """The processes that ``torchrun`` started, or this one alone.

    Raises:
        ConfigError: There are more processes than packs in a step.
    """
    size = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
    local_rank = _local_rank()
    place = torch.device("cuda", local_rank) if device == "cuda" else torch.device(device)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    if size == 1:
        yield World(0, 1, place)
        return
    if packs_per_step < size:
        with same_on_all():
            raise ConfigError(
                f"train.packs_per_step: {packs_per_step}, expected at least the number of processes: {size}",
                f"set train.packs_per_step to {size} or a multiple of it; it decides the result, the processes do not",
            )
    dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
    try:
        yield World(int(os.environ["RANK"]), size, place)
    finally:
        with contextlib.suppress(RuntimeError):  # a lost peer has been told of already
            dist.destroy_process_group()


@contextlib.contextmanager
def same_on_all() -> Iterator[None]:
    """Around what every process of a host finds alike: the first of the host tells its errors.

    Raises:
        ToldElsewhereError: An error, in any process but that one.
    """
    try:
        yield
    except EyasError as error:
        if _local_rank():
            raise ToldElsewhereError(error.message, error.hint) from None
        raise


@contextlib.contextmanager
def told_once() -> Iterator[None]:
    """Around a whole process: what another rank tells ends this one with the same exit code and no word.

    Raises:
        SystemExit: Instead of ``ToldElsewhereError``.
    """
    try:
        yield
    except ToldElsewhereError:
        time.sleep(LAST_WORDS_S)
        raise SystemExit(EXIT_CODE) from None


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))
