"""``eyas guard``: look at the finished hidden states before anything runs that could wipe them.

DVC deletes a stage's outputs before it runs the stage again, and it runs it again for a parameter that does not
change a byte, for one lost cache object, or because it was killed before it wrote ``dvc.lock``. Here a terabyte is
behind that. The guard compares the capture identity that is wanted with the one that is stored:

* the same, and DVC has nothing to do → on;
* the same, but DVC would run the stage → the states are recorded as they are (``dvc commit``), nothing is captured;
* another one → refused, with what is stored and where it is safe; ``FORCE=1`` goes on.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from eyas import config, console, fs
from eyas.config.images import check_image
from eyas.contracts import CapturePlan
from eyas.errors import ConfigError, EyasError, StoreError
from eyas.ops import published as store
from eyas.ops.before import check_before, check_data, ends_before_states, is_changed
from eyas.ops.gc.intent import read_intent
from eyas.ops.published import MANIFEST, OUTS, PLAN, STATES, Planned, Published
from eyas.plan.cache import cache_object, hashes, locked_stage, object_finder, read_yaml
from eyas.shards import handover
from eyas.shards.handover import HOME, LOCK_NAME

EXTRACT = ("dvc", "repro", "extract")
PLANNING = (sys.executable, "-m", "dvc", "repro", "plan")
DRAFTER = "models/drafter"
IMPORTED_LOCKS = "imports/*/dvc.lock"
"""An imported set has a pipeline of its own, whose paths are the repository's."""
FORCE_HINT = "`make extract FORCE=1` goes on all the same"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the guard found."""

    state: str
    """``empty``, ``current``, ``healed``, ``resume`` or ``forced``."""
    note: str

    @property
    def is_current(self) -> bool:
        """Whether stage ``extract`` has nothing left to do."""
        return self.state in ("current", "healed")


def run(root: Path, command: Sequence[str], *, force: bool) -> int:
    """Make the plan, look, run a command of DVC's unless there is nothing left to do, settle.

    A command that ends before the states is run as it is, once data and engines were looked for.

    Args:
        root: The repository.
        command: ``dvc repro`` with stages; empty to look alone, at the plan as it is.
        force: Go on although finished states of another identity would be wiped.

    Returns:
        Exit code of what was run; 0 when nothing had to be.

    Raises:
        DataError: There is no file or folder at ``data.path``.
        ConfigError: A parameter is wrong, or this is not the pinned image: DVC would empty a stage's outputs before the
            stage itself could say so.
        StoreError: Finished states would be wiped, or are damaged.
        EyasError: SGLang or vLLM is missing where a stage would call for it; an extraction runs; DVC failed.
    """
    params = config.load(root / config.PARAMS_PATH) if command else None
    if params is not None:
        check_before(root, params, command)
        if ends_before_states(command):
            return _run(root, params, command)
    if params is not None and _never_captured(root):  # before the hours of `respond`
        check_image("extract.image", params.extract.image)
    if params is not None and (code := _run(root, params, PLANNING)):
        return code
    with _lock(root):
        verdict = look(root, force=force)
        if verdict.is_current:
            _settle_spools(root)
    if (interrupted := read_intent(root)) is not None:
        # Nothing of it needs to be waited for: it deletes no file that was written since, and nothing named again.
        console.log(f"guard: a gc was interrupted: make gc CONFIRM={interrupted.plan_id} finishes it")
    console.log(f"guard: {verdict.note}")
    if not command or (tuple(command) == EXTRACT and verdict.is_current):
        return 0
    if params is not None:
        if not verdict.is_current and params.extract.executor == "local":
            from eyas.engines.registry import check_installed  # the look, which has half a second, does without

            check_installed(params.extract.engine)
        _refuse_other_images(root, params, verdict, trains=tuple(command) != EXTRACT)
    code = subprocess.run(command, cwd=root, check=False).returncode
    if code == 0:
        settle(root)
    return code


def _run(root: Path, params: config.Params, command: Sequence[str]) -> int:
    """Run stages that wipe no states; their data, when they fail for want of it, is named as everywhere."""
    code = subprocess.run(command, cwd=root, check=False).returncode
    if code:
        check_data(root, params)
    return code


def _never_captured(root: Path) -> bool:
    """Whether neither the workspace nor ``dvc.lock`` knows of hidden states: they are captured for certain."""
    return not (root / MANIFEST).exists() and not hashes(locked_stage(root, "extract"), "outs")


def _refuse_other_images(root: Path, params: config.Params, verdict: Verdict, *, trains: bool) -> None:
    """Refuse what would run in another image than the pinned one, before DVC empties its outputs."""
    if not verdict.is_current:
        check_image("extract.image", params.extract.image)
    try:
        check_image("train.image", params.train.image)
    except ConfigError:
        if trains and (not verdict.is_current or is_changed(root, "train")):
            raise


def settle(root: Path) -> list[str]:
    """After DVC's success: give up spools and finished trainings that it holds now, and note its state for the next look.

    Returns:
        Identities of the spools that were removed.
    """
    from eyas.train import finished  # the look, which has half a second, does without

    for pipeline, drafter in (
        (root, DRAFTER),
        *((lock.parent, f"{lock.parent.relative_to(root)}/{DRAFTER}") for lock in sorted(root.glob(IMPORTED_LOCKS))),
    ):
        locked = hashes(locked_stage(pipeline, "train"), "outs")
        finished.settle(root / HOME / "train", locked.get(drafter), object_finder(root))
    with _lock(root):
        settled = _settle_spools(root)
        published = store.read_published(root / MANIFEST)
        if published is not None:
            store.remember(root, published)
    return settled


def _settle_spools(root: Path) -> list[str]:
    locked = hashes(locked_stage(root, "extract"), "outs")
    return handover.settle(root / HOME, locked, OUTS, object_finder(root))


def _lock(root: Path) -> AbstractContextManager[int]:
    return fs.volume_lock(root / HOME / LOCK_NAME, "guard")


def look(root: Path, *, force: bool = False) -> Verdict:
    """Compare what is wanted with what is stored; heal what can be healed without capturing.

    Raises:
        StoreError: Finished states would be wiped, or are damaged.
    """
    planned = store.read_planned(root / PLAN)
    published = store.read_published(root / MANIFEST)
    found = store.stat_tree(root / STATES)
    if _is_gap(planned, published, found) and _cache_has(root, planned):
        console.log("guard: files are missing here and whole in DVC's cache: they are linked back")
        _must(root, "checkout", "--force", *OUTS)
        published, found = store.read_published(root / MANIFEST), store.stat_tree(root / STATES)
    if published is None:
        return _unfinished(root, planned, force) if found else Verdict(state="empty", note="no finished hidden states")
    try:
        _refuse_other(root, planned, published)
        _refuse_strangers(found, published)
    except StoreError as error:
        if not force:
            raise
        return Verdict(state="forced", note=f"FORCE=1: {error.message}")
    return _same_identity(root, planned, published, found)


def _dvc(root: Path, *arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", "dvc", *arguments], cwd=root, check=False).returncode


def _must(root: Path, *arguments: str) -> None:
    if code := _dvc(root, *arguments):
        raise EyasError(
            f"`dvc {' '.join(arguments)}` ended with {code}, expected 0; nothing was deleted",
            "read DVC's message above; the same command goes on from here",
        )


# ── nothing, or half of it ────────────────────────────────────────────────────────────────────


def _cache_has(root: Path, planned: Planned) -> bool:
    """Whether ``dvc.lock`` names a set of the wanted identity that lies whole in the cache."""
    outs = hashes(locked_stage(root, "extract"), "outs")
    if not all(outs.get(out) for out in OUTS):
        return False
    cached = store.read_published(cache_object(root, outs[MANIFEST]))
    return (
        cached is not None
        and cached.identity == planned.identity
        and store.is_locked(root, cached)
        and cache_object(root, outs[STATES]).is_file()
        and not store.lost_objects(root, cached)
    )


def _is_gap(planned: Planned, published: Published | None, found: dict[str, store.FileStat]) -> bool:
    """Whether files of the wanted set are missing or short in the workspace."""
    if published is None:
        return True
    short = (file for file in published.files if found.get(file.path, (0, 0, -1))[2] != file.size_bytes)
    return published.identity == planned.identity and next(short, None) is not None


def _unfinished(root: Path, planned: Planned, force: bool) -> Verdict:
    """Shards without a manifest: a kill between the two, or somebody's files."""
    try:
        _take_back(root)
    except StoreError as error:
        if not force:
            raise StoreError(f"{error.message}; a rerun would delete {STATES}", f"{error.hint}; {FORCE_HINT}") from None
        return Verdict(state="forced", note=f"FORCE=1: {error.message}")
    return Verdict(
        state="resume", note=f"{STATES} was not published whole ({planned.identity[:16]}): it is gone on with"
    )


def _take_back(root: Path) -> None:
    """Move the states out of DVC's reach, into the spool, from where the stage goes on."""
    from eyas.shards.spool import Spool

    plan = fs.read_record(CapturePlan, root / PLAN)
    Spool(root / HOME, plan.capture).take_back(plan, root / STATES, root / MANIFEST)


# ── another identity ──────────────────────────────────────────────────────────────────────────


def _refuse_other(root: Path, planned: Planned, published: Published) -> None:
    same = published.identity == planned.identity
    if same and published.num_planned == planned.num_planned and {f.path for f in published.files} <= planned.paths:
        return
    rows = store.differing_fields(published.capture, planned.capture)
    what = console.table(rows, ("differs", "stored", "wanted")) if rows else "the identity is the same, the plan is not"
    samples, tokens = published.num_stored
    give_up = f"`make retire GEN={published.states_md5[:8]}`, then `make gc-plan`"
    hint = f"to keep them, undo the change (`git diff params.yaml`); to give them up on purpose: {give_up}"
    if not same and _cache_has(root, planned):  # another branch or commit, checked out by git alone
        hint = f"the wanted states lie whole in DVC's cache: `dvc checkout {' '.join(OUTS)}` exchanges the two"
    raise StoreError(
        f"{STATES} holds finished states of another capture; running `extract` would delete them\n"
        f"stored: identity {published.identity[:16]}…, {samples:,} samples, {tokens:,} tokens, "
        f"{console.human_bytes(published.num_bytes)}\n"
        f"wanted: identity {planned.identity[:16]}…\n{what}\n{_whereabouts(root, published)}",
        f"{hint}; {FORCE_HINT}",
    )


def _refuse_strangers(found: dict[str, store.FileStat], published: Published) -> None:
    if extra := store.strangers(found, published.files):
        raise StoreError(
            f"{STATES} holds {len(extra):,} files that {MANIFEST} does not list ({extra[0]}); DVC would take the "
            "set for changed and delete it",
            f"move them away: mv {STATES}/{extra[0]} /tmp; {FORCE_HINT}",
        )


def _whereabouts(root: Path, published: Published) -> str:
    """Whether the stored bytes survive a rerun."""
    lost = store.lost_objects(root, published)
    if lost or not cache_object(root, published.states_md5).is_file():
        return f"NOT safe: DVC's cache lacks {len(lost):,} of {len(published.all_files):,} files; {STATES} is the only copy"
    commit = _commit_naming(root, published.states_md5)
    if commit:
        return f"safe: in DVC's cache, named by commit {commit}: `git checkout {commit} dvc.lock && dvc checkout` brings it back"
    return "in DVC's cache, but no commit names it: `git commit dvc.lock` first, or `dvc gc` will delete it"


def _commit_naming(root: Path, md5: str) -> str:
    command = ["git", "log", "--all", "-1", "--format=%h", f"-S{md5}", "--", "dvc.lock"]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip()


# ── the same identity ─────────────────────────────────────────────────────────────────────────


def _same_identity(root: Path, planned: Planned, published: Published, found: dict[str, store.FileStat]) -> Verdict:
    which = f"{published.identity[:16]}, {console.human_bytes(published.num_bytes)}"
    if again := _must_run(root, published, found):
        _take_back(root)
        return Verdict(state="resume", note=f"{again}; what is there is kept and gone on with ({which})")
    if store.is_proven(root, published):
        return Verdict(state="current", note=f"hidden states are up to date ({which})")
    lost = store.lost_objects(root, published)
    if not lost and store.is_locked(root, published) and not is_changed(root, "extract"):
        store.remember(root, published)
        return Verdict(state="current", note=f"hidden states are up to date ({which})")
    _heal(root, published, {file.path for file in lost})
    return Verdict(
        state="healed",
        note=f"DVC would have captured again what is stored ({which}); it is recorded instead, nothing was captured",
    )


def _must_run(root: Path, published: Published, found: dict[str, store.FileStat]) -> str:
    """Why the stage has to capture something; empty when every shard is there.

    Raises:
        StoreError: A shard is shorter or longer than it was written.
    """
    absent = [file for file in published.files if file.path not in found]
    for file in published.files:
        if file.path in found and found[file.path][2] != file.size_bytes:
            raise _damage(file.path, f"{found[file.path][2]:,} bytes, expected {file.size_bytes:,}")
    if absent:
        return f"{len(absent):,} of {len(published.files):,} shards are missing ({absent[0].path})"
    limit = read_yaml(root / "params.yaml").get("extract", {}).get("max_failed_samples", published.num_failed)
    if published.num_failed > limit:
        return f"{published.num_failed:,} samples failed, extract.max_failed_samples allows {limit:,}"
    return ""


def _damage(path: str, problem: str) -> StoreError:
    return StoreError(
        f"{STATES}/{path} is damaged: {problem}; DVC would take the set for changed and delete it",
        "`make verify` says which samples are bad, `make repair` captures those alone",
    )


def _heal(root: Path, published: Published, lost: set[str]) -> None:
    """Record the states as they are: every file whose content DVC does not know or has lost is hashed first.

    ``dvc commit -f`` takes whatever lies there. A changed byte must not become the truth that way.
    """
    named = {
        file: root / (MANIFEST if file is published.manifest else f"{STATES}/{file.path}")
        for file in published.all_files
    }
    known = handover.known_md5s(root, list(named.values()))
    doubted = [file for file, path in named.items() if file.path in lost or known.get(path) != file.md5]
    progress = console.Progress("guard: hash", sum(file.size_bytes for file in doubted), unit="B")
    for file in doubted:
        md5 = fs.hash_file(named[file], "md5")
        progress.advance(file.size_bytes)
        if md5 != file.md5:
            progress.close()
            raise _damage(file.path, f"md5 {md5}, expected {file.md5}")
    progress.close()
    handover.register(root, [(named[file], file.md5, file.size_bytes) for file in doubted])
    _must(root, "commit", "--force", "extract")
    if not store.is_locked(root, published):
        raise StoreError(
            f"dvc.lock does not name the set of {MANIFEST} after `dvc commit`: something changed it meanwhile",
            "run the same command again",
        )
    store.remember(root, published)
