"""``eyas bench train``: our trainer beside the peers', same model, same real states, same machine, turn by turn.

Every trainer runs in a process of its own on one thread and starts from the same first weights. After a round that
does not count they take turns, one pass over the sequences each, so that what else the machine does meets all
alike. A token is a token of a sequence, trained or not. Of a peer's ways to run on this device the fastest is taken.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from eyas import console, fs
from eyas.contracts import DrafterShape, ShardManifest
from eyas.errors import ConfigError
from eyas.ops.bench.flops import needed_flops, peak_flops
from eyas.ops.bench.train_data import prepare
from eyas.ops.bench.train_ours import make_pack
from eyas.ops.bench.trainers import OURS, PEERS, PeerError, Running, eyas_version, peer_python, started
from eyas.shards.reader import ShardReader

SETTINGS = {
    "ttt_steps": 3,
    "step_decay": 1.0,
    "lr": 1e-4,
    "betas": (0.9, 0.95),
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
}
WAYS = tuple(
    {"attention": attention, "dtype": dtype} for attention in ("sdpa", "eager") for dtype in ("bfloat16", "float32")
)
"""A peer's ways to run on a CPU."""
OUR_WAY = {"attention": "", "dtype": "bfloat16"}
PROBE_STEPS = 3


def parse_peers(text: str) -> list[str]:
    """Names from "speculators,specforge" or "none".

    Raises:
        ConfigError: Another name.
    """
    names = [] if text == "none" else text.split(",")
    for name in names:
        if name not in PEERS:
            raise ConfigError(f"peer {name!r}, expected some of {', '.join(PEERS)}, or none")
    return names


def measure(
    root: Path, scratch: Path, environments: Path, peers: Sequence[str], num_rounds: int, share: float = 0.0
) -> dict[str, Any]:
    """Speed, memory and loss of ours and of each peer on this CPU.

    Args:
        root: A repository with published states.
        scratch: The sequences are written below it.
        environments: Environments of peers, kept between runs.
        peers: To compare with; one that cannot run is left out with a line that says why.
        num_rounds: Passes over the sequences that count.
        share: Of the rows that train; 0: those of the answers.

    Returns:
        ``trainers``: per trainer ``tokens_s``, ``tokens_cpu_s``, ``peak_bytes``, ``loss`` and how it ran;
        ``ratios``: ours over each peer's.
    """
    if num_rounds < 1:
        raise ConfigError(f"--rounds {num_rounds}, expected at least 1")
    if not 0 <= share <= 1:
        raise ConfigError(f"--share {share}, expected 0 to 1")
    shared = prepare(root, scratch, share) | SETTINGS
    console.log(
        f"bench: {len(shared['sample_ids'])} sequences of {shared['sequence_tokens']:,} tokens, "
        f"{shared['trained_share']:.0%} of the rows train"
    )
    pythons, ways = _trainers(peers, environments, shared, scratch)
    with ExitStack() as stack:
        running = [
            stack.enter_context(started(name, pythons[name], shared | ways[name], scratch / "jobs")) for name in pythons
        ]
        trainers = _take_turns(running, len(shared["sample_ids"]), num_rounds)
    flops, peak = _flops_per_token(shared), peak_flops("cpu")
    for name, figures in trainers.items():
        figures["mfu"] = figures["tokens_cpu_s"] * flops / peak["flops"]
        figures |= {key: value for key, value in ways[name].items() if value}
        figures["version"] = PEERS[name].version if name in PEERS else eyas_version()
    return {
        "trainers": trainers,
        "ratios": {
            name: _ratios(trainers[OURS], trainers[name], has_our_loss=PEERS[name].has_our_loss)
            for name in trainers
            if name != OURS
        },
        "needed_flops_per_token": flops,
        "peak": peak,
        "trained_share": shared["trained_share"],
        "sequence_tokens": shared["sequence_tokens"],
        "num_sequences": len(shared["sample_ids"]),
        "num_rounds": num_rounds,
        "shape": shared["shape"],
        "settings": SETTINGS,
    }


def _trainers(
    peers: Sequence[str], environments: Path, shared: dict[str, Any], scratch: Path
) -> tuple[dict[str, Path], dict[str, dict[str, Any]]]:
    """Interpreter and way to run of ours and of each peer that can run here."""
    pythons, ways = {OURS: Path(sys.executable)}, {OURS: OUR_WAY}
    for name in peers:
        try:
            pythons[name] = peer_python(name, environments)
            ways[name] = _fastest_way(name, pythons[name], shared, scratch)
        except PeerError as error:
            console.log(f"bench: {name} is left out: {error.message}")
            pythons.pop(name, None)
    return pythons, ways


def _flops_per_token(shared: dict[str, Any]) -> float:
    """Needed operations of a pass over the sequences; see ``flops``."""
    folder = Path(shared["data"]["eyas"])
    reader = ShardReader(folder / "shards", fs.read_record(ShardManifest, folder / "manifest.json"))
    packs = [make_pack(reader.read(sample_id), shared["ttt_steps"]) for sample_id in shared["sample_ids"]]
    total = sum(needed_flops(DrafterShape(**shared["shape"]), pack) for pack in packs)
    return total / sum(span.end for pack in packs for span in pack.documents)


def _fastest_way(name: str, python: Path, shared: dict[str, Any], scratch: Path) -> dict[str, str]:
    """The way with the fewest processor seconds; ways that fail are passed over."""
    seconds, failed = {}, None
    for number, way in enumerate(WAYS):
        try:
            with started(name, python, shared | way, scratch / f"probe-{number}") as trainer:
                trainer.train(1)
                seconds[number] = trainer.train(PROBE_STEPS)["cpu_s"] / PROBE_STEPS
        except PeerError as error:
            failed = error
            continue
        console.log(f"bench: {name}, {way['attention']} {way['dtype']}: {seconds[number]:.2f} CPU-s a step")
    if not seconds:
        assert failed is not None
        raise failed
    return WAYS[min(seconds, key=lambda number: seconds[number])]


def _take_turns(running: Sequence[Running], num_steps: int, num_rounds: int) -> dict[str, dict[str, Any]]:
    rounds: dict[str, list[dict[str, Any]]] = {trainer.name: [] for trainer in running}
    for number in range(num_rounds + 1):
        for trainer in running if number % 2 else reversed(running):
            rounds[trainer.name].append(trainer.train(num_steps))
        console.log(f"bench: round {number} of {num_rounds}")
    losses = {name: [loss for part in parts for loss in part["losses"]] for name, parts in rounds.items()}
    # where all have one: ours is taken at some steps alone
    common = [at for at in range(len(losses[OURS])) if all(series[at] is not None for series in losses.values())]
    tail = common[len(common) // 2 :]
    return {
        trainer.name: {
            "tokens_cpu_s": statistics.median(p["num_tokens"] / p["cpu_s"] for p in rounds[trainer.name][1:]),
            "tokens_s": statistics.median(p["num_tokens"] / p["wall_s"] for p in rounds[trainer.name][1:]),
            "tokens_cpu_s_of_rounds": [p["num_tokens"] / p["cpu_s"] for p in rounds[trainer.name][1:]],
            "loss": statistics.fmean(losses[trainer.name][at] for at in tail) if tail else None,
            "losses": {str(at): losses[trainer.name][at] for at in common},
            "peak_bytes": trainer.finish(),
        }
        for trainer in running
    }


def _ratios(ours: dict[str, Any], theirs: dict[str, Any], *, has_our_loss: bool) -> dict[str, float | None]:
    """Ours over theirs."""
    keys = ("tokens_cpu_s", "tokens_s", "peak_bytes", *(("loss",) if has_our_loss else ()))
    return {key: ours[key] / theirs[key] if ours[key] is not None else None for key in keys}


def table(figures: dict[str, Any]) -> str:
    """The figures of one device for people."""
    rows = []
    for name, found in figures["trainers"].items():
        ratios = figures["ratios"].get(name, {})
        speed = [f"{found['tokens_cpu_s']:,.0f}", f"{found['mfu']:.1%}"]
        shown = [*speed, f"{found['peak_bytes'] / 2**20:,.0f} MiB", _number(found["loss"])]
        compared = [_number(ratios.get(key)) for key in ("tokens_cpu_s", "peak_bytes", "loss")]
        how = " ".join(str(found[key]) for key in ("version", "attention", "dtype") if found.get(key))
        rows.append((name, how, *shown, *compared))
    head = ("trainer", "as", "tokens/CPU-s", "MFU", "peak", "loss", "ours ÷ speed", "÷ peak", "÷ loss")
    return console.table(rows, head)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
