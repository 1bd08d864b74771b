"""``eyas bench train --device cuda``: our step beside speculators' fast path on one GPU, turn by turn.

Both train a drafter for a target of Llama-3.1-8B's shape from the same first weights on the same packs of made-up
states, each in a process of its own, with the packs on the device. A round that does not count compiles. A token is
a token of a pack, trained or not; peak memory is that of tensors on the device.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from eyas import config, console, fs
from eyas.canonical import to_plain
from eyas.contracts import DrafterShape
from eyas.errors import ConfigError
from eyas.ops.bench.flops import needed_flops, peak_flops
from eyas.ops.bench.train_device_ours import make_pack
from eyas.ops.bench.train_step import SIZES, make_documents, make_drafter
from eyas.ops.bench.trainers import OURS, PEERS, PeerError, Running, eyas_version, peer_python, started

PEER = "speculators"
TTT_STEPS, SHARES = (3, 7), (0.75, 0.3)
STEPS_PER_ORDER = 30
"""Steps that follow each other: a training waits for its device at log lines and checkpoints, not at every step."""
SETTINGS = {"step_decay": 1.0, "lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.0, "max_grad_norm": 1.0}
BOUNDARIES = (2, 16, 29)
FAST = {"attention": "simple_flex_attention", "loss_implementation": "fused"}
"""The peer's way on CUDA."""
PLAIN = {"attention": "sdpa", "loss_implementation": "eager"}
Record = Callable[[dict[str, Any]], None]


def measure(
    scratch: Path, environments: Path, peers: Sequence[str], num_rounds: int, record: Record, device: str = "cuda"
) -> dict[str, Any]:
    """Speed, memory, loss and MFU of ours and of speculators on a device.

    Args:
        scratch: Weights, packs and jobs go below it: 7 GB.
        environments: Environments of peers, kept between runs.
        peers: Of them speculators is measured; one that cannot run is left out with a line that says why.
        num_rounds: Rounds that count, of ``STEPS_PER_ORDER`` steps per pack.
        record: Gets what is known after each number of TTT steps.
        device: ``cuda``; tests take ``cpu``.

    Raises:
        ConfigError: There is no such device.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device {device}, but torch {torch.__version__} finds none", "`make doctor` shows devices")
    if num_rounds < 1:
        raise ConfigError(f"--rounds {num_rounds}, expected at least 1")
    pythons = {OURS: Path(sys.executable)}
    if PEER in peers:
        try:
            pythons[PEER] = peer_python(PEER, environments)
        except PeerError as error:
            console.log(f"bench: {PEER} is left out: {error.message}")
    shared = _prepare(scratch, device)
    peak = peak_flops(device)
    found: dict[str, Any] = {
        "machine": config.machine() | {"torch": torch.__version__},
        "peak": peak,
        "shape": shared["shape"],
        "settings": SETTINGS,
        "tokens": SIZES["tokens"],
        "num_rounds": num_rounds,
        "cases": [],
    }
    for ttt_steps in TTT_STEPS:
        found["cases"] += _cases(shared | {"ttt_steps": ttt_steps}, pythons, scratch, num_rounds, peak["flops"])
        record(found)
    return found


def _prepare(scratch: Path, device: str) -> dict[str, Any]:
    """First weights, the target and the packs in files; what all jobs share."""
    from safetensors.torch import save_file

    scratch.mkdir(parents=True, exist_ok=True)
    sizes = argparse.Namespace(**SIZES)
    drafter = make_drafter(sizes)
    with torch.no_grad():
        drafter.lm_head.weight.copy_(drafter.lm_head.weight.bfloat16())  # as the target's head is stored
    V, D, W = sizes.vocab, sizes.hidden, sizes.draft_vocab
    head_VD = torch.randn(V, D, dtype=torch.bfloat16) * 0.02
    head_VD[:W] = drafter.lm_head.weight.detach()
    embedding_VD, t2d_V = drafter.embed_tokens.get_buffer("weight"), torch.arange(V) < W
    weights = {name: parameter.detach().contiguous() for name, parameter in drafter.named_parameters()}
    save_file(weights, scratch / "weights.safetensors")
    ends = {"embedding": embedding_VD, "head": head_VD, "d2t": torch.zeros(W, dtype=torch.int64), "t2d": t2d_V}
    save_file(ends, scratch / "ends.safetensors")
    _write_target(scratch / "target", drafter.shape, embedding_VD, head_VD)
    _write_maps(scratch, ends["d2t"], t2d_V)
    packs = []
    for number, share in enumerate(SHARES):
        documents = make_documents(sizes, share)
        tensors = {name: torch.cat([getattr(d, name) for d in documents]) for name in ("ids_T", "mask_T", "aux_TAD")}
        # of size 1, as a final norm leaves them: the peer's norm changes them no more
        last_TD = torch.cat([F.rms_norm(d.last_TD.float(), (D,)).bfloat16() for d in documents])
        lengths_D = torch.tensor([len(d.ids_T) for d in documents])
        packs.append(str(scratch / f"pack-{number}.safetensors"))
        save_file({**tensors, "last_TD": last_TD, "lengths_D": lengths_D}, packs[-1])
    shape = to_plain(drafter.shape)
    del drafter, weights, ends
    gc.collect()
    return {
        **SETTINGS,
        **(FAST if device == "cuda" else PLAIN),
        "device": device,
        "shape": shape,
        "target": str(scratch / "target"),
        "boundaries": list(BOUNDARIES),
        "weights": str(scratch / "weights.safetensors"),
        "ends": str(scratch / "ends.safetensors"),
        "data": {PEER: str(scratch)},
        "packs": packs,
        "steps_per_order": STEPS_PER_ORDER,
    }


def _write_target(folder: Path, shape: DrafterShape, embedding_VD: torch.Tensor, head_VD: torch.Tensor) -> None:
    """What a peer reads of a target: its config, both ends and the norm between."""
    from safetensors.torch import save_file

    folder.mkdir()
    ends = {
        "model.embed_tokens.weight": embedding_VD.contiguous(),
        "lm_head.weight": head_VD,
        "model.norm.weight": torch.ones(shape.hidden_size, dtype=torch.bfloat16),
    }
    save_file(ends, folder / "model.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(ends, "model.safetensors")}
    fs.write_text(folder / "model.safetensors.index.json", json.dumps(index))
    described = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 32,
        "tie_word_embeddings": False,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": shape.rms_norm_eps,
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
    }
    fs.write_text(folder / "config.json", json.dumps(described))


def _write_maps(folder: Path, d2t_W: torch.Tensor, t2d_V: torch.Tensor) -> None:
    import numpy as np

    np.save(folder / "d2t.npy", d2t_W.numpy())
    np.save(folder / "t2d.npy", t2d_V.numpy())


def _cases(
    job: dict[str, Any], pythons: dict[str, Path], scratch: Path, num_rounds: int, peak: float
) -> list[dict[str, Any]]:
    """One per share of trained rows."""
    ttt_steps = job["ttt_steps"]
    with ExitStack() as stack:
        running = [
            stack.enter_context(started(name, python, job, scratch / f"jobs-{ttt_steps}", device=True))
            for name, python in pythons.items()
        ]
        answers = _take_turns(running, len(SHARES), num_rounds)
    cases = []
    for number, share in enumerate(SHARES):
        pack = make_pack(job["packs"][number], ttt_steps)
        flops = needed_flops(DrafterShape(**job["shape"]), pack)
        trainers = {name: _figures(name, parts[number], flops / peak) for name, parts in answers.items()}
        ratios = {
            name: {key: trainers[OURS][key] / trainers[name][key] for key in RATIOS if trainers[name][key]}
            for name in trainers
            if name != OURS
        }
        cases.append(
            {
                "ttt_steps": ttt_steps,
                "trained_share": share,
                "needed_flops": flops,
                "trainers": trainers,
                "ratios": ratios,
            }
        )
    return cases


RATIOS = ("tokens_s", "tokens_cpu_s", "peak_bytes", "loss")


def _take_turns(running: Sequence[Running], num_packs: int, num_rounds: int) -> dict[str, list[list[dict[str, Any]]]]:
    """Per trainer and pack the answers of every round, the first not counted."""
    answers: dict[str, list[list[dict[str, Any]]]] = {t.name: [[] for _ in range(num_packs)] for t in running}
    for number in range(num_rounds + 1):
        for trainer in running if number % 2 else reversed(running):
            for pack in range(num_packs):
                answers[trainer.name][pack].append(trainer.train(STEPS_PER_ORDER))
        console.log(f"bench: round {number} of {num_rounds}")
    return answers


def _figures(name: str, answers: Sequence[dict[str, Any]], least_s: float) -> dict[str, Any]:
    """What the machines keep of one trainer; ``least_s``: seconds of the needed work at the device's peak."""
    counted = answers[1:]
    step_s = statistics.median(a["wall_s"] / STEPS_PER_ORDER for a in counted)
    losses = [a["losses"][-1] for a in answers]
    return {
        "version": PEERS[name].version if name in PEERS else eyas_version(),
        "device": counted[-1].get("device", "cpu"),
        "step_ms": step_s * 1e3,
        "step_ms_of_rounds": [a["wall_s"] / STEPS_PER_ORDER * 1e3 for a in counted],
        "tokens_s": statistics.median(a["num_tokens"] / a["wall_s"] for a in counted),
        "tokens_cpu_s": statistics.median(a["num_tokens"] / a["cpu_s"] for a in counted),
        "peak_bytes": max(a.get("device_peak_bytes", 0) for a in counted),
        "loss": losses[-1],
        "losses": losses,
        "mfu": least_s / step_s,
    }


def table(found: dict[str, Any]) -> str:
    """The cases for people."""
    rows = []
    for case in found["cases"]:
        for name, one in case["trainers"].items():
            ratios = case["ratios"].get(name, {})
            shown = (f"{one['step_ms']:.1f}", f"{one['tokens_s']:,.0f}", f"{one['peak_bytes'] / 2**30:.2f} GiB")
            compared = (f"{ratios[key]:.3f}" if key in ratios else "" for key in ("tokens_s", "peak_bytes", "loss"))
            case_name = (case["ttt_steps"], f"{case['trained_share']:.0%}", f"{name} {one['version']}")
            rows.append((*case_name, *shown, f"{one['mfu']:.1%}", f"{one['loss']:.4f}", *compared))
    head = ("TTT", "rows", "trainer", "ms", "tokens/s", "peak", "MFU", "loss", "ours ÷ speed", "÷ peak", "÷ loss")
    return console.table(rows, head)
