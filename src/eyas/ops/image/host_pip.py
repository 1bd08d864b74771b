"""The host's own pip settings for the time of a build: a private index or certificate works, and nothing of it stays.

pip's settings become a secret of the build, and folders that they name are mounted read-only where the builder can do
that (docker cannot: there an index must have a URL).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

KEYS = ("cert", "extra-index-url", "find-links", "index-url", "trusted-host")
"""No constraints: versions are the locks', and one of the host's could only refuse them."""


def settings() -> dict[str, list[str]]:
    """What pip of this machine is set to, of ``KEYS``; of files and of the environment."""
    done = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False)
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        name, _, value = line.partition("=")
        key = name.rpartition(".")[2]
        if key in KEYS:
            found[key] = value.strip("'\"").replace("\\n", " ").split()
    return found


def config_text(found: dict[str, list[str]]) -> str:
    """A ``pip.conf`` with these settings."""
    return "[global]\n" + "".join(f"{key} = {' '.join(values)}\n" for key, values in sorted(found.items()))


def mounts(found: dict[str, list[str]]) -> list[str]:
    """Folders that these settings name and a build must see, without those below another."""
    paths = set()
    for value in (value for values in found.values() for value in values):
        path = Path(value.removeprefix("file://"))
        if path.is_absolute() and path.exists():
            paths.add(str(path if path.is_dir() else path.parent))
            if value.startswith("file://"):  # a simple index links to its files beside it
                paths.add(str(path.parent))
    return sorted(path for path in paths if not any(str(above) in paths for above in Path(path).parents))
