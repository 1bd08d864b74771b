"""Random histories of DVC's files: every spelling of an output that DVC knows, in every kind of revision."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

from states_repository import StatesRepository

NAMES = ("a", "no", "on", "yes", "1_000", "12:30", "0x1f", "ä", "b c", "null", "2024-01-01", "x.json", "hidden_states")


class Project:
    """Writes one state of DVC's files after another into a repository's workspace."""

    def __init__(self, repository: StatesRepository, random: Random) -> None:
        self.repository, self.random = repository, random
        self.contents = [bytes([65 + i]) * (i + 1) for i in range(12)]

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def out(self, path: str) -> dict[str, Any]:
        """An output as a lock has it, its object laid down, most of the time in DVC 3's place."""
        legacy, lost = self.chance(0.15), self.chance(0.08)
        if self.chance(0.5):
            data = self.random.choice(self.contents)
            name = self.repository.put(data, legacy=legacy)
            entry = {"path": path, "md5": name, "size": len(data)}
            if lost and self.chance(0.5):
                self.repository.object_path(name, legacy=legacy).unlink()
        else:
            files = {f"{i}/s": data for i, data in enumerate(self.random.sample(self.contents, 3))}
            name = self.repository.put_folder(files, legacy=legacy)
            entry = {"path": path, "md5": name, "size": sum(map(len, files.values())), "nfiles": 3}
        return entry if legacy else entry | {"hash": "md5"}

    def option(self, path: str) -> Any:
        """An output as ``dvc.yaml`` spells it."""
        options = self.random.choice([{}, {}, {"cache": False}, {"persist": True}, {"push": False, "cache": True}])
        return {path: options} if options else path

    def stage(self, prefix: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """A stage and its lock."""
        names = self.random.sample(NAMES, self.random.randint(1, 3))
        paths = [f"{prefix}{name}" for name in names]
        spec: dict[str, Any] = {"cmd": "true"}
        for path in paths:
            kind = self.random.choice(["outs", "outs", "metrics", "plots"])
            spec.setdefault(kind, []).append(self.option(path))
        locked = [self.out(path) for path in paths if self.chance(0.9)]
        if self.chance(0.15):
            locked.append(self.out(f"{prefix}gone"))  # an output that the stage no longer has
        if self.chance(0.2):
            spec["wdir"] = "w"
        return spec, {"cmd": "true", "outs": locked} if locked else {"cmd": "true"}

    def templated(self, prefix: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """A stage whose outputs are spelt by parameters."""
        cache = self.chance(0.7)
        spec = {"cmd": "true", "outs": [{"${where}/" + prefix + "t": {"cache": cache}}, f"{prefix}plain"]}
        locked = [self.out(f"there/{prefix}t"), self.out(f"{prefix}plain")]
        if self.chance(0.3):
            locked.append(self.out(f"{prefix}gone"))
        return spec, {"cmd": "true", "outs": locked}

    def repeated(self, name: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """``foreach`` or ``matrix``, and the locks of its items; one item may be gone from the list."""
        items = ["one", "two"]
        body = {"cmd": "true", "outs": [name + "-${item}"]}
        spec: dict[str, Any] = {"foreach": list(items), "do": body}
        if self.chance(0.3):
            spec = {"foreach": {key: {"v": key} for key in items}, "do": body | {"outs": [name + "-${item.v}"]}}
        elif self.chance(0.4):
            spec = {"matrix": {"m": list(items)}, **body, "outs": [name + "-${item.m}"]}
        if self.chance(0.3) and isinstance(spec.get("foreach"), list):
            spec["foreach"] = "${list}"
        elif self.chance(0.4):
            items.append("three")  # locked once, no longer listed
        return spec, {f"{name}@{item}": {"cmd": "true", "outs": [self.out(f"{name}-{item}")]} for item in items}

    def pipeline(self, folder: str) -> None:
        stages: dict[str, Any] = {}
        locks: dict[str, Any] = {}
        for index in range(self.random.randint(1, 3)):
            name = f"s{index}"
            kind = self.random.random()
            if kind < 0.7:
                stages[name], locks[name] = self.stage(f"{name}-" if index else "")
            elif kind < 0.85:
                stages[name], locks[name] = self.templated(f"{name}-")
            else:
                stages[name], more = self.repeated(name)
                locks |= more
        if self.chance(0.2):
            locks["removed"] = {"cmd": "true", "outs": [self.out("removed")]}
        self.repository.write_yaml(f"{folder}params.yaml", {"where": "there", "list": ["one", "two"]})
        self.repository.write_yaml(f"{folder}dvc.yaml", {"stages": stages})
        if self.chance(0.95):
            self.write_lock(f"{folder}dvc.lock", {"schema": "2.0", "stages": locks})

    def write_lock(self, path: str, value: Any) -> None:
        """With DVC's own YAML, whose idea of what needs quotes is another than ours."""
        from dvc.utils.serialize import dumps_yaml

        (self.repository.root / path).write_text(dumps_yaml(value))

    def dvc_file(self, path: str) -> None:
        out = self.out(path.replace("/", "-") + self.random.choice(NAMES))
        spec: dict[str, Any] = {"outs": [out]}
        kind = self.random.random()
        if kind < 0.2:
            spec = {"frozen": True, "deps": [{"path": "p", "repo": {"url": "u", "rev_lock": "0" * 40}}], **spec}
        elif kind < 0.4:
            spec = {"frozen": True, "deps": [{"path": "/elsewhere/x", "md5": "0" * 32, "hash": "md5"}], **spec}
        elif kind < 0.5:
            out["cache"] = False
        elif kind < 0.6:
            spec["meta"] = {"note": "n"}
        elif kind < 0.7 and "/" in path:
            spec["wdir"] = ".."
        elif kind < 0.8:
            out["desc"], out["push"] = "d", False
        (self.repository.root / path).parent.mkdir(parents=True, exist_ok=True)
        self.write_lock(f"{path}.dvc", spec)

    def change(self) -> None:
        """A new state of the workspace."""
        for old in ("dvc.yaml", "dvc.lock", "sub/dvc.yaml", "sub/dvc.lock", "one.dvc", "sub/two.dvc", "in/sub/x.dvc"):
            if self.chance(0.6):
                (self.repository.root / old).unlink(missing_ok=True)
        if self.chance(0.8):
            self.pipeline("")
        if self.chance(0.3):
            self.pipeline("sub/")
        for path in ("one", "sub/two", "in/sub/x"):
            if self.chance(0.3):
                self.dvc_file(path)


def grow(root: Path, random: Random) -> StatesRepository:
    """A repository with branches, tags of every kind, experiments, perhaps packed, perhaps below another folder."""
    is_below = random.random() < 0.2
    repository = StatesRepository(root / "deep/er" if is_below else root, root)
    project = Project(repository, random)
    git = repository.git
    base = repository.put(b"always kept")
    repository.write_yaml("base.dvc", {"outs": [{"path": "base", "hash": "md5", "md5": base, "size": 11}]})
    for index in range(random.randint(1, 6)):
        project.change()
        commit = repository.commit()
        for kind, share in (("branch", 0.3), ("tag", 0.2), ("annotated", 0.15), ("experiment", 0.3)):
            if random.random() < share:
                _name(repository, project, kind, index, commit)
        if random.random() < 0.3:
            git("checkout", "-q", "-B", f"side{index}")
        if random.random() < 0.2:
            git("merge", "-q", "-s", "ours", "--no-edit", "main")
    if random.random() < 0.5:
        project.change()
    if random.random() < 0.2:
        project.change()
        git("add", "-A")
        git("stash", "-q")
    if random.random() < 0.3:
        git("pack-refs", "--all")
    if random.random() < 0.2:
        git("checkout", "-q", "--detach")
    for data in (b"nobody's", b"nobody else's"):
        repository.put(data)
    repository.put_folder({"0/s": b"nobody's folder"})
    repository.put(project.contents[0])
    return repository


def _name(repository: StatesRepository, project: Project, kind: str, index: int, commit: str) -> None:
    git = repository.git
    if kind == "branch":
        git("branch", f"b/{index}")
    elif kind == "tag":
        git("tag", f"light{index}")
    elif kind == "annotated":
        git("tag", "-a", f"noted{index}", "-m", "m")
    else:
        branch = git("symbolic-ref", "-q", "HEAD")
        project.change()
        inner = repository.commit("first")
        project.change()
        tip = repository.commit("second") if project.chance(0.5) else inner
        git("update-ref", f"refs/exps/{commit[:2]}/{commit[2:]}/exp{index}", tip)
        git("update-ref", branch, commit)
        git("reset", "-q", "--hard")
