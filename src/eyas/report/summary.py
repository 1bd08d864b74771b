"""The last results on a terminal: acceptance per prompt set, and where things are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eyas import console
from eyas.report.figures import Figures
from eyas.report.sources import Sources, gather

NOT_MEASURED = "not measured"


def summary_values(root: Path) -> dict[str, Any]:
    """The summary as plain values for JSON; keys are missing where nothing was measured."""
    sources = gather(root)
    values: dict[str, Any] = {
        stage: {"wall_s": run["wall_s"], "cpu_s": run["cpu_s"]} for stage, run in sources.runs.items()
    }
    summary: dict[str, Any] = {"stages": values}
    if (acceptance := sources.acceptance) is not None:
        summary |= {
            "tau": acceptance.number("tau"),
            "tau_loop_free": acceptance.number("tau_loop_free"),
            "tau_by_set": acceptance.group("tau_by_set").values,
            "tau_untrained": acceptance.number("tau_untrained"),
            "lossless": acceptance.flag("lossless"),
        }
    return summary


def summary_text(root: Path) -> str:
    """The summary as a table with a heading sentence."""
    sources = gather(root)
    parts = [_acceptance(sources), _stages(sources), _places(root)]
    return "\n\n".join(part for part in parts if part)


def number(value: float | None) -> str:
    """A tau or share with three decimals."""
    return NOT_MEASURED if value is None else f"{value:.3f}"


def share(value: float | None) -> str:
    """A share as a percentage."""
    return NOT_MEASURED if value is None else f"{value:.1%}"


def count(value: float | None) -> str:
    """A whole number."""
    return NOT_MEASURED if value is None else f"{value:,.0f}"


def span(entry: Figures) -> str:
    """The interval of a prompt set's tau."""
    low, high = entry.number("tau_low"), entry.number("tau_high")
    return NOT_MEASURED if low is None or high is None else f"{low:.3f} to {high:.3f}"


def _acceptance(sources: Sources) -> str:
    acceptance = sources.acceptance
    if acceptance is None:
        return "acceptance: not measured yet; `make evaluate` measures it"
    rows = [
        (
            name,
            number(entry.number("tau")),
            span(entry),
            number(entry.number("tau_loop_free")),
            share(entry.number("loop_share")),
            " ".join(f"{alpha:.2f}" for alpha in entry.numbers("alpha")),
            count(entry.number("num_documents")),
        )
        for name, entry in acceptance.groups("sets").items()
    ]
    rows.append(("untrained drafter", number(acceptance.number("tau_untrained")), "", "", "", "", ""))
    headers = ("prompt set", "tau", "95 % interval", "loop-free", "loops", "alpha", "documents")
    lossless = "equals" if acceptance.flag("lossless") else "DIFFERS FROM"
    num_prompts = sum(check.number("num_prompts") or 0 for check in acceptance.groups("decode").values())
    verdict = (
        f"tau = tokens per forward of the target, bonus included, chain of {count(acceptance.number('chain_length'))}; "
        f"speculative output {lossless} plain greedy output ({num_prompts:,.0f} prompts)"
    )
    return f"{console.table(rows, headers)}\n{verdict}"


def _stages(sources: Sources) -> str:
    rows = []
    for stage, run in sources.runs.items():
        speed = sources.throughput.get(stage, {})
        rate = f"{speed['tokens_per_second']:,.0f} tok/s" if speed else ""
        cpu_s = console.human_seconds(run["cpu_s"])
        memory = console.human_bytes(run["peak_rss_bytes"])
        rows.append((stage, console.human_seconds(run["wall_s"]), cpu_s, memory, rate))
    return console.table(rows, ("stage", "time", "CPU time", "peak memory", "rate")) if rows else ""


def _places(root: Path) -> str:
    places = (
        ("report", "reports/index.html"),
        ("drafter", "models/drafter"),
        ("export for SGLang and vLLM", "models/export"),
        ("hidden states", "data/hidden_states"),
    )
    return console.table([(what, root / path) for what, path in places if (root / path).exists()])
