"""The export's own key check: read the written folder back as its server would, and list every fault.

It reads files only; nothing of what was in memory while writing is trusted. The config has to be the one that
the shape gives, key by key, and every tensor the checkpoint's, value by value. Problems come as lines that name
the key or tensor, so that one run shows all of them.

Letters: V target vocab, W draft vocab.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from eyas import fs
from eyas.contracts import DrafterShape
from eyas.errors import ExportError, StoreError
from eyas.export import loaders
from eyas.export.config_json import sglang_config, vllm_config
from eyas.export.tensors import EMBEDDING, WEIGHTS_FILE, read_tensors

CONFIG_FILE, CARD_FILE = "config.json", "README.md"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
FILES = (CONFIG_FILE, WEIGHTS_FILE, CARD_FILE)
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
SECTIONS = ("eagle_config", "speculators_config", "transformer_layer_config")
WHOLE = ("rope_parameters", "rope_scaling")
"""Small dicts that are told as a whole."""
LOCAL_PATH = re.compile(r"^(/|~|\.{1,2}/|file:|[A-Za-z]:\\)")


def read_checked(
    folder: Path,
    server: str,
    shape: DrafterShape,
    layer_ids: Sequence[int],
    dtype: str,
    expected: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """Tensors of a server's folder, after every check.

    Args:
        folder: Holds ``config.json`` and ``model.safetensors``.
        server: ``sglang`` or ``vllm``.
        shape: What was trained.
        layer_ids: The boundaries in this server's spelling.
        dtype: Of the weights.
        expected: The checkpoint's tensors by this server's names, in ``dtype``; None leaves the values alone.

    Raises:
        ExportError: The server would load something else than what was trained; all faults are listed.
    """
    problems, tensors = examine(folder, server, shape, layer_ids, dtype, expected)
    if problems:
        raise ExportError(f"{server} would not load what was trained:\n{listed(problems)}")
    return tensors


def examine(
    folder: Path,
    server: str,
    shape: DrafterShape,
    layer_ids: Sequence[int],
    dtype: str,
    expected: Mapping[str, torch.Tensor] | None = None,
) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Faults of a server's folder, one line each, and its tensors; arguments as for ``read_checked``."""
    if not folder.is_dir():
        return [f"{folder.name}: no folder of this server"], {}
    problems = list(file_problems(folder))
    if not all((folder / name).is_file() for name in (CONFIG_FILE, WEIGHTS_FILE) if (folder / name).exists()):
        return problems, {}
    try:
        config = fs.read_json(folder / CONFIG_FILE)
    except StoreError as error:
        return [*problems, error.message], {}
    if not isinstance(config, dict):
        return [*problems, f"{CONFIG_FILE}: a {type(config).__name__}, expected an object"], {}
    odd = [name for name in SECTIONS if name in config and not isinstance(config[name], dict)]
    if odd:
        return [*problems, *(f"{name}: {config[name]!r:.60}, expected an object" for name in odd)], {}
    problems += config_problems(server, config, shape, layer_ids, dtype)
    try:
        tensors = read_tensors(folder / WEIGHTS_FILE)
    except ExportError as error:
        return [*problems, error.message], {}
    sizes = loaders.expected_parameters(server, written_config(server, config, shape, layer_ids, dtype))
    problems += tensor_problems(server, sizes, tensors, dtype)
    if expected is not None:
        reached = {name for name in tensors if loaders.parameter_of(server, name) in sizes}
        problems += [f"{name}: not a name of this export" for name in sorted(reached - set(expected))]
        problems += value_problems(tensors, expected)
    return problems, tensors


def listed(problems: Sequence[str]) -> str:
    """One line per fault."""
    return "\n".join(f"- {problem}" for problem in problems)


def file_problems(folder: Path) -> Iterator[str]:
    """What is no file of an export: both servers read every weights file of a folder, its index and its code."""
    for path in sorted(folder.iterdir()):
        if path.name in FILES:
            if path.exists() and not path.is_file():
                yield f"{path.name}: no regular file; whoever opens a pipe or a device waits for ever"
            continue
        if path.suffix in WEIGHT_SUFFIXES:
            yield f"{path.name}: a second file of weights, the server may load it over the first"
        else:
            yield f"{path.name}: no file of an export, the server may read it"


def config_problems(
    server: str, config: Mapping[str, Any], shape: DrafterShape, layer_ids: Sequence[int], dtype: str = "bfloat16"
) -> Iterator[str]:
    """Faults of a ``config.json``, one line each: whatever is not as eyas writes it for this shape."""
    if server == "vllm" and "speculators_config" not in config:
        yield "speculators_config: missing, the server would take the folder for a plain model"
    found_ids = loaders.written_layer_ids(server, config)
    if not _same(found_ids, list(layer_ids)):
        used = f"{found_ids}" if found_ids else "its own default [2, n//2, n-3]"
        yield f"layer ids: the engine would use {used}, expected {list(layer_ids)}"
    for key, text in _differences(config, written_config(server, config, shape, layer_ids, dtype), ""):
        if not key.endswith(LAYER_IDS) and key not in ("eagle_config", "speculators_config"):  # said above
            yield f"{key}: {text}"
    for where, text in _strings(config, ""):
        if LOCAL_PATH.match(text):
            yield f"{where}: {text!r} is a path of this machine; the server would try to open it"


def written_config(
    server: str, found: Mapping[str, Any], shape: DrafterShape, layer_ids: Sequence[int], dtype: str
) -> dict[str, Any]:
    """The config that eyas writes for this shape; what only names the target is taken over from ``found``."""
    if server == "sglang":
        return sglang_config(shape, layer_ids, dtype)
    written = vllm_config(shape, layer_ids, dtype, "", "")
    verifier = (found.get("speculators_config") or {}).get("verifier")
    if isinstance(verifier, Mapping):
        names, name, ours = verifier.get("architectures"), verifier.get("name_or_path"), {}
        if isinstance(names, list) and all(isinstance(each, str) for each in names):
            ours["architectures"] = names
        if name is None or isinstance(name, str):
            ours["name_or_path"] = name
        written["speculators_config"]["verifier"] |= ours
    return written


def tensor_problems(
    server: str, sizes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, torch.Tensor], dtype: str
) -> Iterator[str]:
    """Faults of the weights against the parameters that the server builds, one line each."""
    outcome = loaders.simulate_load(server, sizes, {name: tuple(t.shape) for name, t in tensors.items()})
    yield from (f"{name}: the loader would skip it in silence" for name in outcome.skipped)
    yield from (f"{name}: missing, it would keep random values" for name in outcome.missing)
    yield from (f"{text}: wrong shape" for text in outcome.misshapen)
    for name, tensor in sorted(tensors.items()):
        expected = {"d2t": torch.int64, "t2d": torch.bool}.get(name, getattr(torch, dtype))
        if tensor.dtype != expected:
            yield f"{name}: {tensor.dtype}, expected {expected}"
        elif tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            yield f"{name}: holds NaN or infinite values"
    if not outcome.missing and not outcome.misshapen and "d2t" in tensors and "t2d" in tensors:
        yield from map_problems(tensors["d2t"], tensors["t2d"])


def value_problems(tensors: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Tensors of the right name, shape and dtype that are not the checkpoint's, one line each."""
    for name, wanted in sorted(expected.items()):
        found = tensors.get(name)
        if found is None or found.shape != wanted.shape or found.dtype != wanted.dtype or torch.equal(found, wanted):
            continue
        share = float((found != wanted).float().mean())
        if not bool(found.any()):
            kind = "all zeros"
        elif torch.equal(found.flatten().sort().values, wanted.flatten().sort().values):
            kind = "the checkpoint's values in another order"
        else:
            kind = "other values"
        whose = "target's embedding" if name == EMBEDDING else "checkpoint's"
        yield f"{name}: {kind}: {share:.2%} are not the {whose}"


def map_problems(d2t_W: torch.Tensor, t2d_V: torch.Tensor) -> Iterator[str]:
    """Faults of the draft vocab maps, one line each."""
    W, V = len(d2t_W), len(t2d_V)
    target_W = torch.arange(W) + d2t_W.long()
    if not bool((target_W.diff() > 0).all()):
        yield "d2t: target ids do not rise strictly, so it is no map of the draft vocab"
    if int(target_W.min()) < 0 or int(target_W.max()) >= V:
        yield f"d2t: target ids {int(target_W.min())} to {int(target_W.max())}, expected 0 to {V - 1}"
        return
    if int(t2d_V.sum()) != W:
        yield f"t2d: {int(t2d_V.sum())} ids are marked, expected {W}"
    elif not bool(t2d_V.bool()[target_W].all()):
        yield "t2d: does not mark the ids that d2t names"


def refuse_unservable(shape: DrafterShape, servers: Sequence[str]) -> None:
    """Refuse shapes that a server would run as something else.

    Raises:
        ExportError: The drafter's width is not the target's, ``fc`` would be passed over, or SGLang would add the
            raw hidden state where the normed one was trained.
    """
    if shape.norm_before_residual and "sglang" in servers:
        raise ExportError(
            "drafter.norm_before_residual true: SGLang's residual is the raw hidden state, so it would run another "
            "model, expected false",
            "set drafter.norm_before_residual to false and train again, or leave sglang out of export.servers",
        )
    if shape.hidden_size != shape.target_hidden_size:
        raise ExportError(
            f"drafter.hidden_size {shape.hidden_size}: servers share the target's embedding of "
            f"{shape.target_hidden_size}, expected the same width",
            "set drafter.hidden_size to 0 and train again",
        )
    if shape.num_aux * shape.target_hidden_size == shape.hidden_size:
        raise ExportError(
            "one aux stream as wide as the drafter: SGLang recognises captured states by their width and "
            "would pass over fc, expected at least two boundaries",
            "name more extract.boundaries",
        )


def _differences(found: Mapping[str, Any], expected: Mapping[str, Any], where: str) -> Iterator[tuple[str, str]]:
    """(dotted key, what is wrong) of every leaf that differs."""
    for key in sorted(set(found) | set(expected)):
        name, theirs, ours = f"{where}.{key}".lstrip("."), found.get(key), expected.get(key)
        if key not in expected:
            yield name, f"{theirs!r}, expected no such key: the server may build another model by it"
        elif isinstance(ours, Mapping) and isinstance(theirs, Mapping) and key not in WHOLE:
            yield from _differences(theirs, ours, name)
        elif not _same(theirs, ours) or key not in found:
            yield name, f"{theirs!r}, expected {ours!r} as trained"


def _same(theirs: Any, ours: Any) -> bool:
    """Equal, and of a kind that a server takes for it: 1.0 is no size and 0 is not false, while 10000 is 10000.0."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        return set(ours) == set(theirs) and all(_same(theirs[key], value) for key, value in ours.items())
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(_same, theirs, ours))
    return theirs == ours and (type(theirs) is type(ours) or (type(ours) is float and type(theirs) is int))


def _strings(value: Any, where: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(item, f"{where}.{key}".lstrip("."))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _strings(item, f"{where}[{index}]")
