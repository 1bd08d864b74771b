"""A set below ``imports/`` as it lies there: whether it is whole, what DVC has of it, what git does not have yet."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from eyas import console, fs
from eyas.errors import EyasError, StoreError
from eyas.generations import ledger
from eyas.ops.exchange.stage import IMPORT, IMPORTS, PIPELINE
from eyas.ops.published import read_published, stat_tree, strangers
from eyas.plan.cache import cache_object, hashes, locked_stage
from eyas.shards.handover import HOME, SPOOL

STATES, MANIFEST, TOKENS, REPORT = "hidden_states", "hidden_states.json", "tokens", "import.json"
LOCK = "dvc.lock"


def dvc(root: Path, *arguments: str) -> int:
    """Run DVC; all that it and its stages print goes to stderr, stdout is for the result."""
    return subprocess.run([sys.executable, "-m", "dvc", *arguments], cwd=root, check=False, stdout=2).returncode


def locked(root: Path, name: str) -> dict[str, str]:
    """Path → md5 of what the set's lock names; empty when it was never recorded."""
    return hashes(locked_stage(root / IMPORTS / name, IMPORT), "outs")


def bring(root: Path, name: str) -> None:
    """Fetch from DVC's cache, and from git, what is missing of a set that was recorded."""
    home = IMPORTS / name
    outs = [f"{home}/{out}" for out in (TOKENS, STATES, MANIFEST)]
    named = locked(root, name)
    if any(not (root / out).exists() and _is_cached(root, named.get(out)) for out in outs):
        dvc(root, "checkout", *[out for out in outs if not (root / out).exists()])
    if not (root / home / REPORT).exists():  # what git does not have either, is told by `problem`
        subprocess.run(["git", "checkout", "-q", "--", f"{home}/{REPORT}"], cwd=root, capture_output=True, check=False)


def _is_cached(root: Path, md5: str | None) -> bool:
    return bool(md5) and cache_object(root, str(md5)).is_file()


def problem(root: Path, name: str) -> str:
    """What a set lacks of what its manifest lists, or of what its lock names; empty when it is whole.

    Sizes are compared; bytes are verified by whoever reads them.

    Raises:
        StoreError: Somebody put other files among the shards.
    """
    home = root / IMPORTS / name
    published = read_published(home / MANIFEST)
    if published is None:
        return f"{MANIFEST} is missing"
    found = stat_tree(home / STATES)
    bad = [file.path for file in published.files if found.get(file.path, (0, 0, -1))[2] != file.size_bytes]
    if bad:
        return f"{len(bad):,} of {len(published.files):,} shards are missing or cut ({STATES}/{bad[0]})"
    if extra := strangers(found, published.files):
        raise StoreError(
            f"{IMPORTS / name}/{STATES} holds {len(extra):,} files that {MANIFEST} does not list ({extra[0]})",
            f"move them away: mv {IMPORTS / name}/{STATES}/{extra[0]} /tmp",
        )
    index = home / TOKENS / "index.json"
    if not index.is_file() or fs.read_json(index).get("tokens_sha256") != published.capture.get("tokens"):
        return f"{TOKENS} is missing, or of another set"
    if not (home / REPORT).is_file():
        return f"{REPORT} is missing"
    named = locked(root, name).get(f"{IMPORTS / name}/{STATES}", published.states_md5)
    return "" if named == published.states_md5 else f"{STATES} is not the set that {LOCK} names"


def is_clean(root: Path, name: str) -> bool:
    """Whether DVC finds nothing changed of the import."""
    command = [sys.executable, "-m", "dvc", "status", "--json", target(name)]
    done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=False)
    try:
        return done.returncode == 0 and json.loads(done.stdout) == {}
    except ValueError:
        return False


def target(name: str) -> str:
    """The import as DVC addresses it."""
    return f"{(IMPORTS / name / PIPELINE).as_posix()}:{IMPORT}"


def record(root: Path, name: str) -> None:
    """Tell DVC of a set that is whole; a changed byte does not become the truth that way.

    Raises:
        EyasError: DVC failed.
        StoreError: Its hashes are not those that the manifest lists; the lock is left as it was.
    """
    lock = root / IMPORTS / name / LOCK
    before = lock.read_bytes() if lock.is_file() else None
    code = dvc(root, "commit", "--force", target(name))
    published = read_published(root / IMPORTS / name / MANIFEST)
    named = locked(root, name).get(f"{IMPORTS / name}/{STATES}")
    if code:
        raise EyasError(f"`dvc commit` ended with {code}, expected 0", "read DVC's message above")
    if published is None or named != published.states_md5:
        if before is None:
            lock.unlink(missing_ok=True)
        else:
            fs.write_bytes(lock, before)
        raise StoreError(
            f"{IMPORTS / name}/{STATES} is damaged: DVC finds {named}, {MANIFEST} lists "
            f"{published.states_md5 if published else 'nothing'}",
            f"`git checkout {IMPORTS / name}/{LOCK} && dvc checkout {IMPORTS / name}/{STATES}` takes it from DVC's cache",
        )


def deleted_on(root: Path, generation: str) -> str:
    """Day on which gc deleted a generation, by the ledger; empty when it did not."""
    for event in reversed(ledger.read(root)):
        listed = event.get("generations") if event.get("event") == "gc" else None
        if any(isinstance(one, dict) and one.get("hash") == generation for one in listed or ()):
            return str(event.get("when", ""))[:10]
    return ""


def spool_bytes(root: Path, name: str) -> int:
    """What an import has written and not published."""
    folder = root / IMPORTS / name / HOME / SPOOL
    return sum(size for _, _, size in stat_tree(folder).values())


def uncommitted(root: Path, name: str) -> list[str]:
    """Files of a set's folder, and ``imports/.gitignore``, that git does not have as they are."""
    words = ["git", "status", "--porcelain", "-z", "--untracked-files=all", "--no-renames", "--"]
    places = [f"{IMPORTS / name}", f"{IMPORTS}/.gitignore"]
    done = subprocess.run([*words, *places], cwd=root, capture_output=True, text=True, check=False)
    return sorted(line[3:] for line in done.stdout.split("\0") if line)


def log(text: str) -> None:
    """Say something of the run."""
    console.log(f"train-from: {text}")
