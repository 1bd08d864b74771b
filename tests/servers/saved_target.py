"""The identity of a saved model, for tests that need no fetch."""

import json
from pathlib import Path

from eyas.contracts import FinalNorm, TargetIdentity


def make_target(folder: Path, dtype: str = "float32") -> TargetIdentity:
    """Of a saved model, as the fetch stage would write it."""
    raw = json.loads((folder / "config.json").read_text())
    return TargetIdentity(
        source="directory:",
        revision="0",
        files=(),
        architecture=raw["architectures"][0],
        model_type=raw["model_type"],
        num_layers=raw["num_hidden_layers"],
        hidden_size=raw["hidden_size"],
        vocab_size=raw["vocab_size"],
        max_position_embeddings=raw["max_position_embeddings"],
        tie_word_embeddings=bool(raw.get("tie_word_embeddings")),
        dtype=dtype,
        final_norm=FinalNorm(kind="rms_norm", eps=raw["rms_norm_eps"], weight_offset=0.0, num_zero_scales=0),
        eos_token_ids=(2,),
        tokenizer_sha256="",
        chat_template_sha256="",
    )
