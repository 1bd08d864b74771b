"""EAGLE-3 checkpoints of three forms, read into our names: SGLang's, speculators', and ``models/drafter``.

    folder (config.json or checkpoint.json, weights) → ForeignDrafter: shape, tensors, draft vocab, layer ids

Nothing is skipped in silence: a tensor that is missing, too many or of another shape than the folder's own
config says is refused with all others of its kind. A ``.bin`` is unpickled as tensors alone.

Letters: V target vocab, W draft vocab, E drafter hidden.
"""

from __future__ import annotations

import json
import pickle
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from eyas import fs
from eyas.canonical import digest
from eyas.contracts import CheckpointMeta, DrafterShape
from eyas.drafter.foreign_config import ConfigFacts, read_config
from eyas.drafter.model import Drafter
from eyas.errors import StoreError, TrainError

EYAS_RECORD, CONFIG = "checkpoint.json", "config.json"
WEIGHTS = ("drafter.safetensors", "model.safetensors", "pytorch_model.bin")
SHARD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.(safetensors|bin)")
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
TARGETS_OWN = ("verifier_lm_head.weight", "verifier_norm.weight")
"""Frozen copies of the target's tensors that older trainers saved along."""
RENAMED = {"layers.0.": "midlayer.", "aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1"} | {
    "aux_norm_high": "fc_norm.2"
}


@dataclass(frozen=True, slots=True)
class ForeignDrafter:
    """A checkpoint by our names. Shapes: ``target_ids_W`` int64 [W]; ``embedding_VE`` [V,E] where it carries one."""

    facts: ConfigFacts
    weights: dict[str, torch.Tensor]
    """Trained weights, float32; without ``lm_head.weight`` where the form leaves the head to the target."""
    target_ids_W: torch.Tensor
    """Target id of every draft id."""
    embedding_VE: torch.Tensor | None

    @property
    def shape(self) -> DrafterShape:
        """Sizes and switches, as its own config states them."""
        return self.facts.shape


def read_checkpoint(folder: Path) -> ForeignDrafter:
    """Read a checkpoint of any of the three forms.

    Raises:
        StoreError: The folder, a file of it, or what its index names is missing or damaged.
        TrainError: It is no EAGLE-3 drafter that eyas can be; every fault is listed.
    """
    folder = Path(folder)
    facts = _read_facts(folder)
    found = _own_names(_read_tensors(folder), folder)
    for name in TARGETS_OWN:
        found.pop(name, None)
    d2t_W, t2d_V = found.pop("d2t", None), found.pop("t2d", None)
    embedding_VE = found.pop(EMBEDDING, None)
    problems = _tensor_problems(facts, found)
    V, E = facts.shape.vocab_size, facts.shape.hidden_size
    if embedding_VE is not None and tuple(embedding_VE.shape) != (V, E):
        problems.append(f"{EMBEDDING}: {list(embedding_VE.shape)}, its config says {[V, E]}")
    target_ids_W, map_problems = _target_ids(facts.shape, d2t_W, t2d_V)
    problems += map_problems
    if problems:
        lines = "\n".join(f"- {problem}" for problem in problems)
        raise TrainError(f"{folder} ({facts.form}) is no EAGLE-3 drafter that can be read:\n{lines}")
    return ForeignDrafter(facts, {name: t.float() for name, t in found.items()}, target_ids_W, embedding_VE)


def content_hash(folder: Path) -> str:
    """SHA-256 over names, sizes and hashes of the files that ``read_checkpoint`` reads.

    Raises:
        StoreError: One of them is missing.
    """
    folder = Path(folder)
    record = EYAS_RECORD if (folder / EYAS_RECORD).is_file() else CONFIG
    paths = [folder / record, *_weight_files(folder)]
    paths += [folder / name for name in INDEXES if (folder / name).is_file()]
    missing = [path for path in paths if not path.is_file()]
    if missing:
        raise StoreError(f"{missing[0]} is missing", f"look at it: `ls -l {folder}`")
    return digest([fs.file_digest(path, folder) for path in sorted(set(paths))])


def _read_facts(folder: Path) -> ConfigFacts:
    if (folder / EYAS_RECORD).is_file():
        meta = fs.read_record(CheckpointMeta, folder / EYAS_RECORD)
        for file in meta.files:
            path = folder / file.path
            if not path.is_file() or fs.hash_file(path) != file.sha256:
                raise StoreError(f"{path} is missing or is not the file its record names")
        return ConfigFacts(form="eyas", shape=meta.shape, spelling="boundaries", layer_ids=meta.boundaries)
    if not (folder / CONFIG).is_file():
        raise StoreError(
            f"{folder} holds neither {CONFIG} nor {EYAS_RECORD}, expected an EAGLE-3 checkpoint",
            f"look at it: `ls -l {folder}`",
        )
    config = fs.read_json(folder / CONFIG)
    if not isinstance(config, dict):
        raise StoreError(f"{folder / CONFIG} is a {type(config).__name__}, expected an object")
    return read_config(config)


def _weight_files(folder: Path) -> list[Path]:
    for name in WEIGHTS[:2]:
        if (folder / name).is_file():
            return [folder / name]
    for name in INDEXES:
        if (folder / name).is_file():
            index = fs.read_json(folder / name)
            try:
                files = sorted(set(index["weight_map"].values()))
            except (KeyError, TypeError, AttributeError) as error:
                raise StoreError(f"{folder / name} is no index of weights: {error!r}") from None
            odd = [file for file in files if not isinstance(file, str) or not SHARD_NAME.fullmatch(file)]
            if odd or not files:
                raise StoreError(
                    f"{folder / name} names {odd[0]!r:.60}, expected files of its folder that end with .safetensors or .bin"
                    if odd
                    else f"{folder / name} names no file"
                )
            return [folder / file for file in files]
    if (folder / WEIGHTS[2]).is_file():
        return [folder / WEIGHTS[2]]
    raise StoreError(f"{folder} holds no weights, expected {', '.join(WEIGHTS)} or an index", f"`ls -l {folder}`")


def _read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in _weight_files(folder):
        try:
            part = load_file(path) if path.suffix == ".safetensors" else _load_pickle(path)
        except FileNotFoundError:
            raise StoreError(f"{path} is missing, but the index names it") from None
        except (SafetensorError, json.JSONDecodeError) as error:
            raise StoreError(f"{path} is no safetensors file: {error}") from None
        tensors |= part
    return tensors


def _load_pickle(path: Path) -> dict[str, torch.Tensor]:
    try:
        value = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except (pickle.UnpicklingError, struct.error, RuntimeError, EOFError, ValueError, OSError) as error:
        first = next(iter(str(error).splitlines()), "")
        raise StoreError(f"{path} is no file of tensors alone: {first}", "convert it to safetensors first") from None
    if not isinstance(value, Mapping) or not all(isinstance(t, torch.Tensor) for t in value.values()):
        raise StoreError(f"{path} holds other things than tensors by name")
    return dict(value)


def _own_names(tensors: Mapping[str, torch.Tensor], folder: Path) -> dict[str, torch.Tensor]:
    named: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        own = name.removeprefix("model.")
        for theirs, ours in RENAMED.items():
            own = own.replace(theirs, ours, 1) if own.startswith(theirs) else own
        if own in named:
            raise TrainError(f"{folder}: two tensors are {own}, one of them {name}")
        named[own] = tensor
    return named


def _tensor_problems(facts: ConfigFacts, found: Mapping[str, torch.Tensor]) -> list[str]:
    """Faults of the trained weights against the folder's own config, one line each."""
    expected = expected_shapes(facts.shape)
    if facts.head_is_targets and HEAD not in found:
        del expected[HEAD]
    problems = [f"{name}: missing, expected {list(size)}" for name, size in expected.items() if name not in found]
    for name, tensor in sorted(found.items()):
        if name not in expected:
            problems.append(f"{name}: unknown, {list(tensor.shape)}; a Llama-type layer has no such tensor")
        elif tuple(tensor.shape) != expected[name]:
            problems.append(f"{name}: {list(tensor.shape)}, its config says {list(expected[name])}")
        elif not tensor.is_floating_point() or not bool(torch.isfinite(tensor.float()).all()):
            problems.append(f"{name}: {tensor.dtype} with values that are not finite, expected finite floats")
    return problems


def expected_shapes(shape: DrafterShape) -> dict[str, tuple[int, ...]]:
    """Trained tensors of a drafter and their shapes."""
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in Drafter(shape).named_parameters()}


def _target_ids(
    shape: DrafterShape, d2t_W: torch.Tensor | None, t2d_V: torch.Tensor | None
) -> tuple[torch.Tensor, list[str]]:
    """Target id of every draft id, and what is wrong with the maps."""
    V, W = shape.vocab_size, shape.draft_vocab_size
    plain_W = torch.arange(W)
    if d2t_W is None:
        return plain_W, [] if W == V else [f"d2t: missing, expected offsets of {W:,} draft ids into {V:,} target ids"]
    if tuple(d2t_W.shape) != (W,) or d2t_W.is_floating_point():
        return plain_W, [f"d2t: {d2t_W.dtype} {list(d2t_W.shape)}, expected integers {[W]}"]
    ids_W = plain_W + d2t_W.long()
    if int(ids_W.min()) < 0 or int(ids_W.max()) >= V or len(ids_W.unique()) != W:
        return plain_W, [f"d2t: names target ids {int(ids_W.min())} to {int(ids_W.max())}, expected {W:,} different "
                         f"ones from 0 to {V - 1}"]  # fmt: skip
    if t2d_V is not None:
        marked_V = torch.zeros(V, dtype=torch.bool)
        marked_V[ids_W] = True
        if tuple(t2d_V.shape) != (V,) or not torch.equal(t2d_V.bool(), marked_V):
            return plain_W, [f"t2d: {list(t2d_V.shape)}, does not mark the ids that d2t names among {V:,}"]
    return ids_W, []
