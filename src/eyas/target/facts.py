"""What a folder of model files is: architecture, sizes, final norm, end tokens, tokenizer, hashes.

Facts come from the files themselves (``config.json``, the tensors, the tokenizer), never from a table of
models, so that a repository with code of its own needs none of that code to be described.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from eyas import console, fs
from eyas.canonical import digest
from eyas.config import TargetConfig
from eyas.contracts import FileDigest, FinalNorm, TargetIdentity
from eyas.errors import TargetError
from eyas.target.load import TensorFiles, load_tokenizer, text_config
from eyas.target.store import source_label

TOKENIZER_FILES = (
    "added_tokens.json",
    "merges.txt",
    "special_tokens_map.json",
    "tiktoken.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
SIZE_KEYS = {
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "vocab_size": ("vocab_size",),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "max_seq_len"),
}
RMS_EPS_KEYS = ("rms_norm_eps",)
LAYER_NORM_EPS_KEYS = ("layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")
OFFSET_NORM_MODELS = (
    "gemma", "gemma2", "gemma3", "gemma3_text", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text",
    "qwen3_next", "recurrent_gemma", "vaultgemma",
)  # fmt: skip
"""Model types whose final norm scales by 1 + w; a test compares the list with transformers' own modules."""


def identify(folder: Path, config: TargetConfig, revision: str | None) -> TargetIdentity:
    """Describe a folder and check it against what the parameters expect of it.

    Args:
        folder: All files of the target.
        config: For the source's name and the expected shape.
        revision: Wheel digest or commit; None takes the digest of the files.

    Raises:
        TargetError: A file is missing or damaged, the shape is not the expected one, the tokenizer does not
            fit the model, or there is no chat template.
    """
    raw = read_config(folder / "config.json")
    text = text_config(raw)
    sizes = {name: _size(text, raw, name) for name in SIZE_KEYS}
    tensors = TensorFiles(folder)
    norm = final_norm(text, tensors)
    tied = _tied(text, raw, tensors)
    tokenizer = load_tokenizer(folder, config.trust_remote_code)
    eos = _eos_token_ids(folder, text, raw, tokenizer)
    check_fit(tokenizer, eos, sizes["vocab_size"])
    template = _chat_template(tokenizer)
    files = hash_files(folder)
    identity = TargetIdentity(
        source=source_label(config),
        revision=digest(files) if revision is None else revision,
        files=files,
        architecture=(raw.get("architectures") or text.get("architectures") or [""])[0],
        model_type=str(text.get("model_type") or raw.get("model_type") or ""),
        num_layers=sizes["num_hidden_layers"],
        hidden_size=sizes["hidden_size"],
        vocab_size=sizes["vocab_size"],
        max_position_embeddings=sizes["max_position_embeddings"],
        tie_word_embeddings=tied,
        dtype=tensors.dtype_name("embedding"),
        final_norm=norm,
        eos_token_ids=eos,
        tokenizer_sha256=digest([f for f in files if _is_tokenizer_file(f.path)]),
        chat_template_sha256=hashlib.sha256(template.encode()).hexdigest(),
    )
    check_shape(identity, config)
    return identity


def read_config(path: Path) -> dict[str, Any]:
    """A JSON object of the target.

    Raises:
        TargetError: The file is missing or damaged.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TargetError(f"{path.name} is missing: {path.parent} holds no model in transformers' layout") from None
    except ValueError as error:
        raise TargetError(f"{path.name} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise TargetError(f"{path.name} is a {type(value).__name__}, expected an object")
    return value


def _size(text: dict[str, Any], raw: dict[str, Any], name: str) -> int:
    for key in SIZE_KEYS[name]:
        for source in (text, raw):
            if isinstance(source.get(key), int):
                return source[key]
    raise TargetError(
        f"config.json has no {' or '.join(SIZE_KEYS[name])}", "is it a text model in transformers' layout?"
    )


def final_norm(text: dict[str, Any], tensors: TensorFiles) -> FinalNorm:
    """Kind, eps and offset of the last norm, and its zero scales counted in the tensor itself."""
    rms = next((text[key] for key in RMS_EPS_KEYS if text.get(key) is not None), None)
    eps = rms if rms is not None else next((text[k] for k in LAYER_NORM_EPS_KEYS if text.get(k) is not None), None)
    if eps is None:
        raise TargetError(
            f"config.json names no norm epsilon, expected one of {', '.join(RMS_EPS_KEYS + LAYER_NORM_EPS_KEYS)}"
        )
    offset = 1.0 if text.get("model_type") in OFFSET_NORM_MODELS else 0.0
    scale_D = tensors.read("final_norm").float() + offset
    return FinalNorm(
        kind="layer_norm" if rms is None else "rms_norm",
        eps=float(eps),
        weight_offset=offset,
        num_zero_scales=int((scale_D == 0).sum()),
    )


def _tied(text: dict[str, Any], raw: dict[str, Any], tensors: TensorFiles) -> bool:
    """Whether the head is the embedding; a stored head that differs wins over the config, as in transformers."""
    stated = text.get("tie_word_embeddings", raw.get("tie_word_embeddings"))
    if not tensors.has("head"):
        if stated is False:
            raise TargetError("config.json says tie_word_embeddings: false, but there is no lm_head.weight")
        return True
    return stated is True and bool((tensors.read("head") == tensors.read("embedding")).all())


def _eos_token_ids(folder: Path, text: dict[str, Any], raw: dict[str, Any], tokenizer: Any) -> tuple[int, ...]:
    path = folder / "generation_config.json"
    stated = read_config(path).get("eos_token_id") if path.is_file() else None
    for value in (stated, text.get("eos_token_id"), raw.get("eos_token_id"), tokenizer.eos_token_id):
        if value is not None:
            return tuple(value) if isinstance(value, list) else (value,)
    raise TargetError("neither generation_config.json, config.json nor the tokenizer names an end-of-turn token")


def check_fit(tokenizer: Any, eos_token_ids: tuple[int, ...], vocab_size: int) -> None:
    """Refuse a tokenizer that can give ids which the model has no row for.

    Raises:
        TargetError: It has more tokens, or a special or end token lies outside.
    """
    hint = "model and tokenizer are of different models; take both from one repository"
    if len(tokenizer) > vocab_size:
        raise TargetError(
            f"the tokenizer does not fit the model: {len(tokenizer):,} tokens, expected at most {vocab_size:,}", hint
        )
    beyond = sorted(i for i in {*tokenizer.all_special_ids, *eos_token_ids} if not 0 <= i < vocab_size)
    if beyond:
        raise TargetError(
            f"the tokenizer does not fit the model: special token ids {beyond}, expected below {vocab_size:,}", hint
        )


def _chat_template(tokenizer: Any) -> str:
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("default")
    if not template:
        raise TargetError(
            "the target has no chat template, so conversations cannot be rendered",
            "take the instruct variant, or add its chat_template.jinja to a local copy (target.source: directory)",
        )
    return template


def _is_tokenizer_file(name: str) -> bool:
    return name in TOKENIZER_FILES or (name.startswith("tokenization_") and name.endswith(".py"))


def hash_files(folder: Path) -> tuple[FileDigest, ...]:
    """Digests of all files below a folder, hidden folders left out, sorted by path."""
    paths = [p for p in sorted(folder.rglob("*")) if p.is_file() and not p.relative_to(folder).parts[0].startswith(".")]
    sizes_mb = [path.stat().st_size // 1_000_000 for path in paths]
    progress = console.Progress("fetch hashing", sum(sizes_mb), unit="MB")
    digests = []
    for path, size_mb in zip(paths, sizes_mb, strict=True):
        digests.append(fs.file_digest(path, folder))
        progress.advance(size_mb)
    progress.close()
    return tuple(digests)


def check_shape(identity: TargetIdentity, config: TargetConfig) -> None:
    """Compare a target with the shape that the parameters state.

    Raises:
        TargetError: A size differs.
    """
    for name in ("num_layers", "hidden_size", "vocab_size"):
        found, expected = getattr(identity, name), getattr(config.shape, name)
        if found != expected:
            raise TargetError(
                f"target.shape.{name}: the target has {found:,}, expected {expected:,}",
                "the location is another model than the preset's; correct target.shape if it is the wanted one",
            )
