"""The draft vocab: which W of the target's V token ids the drafter can say.

``d2t`` holds offsets (target id - draft id) and ``t2d`` flags, as servers read them. The map is made
again from the counts every time and stands in its own folder; no other file is ever looked at.

Letters: V target vocab, W draft vocab.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from eyas import fs
from eyas.errors import ConfigError, DataError

FILE_NAME = "draft_vocab.safetensors"
REMAKE = "make it again: `dvc repro tokenize`"


@dataclass(frozen=True, slots=True)
class DraftVocab:
    """The map between draft ids and target ids.

    Shapes: d2t_W int64, target id - draft id, so target ids rise strictly; t2d_V bool, True where a
    target id has a draft id.
    """

    d2t_W: torch.Tensor
    t2d_V: torch.Tensor

    @property
    def vocab_size(self) -> int:
        """V."""
        return len(self.t2d_V)

    @property
    def draft_vocab_size(self) -> int:
        """W."""
        return len(self.d2t_W)

    @property
    def target_ids_W(self) -> torch.Tensor:
        """Target id of every draft id, int64, strictly rising."""
        return self.d2t_W + torch.arange(len(self.d2t_W))

    @property
    def draft_ids_V(self) -> torch.Tensor:
        """Draft id of every target id, int64; -1 where there is none."""
        draft_ids_V = torch.cumsum(self.t2d_V.long(), 0) - 1
        return draft_ids_V.masked_fill(~self.t2d_V, -1)

    def coverage(self, counts_V: np.ndarray) -> float:
        """Share of counted tokens that are inside the draft vocab; 0 when nothing was counted."""
        total = int(counts_V.sum())
        return int(counts_V[self.t2d_V.numpy()].sum()) / total if total else 0.0

    def write(self, folder: Path) -> None:
        """Write ``draft_vocab.safetensors`` into the folder, which is replaced as a whole."""
        with fs.atomic_dir(folder) as part, fs.atomic_writer(part / FILE_NAME) as handle:
            handle.write(save({"d2t": self.d2t_W, "t2d": self.t2d_V}))

    @classmethod
    def read(cls, folder: Path) -> DraftVocab:
        """Read and check the map of a folder; there is no default map.

        Raises:
            DataError: The map is missing, damaged, or no strictly rising bijection.
        """
        path = Path(folder) / FILE_NAME
        try:
            tensors = load_file(path)
        except FileNotFoundError:
            raise DataError(f"{path} is missing; draft ids are not assumed to be target ids", REMAKE) from None
        except SafetensorError as error:
            raise DataError(f"{path} is no safetensors file: {error}", REMAKE) from None
        expected = {"d2t": (torch.int64, 1), "t2d": (torch.bool, 1)}
        found = {name: (tensor.dtype, tensor.ndim) for name, tensor in tensors.items()}
        if found != expected:
            raise DataError(f"{path}: tensors {found}, expected {expected}", REMAKE)
        vocab = cls(d2t_W=tensors["d2t"], t2d_V=tensors["t2d"])
        if not torch.equal(vocab.target_ids_W, vocab.t2d_V.nonzero().flatten()):
            raise DataError(f"{path}: d2t and t2d are not the two sides of one rising map", REMAKE)
        return vocab


def check_size(draft_vocab_size: int, vocab_size: int) -> None:
    """Raise ``ConfigError`` unless a draft vocab of W fits into a vocab of V."""
    if not 1 <= draft_vocab_size <= vocab_size:
        raise ConfigError(
            f"tokenize.draft_vocab_size: {draft_vocab_size:,}, expected at most {vocab_size:,}: the target's vocab",
            f"set tokenize.draft_vocab_size to {vocab_size} or less in params.yaml",
        )


def build_draft_vocab(counts_V: np.ndarray, draft_vocab_size: int, always: Iterable[int] = ()) -> DraftVocab:
    """The most frequent W ids; equal counts go to the lower id, so unused ids fill from the lowest.

    Args:
        counts_V: How often each target id was written by the assistant in the training split.
        draft_vocab_size: W; equal to V it gives the identity.
        always: Ids that must be inside whatever their count (trained end-of-turn tokens).

    Raises:
        ConfigError: W is larger than V, or smaller than the number of required ids.
    """
    vocab_size = len(counts_V)
    check_size(draft_vocab_size, vocab_size)
    required = np.unique(np.fromiter(always, dtype=np.int64))
    if len(required) > draft_vocab_size:
        raise ConfigError(
            f"tokenize.draft_vocab_size: {draft_vocab_size:,}, expected {len(required):,} or more: "
            "the end-of-turn tokens alone need that many"
        )
    ranked = np.asarray(counts_V, dtype=np.int64).copy()
    ranked[required] = np.iinfo(np.int64).max
    chosen = np.sort(np.argsort(-ranked, kind="stable")[:draft_vocab_size])
    t2d_V = np.zeros(vocab_size, dtype=bool)
    t2d_V[chosen] = True
    return DraftVocab(d2t_W=torch.from_numpy(chosen - np.arange(draft_vocab_size)), t2d_V=torch.from_numpy(t2d_V))
