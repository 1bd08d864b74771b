"""A random history of a repository, and a model of it in plain sets that knows nothing of eyas' idea of generations.

The history acts through git and the command ``eyas``; the model follows what it did: which content every branch, tag
and experiment names, which names lie outside the cache. After each gc both are compared.
"""

from __future__ import annotations

import contextlib
import gc as garbage
import io
import json
import os
import shutil
from pathlib import Path
from random import Random
from unittest import mock

from gc_model import Files, Model, Outs, content_bytes, folder_hash, objects_of

from eyas.cli import main
from states_repository import MANIFEST, STATES, StatesRepository, manifest_of, md5

ENGINES = ("vllm", "hf", "sglang")
CONTENTS = [bytes([97 + i]) * size for i, size in enumerate((1, 10, 4096, 4097, 9000, 20000, 50000, 3))]
START_S = 1_700_000_000
DRAFTER = "models/drafter"


class KilledError(BaseException):
    """Ends a command wherever it is; nobody catches it."""


class History:
    """``home`` holds the repository and the folders that are adopted; all of it on one volume."""

    def __init__(self, home: Path, random: Random) -> None:
        self.home, self.random, self.model = home, random, Model()
        self.repository = StatesRepository(home / "r")
        self.root, self.steps, self.num_gcs, self.clock = self.repository.root, [], 0, START_S
        # `/adopted/*/` would do for git; DVC's own reading of it hides adopted/*.dvc as well.
        (self.root / ".gitignore").write_text("/data\n/.eyas\n/models\n/reports\n/adopted/[!.]*/\n")
        self.generate()
        self.commit()

    # ── what a history does ───────────────────────────────────────────────────────────────────

    def run(self, num_steps: int) -> None:
        moves = (
            (self.generate, 5), (self.commit, 4), (self.branch, 2), (self.checkout, 2), (self.tag, 2),
            (self.delete_branch, 2), (self.delete_tag, 2), (self.experiment, 1), (self.delete_experiment, 1),
            (self.adopt, 2), (self.retire, 3), (self.keep, 1), (self.undo, 1), (self.rubbish, 1), (self.spool, 1),
            (self.gc, 3),
        )  # fmt: skip
        for move in self.random.choices([m for m, _ in moves], [w for _, w in moves], k=num_steps):
            move()
        self.gc(commit=True)

    def files(self) -> Files:
        num = self.random.randint(1, 4)
        return {f"{i // 2:03d}/s{i}": self.random.choice(CONTENTS) for i in range(num)}

    def generate(self) -> None:
        files, engine = self.files(), self.random.choice(ENGINES)
        drafter = self.random.choice((b"", b"weights", b"other weights" * 900))
        name = self.repository.publish(files, engine=engine, drafter=drafter)
        assert name == folder_hash(files)
        manifest = json.dumps(manifest_of(files, engine), sort_keys=True).encode()
        for path in (STATES, MANIFEST, DRAFTER):
            self.model.outs.pop(path, None)
        self.model.outs |= {STATES: files, MANIFEST: manifest} | ({DRAFTER: drafter} if drafter else {})
        self.model.laid = files
        self.arrived(files, manifest, *([drafter] if drafter else []))
        self.steps.append(f"generate {name[:6]} ({engine}, {len(files)} files)")

    def arrived(self, *values: Files | bytes) -> None:
        self.model.objects.update(*map(objects_of, values))

    def git(self, *words: str) -> str:
        self.clock += 1
        when = {"GIT_COMMITTER_DATE": f"{self.clock} +0000", "GIT_AUTHOR_DATE": f"{self.clock} +0000"}
        os.environ.update(when)
        try:
            return self.repository.git(*words)
        finally:
            for name in when:
                del os.environ[name]

    def commit(self) -> None:
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", f"{self.clock}")
        sha = self.repository.git("rev-parse", "HEAD")
        self.model.commits[sha] = dict(self.model.outs)
        self.model.branches[self.model.head] = sha
        self.steps.append(f"commit {sha[:6]} on {self.model.head}")

    @property
    def is_dirty(self) -> bool:
        """Whether a file that DVC reads differs from HEAD's, as git sees it."""
        files = ("dvc.yaml", "dvc.lock", "params.yaml", "*.dvc")
        return bool(self.repository.git("status", "--porcelain", "-uall", "--", *files))

    def branch(self) -> None:
        name = f"b{self.clock}"
        self.git("checkout", "-q", "-b", name)
        self.model.branches[name] = self.model.branches[self.model.head]
        self.model.head = name
        self.steps.append(f"branch {name}")

    def checkout(self) -> None:
        """Another branch; the states follow, or are forgotten."""
        if self.is_dirty:
            self.commit()
        name = self.random.choice(sorted(self.model.branches))
        self.git("checkout", "-q", name)
        self.model.head, self.model.outs = name, dict(self.model.commits[self.model.branches[name]])
        follow = self.random.random() < 0.7
        if follow:
            self.lay()
        self.steps.append(f"checkout {name}{' and its states' if follow else ''}")

    def lay(self) -> None:
        """What ``dvc checkout`` does: the states of the workspace's ``dvc.lock``, or none."""
        shutil.rmtree(self.root / STATES, ignore_errors=True)
        (self.root / MANIFEST).unlink(missing_ok=True)
        self.model.laid = None
        states, manifest = self.model.outs.get(STATES), self.model.outs.get(MANIFEST)
        if isinstance(states, dict) and isinstance(manifest, bytes):
            for path, data in states.items():
                self.repository.link(self.root / STATES / path, md5(data))
            self.repository.link(self.root / MANIFEST, md5(manifest))
            self.model.laid = states

    def tag(self) -> None:
        name = f"t{self.clock}"
        note = ("-a", "-m", "m") if self.random.random() < 0.5 else ()
        self.git("tag", *note, name)
        self.model.tags[name] = self.model.branches[self.model.head]
        self.steps.append(f"tag {name}")

    def delete_branch(self) -> None:
        others = sorted(set(self.model.branches) - {self.model.head})
        if others:
            name = self.random.choice(others)
            self.git("branch", "-q", "-D", name)
            del self.model.branches[name]
            self.steps.append(f"delete branch {name}")

    def delete_tag(self) -> None:
        if self.model.tags:
            name = self.random.choice(sorted(self.model.tags))
            self.git("tag", "-d", name)
            del self.model.tags[name]
            self.steps.append(f"delete tag {name}")

    def experiment(self) -> None:
        """Only a reference and a commit, as ``dvc exp run`` leaves them; the workspace is put back."""
        if self.is_dirty:
            self.commit()
        base, outs = self.model.branches[self.model.head], dict(self.model.outs)
        self.generate()
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", "experiment")
        sha, name = self.repository.git("rev-parse", "HEAD"), f"refs/exps/{base[:2]}/{base[2:]}/e{self.clock}"
        self.git("update-ref", name, sha)
        self.model.experiments[name], self.model.commits[sha] = sha, dict(self.model.outs)
        self.git("reset", "-q", "--hard", base)
        self.model.outs = outs
        self.lay()
        self.steps.append("experiment")

    def delete_experiment(self) -> None:
        if self.model.experiments:
            name = self.random.choice(sorted(self.model.experiments))
            self.git("update-ref", "-d", name)
            del self.model.experiments[name]
            self.steps.append("delete experiment")

    def adopt(self) -> None:
        name, files = f"old_{self.clock}", self.files()
        folder = self.home / "elsewhere" / name
        for path, data in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
        self.eyas("adopt", "--dir", os.fspath(folder), "--engine", "vllm", "--format", "other", "--name", name)
        self.clock += 1
        self.model.outs[f"adopted/{name}"] = files
        self.model.adopted[name] = (folder, files)
        self.arrived(files)
        self.steps.append(f"adopt {name}: {folder_hash(files)[:6]}")

    def retire(self) -> None:
        named = sorted(path for path in self.model.outs if path == STATES or path.startswith("adopted/"))
        if not named:
            return
        path = self.random.choice(named)
        value = self.model.outs[path]
        assert isinstance(value, dict)
        name = folder_hash(value)
        self.eyas("retire", name.removesuffix(".dir") if self.random.random() < 0.5 else name[:16])
        for other in [p for p, v in self.model.outs.items() if isinstance(v, dict) and folder_hash(v) == name]:
            del self.model.outs[other]
            if other == STATES:  # the stage's whole entry goes
                self.model.outs.pop(MANIFEST)
        self.steps.append(f"retire {name[:6]}")

    def keep(self) -> None:
        named = {folder_hash(v) for sha in self.reachable() for v in self.states(self.model.commits[sha])}
        there = sorted(named & self.model.objects)
        if not there:
            return
        name, tag = self.random.choice(there), f"keep/{self.clock}"
        self.eyas("keep", name[:16], tag.removeprefix("keep/"))
        self.clock += 1
        sha = self.repository.git("rev-parse", f"{tag}^{{commit}}")
        assert name in {folder_hash(v) for v in self.states(self.model.commits[sha])}, "the tag is on a commit with it"
        self.model.tags[tag] = sha
        self.steps.append(f"keep {name[:6]}")

    def reachable(self) -> list[str]:
        return self.repository.git("rev-list", "--all", "HEAD").split()

    @staticmethod
    def states(outs: Outs) -> list[Files]:
        return [
            v for path, v in outs.items() if isinstance(v, dict) and (path == STATES or path.startswith("adopted/"))
        ]

    def undo(self) -> None:
        """``git checkout`` of DVC's files: whatever was not committed is taken back."""
        self.git("checkout", "-q", "HEAD", "--", ".")
        self.git("clean", "-q", "-fd")
        self.model.outs = dict(self.model.commits[self.model.branches[self.model.head]])
        self.steps.append("undo")

    def rubbish(self) -> None:
        data = self.random.randbytes(self.random.randint(1, 9000))
        self.model.objects.add(self.repository.put(data))
        self.steps.append("rubbish")

    def spool(self) -> None:
        waiting = sorted(identity for identity, retired in self.model.spools.items() if not retired)
        if waiting and self.random.random() < 0.6:
            identity = self.random.choice(waiting)
            self.eyas("retire", identity[:12])
            self.model.spools[identity] = True
            self.steps.append(f"retire spool {identity[:6]}")
            return
        identity = md5(str(self.clock).encode()) * 2
        self.clock += 1
        states = self.root / ".eyas/spool" / identity / "states"
        states.mkdir(parents=True)
        (states / "s0").write_bytes(self.random.choice(CONTENTS))
        self.model.spools[identity] = False
        self.steps.append(f"spool {identity[:6]}")

    # ── gc, and what must be true after it ────────────────────────────────────────────────────

    def gc(self, *, commit: bool = False) -> None:
        if self.is_dirty and (commit or self.random.random() < 0.8):
            self.commit()
        code, plan = self.eyas_json("gc-plan")
        if self.is_dirty:
            assert code == 1, "not committed, and not refused"
            assert not plan["plan_id"]
            return
        assert code == 0, plan["refusals"]
        gone = self.model.objects - self.model.used()
        names = self.names_that_go()
        assert bool(plan["plan_id"]) == bool(gone or names), "an id exactly when there is something to do"
        assert plan["objects"]["num"] == len(gone)
        before = self.measure()
        if plan["plan_id"]:
            if self.random.random() < 0.3:
                self.killed("gc", "--confirm", plan["plan_id"])
            code, _ = self.eyas_json("gc", "--confirm", plan["plan_id"])
            assert code == 0
        self.model.objects -= gone
        self.check(names)
        after = self.measure()
        assert before[0] - after[0] == plan["freed_bytes"], f"du of everything that gc may touch: {before} → {after}"
        # The volume as a whole also holds what gc and DVC write down; du of that is the only difference.
        assert before[1] - after[1] == plan["freed_bytes"] + before[2] - after[2], f"{before} → {after}"
        self.num_gcs += 1
        self.steps.append(f"gc: {len(gone)} objects, {plan['freed_bytes']:,} bytes")

    def names_that_go(self) -> list[Path]:
        """Files outside the cache that must not be there afterwards."""
        used, paths = self.model.used(), []
        if self.model.laid is not None and folder_hash(self.model.laid) not in used:
            paths += [self.root / STATES / path for path in self.model.laid]
        for name, (folder, files) in self.model.adopted.items():
            if folder_hash(files) not in used:
                paths += [self.root / "adopted" / name / path for path in files]
                paths += [folder / path for path in files]
        paths += [
            self.root / ".eyas/spool" / one / "states/s0" for one, retired in self.model.spools.items() if retired
        ]
        return [path for path in paths if path.exists()]

    def check(self, names: list[Path]) -> None:
        used, there = self.model.used(), {p.parent.name + p.name: p for p in self.repository.objects()}
        assert used <= set(there), "an object that a kept generation uses is gone"
        assert set(there) == used, "what nothing uses is still there"
        for name, path in there.items():
            assert md5(path.read_bytes()) == name.removesuffix(".dir"), "an object was changed"
        assert [path for path in names if path.exists()] == [], "a name that keeps freed bytes is still there"
        if self.model.laid is not None:
            if folder_hash(self.model.laid) in used:
                self.same(self.root / STATES, self.model.laid)
            else:
                self.model.laid = None
        for name, (folder, files) in list(self.model.adopted.items()):
            if folder_hash(files) in used:
                self.same(folder, files)
                self.same(self.root / "adopted" / name, files)
            else:
                del self.model.adopted[name]
        for identity, retired in list(self.model.spools.items()):
            assert (self.root / ".eyas/spool" / identity).exists() == (not retired)
            if retired:
                del self.model.spools[identity]

    @staticmethod
    def same(folder: Path, files: Files) -> None:
        found = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        assert found == files, f"{folder}: {sorted(found)}, expected {sorted(files)}"

    def check_out_everything(self) -> int:
        """Every kept revision, whole, by the real DVC; returns how many."""
        from dvc.repo import Repo

        names = [*self.model.branches, *self.model.tags]
        for name in names:
            self.git("checkout", "-q", "-f", "--detach", name)
            outs = self.model.commits[(self.model.branches | self.model.tags)[name]]
            with Repo(os.fspath(self.root)) as repo:
                if outs:
                    repo.checkout([os.fspath(self.root / path) for path in outs], force=True)
            for path, value in outs.items():
                if isinstance(value, bytes):
                    assert (self.root / path).read_bytes() == value
                else:
                    self.same(self.root / path, value)
        return len(names)

    def measure(self) -> tuple[int, int, int]:
        """Bytes of what gc may touch, bytes used on the volume, bytes of everything else on it."""
        garbage.collect()  # a DVC of this process that is done with still holds files that it deleted
        touched = content_bytes(self.root / ".dvc/cache", self.root / "data", self.root / "models", self.root / "adopted",
                                self.home / "elsewhere", self.root / ".eyas/spool", self.root / ".eyas/adopted")  # fmt: skip
        volume = os.statvfs(self.home)
        used = (volume.f_blocks - volume.f_bfree) * volume.f_frsize
        return touched, used, content_bytes(self.home) - touched

    # ── the command ───────────────────────────────────────────────────────────────────────────

    def eyas(self, *words: str) -> str:
        code, text = self.call(*words)
        assert code == 0, f"eyas {words}: {text}"
        return text

    def eyas_json(self, *words: str) -> tuple[int, dict]:
        code, text = self.call(*words, "--json")
        assert code in (0, 1), f"eyas {words}: {text}"
        return code, json.loads(text)

    def killed(self, *words: str) -> None:
        """The command, ended at a random one of the calls that change the disk."""
        left = [self.random.randint(1, 60)]

        def deadly(real):
            def call(*arguments, **options):
                left[0] -= 1
                if left[0] == 0:
                    raise KilledError
                return real(*arguments, **options)

            return call

        with contextlib.ExitStack() as stack:
            for name in ("unlink", "remove", "rmdir", "replace", "rename", "fsync"):
                stack.enter_context(mock.patch.object(os, name, deadly(getattr(os, name))))
            try:
                self.call(*words)
            except KilledError:
                self.steps.append("gc killed")

    def call(self, *words: str) -> tuple[int, str]:
        out, err, before = io.StringIO(), io.StringIO(), Path.cwd()
        os.chdir(self.root)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                main(words)
        except SystemExit as end:
            code = int(end.code or 0)
            return code, out.getvalue() if code in (0, 1) else err.getvalue()
        finally:
            os.chdir(before)
        raise AssertionError("a command ends its process")
