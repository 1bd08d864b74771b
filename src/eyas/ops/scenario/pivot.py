"""``eyas scenario-pivot``: from one engine's states to another's on a volume that does not hold both.

    states by the first engine → parameters say the second → the budget says no → retire, gc → extract → train

Everything is what a user types, in a copy of this repository on a tmpfs of fixed size that holds copy and DVC cache.
The size follows from measured bytes, so that the new set does not fit beside the old one and fits without it.
What each command must say is computed here from ``statvfs``, ``dvc.lock`` and the plan, not taken from the command
that is judged.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas import config, console, fs
from eyas.errors import ConfigError
from eyas.ops.params import write_params
from eyas.ops.published import MANIFEST, OUTS, PLAN, STATES
from eyas.ops.scenario.transcript import DeviationError, Transcript
from eyas.ops.scenario.volume import enter_namespace, mount_memory, resize_memory
from eyas.ops.scratch import SMALL, copy_tree, environment
from eyas.plan.cache import cache_object, hashes, locked_stage

VOLUME = Path(".eyas/pivot")
REPORT = Path("reports/scenario-pivot.md")
ROOMY_BYTES = 8 << 30
"""Size before the bytes are measured; memory is taken only for what lies there."""
RESERVE_BYTES = 300_000_000
"""Stays free beside the new states: the drafter and its training states go there."""
NUM_STEPS = 6
CODEC = "raw"
"""Both sets have exactly the payload's size then. A codec would make the first one tiny: what engine ``fake`` gives
is arithmetic."""
WRONG_ID = "0123456789abcdef"
OWN_OPTIONS = (
    "MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "FROM", "TO", "ARGS", "FORCE", "JSON", "ALL", "GEN", "KEEP",
    "CONFIRM", "PROJECTS", "DIR", "ENGINE", "FORMAT", "NOTE", "NAME", "DVC_SITE_CACHE_DIR",
    "TORCH",
)  # fmt: skip
"""Of the make that called us; the commands here have their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pivot:
    """What a scenario measured."""

    first: str
    second: str
    volume_bytes: int
    old_hash: str
    new_hash: str
    old_bytes: int
    needed_bytes: int
    free_before_bytes: int
    promised_bytes: int
    measured_bytes: int
    plan_id: str
    num_steps: int
    seconds: float


def run_pivot(root: Path, first: str, second: str) -> Pivot:
    """Run the scenario; its transcript goes to ``reports/scenario-pivot.md``, also when it fails.

    Args:
        root: The repository.
        first: Engine whose states are in the way.
        second: Engine that is wanted.

    Raises:
        DeviationError: A command did not do what it has to.
        DiskError: No volume can be mounted here.
        ConfigError: Both engines are the same.
    """
    if first == second:
        raise ConfigError(
            f"FROM={first} TO={second}: the same engine, expected two", "make scenario-pivot FROM=fake TO=hf"
        )
    enter_namespace()
    volume = (root / VOLUME).resolve()
    mount_memory(volume, ROOMY_BYTES)
    folder = volume / "eyas"
    shell = Transcript(folder, _environment(root, folder))
    shell.lines += [f"# From {first} to {second} on a volume that does not hold both", ""]
    try:
        _prepare(root, folder)
        return _Scenario(shell, volume, first, second).run()
    except DeviationError as error:
        shell.lines += [f"**Failed:** {error}", ""]
        raise
    finally:
        fs.write_text(root / REPORT, "\n".join(shell.lines))


def _environment(root: Path, folder: Path) -> dict[str, str]:
    values = {name: value for name, value in environment(root, folder).items() if name not in OWN_OPTIONS}
    who = {
        f"GIT_{role}_{key}": f"pivot{at}"
        for role in ("AUTHOR", "COMMITTER")
        for key, at in (("NAME", ""), ("EMAIL", "@eyas"))
    }
    return values | who | {"GIT_CONFIG_GLOBAL": os.devnull, "NO_COLOR": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def _prepare(root: Path, folder: Path) -> None:
    """Copy the repository, with git instead of without; lend it this interpreter's packages; small parameters."""
    copy_tree(root, folder)
    (folder / ".dvc/config.local").unlink()
    _lend_packages(folder)
    write_params(folder, SMALL)
    path = folder / config.PARAMS_PATH
    params = config.load(path)
    params.respond.max_new_tokens = 16
    params.extract.codec, params.extract.reserve_bytes = CODEC, RESERVE_BYTES
    params.train.num_steps = params.train.checkpoint_every = NUM_STEPS
    params.train.log_every = 2
    fs.write_text(path, config.to_yaml(params))


def _lend_packages(folder: Path) -> None:
    """Let the copy's make find this interpreter and its packages in ``.venv``, ready as they are."""
    venv = folder / ".venv"
    venv.mkdir()
    for path in Path(sys.prefix).iterdir():
        if not path.name.startswith(".ready"):
            (venv / path.name).symlink_to(path)
    makefile = (folder / "Makefile").read_text(encoding="utf-8")
    torch = makefile.partition("TORCH ?= ")[2].partition("\n")[0]
    (venv / f".ready-{torch}").touch()


class _Scenario:
    """The steps, in order."""

    def __init__(self, shell: Transcript, volume: Path, first: str, second: str) -> None:
        self.shell, self.volume, self.first, self.second = shell, volume, first, second
        self.folder = shell.folder

    def run(self) -> Pivot:
        """All of it."""
        self._begin()
        old_hash, old_bytes = self._first_states()
        needed_bytes = self._switch()
        volume_bytes = self._shrink(needed_bytes, old_bytes)
        free_before_bytes = self._free_bytes()
        self._does_not_fit(old_bytes)
        self._is_refused()
        self._still_named(old_hash)
        plan = self._retire(old_hash, old_bytes)
        measured_bytes = self._collect(plan, old_hash)
        new_hash = self._second_states()
        self._train(new_hash)
        return Pivot(
            first=self.first,
            second=self.second,
            volume_bytes=volume_bytes,
            old_hash=old_hash,
            new_hash=new_hash,
            old_bytes=old_bytes,
            needed_bytes=needed_bytes,
            free_before_bytes=free_before_bytes,
            promised_bytes=plan["freed_bytes"],
            measured_bytes=measured_bytes,
            plan_id=plan["plan_id"],
            num_steps=NUM_STEPS,
            seconds=round(self.shell.seconds, 1),
        )

    # ── the situation ─────────────────────────────────────────────────────────────────────────

    def _begin(self) -> None:
        self.shell.heading("A repository")
        self.shell.run("git init -q -b main && git add . && git commit -qm 'a small pipeline'")

    def _first_states(self) -> tuple[str, int]:
        shell = self.shell
        shell.heading(f"States by {self.first}")
        self._set_engine(self.first)
        shell.run("make extract")
        shell.run(f"git add . && git commit -qm 'states by {self.first}'")
        shell.expect("engine in the manifest", self._manifest()["capture"]["engine"], self.first)
        files = [path for path in (self.folder / STATES).rglob("*") if path.is_file()]
        return self._locked_hash(), sum(path.stat().st_blocks * 512 for path in files)

    def _switch(self) -> int:
        """Parameters say the second engine; gives the bytes that its states need."""
        shell = self.shell
        shell.heading(f"Parameters switch to {self.second}")
        self._set_engine(self.second)
        shell.run("make plan")
        shell.run(f"git commit -qam 'capture with {self.second}'")
        needed_bytes = shell.json("make budget JSON=1")["needed_bytes"]
        plan = self._json(PLAN)
        streams = len(plan["capture"]["boundaries"]) + 1
        payload_bytes = plan["num_tokens"] * streams * plan["hidden_size"] * 2
        shell.expect_about("needed for the raw payload", needed_bytes, payload_bytes, payload_bytes // 10)
        return needed_bytes

    def _shrink(self, needed_bytes: int, old_bytes: int) -> int:
        """Give the volume the size that makes the story: half of the old set too little."""
        stat = os.statvfs(self.volume)
        used_bytes = (stat.f_blocks - stat.f_bfree) * stat.f_frsize
        size_bytes = used_bytes + needed_bytes + RESERVE_BYTES - old_bytes // 2
        resize_memory(self.volume, size_bytes)
        self.shell.say(
            f"From here the volume has {size_bytes:,} bytes: {used_bytes:,} are used, the new set needs "
            f"{needed_bytes:,} and a reserve of {RESERVE_BYTES:,}, the old one holds {old_bytes:,}."
        )
        return size_bytes

    # ── no ────────────────────────────────────────────────────────────────────────────────────

    def _does_not_fit(self, old_bytes: int) -> None:
        shell = self.shell
        shell.heading("The budget says no")
        shell.run("make budget")
        found = shell.json("make budget JSON=1")
        shell.expect("fits", found["fits"], False)
        shell.expect("fits after gc alone, the old states being named", found["fits_after_gc"], False)
        shell.expect("fits after retiring", found["fits_after_retiring"], True)
        shell.expect_about("bytes that lack", found["gap_bytes"], old_bytes // 2, old_bytes // 10)
        shell.expect_about("free bytes", found["free_bytes"], self._free_bytes(), 1 << 20)

    def _is_refused(self) -> None:
        """Neither guard nor gate lets the extraction begin, and nothing is lost by trying."""
        shell = self.shell
        shell.heading("make extract refuses, and nothing is lost")
        before = self._contents()
        shell.run("make extract", code=2)
        shell.expect("files of the old states after the guard's refusal", self._contents(), before)
        shell.run("make extract FORCE=1", code=2)
        objects = {name: value for name, value in before.items() if name.startswith(".dvc/")}
        lost = objects.items() - self._contents().items()
        shell.expect("objects lost by FORCE=1", sorted(lost), [])
        shell.run(f"dvc checkout {' '.join(OUTS)}")
        shell.expect("files of the old states, checked out again", self._contents(), before)

    def _still_named(self, old_hash: str) -> None:
        shell = self.shell
        shell.heading("The old states are named: gc leaves them alone")
        shell.run("make generations")
        old = self._generation(old_hash)
        wanted = {"engine": self.first, "state": "stale", "is_kept": True, "is_whole": True, "freed_now_bytes": 0}
        shell.expect("the old generation", {key: old[key] for key in wanted}, wanted)
        shell.expect("its size", old["stored_bytes"], self._manifest()["stored_bytes"])
        shell.run("make gc-plan")
        plan = shell.json("make gc-plan JSON=1")
        self.shell.expect("whether gc would take it", old_hash in _hashes(plan), False)

    # ── retire, collect ───────────────────────────────────────────────────────────────────────

    def _retire(self, old_hash: str, old_bytes: int) -> dict[str, Any]:
        """Gives gc's plan."""
        shell = self.shell
        shell.heading("Retire it: a change of dvc.lock, and a commit")
        before = self._contents()
        shell.run(f"make retire GEN={old_hash[:8]}")
        shell.expect("files after retiring", self._contents(), before)
        shell.run("git diff --stat")
        shell.expect("entry of extract in dvc.lock", locked_stage(self.folder, "extract"), {})
        shell.run(f"git commit -qam 'retire the states by {self.first}'")
        shell.run("make gc-plan")
        plan = shell.json("make gc-plan JSON=1")
        shell.expect("whether gc would take it", old_hash in _hashes(plan), True)
        shell.expect_about("bytes that gc promises", plan["freed_bytes"], old_bytes, old_bytes // 10)
        return plan

    def _collect(self, plan: dict[str, Any], old_hash: str) -> int:
        """Gives the bytes that came back, as ``statvfs`` shows them."""
        shell = self.shell
        shell.heading("Delete, by the plan's id and no other")
        before = self._contents()
        shell.run(f"make gc CONFIRM={WRONG_ID}", code=2)
        shell.expect("files after a wrong id", self._contents(), before)
        free_bytes = self._free_bytes()
        shell.run(f"make gc CONFIRM={plan['plan_id']}")
        measured_bytes = self._free_bytes() - free_bytes
        num_gone = len(before.keys() - self._contents().keys())
        block_bytes = os.statvfs(self.volume).f_frsize
        shell.expect_about("freed", measured_bytes, plan["freed_bytes"], block_bytes * num_gone)
        shell.expect("the old list", cache_object(self.folder, old_hash).exists(), False)
        self._check_ledger(plan, old_hash)
        return measured_bytes

    def _check_ledger(self, plan: dict[str, Any], old_hash: str) -> None:
        self.shell.run("tail -n 1 .eyas/ledger.jsonl")
        last = json.loads((self.folder / ".eyas/ledger.jsonl").read_text().splitlines()[-1])
        self.shell.expect("event in the ledger", (last["event"], last["plan_id"]), ("gc", plan["plan_id"]))
        self.shell.expect("generations in the ledger", [g["hash"] for g in last["generations"]], [old_hash])

    # ── yes ───────────────────────────────────────────────────────────────────────────────────

    def _second_states(self) -> str:
        shell = self.shell
        shell.heading(f"The budget says yes: states by {self.second}")
        shell.run("make budget")
        shell.expect("fits", shell.json("make budget JSON=1")["fits"], True)
        shell.run("make extract")
        shell.expect("engine in the manifest", self._manifest()["capture"]["engine"], self.second)
        manifest, plan = self._manifest(), self._json(PLAN)
        shell.expect("samples stored", manifest["num_stored_samples"], plan["num_samples"])
        shell.run(f"git commit -qam 'states by {self.second}'")
        return self._locked_hash()

    def _train(self, new_hash: str) -> None:
        shell = self.shell
        shell.heading("The drafter trains from them")
        shell.run("make train")
        metrics = self._json("reports/train/metrics.json")
        shell.expect("training steps", metrics["step"], NUM_STEPS)
        shell.run("git commit -qam 'a drafter'")
        shell.run("make generations")
        new = self._generation(new_hash)
        shell.expect("state of the new generation", (new["engine"], new["state"]), (self.second, "current"))
        shell.expect("whether a drafter uses it", len(new["used_by"]), 1)

    # ── what is there, seen without eyas' commands ────────────────────────────────────────────

    def _set_engine(self, engine: str) -> None:
        self.shell.run(
            f"sed -i '/^extract:/,/^$/s/engine: .*/engine: {engine}/' params.yaml && git diff -U0 params.yaml"
        )

    def _free_bytes(self) -> int:
        stat = os.statvfs(self.volume)
        return stat.f_bavail * stat.f_frsize

    def _contents(self) -> dict[str, str]:
        """Path → SHA-256 of the states and of every object in DVC's cache."""
        found = {}
        for name in (STATES, ".dvc/cache/files"):
            if (self.folder / name).is_dir():
                found |= {f"{name}/{file.path}": file.sha256 for file in fs.tree_digests(self.folder / name)}
        return found

    def _locked_hash(self) -> str:
        return hashes(locked_stage(self.folder, "extract"), "outs")[STATES]

    def _manifest(self) -> dict[str, Any]:
        return self._json(MANIFEST)

    def _json(self, name: str) -> dict[str, Any]:
        return json.loads((self.folder / name).read_text())

    def _generation(self, wanted: str) -> dict[str, Any]:
        listed = {one["hash"]: one for one in self.shell.json("make generations JSON=1")}
        self.shell.expect(f"whether generation {wanted} is listed", wanted in listed, True)
        return listed[wanted]


def _hashes(plan: dict[str, Any]) -> list[str]:
    """Generations that a plan of gc's deletes."""
    return [generation["hash"] for generation in plan["generations"]]


def pivot_rows(done: Pivot) -> list[tuple[str, str]]:
    """For people."""
    size = console.human_bytes
    return [
        ("from, to", f"{done.first}, {done.second}"),
        ("volume", size(done.volume_bytes)),
        ("free", f"{size(done.free_before_bytes)}, of them {size(RESERVE_BYTES)} in reserve"),
        ("needed", size(done.needed_bytes)),
        ("old states", f"{size(done.old_bytes)} ({done.old_hash[:10]})"),
        ("gc", f"promised {done.promised_bytes:,} bytes, measured {done.measured_bytes:,}"),
        ("new states", done.new_hash[:10]),
        ("trained", f"{done.num_steps} steps"),
        ("took", console.human_seconds(done.seconds)),
        ("transcript", os.fspath(REPORT)),
    ]
