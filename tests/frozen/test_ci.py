"""``.ci/run`` with programs that do nothing: which checks it makes where an image can be built, and where none can."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILDAH = """#!/bin/sh
echo "buildah $1" >> "$DIARY"
case "$1" in
  info) echo / ;;
  from) [ -z "$FORBIDDEN" ] || { echo "mount: operation not permitted" >&2; exit 125; }; echo box-1 ;;
esac
"""
MAKE = """#!/bin/sh
echo "make $1 ${BASE_CPU:-}" >> "$DIARY"
[ "$1" != "$BROKEN" ]
"""
TESTS = ["test", "test-kernels", "fetch", "test-sglang-quick"]


@pytest.fixture
def ci(tmp_path):
    """Run a copy of ``.ci/run``; gives its exit code, what it said, and the programs that it called."""
    programs = tmp_path / "bin"
    (tmp_path / "tree/.ci").mkdir(parents=True)
    programs.mkdir()
    shutil.copy(ROOT / ".ci/run", tmp_path / "tree/.ci")
    shutil.copytree(ROOT / "containers", tmp_path / "tree/containers")
    doubles = {"buildah": BUILDAH, "make": MAKE, "df": '#!/bin/sh\necho Avail\necho "$FREE_GB"\n', "mmdebstrap": "#!/bin/sh\ncat > /dev/null\n",
               "chromium": "#!/bin/sh\n", "apt-get": "#!/bin/sh\nexit 9\n"}  # fmt: skip
    for name, text in doubles.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)

    def run(forbidden: str = "", free_gb: int = 100, broken: str = "") -> tuple[int, str, list[str]]:
        diary = tmp_path / "diary"
        environment = {"PATH": f"{programs}:{os.environ['PATH']}", "DIARY": str(diary), "FORBIDDEN": forbidden,
                       "FREE_GB": str(free_gb), "BROKEN": broken}  # fmt: skip
        command = ["bash", tmp_path / "tree/.ci/run"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        return done.returncode, done.stderr, diary.read_text().splitlines()

    return run


def targets(diary: list[str]) -> list[str]:
    return [line.split()[1] for line in diary if line.startswith("make ")]


def test_an_image_is_built_on_a_base_of_this_machine_and_removed(ci):
    code, said, diary = ci()
    assert (code, "NO IMAGE" in said) == (0, False)
    assert targets(diary) == ["pins", "check", "lock-check", "image-check", "sbom", *TESTS]
    assert "make image-check localhost/eyas-base:ci" in diary
    assert diary[-1] == "buildah rmi"
    assert [line for line in diary if line == "buildah rm"] == ["buildah rm"] * 2  # the probe's box, the base's


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        ({"forbidden": "yes"}, "mount: operation not permitted"),
        ({"free_gb": 9}, "9 GB free for images, at least 15 are needed"),
    ],
)
def test_a_machine_that_builds_none_is_told_in_one_line_and_runs_the_rest(ci, machine, reason):
    code, said, diary = ci(**machine)
    assert code == 0
    assert f"NO IMAGE WAS BUILT: this machine builds none: {reason}\n" in said
    assert targets(diary) == ["pins", "check", "lock-check", "smoke", *TESTS]


@pytest.mark.parametrize("broken", ["image-check", "smoke", "test", "test-sglang-quick"])
def test_what_fails_fails_the_whole(ci, broken):
    code, _, diary = ci(broken=broken, forbidden="yes" if broken == "smoke" else "")
    assert code != 0
    assert targets(diary)[-1] == broken
    assert (diary[-1] == "buildah rmi") is (broken != "smoke")
