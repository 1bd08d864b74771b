"""Reading a fetched target: the model for the ``hf`` engine, its tokenizer, or only its ends.

The drafter needs three tensors of the target (embedding, head, final norm). ``read_ends`` takes just
those from the safetensors files, so that training on a 600 GB target loads 2 GB.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from eyas.errors import ConfigError, TargetError
from eyas.target.template import pin_date

if TYPE_CHECKING:
    import torch

End = Literal["embedding", "head", "final_norm"]
NAMES: dict[str, tuple[str, ...]] = {
    "embedding": (
        "model.embed_tokens.weight",
        "language_model.model.embed_tokens.weight",
        "model.language_model.embed_tokens.weight",
    ),
    "head": ("lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight"),
    "final_norm": (
        "model.norm.weight",
        "language_model.model.norm.weight",
        "model.language_model.norm.weight",
    ),
}
"""Llama's names, and where multi-modal repositories nest their text model (Kimi-K2.5; Gemma 3, Qwen-VL)."""
LOADING_FAULTS = (OSError, ValueError, KeyError, TypeError, ImportError, AttributeError)
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class TargetEnds:
    """The target's first and last tensors. Shapes: V vocab, D hidden."""

    embedding_VD: torch.Tensor
    head_VD: torch.Tensor
    final_norm_D: torch.Tensor


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> Any:
    """The target's tokenizer, from local files only; its chat template writes a fixed date.

    Raises:
        TargetError: It is damaged, or has code of its own that is not trusted.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:
        # The tokenizers library raises plain Exception for a damaged tokenizer.json.
        if type(error) is not Exception and not isinstance(error, LOADING_FAULTS):
            raise
        raise TargetError(
            f"the tokenizer cannot be loaded: {_first_line(error)}",
            "check tokenizer.json; a repository with tokenizer code of its own needs target.trust_remote_code: true",
        ) from error
    tokenizer.chat_template = pin_date(tokenizer.chat_template)
    return tokenizer


def load_model(folder: Path, dtype: str, device: str = "cpu", trust_remote_code: bool = False) -> Any:
    """The target in transformers, in eval mode, from local files only.

    Raises:
        ConfigError: This machine has no such device.
        TargetError: transformers cannot run it.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # it draws on logs too, for seconds of loading
    require_device("target.device", device)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), local_files_only=True, trust_remote_code=trust_remote_code
        )
    except LOADING_FAULTS as error:
        raise TargetError(
            f"transformers cannot load the target: {_first_line(error)}",
            "an architecture with code of its own needs target.trust_remote_code: true",
        ) from error
    return model.eval().requires_grad_(False).to(device)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def require_device(key: str, device: str) -> None:
    """Check that this machine has a device before anything is loaded for it.

    Raises:
        ConfigError: There is none that torch can use.
    """
    import torch

    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(
            f"{key}: {device!r}, but torch {torch.__version__} finds no such device here",
            f"set {key} to cpu; `make doctor` shows what is there",
        )


def text_config(raw: dict[str, Any]) -> dict[str, Any]:
    """The text model's part of a ``config.json``; multi-modal ones nest it."""
    nested = raw.get("text_config")
    return nested if isinstance(nested, dict) else raw


def read_ends(folder: Path) -> TargetEnds:
    """Embedding, head and final norm, read from the safetensors files alone.

    A head that is stored is the head, also where the config says tied: so transformers reads it.

    Raises:
        TargetError: A tensor is not there under any known name, or has a wrong shape.
    """
    tensors = TensorFiles(folder)
    embedding_VD = tensors.read("embedding")
    head_VD = tensors.read("head") if tensors.has("head") else embedding_VD  # tied
    final_norm_D = tensors.read("final_norm")
    if head_VD.shape != embedding_VD.shape or final_norm_D.shape != embedding_VD.shape[1:]:
        raise TargetError(
            f"embedding {tuple(embedding_VD.shape)}, head {tuple(head_VD.shape)}, final norm "
            f"{tuple(final_norm_D.shape)}: expected (V, D), (V, D) and (D,)"
        )
    return TargetEnds(embedding_VD=embedding_VD, head_VD=head_VD, final_norm_D=final_norm_D)


class TensorFiles:
    """Which safetensors file of a folder holds which tensor; reads one at a time.

    Raises:
        TargetError: There is no safetensors file, or one is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Path] = {}
        index, named = folder / INDEX, {}
        if index.is_file():
            try:
                named = json.loads(index.read_text())["weight_map"]
            except (ValueError, KeyError, TypeError) as error:
                raise TargetError(f"{INDEX} is damaged: {error!r}", "remove it and run `dvc repro fetch`") from error
            paths = sorted({folder / name for name in named.values()})
        else:
            paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise TargetError(
                f"{folder} holds no *.safetensors",
                "weights in other formats are not read; convert with transformers' save_pretrained",
            )
        for path in paths:
            with _open(path) as handle:
                self._files.update(dict.fromkeys(handle.keys(), path))
        if lost := sorted(set(named) - set(self._files)):
            raise TargetError(f"{len(lost)} tensors of {INDEX} are in no file, the first is {lost[0]}")

    def has(self, end: End) -> bool:
        """Whether one of the ends is there under a known name."""
        return any(name in self._files for name in NAMES[end])

    def read(self, end: End) -> torch.Tensor:
        """One of the ends, in its stored dtype."""
        name = self.name(end)
        with _open(self._files[name]) as handle:
            return handle.get_tensor(name)

    def dtype_name(self, end: End) -> str:
        """Stored dtype of one of the ends in torch's spelling, without reading it."""
        name = self.name(end)
        with _open(self._files[name]) as handle:
            stored = str(handle.get_slice(name).get_dtype())
        return {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}.get(stored, stored.lower())

    def name(self, end: End) -> str:
        """The tensor's name in the files."""
        for name in NAMES[end]:
            if name in self._files:
                return name
        raise TargetError(
            f"{NAMES[end][0]} is in none of the target's {len(self._files):,} tensors",
            f"known names: {', '.join(NAMES[end])}",
        )


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise TargetError(f"{path.name} is missing from the target", "run `dvc repro -f fetch`") from None
    except (SafetensorError, OSError) as error:
        raise TargetError(f"{path.name} is damaged: {error}", "fetch the target again: `dvc repro -f fetch`") from error
