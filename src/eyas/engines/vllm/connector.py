"""vLLM's own hidden-states connector, writing our files: named by our request, whole at once, checksummed.

Loaded by vLLM through ``kv_connector_module_path`` in its own interpreter; no file of vLLM is changed. On a CUDA
device the copy is the stock one (own stream, pinned memory); the stock copy knows no CPU, so ours stands in there.
Only TP rank 0 writes, in the stock pool of threads: the engine never waits for a disk.

Letters: T tokens of a request, N streams, D target hidden size.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (  # pyright: ignore[reportMissingImports]
    ExampleHiddenStatesConnector,
    PendingSave,
    extract_from_kv_cache,
)

from eyas.engines.vllm import files

DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
logger = logging.getLogger("vllm.eyas")


class _Done:
    """Stands in for a CUDA event where copies are done at once."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class EyasConnector(ExampleHiddenStatesConnector):
    """Writes each request's states to the path that its request names."""

    def _submit_async_write(self, pending: PendingSave) -> None:
        """Copy a finished request's rows out of the cache and hand them to the pool; never raises into the engine."""
        try:
            if self._kv_cache is not None and self._kv_cache.device.type == "cpu":
                self._submit_from_cpu(pending)
            else:
                super()._submit_async_write(pending)
        except (RuntimeError, OSError, MemoryError) as error:
            logger.exception("request %s: its states could not be copied", pending.req_id)
            _fail(Path(pending.filename), f"{type(error).__name__}: {error}")
            # Without an event that is done, the scheduler would keep the request's blocks for ever.
            self._req_copy_events.setdefault(pending.req_id, _Done())  # type: ignore[arg-type]

    def _submit_from_cpu(self, pending: PendingSave) -> None:
        if not self._is_tp_rank_zero:
            return
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)[:, None] * self._block_size
        slots = (blocks + torch.arange(self._block_size)).flatten()
        states_TND = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))  # indexing copies
        tensors, done = {files.STATES: states_TND, files.IDS: pending.token_ids}, _Done()
        future = self._executor.submit(self._write_tensors, tensors, done, pending.filename, None)
        self._req_copy_events[pending.req_id] = done  # type: ignore[assignment]
        self._req_futures[pending.req_id] = future
        future.add_done_callback(partial(self._on_write_done, pending.req_id))

    @staticmethod
    def _write_tensors(tensors: dict[str, torch.Tensor], event: Any, filename: str, lock_fd: int | None) -> None:
        """In the pool: wait for the copy, write, rename. A failure is written down, for the request's sake."""
        path = Path(filename)
        try:
            event.synchronize()
            states_TND, ids_T = tensors[files.STATES].contiguous(), tensors[files.IDS].to(torch.int32)
            files.write(path, DTYPES[states_TND.dtype], states_TND.shape, _bytes(states_TND), _bytes(ids_T))
        except (OSError, RuntimeError, KeyError) as error:
            logger.error("%s: states not written: %r", path.name, error)  # noqa: TRY400
            _fail(path, f"{type(error).__name__}: {error}")


def _fail(path: Path, reason: str) -> None:
    try:
        files.write_failure(path, reason)
    except OSError:
        logger.exception("%s: not even the failure could be written", path.name)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.flatten().view(torch.uint8).numpy().data)
