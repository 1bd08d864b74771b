"""A finished run's results beside its published ones, for as long as DVC has not recorded them.

    .eyas/train/<run key>/finished/result.json   FinishedRun
    .eyas/train/<run key>/finished/drafter/      links to the files of models/drafter: no disk of their own
    .eyas/train/<run key>/finished/metrics/      a copy of reports/train

DVC deletes a stage's outputs before it runs the stage, and it runs it again when it was killed, or failed, between
the stage's end and ``dvc.lock``. Without these a night of training would be gone with them. At most one is kept:
it goes when ``dvc.lock`` names it, or when another training ends.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from eyas import console, fs
from eyas.contracts import CheckpointMeta
from eyas.errors import StoreError

FOLDER, RESULT_NAME, META_NAME, METRICS_NAME = "finished", "result.json", "checkpoint.json", "metrics.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class BestStep:
    """The validation whose weights are published, with ``keep: best``."""

    step: int
    num_trained_rows: int
    """(row, step) pairs trained up to there."""
    tau: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """``result.json``: what the stage says of a run beside its files."""

    run_key: str
    num_epochs: float
    num_trained_rows: int
    """Of the whole run."""
    damaged: dict[str, str]
    """Samples left out, and why."""
    best: BestStep | None


class Finished:
    """Where one run's results are kept.

    Args:
        root: ``.eyas/train``.
        run_key: Digest of all that decides the result.
    """

    def __init__(self, root: Path, run_key: str) -> None:
        self._root, self._run_key = root, run_key
        self.folder = root / run_key[:16] / FOLDER

    def keep(self, result: FinishedRun, drafter: Path, metrics: Path) -> None:
        """Keep what was published; what is kept of other runs goes."""
        with fs.atomic_dir(self.folder) as part:
            _copy(drafter, part / "drafter")
            _copy_tree(metrics, part / "metrics")
            fs.write_record(part / RESULT_NAME, result)
        for other in self._root.glob(f"*/{FOLDER}"):
            if other != self.folder:
                _forget(other)

    def read(self) -> tuple[CheckpointMeta, FinishedRun] | None:
        """What was kept; None when nothing was, or when it is not whole any more."""
        if not self.folder.is_dir():
            return None
        try:
            return self._read()
        except StoreError as error:
            console.log(f"train: what was kept of the finished run is of no use: {error.message}")
            _forget(self.folder)
            return None

    def publish(self, drafter: Path, metrics: Path) -> None:
        """Publish again what ``read`` found whole."""
        with fs.atomic_dir(metrics) as part:
            _copy_tree(self.folder / "metrics", part)
        with fs.atomic_dir(drafter) as part:
            _copy(self.folder / "drafter", part)

    def _read(self) -> tuple[CheckpointMeta, FinishedRun]:
        result = fs.read_record(FinishedRun, self.folder / RESULT_NAME)
        if result.run_key != self._run_key:
            raise StoreError(f"{self.folder} is of run {result.run_key}, expected {self._run_key}")
        meta = fs.read_record(CheckpointMeta, self.folder / "drafter" / META_NAME)
        for file in meta.files:
            path = self.folder / "drafter" / file.path
            if not path.is_file() or fs.hash_file(path) != file.sha256:
                raise StoreError(f"{path} is missing or is not the file its record names")
        fs.read_json(self.folder / "metrics" / METRICS_NAME)
        return meta, result


def settle(root: Path, locked_md5: str | None, cached: Callable[[str], str]) -> None:
    """Forget what DVC holds: its lock names the drafter and its cache has every file.

    Args:
        root: ``.eyas/train``.
        locked_md5: Of ``models/drafter`` as ``dvc.lock`` names it.
        cached: Where the cache keeps an object, by md5.
    """
    for folder in root.glob(f"*/{FOLDER}"):
        record = folder / "drafter" / META_NAME
        listed = _listed(Path(cached(locked_md5))) if locked_md5 else {}
        whole = all(fs.size_or_none(cached(md5)) is not None for md5 in listed.values())
        if whole and record.is_file() and listed.get(META_NAME) == fs.hash_file(record, "md5"):
            _forget(folder)


def _listed(directory: Path) -> Mapping[str, str]:
    """Path → md5 of a folder that DVC holds; empty when the cache lost the list."""
    if not directory.is_file():
        return {}
    return {entry["relpath"]: entry["md5"] for entry in fs.read_json(directory)}


def _copy(source: Path, folder: Path) -> None:
    """Hard links where the file system makes them, copies where not."""
    folder.mkdir(exist_ok=True)
    for path in sorted(source.iterdir()):
        try:
            os.link(path, folder / path.name)
        except OSError as error:
            if error.errno not in fs.NO_HARDLINKS:
                raise
            shutil.copyfile(path, folder / path.name)


def _copy_tree(source: Path, folder: Path) -> None:
    """Copy file by file: the error of ``shutil.copytree`` does not say that the disk is full."""
    folder.mkdir(exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.is_dir():
            _copy_tree(path, folder / path.name)
        else:
            shutil.copyfile(path, folder / path.name)


def _forget(folder: Path) -> None:
    """Remove it, and the run's folder when nothing else is there."""
    (folder / RESULT_NAME).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    if folder.parent.is_dir() and not any(folder.parent.iterdir()):
        folder.parent.rmdir()
