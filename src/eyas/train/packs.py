"""From the order of the data to packs on the device, made while the device works.

    reading threads → one packing thread (host, pinned) → copy stream → step

The packing thread is one step ahead and no more: memory holds the packs of two steps. What it made and nobody
trained on is made again after a resume, so a checkpoint counts nothing of it: a step carries the cursor that goes
on after it. On the CPU there is nothing to wait for, and packing is done between steps.

Ranks agree on every step before it starts, still in the packing thread: how many rows train in all packs of all
ranks (the divisor of the loss), which samples are damaged, whether somebody has failed or was told to stop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch

from eyas.batches.loader import Batch, BatchLoader
from eyas.batches.order import Cursor
from eyas.drafter.rows import Pack
from eyas.errors import EyasError, TrainError
from eyas.train.data import Packer
from eyas.train.distributed import ToldElsewhereError, World

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class StepData:
    """What one optimizer step trains on. Counts are of all ranks, packs are this rank's."""

    packs: tuple[Pack, ...]
    """In host memory; only those with a row that trains."""
    first: PlacedPack | None
    """The first of them, already on its way to the device."""
    num_trained_S: tuple[int, ...]
    num_oov: int
    num_in_span: int
    num_tokens: int
    after: Cursor
    damaged: tuple[tuple[str, str], ...]
    """(sample id, reason) met since the last step."""
    is_last: bool
    """A rank was told to stop: save after this step and end."""


@dataclass(slots=True)
class PlacedPack:
    """A pack whose copy to the device was started on another stream."""

    pack: Pack | None
    copied: torch.cuda.Event | None

    def take(self) -> Pack:
        """The pack, for kernels of this thread's stream; forgotten here, so that its memory ends with its use."""
        pack, self.pack = self.pack, None
        assert pack is not None, "a pack is taken once"
        if self.copied is not None:
            stream = torch.cuda.current_stream()
            stream.wait_event(self.copied)

            def used(tensor: torch.Tensor) -> torch.Tensor:
                tensor.record_stream(stream)
                return tensor

            pack.map(used)
        return pack


class Placer:
    """Copies packs to the device, on a stream of its own where there are streams.

    Args:
        device: Where packs go; what was put there before may be used on that stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Kernels of this thread run on that stream too: they do not queue behind the trainer's."""
        if self._stream is None:
            yield
            return
        torch.cuda.set_device(self._device)  # a thread starts with the first device
        with torch.cuda.stream(self._stream):
            yield

    def __call__(self, pack: Pack) -> PlacedPack:
        """Start a copy; the pack's memory is pinned."""
        if self._stream is None:
            return PlacedPack(pack, None)
        with torch.cuda.stream(self._stream):
            copy = pack.to(str(self._device), non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(self._stream)
        return PlacedPack(copy, copied)


@dataclass(frozen=True, slots=True)
class _Told:
    """What a rank tells the others of its packs of one step."""

    num_trained_S: tuple[int, ...]
    num_oov: int
    num_in_span: int
    num_tokens: int
    damaged: tuple[tuple[str, str], ...]
    stop: bool
    failed: tuple[str, str | None] | None


class StepSource:
    """Steps of one rank from a cursor on.

    Args:
        loader: Batches of this rank.
        packer: Makes packs.
        placer: Takes the first pack of a step to the device.
        world: Whose ranks agree.
        steps: (first step, number of steps of the run).
        ttt_steps: TTT steps of an optimizer step.
        damaged: Samples found damaged so far, with the reason; grows with those that steps were made of.
        max_damaged: More of them are an error.
        stop: Whether this rank was told to stop.
        agreed: Told where the data goes on and how many steps are left, once all ranks have read a step.
    """

    def __init__(
        self,
        loader: BatchLoader,
        packer: Packer,
        placer: Placer,
        world: World,
        *,
        steps: tuple[int, int],
        ttt_steps: Callable[[int], int],
        damaged: Mapping[str, str],
        max_damaged: int,
        stop: Callable[[], bool],
        agreed: Callable[[Cursor, int], None] = lambda _cursor, _left: None,
    ) -> None:
        self._loader, self._packer, self._placer, self._world = loader, packer, placer, world
        self._step, self._num_steps = steps
        self._ttt_steps, self._max_damaged, self._stop = ttt_steps, max_damaged, stop
        self._agreed = agreed
        self._damaged = dict(damaged)
        self._news: dict[str, str] = {}
        self._barren_since: Cursor | None = None

    def __iter__(self) -> Iterator[StepData]:
        """Steps with a row that trains, up to the last of the run; others are passed over.

        Raises:
            StoreError, DataError: A sample is damaged and none may be.
            TrainError: Too many are, another rank failed, or nothing trains in a whole epoch.
        """
        batches = iter(self._loader)
        while self._step < self._num_steps:
            with self._placer.beside():
                data = self._next(batches)
            if data is not None:
                self._step += 1
                yield data
                if data.is_last:
                    return
                del data  # or its packs would stay in memory while the next are made

    def _next(self, batches: Iterator[Batch]) -> StepData | None:
        packs: list[Pack] = []
        failed: EyasError | None = None
        found: dict[str, str] = {}
        num_tokens, S, after = 0, self._ttt_steps(self._step), Cursor()
        try:
            for batch in batches:
                found |= self._damage(batch)
                after = batch.planned.after
                if batch.documents:
                    packs.append(self._packer(batch.documents, S, self._step))
                    num_tokens += packs[-1].documents[-1].end
                if batch.planned.ends_step:
                    break
        except EyasError as error:
            failed = error
        told = self._agree(packs, S, num_tokens, found, failed)
        self._count_damage(told)
        num_trained_S = tuple(map(sum, zip(*(one.num_trained_S for one in told), strict=True)))
        self._agreed(after, self._num_steps - self._step - any(num_trained_S))
        if not any(num_trained_S):
            self._check_barren(after)
            return None
        self._barren_since = None
        own = tuple(pack for pack in packs if any(pack.num_trained))
        news, self._news = tuple(self._news.items()), {}
        return StepData(
            packs=own,
            first=self._placer(own[0]) if own else None,
            num_trained_S=num_trained_S,
            num_oov=sum(one.num_oov for one in told),
            num_in_span=sum(one.num_in_span for one in told),
            num_tokens=sum(one.num_tokens for one in told),
            after=after,
            damaged=news,
            is_last=any(one.stop for one in told),
        )

    # ── damage ────────────────────────────────────────────────────────────────────────────────

    def _damage(self, batch: Batch) -> dict[str, str]:
        """Samples of a batch that cannot be read; the first of them ends a run that allows none."""
        for damaged in batch.damaged:
            if damaged.sample_id not in self._damaged and not self._max_damaged:
                raise damaged.error
        return {damaged.sample_id: damaged.error.message for damaged in batch.damaged}

    def _count_damage(self, told: Sequence[_Told]) -> None:
        for sample_id, reason in (pair for one in told for pair in one.damaged):
            if sample_id not in self._damaged:
                self._damaged[sample_id] = self._news[sample_id] = reason
        check_damage(self._damaged, self._max_damaged)

    # ── ranks ─────────────────────────────────────────────────────────────────────────────────

    def _agree(
        self, packs: Sequence[Pack], S: int, num_tokens: int, found: dict[str, str], failed: EyasError | None
    ) -> list[_Told]:
        if failed is not None and self._world.size == 1:
            raise failed
        own = _Told(
            num_trained_S=tuple(sum(pack.num_trained[k] for pack in packs) for k in range(S)),
            num_oov=sum(pack.num_oov for pack in packs),
            num_in_span=sum(pack.num_in_span for pack in packs),
            num_tokens=num_tokens,
            damaged=tuple(found.items()),
            stop=self._stop(),
            failed=None if failed is None else (failed.message, failed.hint),
        )
        told = self._world.gather_data(own)
        for rank, one in enumerate(told):
            if one.failed is not None:
                if rank == self._world.rank and failed is not None:
                    raise failed
                raise ToldElsewhereError(f"rank {rank}: {one.failed[0]}", one.failed[1])
        return told

    def _check_barren(self, after: Cursor) -> None:
        if self._barren_since is None:
            self._barren_since = after
        elif after.epoch > self._barren_since.epoch + 1:
            raise TrainError(
                "no batch of a whole epoch has a row that trains: assistant spans of two tokens or more whose target "
                "argmax is in the draft vocab are needed",
                "check the loss mask in reports/tokens.json and tokenize.draft_vocab_size",
            )


def check_damage(damaged: Mapping[str, str], max_damaged: int) -> None:
    """Refuse more damaged samples than are allowed.

    Raises:
        TrainError: The last of them is named.
    """
    if len(damaged) > max_damaged:
        sample_id, reason = list(damaged.items())[-1]
        raise TrainError(
            f"{len(damaged):,} samples are damaged, expected at most train.max_damaged_samples={max_damaged:,}; the "
            f"last is {named(sample_id, reason)}",
            "`make verify` lists the damage and how to repair it; a higher limit goes on from the last checkpoint",
        )


def named(sample_id: str, reason: str) -> str:
    """A reason that says which sample it is of."""
    return reason if sample_id in reason else f"sample {sample_id}: {reason}"


def made_ahead(items: Iterator[Item], in_thread: bool) -> Generator[Item]:
    """The items in order, the next one made in a thread while one is used; an error comes at its item's place.

    Args:
        items: Runs in that one thread only.
        in_thread: False makes each when it is asked for.
    """
    if not in_thread:
        yield from items
        return
    missing = object()
    with ThreadPoolExecutor(1, thread_name_prefix="eyas-pack") as thread:
        coming = thread.submit(next, items, missing)
        while (item := coming.result()) is not missing:
            coming = thread.submit(next, items, missing)
            yield item  # type: ignore[misc]
            del item  # or it would stay in memory while the next one is awaited
