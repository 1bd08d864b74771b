"""From stored states to packs: the teacher's argmax is asked once per document and run, then kept as bits.

Letters: T tokens, V target vocab.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from eyas.batches.loader import Reader, training_samples
from eyas.drafter.rows import Document, Pack, pack_documents
from eyas.drafter.teacher import teacher_ids
from eyas.errors import TrainError
from eyas.shards.reader import StoredStates

CALIBRATION_TOKENS = 4096
FILL_MULTIPLE = 64
"""Packs are filled up to this many tokens and rows: few sizes of products (see ``drafter.precision``)."""


class Packer:
    """Makes packs, remembering which positions have their argmax in the draft vocab.

    The first epoch pays for the full-vocab product; a bit per token stays in memory (21 M tokens: 21 MB).

    Args:
        head_VD: The target's head, float32, on the training device.
        t2d_V: Bool, target ids in the draft vocab.
    """

    def __init__(self, head_VD: torch.Tensor, t2d_V: torch.Tensor, device: str) -> None:
        self._head_VD, self._t2d_V, self._device = head_VD, t2d_V.to(device), device
        self._all_known = bool(t2d_V.all())
        self._in_vocab: dict[str, torch.Tensor] = {}

    def __call__(self, documents: Sequence[StoredStates], ttt_steps: int) -> Pack:
        """Pack whole documents for ``ttt_steps`` steps."""
        return pack_documents([self._document(stored) for stored in documents], ttt_steps, FILL_MULTIPLE).to(
            self._device
        )

    def _document(self, stored: StoredStates) -> Document:
        return Document(
            ids_T=stored.input_ids_T,
            mask_T=stored.loss_mask_T,
            aux_TAD=stored.aux_TAD,
            last_TD=stored.last_TD,
            in_vocab_T=None if self._all_known else self._known(stored),
        )

    def _known(self, stored: StoredStates) -> torch.Tensor:
        sample_id = stored.sample.sample_id
        if sample_id not in self._in_vocab:
            in_vocab_T = torch.ones(len(stored.input_ids_T), dtype=torch.bool)
            # a teacher's position and the token it predicts lie in one span
            mask_T = stored.loss_mask_T.bool()
            asked_T = torch.zeros_like(mask_T)
            asked_T[1:-1] = mask_T[1:-1] & mask_T[2:]
            if bool(asked_T.any()):
                ids_X = teacher_ids(stored.last_TD[asked_T].to(self._device), self._head_VD)
                in_vocab_T[asked_T] = self._t2d_V[ids_X].cpu()
            self._in_vocab[sample_id] = in_vocab_T
        return self._in_vocab[sample_id]


def calibration_slice(reader: Reader) -> torch.Tensor:
    """Aux states [T,A,D] of the first training samples by id, about ``CALIBRATION_TOKENS`` tokens.

    Raises:
        TrainError: There is no training sample.
    """
    samples = sorted(training_samples(reader), key=lambda sample: sample.sample_id)
    if not samples:
        raise TrainError(
            "none of the stored samples belongs to the training split",
            "lower data.held_out_share or add conversations, then `dvc repro`",
        )
    parts, num_tokens = [], 0
    for sample in samples:
        parts.append(reader.read(sample.sample_id).aux_TAD)
        num_tokens += sample.num_tokens
        if num_tokens >= CALIBRATION_TOKENS:
            break
    return torch.cat(parts)
