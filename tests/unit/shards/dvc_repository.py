"""A small DVC repository with the pipeline's own stages ``plan`` and ``extract``, run by the real dvc.

Parameters and ``dvc.yaml`` are the repository's; target and tokens lie there as the stages before would leave them;
``train`` is a stand-in that copies the manifest, so that something downstream can be run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from extract_cases import make_target
from ruamel.yaml import YAML
from shard_cases import make_tokens

from eyas import fs
from eyas.tokens.dataset import write_tokens

ROOT = Path(__file__).parents[3]
LENGTHS = (5, 9, 14, 3, 8, 21, 7, 7, 2, 30)
STATES, MANIFEST = "data/hidden_states", "data/hidden_states.json"
EXTRACT = ["-m", "eyas.stages.extract", "models/target.json", "data/tokens", "data/plan.json", STATES, MANIFEST]


class DvcRepository:
    """``root`` as a repository; commands run in it with this checkout's eyas."""

    def __init__(self, root: Path, lengths=LENGTHS) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        (root / "params.yaml").write_text((ROOT / "params.yaml").read_text())
        self.set(engine="fake", shard_bytes=4096, reserve_bytes=0)
        fs.write_record(root / "models/target.json", make_target())
        self.tokens = make_tokens(list(lengths))
        write_tokens(root / "data/tokens", list(self.tokens.values()))
        self._write_pipeline()
        shutil.copy(ROOT / ".dvcignore", root)
        self.ok("git", "init", "-q")
        self.ok("dvc", "init", "-q")
        (root / ".dvc/config").write_text((ROOT / ".dvc/config").read_text())
        (root / ".dvc/config.local").write_text(f"[core]\n    site_cache_dir = {root}/.dvc/tmp/site\n")
        (root / ".gitignore").write_text("/data\n/.eyas\n/models\n/reports\n")

    def _write_pipeline(self) -> None:
        pipeline = YAML(typ="safe").load((ROOT / "dvc.yaml").read_text())
        stages = {name: pipeline["stages"][name] for name in ("plan", "extract")}
        stages["train"] = {"cmd": f"cp {MANIFEST} models/drafter", "deps": [MANIFEST], "outs": ["models/drafter"]}
        with (self.root / "dvc.yaml").open("w") as handle:
            YAML().dump({"stages": stages}, handle)

    def set(self, **extract) -> None:
        """Set parameters of ``extract``."""
        path = self.root / "params.yaml"
        head, tail = path.read_text().split("\nextract:\n")
        for key, value in extract.items():
            tail, found = re.subn(rf"(?m)^  {key}: .*$", f"  {key}: {value}", tail, count=1)
            assert found == 1, key
        path.write_text(f"{head}\nextract:\n{tail}")

    @property
    def environment(self) -> dict[str, str]:
        names = {name: value for name, value in os.environ.items() if name != "DVC_SITE_CACHE_DIR"}
        path = os.pathsep.join((os.fspath(Path(sys.executable).parent), names.get("PATH", os.defpath)))
        who = {
            "GIT_AUTHOR_NAME": "a",
            "GIT_AUTHOR_EMAIL": "a@b",
            "GIT_COMMITTER_NAME": "a",
            "GIT_COMMITTER_EMAIL": "a@b",
        }
        return names | who | {"PATH": path, "PYTHONPATH": f"{ROOT}/src", "DVC_NO_ANALYTICS": "1"}

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=self.root, env=self.environment, capture_output=True, text=True)

    def ok(self, *command: str) -> str:
        done = self.run(*command)
        assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def make(self, stage: str = "extract", *options: str) -> subprocess.CompletedProcess[str]:
        """What ``make extract`` runs."""
        return self.run(
            sys.executable, "-m", "eyas.cli", "guard", *options, "dvc", "repro", *([stage] if stage else [])
        )

    def made(self, stage: str = "extract", *options: str) -> str:
        done = self.make(stage, *options)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def hashes(self):
        return (*fs.tree_digests(self.root / STATES), fs.file_digest(self.root / MANIFEST, self.root))

    @property
    def captured_tokens(self) -> int:
        """Tokens that the last run of the stage put through the engine, by its run record."""
        return fs.read_json(self.root / "reports/runs/extract.json")["num_tokens"]

    def forget_runs(self) -> None:
        """So that a run record is one of what happens from here on."""
        (self.root / "reports/runs/extract.json").unlink(missing_ok=True)

    @property
    def stage_ran(self) -> bool:
        return (self.root / "reports/runs/extract.json").exists()

    @property
    def spools(self) -> list[Path]:
        folder = self.root / ".eyas/spool"
        return sorted(folder.iterdir()) if folder.is_dir() else []
