"""The spool: where shards wait until the set is whole, and the journal that a rerun resumes from.

``.eyas/spool/<identity>/`` is no output of DVC, so nothing wipes it. A journal line means: this shard
was written, hashed, fsynced and renamed before the line was. What a rerun finds otherwise follows the
rules in ``docs/formats/shards.md``.

Publishing is two renames, states first, manifest last. In a DVC repository the published states are links to those
of the spool, which stays until DVC holds the set: DVC deletes an output before it makes it again, and a kill between
publication and ``dvc.lock`` would otherwise cost the whole capture. The twin takes no disk.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from eyas import config, fs
from eyas.contracts import CaptureIdentity, CapturePlan, PlannedShard, ShardEntry, ShardManifest
from eyas.errors import DiskError, StoreError
from eyas.shards.handover import RETIRED_MARK, SETTLED_SUFFIX, SPOOL, is_dvc_repository
from eyas.shards.journal import JournalLine, file_note, journal_line, lines_of, read_lines, stored_samples
from eyas.shards.opening import check_identity, claims_identity, read_header
from eyas.shards.verify import Finding, verify_file
from eyas.shards.writer import FinishedShard


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """What a spool holds of a plan."""

    done: dict[str, FinishedShard]
    """By path, in the order of the plan."""
    findings: list[Finding]
    num_read: int
    """Of the done ones those that were read through."""


class Spool:
    """The unpublished shards of one capture.

    Args:
        home: The working folder, ``.eyas``.
        capture: Names the spool.
    """

    def __init__(self, home: Path, capture: CaptureIdentity) -> None:
        self.capture, self.identity = capture, capture.digest
        self.folder = Path(home) / SPOOL / self.identity
        self.states = self.folder / "states"
        self.incoming = self.folder / "incoming"
        """What workers of a cluster write; nothing of it counts before the driver moves it."""
        self._journal = self.folder / "journal.jsonl"
        self._identity = self.folder / "identity.json"
        self._manifest = self.folder / "manifest.json"

    def prepare(self) -> None:
        """Make the folders, cut a torn line off the journal, and take up a spool that was retired.

        Raises:
            DiskError: The volume is full.
        """
        with fs.disk_errors(self.folder):
            self.states.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.incoming, ignore_errors=True)
        (self.folder / RETIRED_MARK).unlink(missing_ok=True)
        if not self._identity.exists():
            fs.write_record(self._identity, self.capture)
        if self._journal.exists():
            lines = self._journal.read_bytes()
            whole = lines.rfind(b"\n") + 1
            if whole != len(lines):
                os.truncate(self._journal, whole)

    def drop_if_empty(self) -> None:
        """Remove a spool that holds nothing yet, so that a run that was refused leaves nothing."""
        own = {self.states.name, self._identity.name}
        if (
            self.folder.is_dir()
            and not any(fs.walk_files(self.states))
            and {p.name for p in self.folder.iterdir()} <= own
        ):
            shutil.rmtree(self.folder)

    def journal(self) -> dict[str, FinishedShard]:
        """Finished shards by path, as far as the journal's lines are whole."""
        return {path: line.shard for path, line in self._lines().items()}

    def _lines(self) -> dict[str, JournalLine]:
        return read_lines(self._journal.read_bytes()) if self._journal.exists() else {}

    def append(self, shard: FinishedShard, planned: PlannedShard | None = None) -> None:
        """Record a finished shard durably; its file lies in its place and is fsynced, and so is its folder.

        Of one that has no file any more, since every sample failed, an earlier file goes: it would be published with others.

        Args:
            shard: The shard.
            planned: As the plan has it, to know the file again without reading it; a rerun reads it when None.

        Raises:
            DiskError: The volume is full; the shard counts as not written.
        """
        if shard.entry is None:
            (self.states / shard.path).unlink(missing_ok=True)
        self._append(self.line(shard, planned))

    def amend(self, entry: ShardEntry, manifest: ShardManifest) -> None:
        """A published shard was repaired and has another hash now: a rerun and ``settle`` are to expect that one.

        Args:
            entry: Of the shard.
            manifest: As it is published from now on.
        """
        line = self._lines().get(entry.path)
        if line is not None:
            self._append(journal_line(replace(line.shard, entry=entry)))
        if self._manifest.exists():
            fs.write_record(self._manifest, manifest)

    def line(self, shard: FinishedShard, planned: PlannedShard | None = None) -> bytes:
        """What ``append`` writes."""
        witness, note = self._witness(), None
        if planned is not None and shard.entry is not None and witness is not None:
            note = file_note((self.states / shard.path).lstat(), planned, shard, witness)
        return journal_line(shard, note)

    def _append(self, lines: bytes) -> None:
        with fs.disk_errors(self._journal), self._journal.open("ab") as handle:
            is_new = handle.tell() == 0
            handle.write(lines)
            handle.flush()
            os.fsync(handle.fileno())
        if is_new:
            fs.fsync_dir(self.folder)

    def _witness(self) -> tuple[int, int] | None:
        """What tells this spool from every copy of it; None where the file that says so is missing."""
        try:
            found = self._identity.stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_ctime_ns

    def resume(self, plan: CapturePlan) -> Resumed:
        """What of the plan is done and can be trusted, and what was found wrong with the rest.

        A shard whose file is the one that its journal line was written for is taken by its ``stat``; every other one
        is read through, and noted when it is whole.

        Raises:
            StoreError: The spool holds a file of another capture, or one that the plan does not name.
        """
        lines, present, witness = self._lines(), self._present(plan), self._witness()
        none, linked = JournalLine(FinishedShard(path="", entry=None)), self._manifest.exists()
        doubted = [
            shard
            for shard in plan.shards
            if not lines.get(shard.path, none).is_of(present.get(shard.path), shard, witness, linked=linked)
        ]
        known = {path: line.shard for path, line in lines.items()}
        with ThreadPoolExecutor(config.knob("EYAS_READ_THREADS", min(config.cores(), 8)), "resume") as pool:
            checked = pool.map(lambda shard: self._problems(shard, known.get(shard.path)), doubted)
            problems = dict(zip((shard.path for shard in doubted), checked, strict=True))
        done = {s.path: known[s.path] for s in plan.shards if s.path in known and not problems.get(s.path)}
        read = [shard for shard in doubted if shard.path in done and shard.path in present]
        if read and witness is not None:
            for shard in read:  # a copy may not have reached the disk yet; what is noted has
                fs.fsync_file(self.states / shard.path)
            notes = ((done[s.path], file_note(present[s.path], s, done[s.path], witness)) for s in read)
            self._append(b"".join(journal_line(shard, note) for shard, note in notes))
        findings = [problem for found in problems.values() for problem in found]
        return Resumed(done=done, findings=findings, num_read=len(read))

    def _present(self, plan: CapturePlan) -> dict[str, os.stat_result]:
        """Files at planned paths, before anything is read; parts are removed, strangers refused."""
        planned, found = {shard.path for shard in plan.shards}, {}
        for path, entry in sorted(fs.walk_files(self.states)):
            if path.endswith(fs.PART_SUFFIX):
                (self.states / path).unlink()
            elif path not in planned:
                raise StoreError(
                    f"{self.states / path} is not in the plan of {len(planned)} shards: it would be published with them",
                    f"look at it, then move it away: mv {self.states / path} /tmp",
                )
            else:
                found[path] = entry.stat(follow_symlinks=False)
        return found

    def _problems(self, planned: PlannedShard, finished: FinishedShard | None) -> list[Finding]:
        path = self.states / planned.path
        if path.exists():
            self._refuse_foreign(path, planned.path)
        if finished is None:
            return [_of_shard(planned.path, "not in the journal")] if path.exists() else []
        expected = stored_samples(planned, finished)
        if finished.entry is None:
            return [_of_shard(planned.path, "the journal lists no file for it")] if expected or path.exists() else []
        header, problems = verify_file(path, finished.entry, self.identity)
        if header is None or problems:
            return problems
        if [(s.sample_id, s.num_tokens) for s in header.samples] != expected:
            return [_of_shard(planned.path, "holds other samples than the plan")]
        return []

    def _refuse_foreign(self, path: Path, name: str) -> None:
        """Refuse a whole shard of another capture; a damaged one is simply written again."""
        try:
            if claims_identity(path, self.identity):
                return
            header, _ = read_header(path, name)
        except StoreError:
            return
        if header.facts.identity != self.identity:
            check_identity(header, self.identity, str(path))

    def publish(self, manifest: ShardManifest, out: Path, manifest_path: Path) -> None:
        """Put the states into place, then the manifest.

        In a DVC repository the spool stays as the twin of what is published, file by file the same inode, until
        ``handover.settle`` finds that DVC holds the set. Elsewhere, and where links are impossible, it moves.

        Raises:
            DiskError: The volume is full; the states are still in the spool.
            StoreError: ``out`` holds something, or lies on another volume.
        """
        fs.write_record(self._manifest, manifest)
        with fs.disk_errors(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            manifest_path.parent.mkdir(parents=True, exist_ok=True)
            linked = self._link([entry.path for entry in manifest.shards], out)
        if linked is None:
            self._publish_by_moving(out, manifest_path)
            return
        self._rename(linked, out)
        fs.write_record(manifest_path, manifest)

    def _link(self, paths: list[str], out: Path) -> Path | None:
        """A folder beside ``out`` with links to these shards; None where nobody wipes ``out`` or links do not exist."""
        if not is_dvc_repository(self.folder.parents[2]):
            return None
        part = out.with_name(out.name + fs.PART_SUFFIX)
        try:
            fs.link_tree(self.states, part, paths)
        except OSError as error:
            if error.errno not in fs.NO_HARDLINKS:
                raise
            return None
        return part

    def _publish_by_moving(self, out: Path, manifest_path: Path) -> None:
        for folder in sorted((p for p in self.states.rglob("*") if p.is_dir()), reverse=True):
            if not any(folder.iterdir()):
                folder.rmdir()
        self._rename(self.states, out)
        fs.fsync_dir(self.folder)
        self._manifest.replace(manifest_path)
        fs.fsync_dir(manifest_path.parent)
        shutil.rmtree(self.folder)

    def _rename(self, states: Path, out: Path) -> None:
        try:
            states.rename(out)
        except OSError as error:
            raise StoreError(
                f"cannot move {states} to {out}: {error.strerror}",
                f"{out} must be absent or empty, on the same volume as {self.folder.parent}",
            ) from error
        fs.fsync_dir(out.parent)

    def take_back(self, plan: CapturePlan, out: Path, manifest_path: Path) -> bool:
        """Bring states that lie in ``out`` back into the spool, so that a rerun verifies and publishes them.

        That is the way on after a crash between the two renames, and after a run by hand over a finished
        set of the same identity.

        Returns:
            Whether there were any.

        Raises:
            StoreError: They belong to another capture, or the spool holds states as well.
        """
        manifest = fs.read_record(ShardManifest, manifest_path) if manifest_path.exists() else None
        if manifest is not None and manifest.identity != self.identity:
            raise StoreError(
                f"{manifest_path} is of another capture: identity {manifest.identity}, expected {self.identity}",
                f"keep it (`dvc commit`, `git commit`) or move it and {out} away, then run `make extract`",
            )
        if not out.is_dir() or not any(out.iterdir()):
            return False
        self._refuse_unlike(out)
        self.folder.mkdir(parents=True, exist_ok=True)
        if manifest is not None and not self._journal.exists():
            fs.write_bytes(self._journal, b"".join(lines_of(plan, manifest)))
        manifest_path.unlink(missing_ok=True)
        fs.fsync_dir(manifest_path.parent)
        self._merge(out)
        fs.fsync_dir(self.folder)
        return True

    def _refuse_unlike(self, out: Path) -> None:
        """Refuse files of another capture, and two files for one shard, unless they are one under two names."""
        mine, theirs = _stats(self.states), _stats(out)
        others = [path for path in sorted(theirs) if path not in mine or not os.path.samestat(mine[path], theirs[path])]
        for path in others:
            self._refuse_foreign(out / path, path)
        if not mine.keys().isdisjoint(others):
            raise StoreError(
                f"both {out} and {self.states} hold states of {self.identity}",
                "move one of them away; the other is completed",
            )

    def _merge(self, out: Path) -> None:
        """Empty ``out`` into the spool: links to its files go, files that only lie in ``out`` come over."""
        mine = _stats(self.states)
        if not mine:
            shutil.rmtree(self.states, ignore_errors=True)
            out.rename(self.states)
            return
        for path in sorted(_stats(out).keys() - mine.keys()):
            place = self.states / path
            place.parent.mkdir(parents=True, exist_ok=True)
            (out / path).rename(place)
            fs.fsync_dir(place.parent)
        aside = out.with_name(out.name + fs.PART_SUFFIX)
        shutil.rmtree(aside, ignore_errors=True)
        out.rename(aside)
        shutil.rmtree(aside)


def _stats(folder: Path) -> dict[str, os.stat_result]:
    """Files below a folder; a link that leads nowhere is none."""
    return {path: entry.stat() for path, entry in fs.walk_files(folder) if entry.is_file()}


def check_one_volume(home: Path, out: Path) -> None:
    """Check before the work that the finished states can be renamed into place.

    Raises:
        DiskError: Spool and output lie on different volumes, or the output is a symbolic link.
    """
    if out.is_symlink():
        raise DiskError(
            f"{out} is a symbolic link to {out.readlink()}: nothing can be renamed onto it",
            f"remove the link (`rm {out}`) and keep the whole repository on the volume that is large enough",
        )
    with fs.disk_errors(home):
        home.mkdir(parents=True, exist_ok=True)
        out.parent.mkdir(parents=True, exist_ok=True)
    if home.stat().st_dev != out.parent.stat().st_dev:
        raise DiskError(
            f"{home.resolve()} and {out.parent.resolve()} lie on different volumes: shards could not be renamed",
            "keep the repository, its data folder and .eyas under one mount",
        )


def leftovers(home: Path, identity: str) -> list[tuple[str, int]]:
    """Spools of other captures: (identity, bytes), by name."""
    root = Path(home) / SPOOL
    folders = sorted(root.iterdir()) if root.is_dir() else []
    others = [p for p in folders if p.name != identity and not p.name.endswith(SETTLED_SUFFIX)]
    return [(other.name, _tree_bytes([other])) for other in others]


def _tree_bytes(roots: Iterable[Path]) -> int:
    return sum(p.stat().st_size for root in roots for p in (root, *root.rglob("*")) if p.is_file())


def _of_shard(path: str, problem: str) -> Finding:
    return Finding(shard=path, sample_id="", problem=f"{path}: {problem}")
