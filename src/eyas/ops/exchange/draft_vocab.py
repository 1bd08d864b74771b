"""``eyas draft-vocab``: the draft vocab of a set whose tokens did not come from the pipeline's own ``tokenize``."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from eyas import config, fs
from eyas.contracts import TargetIdentity
from eyas.ops.exchange.states import TARGET
from eyas.tokens.dataset import iter_tokens
from eyas.tokens.draft_vocab import DraftVocab, build_draft_vocab


def make_draft_vocab(root: Path, tokens: Path, out: Path) -> tuple[DraftVocab, float]:
    """Count what the assistant wrote in the training split, and write the most frequent ids.

    The target's end-of-turn tokens are always inside where they were trained.

    Returns:
        The vocab, and the share of counted tokens inside it.

    Raises:
        ConfigError: ``tokenize.draft_vocab_size`` does not fit the target.
        StoreError: The tokens are missing or damaged.
    """
    params = config.load(root / config.PARAMS_PATH)
    target = fs.read_record(TargetIdentity, root / TARGET)
    counts_V = np.zeros(target.vocab_size, dtype=np.int64)
    for sample in iter_tokens(tokens):
        if sample.split == "train":
            np.add.at(counts_V, np.asarray(sample.input_ids)[np.asarray(sample.loss_mask, dtype=bool)], 1)
    ends = [token_id for token_id in target.eos_token_ids if counts_V[token_id]]
    vocab = build_draft_vocab(counts_V, params.tokenize.draft_vocab_size, ends)
    vocab.write(out)
    return vocab, vocab.coverage(counts_V)
