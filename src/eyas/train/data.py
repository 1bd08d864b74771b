"""From stored states to packs: the teacher's argmax is asked once per document and run, then kept as bits.

Only rows that ``extract.last_rows: trained`` stores are read, and each is checked to be there.

Letters: T tokens, L teachers of a document, V target vocab.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from eyas.batches.loader import Reader, training_samples
from eyas.drafter.rows import Document, Pack, pack_documents, rows_to_read
from eyas.drafter.teacher import teacher_ids
from eyas.errors import TrainError
from eyas.rows import StoredRows
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
        """Pack whole documents for ``ttt_steps`` steps.

        Raises:
            StoreError: A row that trains is not stored.
        """
        return pack_documents([self._document(stored) for stored in documents], ttt_steps, FILL_MULTIPLE).to(
            self._device
        )

    def _document(self, stored: StoredStates) -> Document:
        rows = rows_to_read(stored)
        return Document(
            ids_T=stored.input_ids_T,
            mask_T=stored.loss_mask_T,
            aux_TAD=stored.aux_TAD,
            last_TD=stored.last_TD,
            in_vocab_T=None if self._all_known else self._known(stored, rows),
        )

    def _known(self, stored: StoredStates, rows: StoredRows) -> torch.Tensor:
        sample_id = stored.sample.sample_id
        if sample_id not in self._in_vocab:
            in_vocab_T = torch.ones(len(stored.input_ids_T), dtype=torch.bool)
            if len(rows.last_L):
                ids_L = teacher_ids(stored.last_TD[rows.last_L].to(self._device), self._head_VD)
                in_vocab_T[rows.last_L] = self._t2d_V[ids_L].cpu()
            self._in_vocab[sample_id] = in_vocab_T
        return self._in_vocab[sample_id]


def calibration_slice(reader: Reader) -> torch.Tensor:
    """Aux states [T,A,D] of the first training samples by id, about ``CALIBRATION_TOKENS`` rows.

    Of each sample the rows that training reads, so that first weights do not depend on what else is stored.

    Raises:
        StoreError: A row that trains is not stored.
        TrainError: There is no training sample, or none with a row that trains.
    """
    samples = sorted(training_samples(reader), key=lambda sample: sample.sample_id)
    if not samples:
        raise TrainError(
            "none of the stored samples belongs to the training split",
            "lower data.held_out_share or add conversations, then `dvc repro`",
        )
    parts, num_rows = [], 0
    for sample in samples:
        stored = reader.read(sample.sample_id)
        parts.append(stored.aux_TAD[: rows_to_read(stored).num_aux])
        num_rows += len(parts[-1])
        if num_rows >= CALIBRATION_TOKENS:
            break
    if not num_rows:
        raise TrainError(
            f"none of {len(samples):,} training samples has a row that trains: an assistant span of two tokens or more "
            "behind the first token is needed",
            "check the loss mask in reports/tokens.json",
        )
    return torch.cat(parts)
