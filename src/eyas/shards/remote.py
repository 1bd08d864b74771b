"""Objects of a DVC remote by md5, read piece by piece: a connection that breaks costs a piece, not a shard.

DVC knows the remote, its credentials and its file system (S3 by ``dvc-s3``, a folder on a shared volume by itself);
eyas asks it for both and keeps neither. What an error says goes through ``Secrets``: nothing that could be a
credential is printed.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from eyas.config import dvc
from eyas.errors import RemoteError, StoreError

Answer = TypeVar("Answer")
PIECE_BYTES = 16 << 20
ATTEMPTS = 6
FIRST_WAIT_S = 0.2
SECRET_KEYS = re.compile(r"key|secret|token|password|credential|connection_string|passphrase|auth", re.IGNORECASE)
USER_INFO = re.compile(r"(?<=://)[^/@\s]+@")
NETWORK_ERRORS = (("botocore.exceptions", "BotoCoreError"), ("aiohttp", "ClientError"))
"""What a remote's library raises beside ``OSError``."""


class Secrets:
    """Takes credentials out of texts: values of DVC's settings and of ``AWS_*`` variables, and names in URLs."""

    def __init__(self, root: Path, environment: Mapping[str, str] = os.environ) -> None:
        values = {v for k, v in environment.items() if k.startswith(("AWS_", "DVC_")) and SECRET_KEYS.search(k)}
        for path in dvc.files(root):
            for _, section in dvc.sections(path):
                values |= {v for k, v in section.items() if SECRET_KEYS.search(k)}
        self._values = sorted((value for value in values if len(value) > 3), key=len, reverse=True)

    def out_of(self, text: object) -> str:
        """The text without them, on one line."""
        line = USER_INFO.sub("***@", " ".join(str(text).split()))
        return functools.reduce(lambda said, value: said.replace(value, "***"), self._values, line)


def check_remote(root: Path, name: str) -> None:
    """Ask DVC's settings for a remote: DVC's own pull goes on without one and misses every file.

    Args:
        root: The repository.
        name: Of the remote; empty for DVC's default one.

    Raises:
        StoreError: There is no such remote.
    """
    known = [remote.name for remote in dvc.remotes(root)]
    chosen = name or dvc.settings(root, "core").get("remote", "")
    if chosen.lower() in known:  # DVC reads names in lower case
        return
    if not known:
        add = "`dvc remote add -d NAME URL` adds one, a folder that others see or s3://BUCKET/PATH: docs/remotes.md"
        raise StoreError("no DVC remote is configured, expected one that holds the states", add)
    said = (
        f"called {chosen!r}" + ("" if name else ", the default one in DVC's settings") if chosen else "the default one"
    )
    raise StoreError(
        f"no DVC remote is {said}, expected one of: {', '.join(known)}",
        "name one of them: REMOTE=NAME, or make it the default: `dvc remote default NAME`; docs/remotes.md",
    )


class RemoteStore:
    """Read access to the objects of one remote; safe in threads.

    Args:
        root: The repository.
        name: Of the remote; empty for DVC's default one.

    Raises:
        StoreError: There is no such remote, or its plugin is not installed.
    """

    def __init__(self, root: Path, name: str = "") -> None:
        from dvc.exceptions import DvcException
        from dvc.repo import Repo

        check_remote(root, name)
        self._secrets, self.name = Secrets(root), name or "the default one"
        try:
            with Repo(str(root)) as repo:
                self._odb: Any = repo.cloud.get_remote_odb(name or None, hash_name="md5")
                self._fs: Any = self._odb.fs.fs
        except (DvcException, ImportError, OSError, ValueError) as error:
            hint = "`dvc remote list`; for s3:// install eyas with its extra: pip install -e '.[s3]'"
            raise StoreError(f"remote {self.name}: {self._secrets.out_of(error)}", hint) from None

    def size(self, md5: str) -> int | None:
        """Bytes of an object; None when the remote lacks it.

        Raises:
            RemoteError: It does not answer.
        """
        try:
            return int(self._again(md5, lambda: self._fs.info(self._path(md5), refresh=True)["size"]))
        except FileNotFoundError:
            return None

    def read(self, md5: str, begin: int, end: int) -> bytes:
        """Bytes of an object.

        Raises:
            RemoteError: The remote lacks it, does not answer, or gives fewer.
        """
        try:
            data = self._again(
                md5, lambda: self._whole(self._fs.cat_file(self._path(md5), start=begin, end=end), end - begin)
            )
        except FileNotFoundError:
            hint = f"push it from where it lies: `dvc push -r {self.name}`"
            raise RemoteError(f"remote {self.name} has no object {md5}", hint) from None
        return data

    def pieces(self, md5: str, size_bytes: int) -> Iterator[bytes]:
        """A whole object in order.

        Raises:
            RemoteError: As ``read``.
        """
        for begin in range(0, size_bytes, PIECE_BYTES):
            yield self.read(md5, begin, min(begin + PIECE_BYTES, size_bytes))

    def _path(self, md5: str) -> str:
        return self._odb.oid_to_path(md5)

    @staticmethod
    def _whole(data: bytes, num_bytes: int) -> bytes:
        if len(data) != num_bytes:  # a connection that was closed early gives what had arrived
            raise OSError(f"{len(data):,} bytes arrived, expected {num_bytes:,}")
        return data

    def _again(self, md5: str, ask: Callable[[], Answer]) -> Answer:
        """Ask until there is an answer, waiting longer each time.

        Raises:
            FileNotFoundError: The remote says that it lacks the object.
            RemoteError: It refuses, or there is no answer.
        """
        for attempt in range(ATTEMPTS):
            try:
                return ask()
            except FileNotFoundError:
                raise
            except PermissionError as error:
                raise self._failed(md5, error, "look at its credentials: `dvc remote list`, `dvc status -c`") from None
            except _errors() as error:
                if attempt == ATTEMPTS - 1:
                    raise self._failed(md5, error, "run the same command again when it answers") from None
                time.sleep(FIRST_WAIT_S * 2**attempt)
        raise AssertionError("unreachable")

    def _failed(self, md5: str, error: BaseException, hint: str) -> RemoteError:
        said = self._secrets.out_of(error)
        return RemoteError(f"remote {self.name}: object {md5}: {type(error).__name__}: {said}", hint)


@functools.cache
def _errors() -> tuple[type[BaseException], ...]:
    found: list[type[BaseException]] = [OSError, TimeoutError]
    for module, name in NETWORK_ERRORS:
        try:
            found.append(getattr(importlib.import_module(module), name))
        except ImportError:  # that remote's plugin is not installed
            continue
    return tuple(found)
