"""The hf engine: transformers in process, the embedded default and the numeric reference.

A planned batch is one forward, padded on the right, so that no padding comes before a token. The head is
not run, and of the layers' states only the wanted boundaries are kept.

Letters: B rows, T padded tokens, A aux streams, D target hidden size.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from eyas.contracts import EngineFacts, TargetIdentity, TokenSample
from eyas.conversations.generation import Generated, GenerateRequest
from eyas.engines.base import CapturedSample
from eyas.engines.checks import check_sample
from eyas.engines.generate import generate
from eyas.engines.taps import Taps, text_model
from eyas.errors import ConfigError
from eyas.target.load import load_model

OPTIONS = ("attention",)
ATTENTION_KINDS = ("sdpa", "eager")


class HfEngine:
    """Captures and generates with transformers.

    Args:
        target: Identity of the target.
        folder: The target's files.
        boundaries: Aux boundaries, in stored order.
        dtype: Dtype of the weights while running.
        batch_size: Rows of a decoding batch.
        device: A torch device.
        trust_remote_code: Let transformers run the repository's own model code.
        attention: ``sdpa`` or ``eager``, for captures.

    Raises:
        ConfigError: ``attention`` is unknown.
    """

    def __init__(
        self,
        target: TargetIdentity,
        folder: Path,
        boundaries: Sequence[int],
        *,
        dtype: str,
        batch_size: int = 1,
        device: str = "cpu",
        trust_remote_code: bool = False,
        attention: str = "sdpa",
    ) -> None:
        if attention not in ATTENTION_KINDS:
            raise ConfigError(f"engine_options.attention: {attention!r}, expected one of {', '.join(ATTENTION_KINDS)}")
        self._target, self._folder, self._boundaries = target, folder, tuple(boundaries)
        self._dtype, self._batch_size, self._device = dtype, batch_size, device
        self._trust_remote_code, self._attention = trust_remote_code, attention
        self._loaded: Any = None

    @property
    def model(self) -> Any:
        """The open model."""
        assert self._loaded is not None, "engine is not open"
        return self._loaded

    def announce(self, samples: Sequence[TokenSample]) -> None:
        """Nothing is computed ahead."""

    def open(self) -> None:
        """Load the model and give torch every core this process may use."""
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(len(os.sched_getaffinity(0)))
        self._loaded = load_model(self._folder, self._dtype, self._device, self._trust_remote_code)
        self._loaded.set_attn_implementation(self._attention)

    def describe(self) -> EngineFacts:
        """CPU kernels give the same bytes for the same batch; CUDA ones are not promised to."""
        return EngineFacts(
            name="hf",
            version=f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}",
            options={"attention": self._attention, "dtype": self._dtype},
            deterministic=self._device == "cpu",
        )

    @torch.no_grad()
    def capture(self, batch: Sequence[TokenSample]) -> Iterator[CapturedSample]:
        """States of one planned batch, from one forward.

        Raises:
            CaptureError: A sample holds an id outside the vocab or is longer than the context, or a
                boundary does not exist.
        """
        for sample in batch:
            check_sample(sample, self._target.vocab_size, self._target.max_position_embeddings)
        base = text_model(self.model)
        taps = Taps(base, self._boundaries)
        ids_BT, mask_BT = _pad(batch)
        with taps.listening():
            output = base(input_ids=ids_BT.to(self._device), attention_mask=mask_BT.to(self._device), use_cache=False)
        aux_BTAD, last_BTD = taps.take(), output.last_hidden_state
        for row, sample in enumerate(batch):
            num_tokens = len(sample.input_ids)
            yield CapturedSample(
                sample_id=sample.sample_id,
                input_ids_T=ids_BT[row, :num_tokens].to(torch.int32),
                aux_TAD=_own(aux_BTAD[row, :num_tokens]),
                last_TD=_own(last_BTD[row, :num_tokens]),
            )

    def generate(self, requests: Sequence[GenerateRequest]) -> Iterator[Generated]:
        """Continuations in fixed shapes, see ``engines.generate``."""
        return generate(self.model, requests, self._batch_size, self._target.eos_token_ids)

    def close(self) -> None:
        """Free the model's memory."""
        self._loaded = None
        gc.collect()
        if self._device != "cpu":
            torch.cuda.empty_cache()


def _pad(batch: Sequence[TokenSample]) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(len(sample.input_ids) for sample in batch)
    ids_BT = torch.zeros(len(batch), longest, dtype=torch.long)
    mask_BT = torch.zeros(len(batch), longest, dtype=torch.long)
    for row, sample in enumerate(batch):
        ids_BT[row, : len(sample.input_ids)] = torch.tensor(sample.input_ids)
        mask_BT[row, : len(sample.input_ids)] = 1
    return ids_BT, mask_BT


def _own(states: torch.Tensor) -> torch.Tensor:
    """A sample's rows on the CPU in the stored dtype, not a view of the padded batch."""
    return states.to("cpu", torch.bfloat16).clone(memory_format=torch.contiguous_format)
