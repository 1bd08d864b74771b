"""``eyas export-states`` and ``eyas import-states``: the published set to and from other projects' layouts.

An import is an extraction whose engine reads files: same plan, spool, checks, codec and publication. It writes
``tokens/``, ``hidden_states/``, ``hidden_states.json`` and, last, ``import.json`` into a folder of its own.

Letters: T tokens of a sample, D target hidden size.
"""

from __future__ import annotations

import dataclasses
import functools
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from eyas import config, console, fs
from eyas.canonical import digest
from eyas.config import Params
from eyas.contracts import SCHEMA_VERSION, FinalHidden, ShardManifest, StoredSample, TargetIdentity, TokenSample
from eyas.engines.boundaries import layer_ids
from eyas.engines.loop import ExtractLimits, ExtractResult, extract
from eyas.errors import CaptureError, ConfigError, DataError
from eyas.ops.exchange.engine import ENGINE_NAME, ENGINE_VERSION, ImportEngine
from eyas.ops.exchange.gate import check_room, folder_need, log_room, reclaim
from eyas.ops.exchange.hold_out import hold_out
from eyas.ops.exchange.stage import keep_from_git
from eyas.plan.build import build_plan
from eyas.plan.cache import copying_types
from eyas.plan.identity import capture_identity
from eyas.shards.format import CALIBRATED_CODECS
from eyas.shards.handover import hand_over
from eyas.shards.layouts.base import ExportFacts, ExportRecord, LayoutSource
from eyas.shards.layouts.export import ExportResult, export_layout
from eyas.shards.layouts.norms import FinalScale, NormReading, final_scale, read_norm, to_post_norm, to_pre_norm
from eyas.shards.layouts.registry import make_writer, open_source, read_export_record
from eyas.shards.layouts.scan import SourceFile, scan
from eyas.shards.reader import ShardReader
from eyas.target.load import TensorFiles
from eyas.target.locate import ensure
from eyas.tokens.dataset import make_sample, read_index, write_tokens
from eyas.tokens.draft_vocab import DraftVocab

STATES, MANIFEST, DRAFT_VOCAB = "hidden_states", "hidden_states.json", "draft_vocab"
TARGET = Path("models/target.json")
IMPORT_REPORT = "import.json"
JUDGED_FILES = 64
"""Files of which the last states are read both ways, spread over the folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportRequest:
    """What a user says about a foreign folder."""

    layout: str
    source: Path
    out: Path
    boundaries: tuple[int, ...] = ()
    """Aux boundaries; empty where the layout says them."""
    final_hidden: FinalHidden | None = None
    max_failed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportReport:
    """``import.json``: files = imported + bad, and which norm state the files had, decided by what."""

    layout: str
    boundaries: tuple[int, ...]
    final_hidden: FinalHidden
    """As the files hold it; the set holds post_norm in any case."""
    decided_by: str
    norm_reading: str
    """Both readings of the last states in one line; empty when they could not be compared."""
    num_files: int
    num_imported: int
    num_tokens: int
    bad: tuple[SourceFile, ...]
    identity: str
    is_lossy: bool
    """The files are an export whose states a codec had rounded, or the imported set's own codec rounds them."""
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class _Scanned:
    """Good samples in file order with their files, and the bad files."""

    samples: list[TokenSample]
    files: dict[str, SourceFile]
    bad: list[SourceFile]


def export_states(
    root: Path, layout: str, folder: Path, trainer_version: str, published: Path = Path("data")
) -> ExportResult:
    """Export a set into ``folder``; see ``export_layout``.

    Args:
        root: The repository.
        layout: Of the files to write.
        folder: Where they go.
        trainer_version: Of the peer that will read them.
        published: The folder below ``root`` that holds the set: the pipeline's, or one below ``imports/``.

    Raises:
        EyasError: The set is missing or damaged, or the layout cannot hold it.
    """
    params = config.load(root / config.PARAMS_PATH)
    target = fs.read_record(TargetIdentity, root / TARGET)
    states, draft_vocab = root / published / STATES, root / published / DRAFT_VOCAB
    vocab = DraftVocab.read(draft_vocab) if draft_vocab.is_dir() else None
    maps = (None, None) if vocab is None else (vocab.d2t_W, vocab.t2d_V)
    writer, version = make_writer(layout, trainer_version, *maps)
    manifest = fs.read_record(ShardManifest, root / published / MANIFEST)
    if manifest.capture.target != target.digest:
        raise DataError(
            f"the states are of target {manifest.capture.target[:16]}, {TARGET} is {target.digest[:16]}",
            "`dvc checkout` brings states and target of one revision together",
        )
    streams = (*manifest.boundaries, target.num_layers)
    facts = ExportFacts(
        layout=layout,
        trainer_version=version,
        capture_identity=manifest.identity,
        boundaries=manifest.boundaries,
        layer_ids=layer_ids(streams, writer.spelling, model_type=target.model_type, num_layers=target.num_layers),
        final_hidden=writer.final_hidden,
        hidden_size=manifest.hidden_size,
        is_lossy=manifest.capture.codec in CALIBRATED_CODECS,
    )
    if facts.is_lossy:
        console.log(f"export: the set's codec {manifest.capture.codec} is lossy: the files hold what it gives back")
    norm = _as_is
    if writer.final_hidden == "pre_norm":
        norm = functools.partial(to_pre_norm, final=_final_scale(target, params))
    reader = ShardReader(states, manifest)
    return export_layout(reader, writer, facts, folder, norm=norm, reserve_bytes=params.extract.reserve_bytes)


def _as_is(last_TD: torch.Tensor) -> torch.Tensor:
    return last_TD


def _final_scale(target: TargetIdentity, params: Params) -> FinalScale:
    tensors = TensorFiles(ensure(target, params.target))
    return final_scale(target.final_norm, tensors.read("final_norm"))


def import_states(root: Path, request: ImportRequest) -> ImportReport:
    """Bring a foreign folder into a set of its own below ``request.out``.

    Args:
        root: The repository: its parameters give codec, shard size and target.
        request: The folder and what its layout does not say.

    Raises:
        DataError: Boundaries are unknown or contradict, or more files are bad than allowed.
        CaptureError: The norm state cannot be told, or contradicts the layout's rule.
        EyasError: Whatever an extraction raises.
    """
    params = config.load(root / config.PARAMS_PATH)
    target = fs.read_record(TargetIdentity, root / TARGET)
    source = open_source(request.layout, request.source, target.num_layers)
    record = read_export_record(request.source)
    boundaries = choose_boundaries(request, source, record, target.num_layers)
    keep_from_git(root, request.out)
    room = check_room(root, request.out, params, folder_need(params, source, request.source))
    log_room(room, request.out, request.source)
    scanned = _scan(source, request, record, len(boundaries), target)
    _check_bad(scanned, request, len(source.paths))
    if record is None:
        scanned.samples[:] = hold_out(scanned.samples, params.data.held_out_share)
    tensors = TensorFiles(ensure(target, params.target))
    final = final_scale(target.final_norm, tensors.read("final_norm"))
    head_VD = tensors.read("head" if tensors.has("head") else "embedding")  # tied
    reading = _judge(source, scanned, final, head_VD)
    final_hidden, decided_by = choose_norm(request, source, record, reading)
    console.log(f"import: last is {final_hidden}: {decided_by}")
    norm = functools.partial(to_post_norm, final=final) if final_hidden == "pre_norm" else _as_is
    options = _options(request, final_hidden, scanned)
    engine = ImportEngine(source, request.source, scanned.files, norm, options)
    limits = _limits(root, request.out, params)
    result = _store(params, target, request, boundaries, scanned, engine, limits, head_VD)
    if result.effect is not None:
        console.log(f"import: {params.extract.codec}: {result.effect}")
    report = ImportReport(
        layout=request.layout,
        boundaries=boundaries,
        final_hidden=final_hidden,
        decided_by=decided_by,
        norm_reading=reading.text if reading else "",
        num_files=len(source.paths),
        num_imported=len(scanned.samples),
        num_tokens=sum(len(sample.input_ids) for sample in scanned.samples),
        bad=tuple(scanned.bad),
        identity=result.manifest.identity,
        is_lossy=params.extract.codec in CALIBRATED_CODECS or (record is not None and record.facts.is_lossy),
    )
    assert report.num_files == report.num_imported + len(report.bad)
    fs.write_record(request.out / IMPORT_REPORT, report)
    hand_over(root, result.manifest, request.out / STATES, request.out / MANIFEST)
    return report


def _limits(root: Path, out: Path, params: Params) -> ExtractLimits:
    """When the writing of a set stops."""
    # Only below the repository a commit follows.
    is_committed = out.resolve().is_relative_to(root.resolve())
    return ExtractLimits(
        reserve_bytes=params.extract.reserve_bytes,
        max_failed_samples=0,
        cache_types=copying_types(root) if is_committed else (),
        reclaim=lambda: reclaim(root),
    )


def choose_boundaries(
    request: ImportRequest, source: LayoutSource, record: ExportRecord | None, num_layers: int
) -> tuple[int, ...]:
    """Aux boundaries of a source: as given, as its layout says, as the export record says.

    Raises:
        DataError: Nobody says them, or two say different ones.
        ConfigError: The given ones do not exist.
    """
    if list(request.boundaries) != sorted(set(request.boundaries)) or any(
        not 0 <= b <= num_layers for b in request.boundaries
    ):
        raise ConfigError(f"boundaries {list(request.boundaries)}, expected rising numbers from 0 to {num_layers}")
    said = {
        "given": request.boundaries,
        "the layout": source.boundaries or (),
        "the export record": record.facts.boundaries if record else (),
    }
    known = {who: boundaries for who, boundaries in said.items() if boundaries}
    if not known:
        raise DataError(
            f"{source.name} files do not say which layers their states come from",
            "give the boundaries (states entering layer b): BOUNDARIES=2,15,27 (`--boundaries`)",
        )
    if len(set(known.values())) > 1:
        listed = ", ".join(f"{who}: {list(boundaries)}" for who, boundaries in known.items())
        raise DataError(f"boundaries contradict each other: {listed}", "leave them out, or look at data_config.json")
    return next(iter(known.values()))


def choose_norm(
    request: ImportRequest, source: LayoutSource, record: ExportRecord | None, reading: NormReading | None
) -> tuple[FinalHidden, str]:
    """Norm state of a source's ``last``, and what decided it.

    Raises:
        CaptureError: Nothing says it, or the states themselves contradict what the layout prescribes.
    """
    verdict = reading.verdict if reading else None
    text = reading.text if reading else "no row to judge by"
    if request.final_hidden is not None:
        if verdict not in (None, request.final_hidden):
            console.log(f"import: warning: the states look {verdict}: {text}")
        return request.final_hidden, f"given; {text}"
    said = record.facts.final_hidden if record else source.final_hidden
    who = "the export record" if record else f"{source.name} files always are"
    if said is None:
        if verdict is None:
            raise CaptureError(
                f"{source.name} files do not say whether last is before or after the final norm, and the states do "
                f"not tell: {text}",
                "say it: FINAL_HIDDEN=pre_norm (generators of 0.3 and 0.4) or post_norm (`--final-hidden`)",
            )
        return verdict, text
    if verdict not in (None, said):
        raise CaptureError(
            f"last should be {said} ({who}), but the states are {verdict}: {text}",
            f"to insist, say it: FINAL_HIDDEN={said} (`--final-hidden`)",
        )
    return said, f"{who}; {text}"


def _scan(
    source: LayoutSource, request: ImportRequest, record: ExportRecord | None, num_aux: int, target: TargetIdentity
) -> _Scanned:
    facts = {sample.sample_id: sample for sample in record.samples} if record else {}
    found = _Scanned([], {}, [])
    for scanned in scan(source, request.source, num_aux, target.hidden_size, target.vocab_size):
        if scanned.input_ids_T is None or scanned.loss_mask_T is None:
            found.bad.append(scanned.file)
            continue
        sample = _token_sample(scanned.input_ids_T, scanned.loss_mask_T, request.layout, facts)
        if twin := found.files.get(sample.sample_id):
            problem = f"the same ids and mask as {twin.path}"
            found.bad.append(dataclasses.replace(scanned.file, problem=problem))
            continue
        found.files[sample.sample_id] = scanned.file
        found.samples.append(sample)
    return found


def _token_sample(
    ids_T: torch.Tensor, mask_T: torch.Tensor, layout: str, facts: Mapping[str, StoredSample]
) -> TokenSample:
    """A sample under its content's id; an export of eyas says where it came from, others do not."""
    ids, mask = ids_T.tolist(), mask_T.tolist()
    sample = make_sample(ids, mask, conversation_id="", source=layout, split="train", variant="given")
    known = facts.get(sample.sample_id)
    if known is None:
        return dataclasses.replace(sample, conversation_id=sample.sample_id)
    return dataclasses.replace(
        sample,
        conversation_id=known.conversation_id,
        source=known.source,
        split=known.split,
        variant=known.variant,
    )


def _check_bad(scanned: _Scanned, request: ImportRequest, num_files: int) -> None:
    for file in scanned.bad[:20]:
        console.log(f"import: bad: {file.path}: {file.problem}")
    console.log(
        f"import: {num_files:,} files = {len(scanned.samples):,} good + {len(scanned.bad):,} bad"
        f"{' (20 shown)' if len(scanned.bad) > 20 else ''}"
    )
    if len(scanned.bad) > request.max_failed or not scanned.samples:
        raise DataError(
            f"{len(scanned.bad):,} of {num_files:,} files of {request.source} are bad, at most {request.max_failed:,} "
            f"allowed and one good one needed; the first: {scanned.bad[0].path}: {scanned.bad[0].problem}",
            f"to go on without them: MAX_FAILED={len(scanned.bad)} (`--max-failed`)"
            if scanned.samples
            else "all are bad: are BOUNDARIES= (one per stream but the last) and the target of params.yaml theirs?",
        )


def _judge(source: LayoutSource, scanned: _Scanned, final: FinalScale, head_VD: torch.Tensor) -> NormReading | None:
    paths = [file.path for file in scanned.files.values()]
    step = max(1, len(paths) // JUDGED_FILES)
    return read_norm((source.read(path) for path in paths[::step]), final, head_VD)


def _options(request: ImportRequest, final_hidden: FinalHidden, scanned: _Scanned) -> dict[str, str]:
    """Everything about the source that decides the set's bytes."""
    files = sorted([sample_id, file.size_bytes, file.xxh3] for sample_id, file in scanned.files.items())
    return {"files": digest(files), "final_hidden": final_hidden, "layout": request.layout}


def _store(
    params: Params,
    target: TargetIdentity,
    request: ImportRequest,
    boundaries: Sequence[int],
    scanned: _Scanned,
    engine: ImportEngine,
    limits: ExtractLimits,
    head_VD: torch.Tensor,
) -> ExtractResult:
    """Tokens, plan, extraction."""
    home = request.out / ".eyas"
    tokens_sha256 = write_tokens(home / "tokens", scanned.samples)
    capture = dataclasses.replace(
        capture_identity(params.extract, target, params.target, tokens_sha256),
        boundaries=tuple(boundaries),
        engine=ENGINE_NAME,
        engine_version=ENGINE_VERSION,
        engine_options=engine.describe().options,
        image="",
    )
    lengths = [(sample.sample_id, len(sample.input_ids)) for sample in scanned.samples]
    plan = build_plan(lengths, capture, target.hidden_size, read_index(home / "tokens").trained_rows)
    shutil.rmtree(home / "tokens")
    _refuse_other_set(request.out, tokens_sha256, plan.identity)
    write_tokens(request.out / "tokens", scanned.samples)
    return extract(
        plan,
        {sample.sample_id: sample for sample in scanned.samples},
        engine,
        limits,
        out=request.out / STATES,
        manifest_path=request.out / MANIFEST,
        home=home,
        head=lambda: head_VD,
    )


def _refuse_other_set(out: Path, tokens_sha256: str, identity: str) -> None:
    """Nothing of another set, or of the pipeline's own data folder, is written over."""
    found = {
        "tokens": (out / "tokens/index.json", "tokens_sha256", tokens_sha256),
        "hidden states": (out / MANIFEST, "identity", identity),
    }
    for what, (path, key, expected) in found.items():
        value = fs.read_json(path).get(key) if path.exists() else expected
        if value != expected:
            raise DataError(
                f"{out} holds {what} of another set: {key} {str(value)[:16]}, expected {expected[:16]}; nothing was written",
                "import into a folder of its own: TO=imports/NAME",
            )
