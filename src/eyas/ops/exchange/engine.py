"""The engine of an import: it captures nothing, it reads a foreign folder's files.

Each file is hashed again before it is used: what is stored is what the scan judged.

Letters: T tokens of a sample, D target hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from eyas.contracts import EngineFacts, TokenSample
from eyas.conversations.generation import Generated, GenerateRequest
from eyas.engines.base import CapturedSample
from eyas.errors import CaptureError, DataError
from eyas.shards.layouts.base import LayoutSource, hash_layout_file
from eyas.shards.layouts.scan import SourceFile

ENGINE_NAME = "import"
ENGINE_VERSION = "1"


class ImportEngine:
    """Reads samples out of their files.

    Args:
        source: The layout's reader.
        folder: Of the source.
        files: The scanned file of every sample id.
        norm: Brings ``last_TD`` to post-norm.
        options: What decides the bytes: layout, norm state, digest over the files.
    """

    def __init__(
        self,
        source: LayoutSource,
        folder: Path,
        files: Mapping[str, SourceFile],
        norm: Callable[[torch.Tensor], torch.Tensor],
        options: dict[str, str],
    ) -> None:
        self._source, self._folder, self._files = source, folder, files
        self._norm, self._options = norm, options

    def announce(self, samples: Sequence[TokenSample]) -> None:
        """Nothing is computed ahead."""

    def open(self) -> None:
        """Nothing to load."""

    def close(self) -> None:
        """Nothing to free."""

    def describe(self) -> EngineFacts:
        """Deterministic: the bytes are those of the files."""
        return EngineFacts(name=ENGINE_NAME, version=ENGINE_VERSION, options=dict(self._options), deterministic=True)

    def capture(self, batch: Sequence[TokenSample]) -> Iterator[CapturedSample]:
        """States of each sample, ``last`` post-norm, both bf16.

        Raises:
            CaptureError: A file is not what the scan saw.
        """
        for sample in batch:
            file = self._files[sample.sample_id]
            path = self._folder / file.path
            if not path.is_file() or hash_layout_file(path) != file.xxh3:
                raise CaptureError(f"sample {sample.sample_id}: {path} changed since it was scanned")
            try:
                states = self._source.read(file.path)
            except DataError as error:
                raise CaptureError(f"sample {sample.sample_id}: {path}: {error.message}") from error
            yield CapturedSample(
                sample_id=sample.sample_id,
                input_ids_T=states.input_ids_T.int(),
                aux_TAD=states.aux_TAD.bfloat16(),
                last_TD=self._norm(states.last_TD).bfloat16(),
            )

    def generate(self, requests: Sequence[GenerateRequest]) -> Iterator[Generated]:
        """Files generate nothing.

        Raises:
            CaptureError: Always.
        """
        raise CaptureError(f"engine {ENGINE_NAME} reads files, it does not generate")
