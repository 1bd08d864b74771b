"""docker with buildx, podman or buildah: whichever is there, behind the same few verbs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.errors import ConfigError, EyasError
from eyas.ops.image import host_pip
from eyas.ops.image.pins import LOCAL

TOOLS = ("docker", "podman", "buildah")
VARIABLE = "EYAS_CONTAINER_TOOL"
EPOCH = "0"
"""Of every file in an image: two builds give the same bytes."""


LONGEST_PROBE_S = 180
LEAST_IDS = 1001
"""Images of ours have root and user 1000."""


class ImageError(EyasError):
    """An image cannot be built, found or run."""


@dataclass(frozen=True, slots=True)
class Image:
    """A built image of this machine."""

    name: str
    digest: str
    """Of its manifest, where the tool knows one; else its id, which is the hash of its configuration."""
    size_bytes: int
    config: dict[str, Any]
    """As OCI has it: ``User``, ``Labels``, ``Env``, ``Entrypoint``."""


@dataclass(frozen=True, slots=True)
class Builder:
    """One of ``TOOLS``."""

    tool: str

    def build(self, root: Path, target: str, name: str, arguments: Mapping[str, str], anew: bool = False) -> None:
        """Build a target of the Dockerfile of ``root``; ``anew`` takes no step from an earlier build.

        Raises:
            ImageError: The build failed; its output was shown.
        """
        self._need_ids()
        self._need_own_base(arguments["BASE_CUDA" if target == "cuda" else "BASE_CPU"])
        found = host_pip.settings()
        with tempfile.NamedTemporaryFile("w", suffix=".conf") as conf:
            conf.write(host_pip.config_text(found))
            conf.flush()
            values = [f"--build-arg={key}={value}" for key, value in {"SOURCE_DATE_EPOCH": EPOCH, **arguments}.items()]
            shared = [f"--secret=id=pip,src={conf.name}", f"--target={target}", *values]
            if self.tool == "docker":
                output = f"--output=type=image,name={name},rewrite-timestamp=true,unpack=true"
                command = ["docker", "buildx", "build", output, "--provenance=false", *shared]
                command += ["--no-cache"] if anew else []
            else:
                volumes = [f"--volume={path}:{path}:ro" for path in host_pip.mounts(found)]
                own = ["--isolation=chroot"] if self.tool == "buildah" else []
                command = [
                    self.tool,
                    "build",
                    *own,
                    "--network=host",
                    "--timestamp=0",
                    "--layers=false",
                ]  # never from a cache
                command += [*volumes, *shared, f"--tag={name}"]
            if subprocess.run([*command, str(root)], check=False).returncode:
                raise ImageError(
                    f"{self.tool} could not build {target} of {root / 'Dockerfile'}",
                    "its output is above; where no registry is reached, make a base of this machine's Debian packages: "
                    "docs/containers.md",
                )

    def _need_own_base(self, base: str) -> None:
        """Refuse a base of this machine that was not made: a builder would ask a registry on this machine for it."""
        if base.startswith(LOCAL) and not self._inspected(base)[0]:
            raise ImageError(f"no base image {base} here", f"bash containers/debian-base.sh {base}")

    def _need_ids(self) -> None:
        """Refuse an ordinary user to whom the system gives no further ids: an image's files belong to several users."""
        if self.tool == "docker" or os.getuid() == 0:
            return
        command = [self.tool, "unshare", "cat", "/proc/self/uid_map"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if sum(int(line.split()[2]) for line in done.stdout.splitlines()) < LEAST_IDS:
            raise ImageError(
                f"{self.tool} as an ordinary user has no ids for an image's users: {done.stderr.strip()[-200:]}",
                "sudo apt-get install uidmap && "
                'sudo usermod --add-subuids 100000-165535 --add-subgids 100000-165535 "$USER"',
            )

    def inspect(self, name: str) -> Image:
        """Digest, size and configuration of an image of this machine.

        Raises:
            ImageError: There is no such image.
        """
        found, reason = self._inspected(name)
        if not found:
            target = name.rpartition(":")[2]
            raise ImageError(f"no image {name} here: {reason}", f"`make image IMAGE={target}` builds it")
        if self.tool == "buildah":
            digest, config = found["FromImageDigest"], found["OCIv1"]["config"]
            return Image(name, digest, self._buildah_size(name), config)
        digest = found.get("Digest") or next(iter(found.get("RepoDigests") or ()), "").rpartition("@")[2]
        return Image(name, digest or f"sha256:{found['Id'].removeprefix('sha256:')}", found["Size"], found["Config"])

    def _inspected(self, name: str) -> tuple[dict[str, Any], str]:
        """What the tool says about an image; nothing, and why, when there is none."""
        own = ["inspect", "--type", "image"] if self.tool == "buildah" else ["image", "inspect"]
        done = subprocess.run([self.tool, *own, name], capture_output=True, text=True, check=False)
        if done.returncode:
            return {}, done.stderr.strip()[-200:]
        found = json.loads(done.stdout)
        return (found[0] if isinstance(found, list) else found), ""

    def _buildah_size(self, name: str) -> int:
        done = subprocess.run(["buildah", "images", "--json", name], capture_output=True, text=True, check=True)
        number, unit = json.loads(done.stdout)[0]["size"].split()
        return int(float(number) * {"KB": 1e3, "MB": 1e6, "GB": 1e9}[unit])

    def forget(self, name: str) -> None:
        """Take a name from an image of this machine; the last name takes the image along."""
        self._must([self.tool, "rmi", name], f"remove {name}")

    def save(self, name: str, archive: Path) -> None:
        """Write an image as a docker archive, the form that every scanner reads.

        Raises:
            ImageError: The tool could not.
        """
        words = {
            "docker": ["docker", "save", "-o", str(archive), name],
            "podman": ["podman", "save", "--format=docker-archive", "-o", str(archive), name],
            "buildah": ["buildah", "push", "-q", name, f"docker-archive:{archive}:{name}"],
        }[self.tool]
        self._must(words, f"save {name}")

    def push(self, name: str, to: str, user: str, token: str) -> str:
        """Push an image to a registry; the digest that it has there.

        Args:
            name: Of this machine.
            to: ``ghcr.io/OWNER/eyas:1.0``.
            user: Empty to push as whoever is logged in already.
            token: Of that user; goes in by standard input, never as an argument.

        Raises:
            ImageError: The registry refuses.
        """
        if user:
            login = [self.tool, "login", "--username", user, "--password-stdin", to.partition("/")[0]]
            self._must(login, f"log in for {to}", given=token)
        with tempfile.TemporaryDirectory() as folder:
            digest = Path(folder) / "digest"
            if self.tool == "docker":
                self._must(["docker", "tag", name, to], f"tag {to}")
                self._must(["docker", "push", "-q", to], f"push {to}")
                found = self._must(
                    ["docker", "image", "inspect", "--format", "{{index .RepoDigests 0}}", to], "inspect"
                )
                return found.strip().rpartition("@")[2]
            self._must([self.tool, "push", "-q", f"--digestfile={digest}", name, f"docker://{to}"], f"push {to}")
            return digest.read_text().strip()

    def _must(self, command: list[str], what: str, given: str = "") -> str:
        done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ImageError(f"{self.tool} could not {what}: {done.stderr.strip()[-300:]}", "its message says why")
        return done.stdout

    def run(self, name: str, command: Sequence[str], options: RunOptions) -> int:
        """Run a command in a new container; its exit code."""
        if self.tool != "buildah":
            return subprocess.run(self._run_command(name, command, options), check=False).returncode
        box = subprocess.run(
            ["buildah", "from", "--pull-never", name], capture_output=True, text=True, check=True
        ).stdout.strip()
        try:
            return subprocess.run(self._buildah_command(box, command, options), check=False).returncode
        finally:
            subprocess.run(["buildah", "rm", box], capture_output=True, check=False)

    def _buildah_command(self, box: str, command: Sequence[str], options: RunOptions) -> list[str]:
        words = ["buildah", "run", "--isolation=chroot", "--cap-drop=all", f"--workingdir={options.folder}"]
        # To an ordinary user's buildah the caller is root, without a root's rights; any other id is nobody's outside.
        mine = options.user == caller() and os.getuid() != 0
        words += ["--user=0:0" if mine else f"--user={options.user}"]
        words += [f"--volume={path}:{path}" for path in options.mounts]
        words += [f"--env={key}={value}" for key, value in options.environment.items()]
        return [*words, box, "--", *command]

    def _run_command(self, name: str, command: Sequence[str], options: RunOptions) -> list[str]:
        words = [self.tool, "run", "--rm", "--ipc=host", f"--user={options.user}", f"--workdir={options.folder}"]
        if sys.stdin.isatty() and sys.stdout.isatty():
            words += ["--interactive", "--tty"]
        if self.tool == "podman" and os.getuid() != 0:
            words += ["--userns=keep-id"]
        if options.gpus:
            words += ["--device=nvidia.com/gpu=all"] if self.tool == "podman" else ["--gpus=all"]
        words += [f"--volume={path}:{path}" for path in options.mounts]
        words += _environment_words(options.environment)
        return [*words, name, *command]


def _environment_words(environment: Mapping[str, str]) -> list[str]:
    """What is in this process' environment too goes by its name alone: among arguments everybody on the machine sees it."""
    return [
        f"--env={key}" if os.environ.get(key) == value else f"--env={key}={value}" for key, value in environment.items()
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How a container runs."""

    user: str
    """``uid:gid``."""
    folder: Path
    mounts: tuple[Path, ...]
    """Each at its own path: links of a cache, and paths in messages, mean the same inside and outside."""
    environment: Mapping[str, str]
    gpus: bool = False


def caller() -> str:
    """``uid:gid`` of this process."""
    return f"{os.getuid()}:{os.getgid()}"


def find_builder() -> Builder:
    """The first tool that works here, or the one that ``EYAS_CONTAINER_TOOL`` names.

    Raises:
        ConfigError: There is none.
    """
    named = os.environ.get(VARIABLE, "")
    if named and named not in TOOLS:
        raise ConfigError(f"{VARIABLE}: {named!r}, expected one of {', '.join(TOOLS)}", f"unset {VARIABLE}")
    for tool in (named,) if named else TOOLS:
        if works(tool):
            return Builder(tool)
    raise ConfigError(
        f"{named} does not work here" if named else "neither docker with buildx, podman nor buildah works here",
        "apt-get install buildah needs no daemon; a docker needs its daemon and the buildx plugin",
    )


def works(tool: str) -> bool:
    """Whether a tool is there and answers."""
    if shutil.which(tool) is None:
        return False
    probes = {"docker": (("info",), ("buildx", "version")), "podman": (("info",),), "buildah": (("info",),)}[tool]
    return all(_answers([tool, *words]) for words in probes)


def _answers(command: list[str]) -> bool:
    """Whether a command ends well in time: a daemon that hangs is none."""
    try:
        return subprocess.run(command, capture_output=True, check=False, timeout=LONGEST_PROBE_S).returncode == 0
    except subprocess.TimeoutExpired:
        return False
