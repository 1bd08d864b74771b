"""DVC's settings, read without importing DVC, from every place where DVC looks for them."""

from __future__ import annotations

import configparser
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import platformdirs

from eyas.errors import ConfigError

QUOTED = re.compile(r"""(["'])(.*)\1\s*(#.*)?""")
REMOTE = re.compile(r'remote "(.+)"')


def files(root: Path) -> tuple[Path, ...]:
    """Of the system, of the user, of the repository, local ones; later ones win. Not all need be there."""
    system = os.environ.get("DVC_SYSTEM_CONFIG_DIR") or platformdirs.site_config_dir("dvc", "iterative")
    user = os.environ.get("DVC_GLOBAL_CONFIG_DIR") or platformdirs.user_config_dir("dvc", "iterative")
    return Path(system) / "config", Path(user) / "config", root / ".dvc/config", root / ".dvc/config.local"


def sections(path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Title and values of each section of one file: ``cache``, ``remote "name"``.

    Raises:
        ConfigError: It cannot be read, or not as settings. What stands there is not quoted: it may be a secret.
    """
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    try:
        parser.read_string(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    except (configparser.Error, UnicodeDecodeError) as error:
        line = f", line {error.lineno}" if isinstance(error, configparser.MissingSectionHeaderError) else ""
        raise ConfigError(
            f"{path}{line}: no settings of DVC's", "mend that file; `dvc config --list` reads it"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{path}: settings of DVC's that cannot be read: {error.strerror}",
            "DVC needs them too: let this user read it",
        ) from None
    for section in parser.sections():
        # DVC writes: ['remote "storage"'], and reads titles and keys in lower case.
        yield section.strip("'").lower(), {key: _value(said) for key, said in parser.items(section)}


def settings(root: Path, section: str) -> dict[str, str]:
    """One section, of all files."""
    found: dict[str, str] = {}
    for path in files(root):
        for title, values in sections(path):
            if title == section:
                found |= values
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


def _value(said: str) -> str:
    quoted = QUOTED.fullmatch(said)
    return quoted[2] if quoted else said.partition("#")[0].strip()
