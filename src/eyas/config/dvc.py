"""DVC's settings, read without importing DVC, but by its own reader, from every place where DVC looks for them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import platformdirs
from configobj import ConfigObj, ConfigObjError

from eyas.errors import ConfigError

REMOTE = re.compile(r'remote "(.+)"')


def files(root: Path) -> tuple[Path, ...]:
    """Of the system, of the user, of the repository, local ones; later ones win. Not all need be there."""
    system = os.environ.get("DVC_SYSTEM_CONFIG_DIR") or platformdirs.site_config_dir("dvc", "iterative")
    user = os.environ.get("DVC_GLOBAL_CONFIG_DIR") or platformdirs.user_config_dir("dvc", "iterative")
    return Path(system) / "config", Path(user) / "config", root / ".dvc/config", root / ".dvc/config.local"


def sections(path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Title and values of each section of one file: ``cache``, ``remote "name"``; lists with commas between.

    Raises:
        ConfigError: It cannot be read, or not as settings. What stands there is not quoted: it may be a secret.
    """
    try:
        with path.open(encoding="utf-8") as file:
            found = ConfigObj(file).dict()
    except FileNotFoundError:
        return
    except (ConfigObjError, UnicodeDecodeError) as error:
        first = getattr(error, "errors", [error])[0]  # of several
        number = getattr(first, "line_number", None)
        raise ConfigError(
            f"{path}{f', line {number}' if number else ''}: no settings of DVC's",
            "mend that file; `dvc config --list` reads it",
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{path}: settings of DVC's that cannot be read: {error.strerror}",
            "DVC needs them too: let this user read it",
        ) from None
    for title, section in found.items():
        if isinstance(section, dict):
            texts = {
                key.lower(): ",".join(value) if isinstance(value, list) else value for key, value in section.items()
            }
            yield title.lower(), {key: value for key, value in texts.items() if isinstance(value, str)}


def settings(root: Path, section: str) -> dict[str, str]:
    """One section, of all files."""
    found: dict[str, str] = {}
    for path in files(root):
        found |= dict(sections(path)).get(section, {})
    return found


class Remote(NamedTuple):
    """A remote as DVC's settings name it."""

    name: str
    url: str
    base: Path
    """Of the file that says so: a relative path is relative to it."""


def remotes(root: Path) -> list[Remote]:
    """All remotes that DVC knows in a repository, by its settings and those of user and system."""
    found: dict[str, Remote] = {}
    for path in files(root):
        for title, values in sections(path):
            named = REMOTE.fullmatch(title)
            if named and "url" in values:
                found[named[1]] = Remote(named[1], values["url"], path.parent)
    return [remote for _, remote in sorted(found.items())]
