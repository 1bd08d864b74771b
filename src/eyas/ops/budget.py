"""``eyas budget``: does the planned capture fit this volume, and if not, what would make it fit?

It gathers the facts that ``eyas.plan.budget`` judges by: figures of the plan, parsed but not rebuilt record by
record; the volume as ``statvfs`` shows it (quotas of projects, CephFS folders and NFS servers included); the codec's
ratio on states that are stored already; what is done; what gc could free. No state is read, nothing heavy imported.
"""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from eyas import config, fs
from eyas.canonical import from_plain
from eyas.config import Params
from eyas.contracts import BYTES_PER_STATE, CaptureIdentity, TargetIdentity
from eyas.errors import PlanError
from eyas.generations.working import WorkingFolders, read_working
from eyas.ops import published as store
from eyas.ops.published import MANIFEST, PLAN, STATES
from eyas.plan.budget import Budget, Done, Need, Reclaim, best_ratio
from eyas.plan.cache import copying_types
from eyas.plan.earlier import earlier_ratio, no_manifest
from eyas.plan.identity import STORED, capture_identity
from eyas.plan.volume import Volume, others, volume
from eyas.shards.handover import HOME, SPOOL

if TYPE_CHECKING:
    from eyas.ops.stream_budget import StreamAccount

TARGET, TOKENS_INDEX = "models/target.json", "data/tokens/index.json"
REPLAN = "`make plan`"
Entry = dict[str, Any]
"""A stored shard as the journal or a manifest lists it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens of a sample."""

    mean: float
    min: int
    max: int
    median: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan, parsed: its figures, and the paths of its shards."""

    identity: str
    capture: dict[str, Any]
    need: Need
    lengths: Lengths
    streams: dict[str, int]
    """Bytes of the stored rows before the codec, by stream: ``b2`` enters layer 2, ``last`` is the final state."""
    paths: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Everything that ``make budget`` prints."""

    planned: Planned
    volume: Volume
    other_volumes: tuple[Volume, ...]
    """Asked only when the capture does not fit."""
    budget: Budget
    working: WorkingFolders = field(default_factory=WorkingFolders)
    stream: StreamAccount | None = None
    """Of a training whose states are streamed; the rest is then of the part that is stored."""


def examine(root: Path) -> Account:
    """Gather the facts of the capture that ``data/plan.json`` plans, for the volume of ``root``.

    Raises:
        PlanError: There is no plan, or parameters, target or tokens are not its own any more.
        ConfigError: ``params.yaml`` is missing or wrong.
        StoreError: Something that must be read is damaged.
    """
    params = config.load(root / config.PARAMS_PATH)
    planned = read_plan(root, params)
    home = root / HOME
    here = volume(home if home.is_dir() else root)
    done, num_done_tokens = find_done(root, planned)
    earlier = None if num_done_tokens else earlier_ratio(root, planned.need, planned.capture, Path(MANIFEST))
    found = Budget(
        need=planned.need,
        ratio=best_ratio(planned.need, done, num_done_tokens, earlier),
        free_bytes=here.free_bytes,
        reserve_bytes=params.extract.reserve_bytes,
        done=done,
        cache_types=copying_types(root),
        free_files=here.free_files,
        reclaim=_reclaim(root, planned.identity),
    )
    return Account(
        planned=planned,
        volume=here,
        other_volumes=() if found.fits else tuple(others(root)),
        budget=found,
        working=read_working(root),
        stream=_stream(root, params, planned, found) if params.train.source == "stream" else None,
    )


def _stream(root: Path, params: Params, planned: Planned, found: Budget) -> StreamAccount:
    from eyas.ops.stream_budget import stream_account

    target, capture = fs.read_record(TargetIdentity, root / TARGET), from_plain(CaptureIdentity, planned.capture)
    return stream_account(root, params, capture, target, found)


def _reclaim(root: Path, identity: str) -> Reclaim:
    from eyas.generations.reclaim import reclaimable

    return Reclaim.of(reclaimable(root), own=(identity,))


# ── the plan ──────────────────────────────────────────────────────────────────────────────────


def read_plan(root: Path, params: Params) -> Planned:
    """Read the plan and check that parameters, target and tokens still give its capture identity.

    Raises:
        PlanError: It is missing, no plan, or of another capture.
    """
    for path in (TARGET, TOKENS_INDEX, PLAN):
        if not (root / path).is_file():
            raise PlanError(f"{root / path} is missing: nothing says what is to be captured", f"{REPLAN} makes it")
    index, target = fs.read_json(root / TOKENS_INDEX), fs.read_record(TargetIdentity, root / TARGET)
    with _no_collector():
        value = fs.read_json(root / PLAN)
    try:
        stored = STORED[params.train.source]
        capture = capture_identity(params.extract, target, params.target, index["tokens_sha256"], stored)
        rows = (index["num_trained_aux_rows"], index["num_trained_last_rows"])
        if stored != "all" and capture.last_rows == "trained":
            from eyas.tokens.part import planned_part  # the index counts rows of the whole set

            rows = planned_part((root / TOKENS_INDEX).parent, stored).trained_rows
        _check_identity(value, capture)
        return _planned(value, capture, rows)
    except (KeyError, TypeError, ValueError) as error:
        raise PlanError(f"{root / PLAN} is no plan: {error!r}", "make it again: `dvc repro -f -s plan`") from None


@contextlib.contextmanager
def _no_collector() -> Iterator[None]:
    """A plan of 600,000 samples is 1.2 million objects that all stay: looking for garbage among them costs a third."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _check_identity(value: Mapping[str, Any], capture: CaptureIdentity) -> None:
    if value["identity"] == capture.digest:
        return
    from eyas.canonical import to_plain

    differing = store.differing_fields(value["capture"], to_plain(capture))
    shown = ", ".join(f"{name} {old}, now {new}" for name, old, new in differing)
    raise PlanError(
        f"{PLAN} is of capture {value['identity'][:16]}; params.yaml, target and tokens give {capture.digest[:16]}"
        f" (planned: {shown or 'the same fields under another name'})",
        f"{REPLAN}, then ask again",
    )


def _planned(value: Mapping[str, Any], capture: CaptureIdentity, trained_rows: tuple[int, int]) -> Planned:
    shards = value["shards"]
    lengths = [sample["num_tokens"] for shard in shards for batch in shard["batches"] for sample in batch]
    num_tokens = value["num_tokens"]
    if (len(lengths), sum(lengths)) != (value["num_samples"], num_tokens):
        raise ValueError(
            f"{len(lengths):,} samples of {sum(lengths):,} tokens listed, {value['num_samples']:,} of {num_tokens:,} said"
        )
    need = Need(
        num_samples=len(lengths),
        num_tokens=num_tokens,
        num_shards=len(shards),
        payload_bytes=value["payload_bytes"],
        trained_payload_bytes=value["trained_payload_bytes"],
        token_bytes=value["token_bytes"],
        codec=capture.codec,
        last_rows=capture.last_rows,
    )
    aux_rows, last_rows = trained_rows if capture.last_rows == "trained" else (num_tokens, num_tokens)
    row_bytes = value["hidden_size"] * BYTES_PER_STATE
    return Planned(
        identity=value["identity"],
        capture=value["capture"],
        need=need,
        lengths=Lengths(
            mean=num_tokens / len(lengths), min=min(lengths), max=max(lengths), median=float(median(lengths))
        ),
        streams={**{f"b{b}": aux_rows * row_bytes for b in capture.boundaries}, "last": last_rows * row_bytes},
        paths=frozenset(shard["path"] for shard in shards),
    )


# ── what is done ──────────────────────────────────────────────────────────────────────────────


def find_done(root: Path, planned: Planned) -> tuple[Done, int]:
    """Shards of this capture that lie in the spool or are published, and the tokens they hold.

    The journal and sizes are believed; ``extract`` verifies every byte before it counts one.
    """
    published = _published_entries(root, planned)
    spool = root / HOME / SPOOL / planned.identity
    entries = {**published, **_journal_entries(spool / "journal.jsonl")}
    num_failed, there = 0, []
    for path in planned.paths & entries.keys():
        entry = entries[path]
        if entry is None:  # every sample of it failed
            num_failed += 1
        elif entry["size_bytes"] in (fs.size_or_none(f"{spool}/states/{path}"), fs.size_or_none(root / STATES / path)):
            there.append(entry)
    is_cached = bool(published and copying_types(root)) and _is_cached(root)
    num_bytes = sum(entry["size_bytes"] for entry in there)
    done = Done(num_shards=num_failed + len(there), num_bytes=num_bytes, is_cached=is_cached)
    return done, sum(entry["num_tokens"] for entry in there)


def _published_entries(root: Path, planned: Planned) -> dict[str, Entry | None]:
    """What a manifest of this capture lists; it is published when all is done, so what it lacks failed whole."""
    if not (root / MANIFEST).is_file():
        return {}
    manifest = fs.read_json(root / MANIFEST)
    try:
        counts = (manifest["num_planned_samples"], manifest["num_planned_tokens"])
        if (manifest["identity"], *counts) != (planned.identity, planned.need.num_samples, planned.need.num_tokens):
            return {}
        return {**dict.fromkeys(planned.paths), **{entry["path"]: entry for entry in manifest["shards"]}}
    except (KeyError, TypeError) as error:
        raise no_manifest(root / MANIFEST, error) from None


def _is_cached(root: Path) -> bool:
    found = store.read_published(root / MANIFEST)
    return found is not None and store.is_locked(root, found)


def _journal_entries(path: Path) -> dict[str, Entry | None]:
    """Finished shards by path; lines that are torn are left out."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return {}
    return {shard["path"]: shard["entry"] for shard in _shards(lines)}


def _shards(lines: Iterable[bytes]) -> Iterable[dict[str, Any]]:
    for line in lines:
        try:
            shard = json.loads(line)["shard"]
            if shard["entry"] is None or shard["entry"]["size_bytes"] >= 0 <= shard["entry"]["num_tokens"]:
                yield {"path": shard["path"], "entry": shard["entry"]}
        except (ValueError, KeyError, TypeError):
            continue
