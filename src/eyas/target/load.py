"""Reading a fetched target: the model for the ``hf`` engine, its tokenizer, or only its ends.

The drafter needs three tensors of the target (embedding, head, final norm). ``read_ends`` takes just
those from the safetensors files, so that training on a 600 GB target loads 2 GB.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.errors import TargetError
from eyas.target.template import pin_date

if TYPE_CHECKING:
    import torch

PREFIXES = ("", "language_model.")
"""Where multi-modal repositories nest their text model."""


@dataclass(frozen=True, slots=True)
class TargetEnds:
    """The target's first and last tensors. Shapes: V vocab, D hidden."""

    embedding_VD: torch.Tensor
    head_VD: torch.Tensor
    final_norm_D: torch.Tensor


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> Any:
    """The target's tokenizer, from local files only; its chat template writes a fixed date."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    tokenizer.chat_template = pin_date(tokenizer.chat_template)
    return tokenizer


def load_model(folder: Path, dtype: str, device: str = "cpu", trust_remote_code: bool = False) -> Any:
    """The target in transformers, in eval mode, from local files only."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), local_files_only=True, trust_remote_code=trust_remote_code
    )
    return model.eval().requires_grad_(False).to(device)


def read_ends(folder: Path) -> TargetEnds:
    """Embedding, head and final norm, read from the safetensors files alone.

    Raises:
        TargetError: A tensor is not there under any known name.
    """
    files = _tensor_files(folder)
    embedding = _read(files, "model.embed_tokens.weight")
    if _has(files, "lm_head.weight"):
        head = _read(files, "lm_head.weight")
    else:
        head = embedding  # tied
    return TargetEnds(embedding_VD=embedding, head_VD=head, final_norm_D=_read(files, "model.norm.weight"))


def _tensor_files(folder: Path) -> dict[str, Path]:
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    files = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as handle:
            files.update(dict.fromkeys(handle.keys(), path))
    return files


def _has(files: dict[str, Path], name: str) -> bool:
    return any(prefix + name in files for prefix in PREFIXES)


def _read(files: dict[str, Path], name: str) -> torch.Tensor:
    from safetensors import safe_open

    for prefix in PREFIXES:
        if prefix + name in files:
            with safe_open(files[prefix + name], framework="pt") as handle:
                return handle.get_tensor(prefix + name)
    raise TargetError(
        f"{name} is in none of the target's {len(files)} tensors", "only Llama-style tensor names are known"
    )
