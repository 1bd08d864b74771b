"""``eyas train-from``: a drafter from states that others captured, by the pipeline's own stages.

Everything that can be told before the import starts is told then: options against what the adoption found, the disk,
what git tracks. DVC then runs ``import`` alone. What fails there leaves no trace but the shards that are gone on with;
what is done is frozen (``eyas.ops.exchange.stage``), and DVC does the rest.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas import config, console, fs
from eyas.errors import ConfigError, DataError, EyasError, StoreError
from eyas.generations.listing import find
from eyas.generations.trees import ADOPTED
from eyas.ops.adopt.source import OTHER
from eyas.ops.exchange import imported as store
from eyas.ops.exchange.gate import adopted_need, check_room, log_room
from eyas.ops.exchange.stage import (
    IMPORT,
    IMPORTS,
    PIPELINE,
    TARGET,
    ImportOptions,
    freeze,
    generation_of,
    import_stage,
    imported_by,
    keep_from_git,
    write,
)
from eyas.plan.cache import locked_stage, read_yaml

MIN_PREFIX = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a call made, and what is left to do."""

    name: str
    generation: str
    """Hash of the adopted generation; empty for a set that was imported by hand."""
    tau: float
    paths: dict[str, str]
    """Drafter, export, states, reports."""
    uncommitted: tuple[str, ...]
    commit: str
    """The command; empty when git has everything."""


def train_from(root: Path, generation: str, options: ImportOptions) -> Trained:
    """Import an adopted generation, train, evaluate and export from it; whatever is up to date is not run again.

    Args:
        root: The repository.
        generation: Name or hash of an adopted generation, or the name of a set below ``imports/``.
        options: Replace those of the last import that was finished; none keeps them.

    Raises:
        StoreError: There is no such generation, or nothing can be trained from it.
        DataError: Nothing says which layers its states come from, or what was said does not fit its files.
        DiskError: A second full set does not fit.
        EyasError: DVC or a stage of it failed.
    """
    name = _name(root, generation)
    home = IMPORTS / name
    made = imported_by(root, name)
    keep_from_git(root, root / home)
    adopted = read_yaml(root / ADOPTED / f"{name}.dvc")
    if adopted:
        _check_source(made, name)
        wanted = _wanted(root, adopted, name, made, options)
        is_there = wanted == made and (_is_done(root, name, made) or _is_unrecorded(root, name))
        if not is_there or _is_lost(root, name):
            _import(root, name, adopted, wanted)
            made = wanted
        _use(root, name, made)
    elif not made:
        raise StoreError(f"{home / PIPELINE} is missing", f"import again: make import-states FORMAT=… FROM=… TO={home}")
    else:
        if options.arguments and options.arguments != _arguments(made):
            raise StoreError(
                f"{home} is used as it was imported: {' '.join(_arguments(made)) or 'no option'} was said then",
                f"say nothing, or import again into another folder: make import-states … TO={IMPORTS}/NAME",
            )
        _use(root, name, made)
    _repro(root, (home / PIPELINE).as_posix())
    return _trained(root, name, generation_of(made))


# ── which set ─────────────────────────────────────────────────────────────────────────────────


def _name(root: Path, generation: str) -> str:
    if (root / ADOPTED / f"{generation}.dvc").is_file() or (root / IMPORTS / generation / PIPELINE).is_file():
        return generation
    if len(generation) >= MIN_PREFIX and (name := _imported_from(root, generation)):
        return name
    found = find(root, generation)
    path = Path(found.path)
    if path.parts[0] == IMPORTS.name:
        return path.parts[1]
    if found.kind != "adopted":
        raise StoreError(
            f"generation {found.name} is the pipeline's own, expected an adopted or imported one",
            "check its revision out and train there: git checkout REVISION && dvc checkout && make train",
        )
    if not (root / ADOPTED / f"{found.name}.dvc").is_file():
        raise StoreError(
            f"adopted generation {found.name} was retired: {ADOPTED}/{found.name}.dvc is gone, and nothing was imported "
            "from it",
            "git checkout it",
        )
    return found.name


def _imported_from(root: Path, prefix: str) -> str:
    """The set that was imported from a generation, which may be gone since."""
    names = [path.parent.name for path in sorted((root / IMPORTS).glob(f"*/{PIPELINE}"))]
    found = [name for name in names if generation_of(imported_by(root, name)).startswith(prefix)]
    return found[0] if len(found) == 1 else ""


def _check_source(made: Mapping[str, Any], name: str) -> None:
    """Refuse to take one set for another that has its name.

    Raises:
        StoreError: ``imports/<name>`` was imported by hand, from another folder than ``adopted/<name>``.
    """
    if made and not generation_of(made) and (ADOPTED / name).as_posix() not in made.get("deps", ()):
        raise StoreError(
            f"{IMPORTS / name} was imported by hand and is not of {ADOPTED / name}: `{made.get('cmd')}`",
            f"move it to another name: git mv, or away: rm -r {IMPORTS / name}; or adopt the folder under another NAME=",
        )


# ── what was said ─────────────────────────────────────────────────────────────────────────────


def _arguments(stage: Mapping[str, Any]) -> list[str]:
    """Options of a stage's command: what stands behind the folder of the set."""
    words = shlex.split(str(stage.get("cmd", "")))
    return words[words.index("--to") + 2 :] if "--to" in words else []


def _wanted(
    root: Path, adopted: Mapping[str, Any], name: str, made: Mapping[str, Any], options: ImportOptions
) -> Mapping[str, Any]:
    """The stage to run: the one that is there, unless something else is said or another generation has its name."""
    hashed = str(adopted["outs"][0]["md5"])
    is_same = generation_of(made) == hashed
    if is_same and options.arguments in ([], _arguments(made)):
        return made
    layout = _check_options(root, adopted, name, options)
    return import_stage(layout, (ADOPTED / name).as_posix(), name, options, hashed)


def _check_options(root: Path, adopted: Mapping[str, Any], name: str, options: ImportOptions) -> str:
    """Hold what was said against what the adoption found in the files; gives their layout."""
    meta = adopted.get("meta", {}).get("eyas", {}).get("adopted", {})
    layout = str(meta.get("layout", ""))
    if layout in ("", OTHER):
        raise StoreError(
            f"{name} was adopted as {layout or 'a folder that DVC added'}: nothing says how to read its files",
            "retire it, then adopt the folder again with FORMAT=speculators_v1, speculators or specforge",
        )
    said, known = list(options.boundaries), list(meta.get("boundaries") or ())
    if not said and not known:
        raise DataError(
            f"the {layout} files of {name} do not say which layers their states come from",
            "give the boundaries (states entering layer b): BOUNDARIES=2,15,27 (`--boundaries`)",
        )
    path = root / TARGET
    num_layers = int(fs.read_json(path)["num_layers"]) if path.is_file() else max(said, default=0)
    if said != sorted(set(said)) or any(not 0 <= boundary <= num_layers for boundary in said):
        raise ConfigError(f"boundaries {said}, expected rising numbers from 0 to {num_layers}", "BOUNDARIES=2,15,27")
    num_aux = int(meta.get("num_aux") or len(known) or len(said))
    if said and len(said) != num_aux:
        raise DataError(
            f"boundaries {said} are {len(said)}, the files of {name} hold {num_aux} aux streams and the last states",
            "one number for each aux stream, in their order: BOUNDARIES=2,15,27",
        )
    if said and known and said != known:
        raise DataError(f"boundaries contradict each other: given: {said}, the files: {known}", "leave them out")
    return layout


# ── the import ────────────────────────────────────────────────────────────────────────────────


def _is_done(root: Path, name: str, made: Mapping[str, Any]) -> bool:
    """Whether the lock names what this very stage made: of this generation, with these options."""
    entry = locked_stage(root / IMPORTS / name, IMPORT)
    deps = {str(dep.get("path")): str(dep.get("md5")) for dep in entry.get("deps", ())}
    source = (ADOPTED / name).as_posix()
    return (
        bool(entry)
        and entry.get("cmd") == made.get("cmd")
        and deps.get(source, generation_of(made)) == generation_of(made)
    )


def _is_unrecorded(root: Path, name: str) -> bool:
    """Whether the import came to its end and DVC did not: DVC would run it again, and begin by deleting the set."""
    return not store.locked(root, name) and not store.problem(root, name)


def _is_lost(root: Path, name: str) -> bool:
    """Whether the set is not whole, DVC's cache has not what lacks, and the files that it came from are there."""
    store.bring(root, name)
    return (root / ADOPTED / name).is_dir() and bool(store.problem(root, name))


def _import(root: Path, name: str, adopted: Mapping[str, Any], stage: Mapping[str, Any]) -> None:
    """Run the import; when it fails, everything is as it was but for the shards that the next call goes on with."""
    home = root / IMPORTS / name
    params = config.load(root / config.PARAMS_PATH)
    source = ADOPTED / name
    if not (root / source).is_dir() and store.dvc(root, "checkout", f"{source}.dvc"):
        raise StoreError(f"{source} is gone, and DVC's cache lacks it too", f"dvc pull {source}.dvc, or adopt it again")
    log_room(check_room(root, home, params, adopted_need(params, adopted), own=(generation_of(stage),)), home, source)
    is_new, before = not home.exists(), _read(home / PIPELINE)
    write(root, name, {key: value for key, value in stage.items() if key != "frozen"})
    code = store.dvc(root, "repro", store.target(name))
    if code == 0 and _is_done(root, name, stage):
        freeze(root, name)
        return
    _undo(root, name, before, is_new=is_new)
    kept_bytes = store.spool_bytes(root, name)
    kept = f"; {console.human_bytes(kept_bytes)} of it are kept in {IMPORTS / name}/.eyas" if kept_bytes else ""
    hint = "read the message above; "
    hint += f"the same command goes on, rm -r {IMPORTS / name}/.eyas gives it up" if kept else "then the same command"
    raise EyasError(f"the import of {name} failed (`dvc repro` ended with {code}){kept}", hint)


def _read(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _undo(root: Path, name: str, before: bytes | None, *, is_new: bool) -> None:
    """Take back what a failed import was told, and bring back what DVC deleted for it."""
    home = root / IMPORTS / name
    if before is not None:
        fs.write_bytes(home / PIPELINE, before)
        store.bring(root, name)
        return
    (home / PIPELINE).unlink()
    if is_new and not store.spool_bytes(root, name):
        shutil.rmtree(home)


def _use(root: Path, name: str, made: Mapping[str, Any]) -> None:
    """Go on with a set that was imported, if it is whole; from here on DVC never deletes it.

    Raises:
        StoreError: It is not whole.
    """
    home, source = IMPORTS / name, ADOPTED / name
    is_adopted = bool(generation_of(made)) or source.as_posix() in made.get("deps", ())
    is_gone = is_adopted and not (root / source).is_dir()
    store.bring(root, name)
    if lacks := store.problem(root, name):
        where = f"; {source}, from which it was imported, is gone" if is_gone else ""
        again = (
            f"adopt the folder again: make adopt DIR=… NAME={name}" if is_gone else f"rm -r {home}, and import again"
        )
        raise StoreError(
            f"{home} is not whole: {lacks}{where}",
            f"dvc checkout --force {home / store.STATES}, or dvc pull; or {again}",
        )
    if is_gone:
        day = store.deleted_on(root, generation_of(made))
        what = f"was deleted by gc on {day}" if day else "is gone"
        store.log(f"{source} {what}; {home} is whole and is used as it is")
    freeze(root, name)
    is_recorded = bool(store.locked(root, name))
    if not is_recorded or ((is_gone or not is_adopted) and not store.is_clean(root, name)):
        freeze(root, name, without_source=is_gone)
        store.record(root, name)
    _log_changes(root, name)


def _log_changes(root: Path, name: str) -> None:
    """Say when parameters are others than those of the import: it is not run again for them."""
    noted = locked_stage(root / IMPORTS / name, IMPORT).get("params", {}).get(config.PARAMS_PATH.name, {})
    params = read_yaml(root / config.PARAMS_PATH)
    changed = [key for key, value in noted.items() if _value(params, key) != value]
    if changed:
        store.log(
            f"{IMPORTS / name} was imported with other parameters ({', '.join(changed)}) and is used as it is; to import "
            f"it again, rm -r {IMPORTS / name}"
        )


def _value(params: Mapping[str, Any], key: str) -> Any:
    value: Any = params
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


# ── the rest ──────────────────────────────────────────────────────────────────────────────────


def _repro(root: Path, pipeline: str) -> None:
    if code := store.dvc(root, "repro", pipeline):
        raise EyasError(
            f"`dvc repro {pipeline}` ended with {code}, expected 0; what was imported is kept",
            "read the message above; the same command goes on from there",
        )


def _trained(root: Path, name: str, generation: str) -> Trained:
    home = (IMPORTS / name).as_posix()
    places = {"drafter": "drafter", "export": "export", "states": store.STATES, "reports": "reports"}
    left = store.uncommitted(root, name)
    is_noted = any(path.endswith(f"{IMPORTS}/.gitignore") for path in left)
    return Trained(
        name=name,
        generation=generation,
        tau=float(fs.read_json(root / home / "reports/acceptance.json")["tau"]),
        paths={what: f"{home}/{place}" for what, place in places.items()},
        uncommitted=tuple(left),
        commit=f"git add {IMPORTS if is_noted else home} && git commit -m 'train from {name}'" if left else "",
    )


def trained_rows(done: Trained) -> list[tuple[str, object]]:
    """A drafter for people, line by line."""
    source = f" (of generation {done.generation[:10]})" if done.generation else ""
    return [
        ("set", f"{IMPORTS / done.name}{source}"),
        ("tau", f"{done.tau:.3f}"),
        *done.paths.items(),
        *([("commit", ", ".join(done.uncommitted)), ("next", done.commit)] if done.commit else []),
    ]
