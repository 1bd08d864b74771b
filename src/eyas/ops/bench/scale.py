"""What scaling out gives and costs: ``python -m eyas.ops.bench.scale``; ``reports/bench/scale.json``.

The report is one object whose keys the parts fill in; a part that is measured alone leaves the others' keys as they are.
With ``--engine`` it measures engines side by side on this machine's GPUs instead, under the key ``engines``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eyas import fs
from eyas.ops.bench import scale_engines

REPORT = Path("reports/bench/scale.json")
Part = Callable[[argparse.Namespace], dict[str, Any]]
"""Measures, below ``args.work``; gives keys of the report."""


def _ray_hashes(args: argparse.Namespace) -> dict[str, Any]:
    from eyas.ops.bench import scale_ray

    return scale_ray.hashes(args.work / "hashes", Path.cwd())


def _ray_kills(args: argparse.Namespace) -> dict[str, Any]:
    from eyas.ops.bench import scale_ray

    found: dict[str, Any] = {}
    for found in scale_ray.kills(args.work / "kills", args.runs, args.seed):
        write(found)  # many minutes: what was done counts
    return found


def _ray_overhead(args: argparse.Namespace) -> dict[str, Any]:
    from eyas.ops.bench import scale_overhead

    found: dict[str, Any] = {}
    for found in scale_overhead.overhead(args.work / "overhead", Path.cwd(), args.overhead_tokens, args.rounds):
        write(found)
    return found


def _planner(args: argparse.Namespace) -> dict[str, Any]:
    from eyas.ops.bench import scale_plan

    return scale_plan.measure(args.work / "planner", Path("params.yaml"))


def _simulation(args: argparse.Namespace) -> dict[str, Any]:
    from eyas.ops.simulate.runs import judge
    from eyas.ops.simulate.text import judged_json

    return {"simulation": judged_json(judge(args.smaller, args.larger))}


PARTS: dict[str, Part] = {
    "simulation": _simulation,
    "planner": _planner,
    "hashes": _ray_hashes,
    "kills": _ray_kills,
    "overhead": _ray_overhead,
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="scratch folder on the disk to measure; 70 GB for 8b")
    parser.add_argument("--parts", default=",".join(PARTS), help="of the report, by comma")
    parser.add_argument("--runs", type=int, default=50, help="of part kills")
    parser.add_argument("--seed", type=int, default=0, help="of part kills")
    parser.add_argument("--overhead-tokens", type=int, default=120_000, help="of each turn of part overhead")
    parser.add_argument("--rounds", type=int, default=3, help="of part overhead, two turns each")
    smaller, larger = Path(".eyas/smoke/reports"), Path("reports")
    parser.add_argument("--smaller", nargs="+", type=Path, default=[smaller], help="of part simulation: runs known")
    parser.add_argument("--larger", type=Path, default=larger, help="of part simulation: the run that is predicted")
    scale_engines.add_arguments(parser)
    args = parser.parse_args()
    args.work = args.work.resolve()
    if args.engine:
        found: dict[str, Any] = {"engines": {args.device: scale_engines.measure(args)}}
        write(found)
    else:
        found = {}
        for name in args.parts.split(","):
            part = PARTS[name](args)
            write(part)
            found |= part
    sys.stdout.write(json.dumps(found, indent=1) + "\n")


def write(found: dict[str, Any]) -> None:
    """Put keys into the report; those of other parts, and of other devices, stay."""
    known = fs.read_json(REPORT) if REPORT.exists() else {}
    if "engines" in found:
        found = found | {"engines": known.get("engines", {}) | found["engines"]}
    fs.write_text(REPORT, json.dumps(known | found, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
