"""Writing the export: one folder per server, each read back and checked, the record last.

    models/export/{sglang/, vllm/, export.json}, every server's folder ready for the hub:
    README.md (model card), config.json, model.safetensors

The whole folder appears at once, and only when every check passed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from eyas import fs
from eyas.canonical import digest
from eyas.config import ExportConfig
from eyas.contracts import CheckpointMeta, ExportMeta, TargetIdentity
from eyas.engines import boundaries
from eyas.export import compare
from eyas.export.card import Evidence, model_card
from eyas.export.check import CARD_FILE, CONFIG_FILE, read_checked, refuse_unservable
from eyas.export.config_json import sglang_config, vllm_config
from eyas.export.tensors import WEIGHTS_FILE, server_tensors, write_tensors

if TYPE_CHECKING:
    import torch

    from eyas.drafter.model import Drafter

RECORD_FILE = "export.json"


def export(
    drafter: Drafter,
    meta: CheckpointMeta,
    target: TargetIdentity,
    config: ExportConfig,
    folder: Path,
    evidence: Evidence | None = None,
) -> ExportMeta:
    """Write ``folder`` for every configured server and check what was written.

    Args:
        drafter: The trained drafter, fp32.
        meta: Its checkpoint's record.
        target: The model it drafts for.
        config: Servers, dtype and the name the server knows the target by.
        folder: Replaced as a whole.
        evidence: What the cards say of training and quality; None for a drafter that was not made here.

    Raises:
        ExportError: A server could not load it as what was trained. Nothing is published.
        PlanError: The boundaries cannot be asked of a server for this target.
    """
    shape = meta.shape
    refuse_unservable(shape, config.servers)
    ids = {server: server_layer_ids(server, meta, target) for server in config.servers}
    tensors = compare.drafter_tensors(drafter)
    difference = 0.0
    with fs.atomic_dir(folder) as part:
        for server in config.servers:
            named = server_tensors(server, shape, tensors, config.dtype)
            _write_server(part / server, server, meta, ids[server], named, target, config)
            card = model_card(server, meta, target, ids[server], config, evidence)
            fs.write_text(part / server / CARD_FILE, card)
            found = read_checked(part / server, server, shape, ids[server], config.dtype, named)
            difference = max(difference, compare.require_same_logits(server, shape, found, drafter, config.dtype))
        record = ExportMeta(
            servers=tuple(config.servers),
            boundaries=meta.boundaries,
            layer_ids=ids,
            drafter=digest(meta),
            capture_identity=meta.capture_identity,
            target=meta.target,
            max_logit_difference=difference,
            files=fs.tree_digests(part),
            dtype=config.dtype,
        )
        fs.write_record(part / RECORD_FILE, record)
    return record


def server_layer_ids(server: str, meta: CheckpointMeta, target: TargetIdentity) -> tuple[int, ...]:
    """The checkpoint's boundaries in a server's spelling for this target.

    Raises:
        PlanError: The server cannot be asked for them.
    """
    spelling = "sglang" if server == "sglang" else "vllm"
    return boundaries.layer_ids(meta.boundaries, spelling, model_type=target.model_type, num_layers=target.num_layers)


def _write_server(
    folder: Path,
    server: str,
    meta: CheckpointMeta,
    layer_ids: tuple[int, ...],
    tensors: dict[str, torch.Tensor],
    target: TargetIdentity,
    config: ExportConfig,
) -> None:
    if server == "sglang":
        written = sglang_config(meta.shape, layer_ids, config.dtype)
    else:
        written = vllm_config(meta.shape, layer_ids, config.dtype, config.target_name, target.architecture)
    folder.mkdir(parents=True)
    fs.write_text(folder / CONFIG_FILE, json.dumps(written, indent=2, sort_keys=True) + "\n")
    write_tensors(folder / WEIGHTS_FILE, tensors)
