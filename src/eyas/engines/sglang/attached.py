"""What a server that somebody else started may have been given otherwise: its model's files, and what it stores in fewer bits.

A server of ours gets the target's folder and none of these arguments; it needs no such look.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eyas import console, fs
from eyas.contracts import TargetIdentity
from eyas.engines.sglang import wire
from eyas.errors import ServerError

COMMAND = "`eyas sglang-command` prints how to start the right one"
SMALL_BYTES = 64 << 20
"""Files up to this size are hashed; of larger ones the size alone is compared: the start-up probe looks at the states."""
SPARSE_MLA = ("deepseek_v32",)
"""Model types whose own KV cache SGLang keeps in eight bits."""


def check(hello: wire.Hello, target: TargetIdentity, folder: Path) -> None:
    """Compare an attached server's files and number formats with the target.

    Args:
        hello: What it says of itself.
        target: What the plan was made for.
        folder: The target's files here.

    Raises:
        ServerError: Other files, weights that are quantized on loading, or a KV cache of other numbers.
    """
    _check_files(Path(hello.model_path), target, folder)
    quantization = hello.server_args.get("quantization")
    if quantization is not None and not _is_quantized(folder):
        raise ServerError(
            f"the server runs with quantization = {quantization!r}, the target's weights are {target.dtype}",
            f"start the server without --quantization; {COMMAND}",
        )
    kv_dtype = hello.server_args.get("kv_cache_dtype")
    if kv_dtype not in (None, "auto", target.dtype, hello.dtype) and target.model_type not in SPARSE_MLA:
        raise ServerError(
            f"the server has kv_cache_dtype = {kv_dtype!r}, expected 'auto'",
            f"start the server without --kv-cache-dtype; {COMMAND}",
        )


def _check_files(served: Path, target: TargetIdentity, folder: Path) -> None:
    if served.resolve() == folder.resolve():
        return
    if not served.is_dir():
        console.log(
            f"sglang: the server's model {served} is not seen from here; the probe alone tells whether it is {folder}"
        )
        return
    for file in target.files:
        path = served / file.path
        if not path.is_file():
            raise _other(served, f"has no {file.path}", folder)
        size_bytes = path.stat().st_size
        if size_bytes != file.size_bytes:
            raise _other(served, f"has a {file.path} of {size_bytes} bytes, expected {file.size_bytes}", folder)
        if size_bytes <= SMALL_BYTES and (found := fs.hash_file(path)) != file.sha256:
            raise _other(served, f"has a {file.path} of SHA-256 {found}, expected {file.sha256}", folder)


def _other(served: Path, what: str, folder: Path) -> ServerError:
    return ServerError(
        f"the server's model {served} {what}: it is not the target", f"serve {folder.resolve()}; {COMMAND}"
    )


def _is_quantized(folder: Path) -> bool:
    """Whether the weights come quantized, as published; then the server's format is theirs."""
    if (folder / "hf_quant_config.json").exists():
        return True
    settings: dict[str, Any] = json.loads((folder / "config.json").read_text())
    inner = settings.get("text_config")
    return "quantization_config" in settings or (isinstance(inner, dict) and "quantization_config" in inner)
