"""The stages in order: what each wrote, how large, under which hash, how long it took and what bounded it."""

from __future__ import annotations

from collections.abc import Iterator

from eyas.report.charts import meter, split_bar
from eyas.report.figures import Figures
from eyas.report.html import Markup, code, note, nothing, section, short_hash, subtitle, table, text
from eyas.report.parts.words import count, seconds, share, size
from eyas.report.sources import STAGES, Output, Sources

PURPOSE = {
    "fetch": "the target, by source and hash",
    "ingest": "conversations, deduplicated, split",
    "respond": "assistant turns by the target",
    "tokenize": "ids, loss masks, draft vocab",
    "plan": "which sample goes where",
    "extract": "hidden states into shards",
    "train": "the drafter",
    "evaluate": "acceptance",
    "export": "for SGLang and vLLM",
}


def pipeline(sources: Sources) -> str:
    """The section."""
    return section(
        "pipeline",
        "Pipeline",
        f'<ol class="stages">{"".join(_stage(sources, stage) for stage in PURPOSE)}</ol>',
        *_speed(sources),
        lead="What each stage wrote, its size and the first digits of its MD5 in dvc.lock.",
    )


def _stage(sources: Sources, stage: str) -> str:
    outputs = [output for output in sources.outputs if output.stage == stage]
    run = Figures.of(sources.runs.get(stage))
    time = seconds(run.number("wall_s"))
    rows = "".join(_output(output) for output in outputs) or '<li class="muted">nothing recorded</li>'
    return (
        f"<li><h3>{STAGES.index(stage) + 1}. {text(stage)}{f'<span>{text(time)}</span>' if time else ''}</h3>"
        f'<p class="muted">{text(PURPOSE[stage])}</p><ul>{rows}</ul></li>'
    )


def _output(output: Output) -> str:
    files = f", {output.num_files:,} files" if output.num_files > 1 else ""
    return f"<li>{code(output.path)}<span>{text(size(output.size_bytes))}{files}</span>{short_hash(output.md5)}</li>"


def _speed(sources: Sources) -> Iterator[str]:
    runs = {stage: Figures.of(run) for stage, run in sources.runs.items()}
    if not runs:
        yield subtitle("Time and throughput") + nothing()
        return
    yield subtitle("Time and throughput")
    yield split_bar(
        "Wall time by stage",
        [(s, run.number("wall_s") or 0, seconds(run.number("wall_s")) or "") for s, run in runs.items()],
    )
    rows = [_speed_row(sources, stage, run) for stage, run in runs.items()]
    headers = ("stage", "time", "CPU time", "tokens", "tokens / s", "tokens / CPU-s", "of its bound", "", "peak memory")
    yield table("Time and throughput", headers, rows, numeric=(1, 2, 3, 4, 5, 8))
    yield note(
        "The bound of a stage is the first that it would hit: the processor (CPU time by time of all cores) or the disk "
        "(bytes of hidden states per second by the disk's own speed, where make bench-store measured that). On a GPU the "
        "processor waits, and its share says so. Loading models is part of the time, not of tokens / s."
    )


def _speed_row(sources: Sources, stage: str, run: Figures) -> tuple[object, ...]:
    speed = Figures.of(sources.throughput.get(stage))
    bound = max(_bounds(sources, stage, run), default=None)
    words = None if bound is None else f"{bound[0]:.0%} of {bound[1]}"
    return (
        stage,
        seconds(run.number("wall_s")),
        seconds(run.number("cpu_s")),
        count(speed.number("tokens")) or "",
        count(speed.number("tokens_per_second")) or "",
        count(speed.number("tokens_per_cpu_second")) or "",
        words,
        "" if bound is None else Markup(meter(bound[0], f"{stage}: {words}")),
        _memory(run),
    )


def _bounds(sources: Sources, stage: str, run: Figures) -> Iterator[tuple[float, str]]:
    """Share of each bound that is known, and its name."""
    cores, wall_s, cpu_s = run.group("machine").number("cores"), run.number("wall_s"), run.number("cpu_s")
    if cores and wall_s and cpu_s is not None:
        yield cpu_s / (wall_s * cores), f"{cores:,.0f} cores"
    disk, manifest = sources.store_bench.number("disk_gigabytes_per_s"), sources.manifest
    speed = Figures.of(sources.throughput.get(stage)).number("tokens_per_second")
    if disk and manifest and speed and stage in ("extract", "train"):
        bytes_per_token = manifest.stored_bytes / max(manifest.num_stored_tokens, 1)
        yield speed * bytes_per_token / (disk * 1e9), f"disk at {disk:.2f} GB/s"


def _memory(run: Figures) -> str | None:
    peak, whole = run.number("peak_rss_bytes"), run.group("machine").number("memory_bytes")
    of = f" ({share(peak / whole)})" if peak is not None and whole and whole > peak else ""
    return None if peak is None else f"{size(peak)}{of}"
