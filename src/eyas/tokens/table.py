"""The token dataset by sample id, its ids and masks on the disk: memory grows with samples, not with tokens.

A record of a sample holds a Python number per token, 16 bytes with its mask: billions of tokens would not fit. Here
they lie in a file without a name, five bytes a token, that goes with the process; a record is made when it is asked for.
"""

from __future__ import annotations

import itertools
import mmap
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from eyas import fs
from eyas.contracts import BYTES_PER_MASK, BYTES_PER_TOKEN_ID, TokenSample
from eyas.tokens.dataset import FACTS, TokenRow, iter_rows

BYTES_PER_TOKEN = BYTES_PER_TOKEN_ID + BYTES_PER_MASK


class TokenTable(Mapping[str, TokenSample]):
    """Samples by id, in stored order; safe in threads.

    Args:
        folder: The dataset; read once, in full, and checked.
        scratch: Folder of a volume with five bytes free per token.

    Raises:
        DataError: The dataset is missing, damaged, or not what its index says.
        DiskError: The volume is full.
    """

    def __init__(self, folder: Path, scratch: Path) -> None:
        self._rows: dict[str, tuple[str | int, ...]] = {}
        self._begins: list[int] = []
        with fs.disk_errors(scratch / "tokens"), tempfile.TemporaryFile(dir=scratch) as file:
            end = 0
            for row in iter_rows(folder):
                self._rows[row.facts["sample_id"]] = (len(self._begins), *_shared(row.facts))
                self._begins.append(end)
                end += file.write(row.input_ids_T.astype("<i4", copy=False).tobytes())
                end += file.write(row.loss_mask_T.astype(np.uint8, copy=False).tobytes())
            self._begins.append(end)
            file.flush()
            self._data = mmap.mmap(file.fileno(), end, prot=mmap.PROT_READ)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __contains__(self, sample_id: object) -> bool:
        return sample_id in self._rows

    @property
    def lengths(self) -> dict[str, int]:
        """Tokens of every sample, without making its record."""
        lengths = [(end - begin) // BYTES_PER_TOKEN for begin, end in itertools.pairwise(self._begins)]
        return {name: lengths[int(index)] for name, (index, *_) in self._rows.items()}

    def __getitem__(self, sample_id: str) -> TokenSample:
        index, *facts = self._rows[sample_id]
        assert isinstance(index, int)
        begin, end = self._begins[index], self._begins[index + 1]
        num_tokens = (end - begin) // BYTES_PER_TOKEN
        ids_T = np.frombuffer(self._data, "<i4", num_tokens, begin)
        mask_T = np.frombuffer(self._data, np.uint8, num_tokens, begin + num_tokens * BYTES_PER_TOKEN_ID)
        named = dict(zip(FACTS, (sample_id, *facts, num_tokens), strict=True))
        return TokenRow(named, ids_T, mask_T).sample


def _shared(facts: dict[str, str]) -> tuple[str, ...]:
    """Conversation, then source, split and variant: words that many samples have in common, kept once."""
    conversation, *words = (facts[name] for name in FACTS[1:-1])
    return (conversation, *map(sys.intern, words))
