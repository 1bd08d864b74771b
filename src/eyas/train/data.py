"""From stored states to packs: the teacher's argmax is asked once per document and run, then kept as bits.

Only rows that ``extract.last_rows: trained`` stores are read, and each is checked to be there.

Letters: T tokens, L teachers of a document, V target vocab.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from eyas.batches.loader import Reader, training_samples
from eyas.drafter.anchors import anchor_key
from eyas.drafter.judged import UNKNOWN, target_argmaxes
from eyas.drafter.rows import Document, Pack, pack_documents, rows_to_read
from eyas.drafter.teacher import TargetHead
from eyas.errors import DataError, StoreError, TrainError
from eyas.rows import CALIBRATION_ROWS
from eyas.shards.reader import StoredStates

INFINITY_BITS, SIGN_BIT = 0x7F80, 0x8000
"""Of bfloat16: what is from here on, by sign, is no number."""
FILL_MULTIPLE = 64
"""Packs are filled up to this many tokens and rows: few sizes of products (see ``drafter.precision``)."""


def check_states(stored: StoredStates) -> None:
    """Refuse a document whose rows are missing or hold what is no number.

    Raises:
        StoreError: The sample and the row are named.
    """
    rows = rows_to_read(stored)
    for name, states in (("aux", stored.aux_TAD[: rows.num_aux]), ("last", stored.last_TD[rows.last_L])):
        if not _are_numbers(states):
            row = int((~states.flatten(1).isfinite().all(1)).nonzero()[0, 0])
            row = int(rows.last_L[row]) if name == "last" else row
            raise StoreError(
                f"sample {stored.sample.sample_id}: row {row} of {name} holds NaN or infinity, expected numbers",
                "`make verify` compares the states with their tokens",
            )


def _are_numbers(states: torch.Tensor) -> bool:
    """Whether no bf16 value is NaN or infinite, at the speed of memory: as integers these are the largest of a sign."""
    bits = states.view(torch.int16).numpy()
    return bits.size == 0 or bool(bits.max() < INFINITY_BITS and bits.view(np.uint16).max() < SIGN_BIT + INFINITY_BITS)


class Packer:
    """Makes packs, remembering which positions have their argmax in the draft vocab.

    The first epoch pays for the full-vocab product; a bit per token stays in memory (21 M tokens: 21 MB).

    Args:
        head: The target's head; packs are made for its device.
        t2d_V: Bool, target ids in the draft vocab.
        embedding_VE: The target's embedding, on the host; packs for another device carry their rows of it.
        anchors: Most rows of a sample that train, see ``drafter.anchors``; 0 trains all.
        seed: Of the anchors.
    """

    def __init__(
        self, head: TargetHead, t2d_V: torch.Tensor, embedding_VE: torch.Tensor, anchors: int = 0, seed: int = 0
    ) -> None:
        self._head, self._t2d_V, self._embedding_VE = head, t2d_V.cpu(), embedding_VE
        self._all_known, self._anchors, self._seed = bool(t2d_V.all()), anchors, seed
        self._in_vocab: dict[str, torch.Tensor] = {}

    def __call__(
        self, documents: Sequence[StoredStates], ttt_steps: int, step: int | None = None, mask_oov: bool = True
    ) -> Pack:
        """Pack whole documents for ``ttt_steps`` steps, in host memory, pinned when the device is a GPU.

        Args:
            documents: Checked with ``check_states``.
            ttt_steps: S.
            step: Optimizer step that trains on them, which decides the anchors; None takes every row.
            mask_oov: Rows whose teacher's argmax is out of vocab do not train.
        """
        anchors = 0 if step is None else self._anchors
        if mask_oov and not self._all_known:
            self.argmaxes([stored for stored in documents if stored.sample.sample_id not in self._in_vocab])
        whole = [self._document(stored, step, mask_oov) for stored in documents]
        on_gpu = self._head.device.type == "cuda"
        pack = pack_documents(whole, ttt_steps, FILL_MULTIPLE, anchors, pinned=on_gpu)
        if on_gpu:
            pack = pack.with_embedding(self._embedding_VE).map(torch.Tensor.pin_memory)
        return pack

    def argmaxes(self, documents: Sequence[StoredStates]) -> list[np.ndarray]:
        """The target's choices, see ``judged.target_argmaxes``; which of them are in the draft vocab is remembered."""
        found = target_argmaxes(documents, self._head) if documents else []
        for stored, argmax in zip(documents, found, strict=True):
            in_vocab_T, argmax_T = torch.ones(len(argmax), dtype=torch.bool), torch.from_numpy(argmax)
            judged_T = (argmax_T != UNKNOWN).nonzero()[:, 0]
            in_vocab_T[judged_T - 1] = self._t2d_V[argmax_T[judged_T]]
            self._in_vocab[stored.sample.sample_id] = in_vocab_T
        return found

    def _document(self, stored: StoredStates, step: int | None, mask_oov: bool) -> Document:
        return Document(
            ids_T=stored.input_ids_T,
            mask_T=stored.loss_mask_T,
            aux_TAD=stored.aux_TAD,
            last_TD=stored.last_TD,
            in_vocab_T=self._in_vocab[stored.sample.sample_id] if mask_oov and not self._all_known else None,
            anchor_key="" if step is None else anchor_key(self._seed, step, stored.sample.sample_id),
        )


def calibration_slice(reader: Reader) -> torch.Tensor:
    """Aux states [T,A,D] of the first training samples by id, about ``CALIBRATION_ROWS`` rows.

    Of each sample the rows that training reads, so that first weights do not depend on what else is stored.
    Damaged samples are passed over: training counts them.

    Raises:
        StoreError: Every sample is damaged.
        TrainError: There is no training sample, or none with a row that trains.
    """
    samples = sorted(training_samples(reader), key=lambda sample: sample.sample_id)
    if not samples:
        raise TrainError(
            "none of the stored samples belongs to the training split",
            "lower data.held_out_share or add conversations, then `dvc repro`",
        )
    parts, num_rows, damage = [], 0, None
    for sample in samples:
        try:
            stored = reader.read(sample.sample_id)
            check_states(stored)
        except (StoreError, DataError) as error:
            damage = damage or error
            continue
        parts.append(stored.aux_TAD[: rows_to_read(stored).num_aux])
        num_rows += len(parts[-1])
        if num_rows >= CALIBRATION_ROWS:
            break
    if damage is not None and not num_rows:
        raise damage
    if not num_rows:
        raise TrainError(
            f"none of {len(samples):,} training samples has a row that trains: an assistant span of two tokens or more "
            "behind the first token is needed",
            "check the loss mask in reports/tokens.json",
        )
    return torch.cat(parts)
