"""``reports/metrics.json``: the few figures by which runs are compared, under names short enough for a table of DVC's.

Only what is deterministic is here: DVC hashes the file, and a time would make every run another one.
"""

from __future__ import annotations

import math

from eyas.report.figures import other_sets
from eyas.report.sources import Sources

NUM_ALPHAS = 3
"""Columns a table bears; the page has all."""
CURVES = {"loss/step_0": "loss", "alpha/step_0": "agree", "validation/tau": "tau_val"}
"""Where these curves end, under names of their own."""
FIGURES = ("tau", "tau_low", "tau_high", "tau_loop_free", "tau_untrained")


def headline(sources: Sources) -> dict[str, float | bool]:
    """Figures by name; what was not measured is left out."""
    found: dict[str, float | bool | None] = {}
    if sources.acceptance is not None:
        acceptance = sources.acceptance
        found |= {name: acceptance.number(name) for name in FIGURES}
        found |= {f"alpha_{k}": alpha for k, alpha in enumerate(acceptance.numbers("alpha")[:NUM_ALPHAS], start=1)}
        found |= {f"tau_{name}": value for name, value in other_sets(acceptance).items()}
        found |= {"loops": acceptance.number("loop_share"), "lossless": acceptance.flag("lossless")}
    found |= {
        CURVES[curve.name]: curve.points[-1][1] for curve in sources.curves if curve.name in CURVES and curve.points
    }
    if sources.tokens is not None:
        found |= {"samples": sources.tokens.num_samples, "tokens": sources.tokens.num_tokens}
    if sources.manifest is not None:
        found["stored_gb"] = round(sources.manifest.stored_bytes / 1e9, 3)
    return {name: value for name, value in found.items() if value is not None and math.isfinite(value)}
