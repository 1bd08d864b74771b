"""``eyas parity``: the same samples through several engines, each beside transformers in float32; ``reports/parity.json``.

In bf16 a single row says little: two right engines differ there. So each stream is judged by its mean over all rows,
and by transformers' own bf16 (engine ``hf``): an engine may be no further from float32 than 1.1 times that.

Letters: T tokens of a sample, N streams (aux boundaries, then last), D target hidden size, V target vocab.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eyas import config, console, fs
from eyas.config import resolve_boundaries
from eyas.contracts import TargetIdentity, TokenSample
from eyas.engines.base import CapturedSample, Engine
from eyas.engines.registry import make_engine
from eyas.engines.taps import Taps, text_model
from eyas.errors import ConfigError
from eyas.target.load import load_model, read_ends
from eyas.target.locate import ensure

REPORT = Path("reports/parity.json")
YARDSTICK, FACTOR = "hf", 1.1
SHORTEST, LONGEST = 10, 1500
BATCH = 8
SEED = 0


@dataclass(slots=True)
class RowErrors:
    """Sums over the rows of one stream, each beside what it should be."""

    num_rows: int = 0
    error: float = 0.0
    cosine: float = 0.0
    max_abs: float = 0.0
    worst: tuple[float, str, int] = (0.0, "", 0)
    same_top1: int = 0

    def add(self, name: str, found_TD: torch.Tensor, exact_TD: torch.Tensor) -> None:
        """Take one sample."""
        error_T = (found_TD - exact_TD).norm(dim=-1) / exact_TD.norm(dim=-1)
        row = int(error_T.argmax())
        self.num_rows += len(error_T)
        self.error += float(error_T.double().sum())
        self.cosine += float(torch.cosine_similarity(found_TD, exact_TD, dim=-1).double().sum())
        self.max_abs = max(self.max_abs, float((found_TD - exact_TD).abs().max()))
        self.worst = max(self.worst, (float(error_T[row]), name, row))

    def figures(self) -> dict[str, Any]:
        """Errors relative to each row's length."""
        return {
            "rows": self.num_rows,
            "mean_relative_error": self.error / self.num_rows,
            "worst_relative_error": self.worst[0],
            "worst_sample": self.worst[1],
            "worst_row": self.worst[2],
            "mean_cosine": self.cosine / self.num_rows,
            "max_abs": self.max_abs,
        }


def run_parity(root: Path, engines: Sequence[str], num_samples: int) -> dict[str, Any]:
    """Capture made-up prompts of 10 to 1,500 tokens with each engine; writes ``REPORT``.

    Args:
        root: A repository with a fetched target that fits into memory in float32.
        engines: Names; ``hf`` is run whether named or not.
        num_samples: Prompts, two or more.

    Raises:
        ConfigError: An engine has no states to compare.
    """
    if not set(engines) <= {"hf", "sglang", "vllm"} or num_samples < 2:
        raise ConfigError(
            f"parity of {', '.join(engines)} on {num_samples} samples, expected hf, sglang, vllm and 2 or more"
        )
    params = config.load(root / config.PARAMS_PATH)
    target = fs.read_record(TargetIdentity, root / "models/target.json")
    folder = ensure(target, params.target)
    boundaries = resolve_boundaries(params.extract, target.num_layers)
    samples = make_prompts(target, num_samples)
    device, trusted = params.target.device, params.target.trust_remote_code
    exact = dict(exact_streams(folder, boundaries, samples, device, trusted))
    head_VD = read_ends(folder).head_VD.float()
    names = [*(f"aux {boundary}" for boundary in boundaries), "last"]
    found: dict[str, Any] = {}
    for name in (YARDSTICK, *(each for each in engines if each != YARDSTICK)):
        options = params.extract.engine_options if params.extract.engine == name else {}
        engine = make_engine(
            name, target=target, folder=folder, boundaries=boundaries, dtype=params.target.dtype,
            device=device, options=options, trust_remote_code=trusted,
        )  # fmt: skip
        found[name] = _measure(engine, samples, exact, head_VD, names)
        console.log(f"parity: {name} done")
    figures = _judge(found) | {
        "dtype": params.target.dtype, "num_samples": num_samples, "tolerance": FACTOR, "machine": config.machine(),
    }  # fmt: skip
    fs.write_text(root / REPORT, json.dumps(figures, indent=2, sort_keys=True) + "\n")
    return figures


def make_prompts(target: TargetIdentity, num_samples: int) -> list[TokenSample]:
    """Random ids; lengths spread over the range's orders of magnitude, both ends among them."""
    rng = random.Random(SEED)  # noqa: S311 - the same samples each time
    longest = min(LONGEST, target.max_position_embeddings - 8)
    spread = longest / SHORTEST
    lengths = [SHORTEST, longest, *(round(SHORTEST * spread ** rng.random()) for _ in range(num_samples - 2))]
    return [
        TokenSample(
            sample_id=f"p{index:03d}", conversation_id=f"p{index:03d}", source="random", split="train", variant="given",
            input_ids=tuple(rng.randrange(3, target.vocab_size) for _ in range(length)), loss_mask=(1,) * length,
        )
        for index, length in enumerate(lengths)
    ]  # fmt: skip


@torch.no_grad()
def exact_streams(
    folder: Path, boundaries: tuple[int, ...], samples: Sequence[TokenSample], device: str, trust_remote_code: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Streams [T, N, D] of each sample alone, by transformers in float32."""
    base = text_model(load_model(folder, "float32", device, trust_remote_code))
    taps = Taps(base, boundaries)
    for sample in samples:
        with taps.listening():
            output = base(input_ids=torch.tensor([sample.input_ids], device=device), use_cache=False)
        yield sample.sample_id, torch.cat([taps.take()[0], output.last_hidden_state[0][:, None]], dim=1).float().cpu()


def _measure(
    engine: Engine, samples: Sequence[TokenSample], exact: dict[str, torch.Tensor], head_VD: torch.Tensor,
    names: Sequence[str],
) -> dict[str, Any]:  # fmt: skip
    errors, missing = [RowErrors() for _ in names], {sample.sample_id for sample in samples}
    hits = 0
    engine.announce(samples)
    engine.open()
    try:
        batch = 1 if engine.describe().name == YARDSTICK else BATCH  # padded batches are transformers' own matter
        for begin in range(0, len(samples), batch):
            for got in engine.capture(samples[begin : begin + batch]):
                exact_TND = exact[got.sample_id]
                found_TND = streams(got)
                for index, stream in enumerate(errors):
                    stream.add(got.sample_id, found_TND[:, index], exact_TND[:, index])
                first_T, second_T = (
                    (rows_TD @ head_VD.T).argmax(-1) for rows_TD in (found_TND[:, -1], exact_TND[:, -1])
                )
                hits += int((first_T == second_T).sum())
                missing.remove(got.sample_id)
    finally:
        engine.close()
    assert not missing, "an engine that ends without an error gives every sample"
    figures = {name: stream.figures() for name, stream in zip(names, errors, strict=True)}
    return {
        "version": engine.describe().version,
        "streams": figures,
        "top1_agreement": hits / errors[-1].num_rows,
    }


def streams(got: CapturedSample) -> torch.Tensor:
    """All streams of a sample, [T, N, D], float32."""
    return torch.cat([got.aux_TAD, got.last_TD[:, None]], dim=1).float()


def _judge(found: dict[str, Any]) -> dict[str, Any]:
    """The verdict of each stream by the yardstick's."""
    right = True
    for facts in found.values():
        for stream, figures in facts["streams"].items():
            limit = found[YARDSTICK]["streams"][stream]["mean_relative_error"]
            figures["by_hf"] = figures["mean_relative_error"] / limit if limit else 1.0
            figures["right"] = figures["by_hf"] <= FACTOR
            right = right and figures["right"]
    return {"engines": found, "right": right}


def parity_table(figures: dict[str, Any]) -> str:
    """The figures for people."""
    rows = [
        (
            engine, stream, f"{f['mean_relative_error']:.2e}", f"{f['by_hf']:.3f}", f"{f['worst_relative_error']:.2e}",
            f"{f['worst_sample']}:{f['worst_row']}", f"{f['max_abs']:.3g}", f"{f['mean_cosine']:.6f}",
            f"{facts['top1_agreement']:.2%}" if stream == "last" else "", "yes" if f["right"] else "NO",
        )
        for engine, facts in figures["engines"].items()
        for stream, f in facts["streams"].items()
    ]  # fmt: skip
    heads = ("engine", "stream", "mean", "by hf", "worst", "sample:row", "max abs", "cosine", "top-1", "right")
    return console.table(rows, heads)
