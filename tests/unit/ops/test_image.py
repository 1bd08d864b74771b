"""Images without a builder: pins, the host's pip settings, what is refused before a container starts.

``make image-check`` builds and runs real ones.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
from pathlib import Path

import pytest

from eyas.config.images import check_image, require_pin
from eyas.errors import ConfigError
from eyas.ops.image import builder as builders
from eyas.ops.image import host_pip, pins
from eyas.ops.image import run as runs
from eyas.ops.image.builder import Builder, Image, RunOptions
from eyas.ops.image.check import structure_faults

ROOT = Path(__file__).parents[3]
DIGEST = "sha256:" + "0123456789abcdef" * 4
BASES = {"BASE_CPU": f"python@{DIGEST}", "BASE_CUDA": f"cuda@{DIGEST}"}
OTHER = "sha256:" + "fedcba9876543210" * 4


@pytest.fixture(autouse=True)
def no_choice_from_outside(monkeypatch):
    """Whoever builds with another base or tool sets them for everything that runs after, these tests among it."""
    for name in (builders.VARIABLE, *BASES):
        monkeypatch.delenv(name, raising=False)


# ── pins ──────────────────────────────────────────────────────────────────────────────────────


def test_every_base_of_the_dockerfile_is_pinned():
    found = pins.read_pins(ROOT)
    taken = {line.split("${")[1].split("}")[0] for line in (ROOT / "Dockerfile").read_text().splitlines()
             if line.startswith("FROM ${")}  # fmt: skip
    assert taken == set(found)


@pytest.mark.parametrize(
    "image",
    ["python:3.11", "python:latest", "python@sha256:123", "python:3.11@sha512:" + "0" * 64, f"python:3.11@{DIGEST}0"],
)
def test_a_base_without_a_digest_is_refused(tmp_path, image):
    """Case 88: a floating tag."""
    (tmp_path / "containers").mkdir()
    (tmp_path / pins.PINS).write_text(f"# bases\nBASE_CPU={image}\n")
    with pytest.raises(ConfigError, match=r"BASE_CPU: .* has no digest"):
        pins.read_pins(tmp_path)


def test_an_override_is_held_to_the_same_rule(tmp_path, monkeypatch):
    (tmp_path / "containers").mkdir()
    (tmp_path / pins.PINS).write_text(f"BASE_CPU=python:3.11@{DIGEST}\n")
    monkeypatch.setenv("BASE_CPU", "localhost/base:1")  # of this machine alone: nobody can move it
    assert pins.read_pins(tmp_path) == {"BASE_CPU": "localhost/base:1"}
    monkeypatch.setenv("BASE_CPU", "debian:bookworm")
    with pytest.raises(ConfigError, match="has no digest"):
        pins.read_pins(tmp_path)


@pytest.mark.parametrize("line", ["CPU=python", "BASE_CPU", "BASE_CPU="])
def test_a_line_that_is_no_pin_is_named(tmp_path, line):
    (tmp_path / "containers").mkdir()
    (tmp_path / pins.PINS).write_text(f"\n{line}\n")
    with pytest.raises(ConfigError, match=r"pins\.env:2: "):
        pins.read_pins(tmp_path)


# ── the host's pip ────────────────────────────────────────────────────────────────────────────


def test_folders_of_the_hosts_index_come_into_the_build_once(tmp_path):
    simple, wheels, cert = tmp_path / "index/simple", tmp_path / "index/simple/more", tmp_path / "ssl/ca.crt"
    wheels.mkdir(parents=True)
    cert.parent.mkdir()
    cert.touch()
    found = {
        "extra-index-url": [f"file://{simple}", "https://example.org/simple"],
        "find-links": [str(wheels), "/not/there"],
        "cert": [str(cert)],
    }
    assert host_pip.mounts(found) == [str(tmp_path / "index"), str(tmp_path / "ssl")]
    text = host_pip.config_text(found)
    assert f"extra-index-url = file://{simple} https://example.org/simple\n" in text


def test_a_constraint_of_the_host_is_not_taken(tmp_path, monkeypatch):
    """Versions are the locks': a cap of this machine's could only refuse one of them."""
    (tmp_path / "pip.conf").write_text("[global]\nconstraint = /etc/caps.txt\ntrusted-host = pypi.internal\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    found = host_pip.settings()
    assert (found["trusted-host"], "constraint" in found) == (["pypi.internal"], False)


# ── builders ──────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def calls(monkeypatch):
    """Commands instead of programs."""
    seen: list[list[str]] = []

    def record(command, **_):
        seen.append([str(word) for word in command])
        return subprocess.CompletedProcess(command, 0, "box-1\n", "")

    monkeypatch.setattr(builders.subprocess, "run", record)
    monkeypatch.setattr(host_pip, "settings", dict)
    return seen


@pytest.mark.parametrize("tool", builders.TOOLS)
def test_every_tool_builds_without_the_time(calls, tool, tmp_path):
    """Case 87: times of files and of the build are no part of the image."""
    Builder(tool).build(tmp_path, "cpu", "localhost/eyas:cpu", BASES)
    (command,) = calls
    assert "--build-arg=SOURCE_DATE_EPOCH=0" in command
    assert f"--build-arg=BASE_CPU=python@{DIGEST}" in command
    assert "--target=cpu" in command
    assert "--timestamp=0" in command or any("rewrite-timestamp=true" in word for word in command)


@pytest.mark.parametrize(("anew", "flags"), [(False, 0), (True, 1)])
def test_docker_takes_nothing_from_an_earlier_build_when_asked(calls, tmp_path, anew, flags):
    Builder("docker").build(tmp_path, "cpu", "localhost/eyas:cpu", BASES, anew=anew)
    assert calls[0].count("--no-cache") == flags


@pytest.mark.parametrize(("ids", "right"), [("0 1001 1\n1 100000 65536\n", True), ("0 1001 1\n", False), ("", False)])
def test_an_ordinary_user_without_further_ids_is_told(monkeypatch, tmp_path, ids, right):
    """Files of an image belong to several users; the fault would come after minutes, from within a layer."""
    done = subprocess.CompletedProcess([], 0, ids, "")
    monkeypatch.setattr(builders.subprocess, "run", lambda *_, **__: done)
    monkeypatch.setattr(host_pip, "settings", dict)
    monkeypatch.setattr(os, "getuid", lambda: 1001)
    if right:
        Builder("buildah").build(tmp_path, "cpu", "localhost/eyas:cpu", BASES)
    else:
        with pytest.raises(builders.ImageError, match="as an ordinary user has no ids") as told:
            Builder("podman").build(tmp_path, "cpu", "localhost/eyas:cpu", BASES)
        assert "usermod --add-subuids" in str(told.value)


def test_the_caller_of_an_unprivileged_buildah_is_root_inside_without_its_rights(calls, monkeypatch):
    """Any other id would be one of the user's further ids outside, which could write nothing of his."""
    monkeypatch.setattr(os, "getuid", lambda: 1001)
    mine = RunOptions(user=builders.caller(), folder=Path("/r"), mounts=(), environment={})
    Builder("buildah").run("image", ["make"], mine)
    assert {"--user=0:0", "--cap-drop=all"} <= set(calls[1])
    calls.clear()
    Builder("buildah").run("image", ["make"], OPTIONS)  # the image's own user
    assert "--user=1000:1001" in calls[1]


@pytest.mark.parametrize(("uid", "mapped"), [(0, False), (1001, True)])
def test_podman_keeps_the_callers_id_where_it_would_change_it(calls, monkeypatch, uid, mapped):
    monkeypatch.setattr(os, "getuid", lambda: uid)
    Builder("podman").run("image", ["make"], OPTIONS)
    assert ("--userns=keep-id" in calls[0]) is mapped


OPTIONS = RunOptions(user="1000:1001", folder=Path("/r"), mounts=(Path("/r"),), environment={"HOME": "/r/h"}, gpus=True)


def test_a_container_has_the_callers_user_and_one_mount_at_its_own_path(calls):
    Builder("docker").run("image", ["make", "extract"], OPTIONS)
    (command,) = calls
    assert command[-3:] == ["image", "make", "extract"]
    assert {"--rm", "--ipc=host", "--user=1000:1001", "--workdir=/r", "--volume=/r:/r", "--gpus=all"} <= set(command)


def test_a_variable_of_this_process_is_passed_by_its_name(calls, monkeypatch):
    """What stands among arguments is read by everybody on a machine."""
    monkeypatch.setenv("HF_TOKEN", "s3cret")
    Builder("podman").run(
        "image", ["make"], dataclasses.replace(OPTIONS, environment={"HF_TOKEN": "s3cret", "HOME": "/r/h"})
    )
    assert {"--env=HF_TOKEN", "--env=HOME=/r/h"} <= set(calls[0])
    assert "s3cret" not in " ".join(calls[0])


def test_a_box_of_buildah_is_removed(calls):
    Builder("buildah").run("image", ["make"], OPTIONS)
    assert [command[1] for command in calls] == ["from", "run", "rm"]
    assert calls[2][-1] == "box-1"


@pytest.mark.parametrize("tool", builders.TOOLS)
def test_every_tool_saves_an_archive_for_scanners(calls, tool, tmp_path):
    Builder(tool).save("localhost/eyas:cpu", tmp_path / "image.tar")
    (command,) = calls
    assert command[0] == tool
    assert any(str(tmp_path / "image.tar") in word for word in command)


def test_a_token_is_no_argument_of_a_push(monkeypatch):
    """Arguments are read by everybody on a machine."""
    seen = []

    def record(command, input="", **_):  # noqa: A002 - subprocess names it so
        seen.append((command, input))
        for word in command:
            if word.startswith("--digestfile="):
                Path(word.partition("=")[2]).write_text(DIGEST + "\n")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(builders.subprocess, "run", record)
    assert Builder("buildah").push("localhost/eyas:cpu", "ghcr.io/o/eyas:1", "me", "s3cret") == DIGEST
    assert [command[1] for command, _ in seen] == ["login", "push"]
    assert seen[0][1] == "s3cret"
    assert seen[0][0][-1] == "ghcr.io"
    assert not any("s3cret" in word for command, _ in seen for word in command)


def test_a_registry_that_refuses_is_told(monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "unauthorized")
    monkeypatch.setattr(builders.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(builders.ImageError, match=r"podman could not push r\.io/o/eyas:1: unauthorized"):
        Builder("podman").push("localhost/eyas:cpu", "r.io/o/eyas:1", "", "")


def test_a_base_of_this_machine_that_was_not_made_is_told(monkeypatch, tmp_path):
    """A builder would ask a registry on this machine for it, and say that nobody listens there."""
    failed = subprocess.CompletedProcess([], 1, "", "image not known")
    monkeypatch.setattr(builders.subprocess, "run", lambda *_, **__: failed)
    monkeypatch.setattr(os, "getuid", lambda: 0)
    with pytest.raises(builders.ImageError, match="no base image localhost/base:1 here") as told:
        Builder("buildah").build(tmp_path, "cuda", "localhost/eyas:cuda", BASES | {"BASE_CUDA": "localhost/base:1"})
    assert told.value.hint == "bash containers/debian-base.sh localhost/base:1"


def test_the_missing_image_is_the_one_to_build(monkeypatch):
    failed = subprocess.CompletedProcess([], 125, "", "image not known")
    monkeypatch.setattr(builders.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(builders.ImageError, match="`make image IMAGE=cuda` builds it"):
        Builder("podman").inspect("localhost/eyas:cuda")


def test_a_tool_that_hangs_does_not_work(monkeypatch, tmp_path):
    (tmp_path / "podman").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "podman").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv(builders.VARIABLE, "podman")
    monkeypatch.setattr(builders, "LONGEST_PROBE_S", 0.2)
    with pytest.raises(ConfigError, match="podman does not work here"):
        builders.find_builder()


def test_no_tool_at_all_is_told(monkeypatch):
    monkeypatch.setattr(builders, "works", lambda tool: False)
    with pytest.raises(ConfigError, match="neither docker with buildx, podman nor buildah works here"):
        builders.find_builder()
    monkeypatch.setenv(builders.VARIABLE, "docker")
    with pytest.raises(ConfigError, match=r"^docker does not work here"):
        builders.find_builder()
    monkeypatch.setenv(builders.VARIABLE, "kaniko")
    with pytest.raises(ConfigError, match="EYAS_CONTAINER_TOOL: 'kaniko'"):
        builders.find_builder()


# ── structure ─────────────────────────────────────────────────────────────────────────────────

GOOD = {
    "User": "1000:1000",
    "Labels": {f"org.opencontainers.image.{key}": "x" for key in ("title", "licenses", "version")},
    "Env": ["PATH=/opt/eyas/bin"],
    "Entrypoint": ["tini", "--"],
}


def image(size_bytes: int = 1_000_000_000, **changes: object) -> Image:
    return Image("localhost/eyas:cpu", DIGEST, size_bytes, GOOD | changes)


def test_a_right_image_has_no_fault():
    assert structure_faults(image(), "cpu") == []
    assert structure_faults(image(Env=["TOKENIZERS_PARALLELISM=false", "KEYBOARD=us"]), "cpu") == []


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        (image(User="eyas"), "user 'eyas'"),
        (image(User=""), "user ''"),
        (image(User="0:0"), "user '0:0'"),
        (image(Labels=None), "no label org.opencontainers.image.licenses"),
        (image(Env=["HF_TOKEN=abc"]), "variable HF_TOKEN"),
        (image(Env=["NCCL_P2P_DISABLE=1"]), "variable NCCL_P2P_DISABLE"),
        (image(Entrypoint=None), "no entrypoint"),
        (image(9_000_000_000), "9.00 GB, expected at most"),
    ],
)
def test_each_fault_of_an_image_is_named(wrong, fault):
    assert any(fault in found for found in structure_faults(wrong, "cpu"))


# ── before a container starts ─────────────────────────────────────────────────────────────────


@pytest.fixture
def repository(tmp_path):
    root = tmp_path / "volume/repo"
    (root / ".dvc/cache").mkdir(parents=True)
    (root / "params.yaml").write_text("target: {device: cpu}\n")
    return root


def test_nothing_stands_in_the_way_of_a_plain_repository(repository):
    assert runs.preflight(repository, Builder("buildah")) == []
    assert runs.common_mount(repository) == repository


def test_a_cache_beside_the_repository_comes_in_by_the_same_mount(repository):
    cache = repository.parent / "cache"
    cache.mkdir()
    (repository / ".dvc/config").write_text("[cache]\n    dir = ../../cache\n")
    assert runs.common_mount(repository) == repository.parent
    assert runs.preflight(repository, Builder("docker")) == []


def test_a_cache_on_another_volume_is_refused(repository, monkeypatch):
    """Case 89: two mounts know no hard links; DVC would keep everything twice without a word."""
    (repository / ".dvc/config").write_text("[cache]\n    dir = /dev/shm\n")
    faults = runs.preflight(repository, Builder("docker"))
    assert any("share no folder below /" in fault for fault in faults)
    assert any("no hard link from /dev/shm" in fault for fault in faults)


def test_files_of_root_are_found_before_dvc_fails_on_them(repository, monkeypatch):
    """Case 89: an earlier run as root."""
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    (fault,) = runs.preflight(repository, Builder("docker"))
    assert ".dvc/cache belong to another user: sudo chown -R 4242:" in fault


def test_a_gpu_that_no_container_would_see_is_told(repository):
    (repository / "params.yaml").write_text("target: {device: cuda}  # the server's\n")
    assert runs.wants_gpu(repository)
    (fault,) = runs.preflight(repository, Builder("buildah"))
    assert "buildah gives none" in fault


def test_too_little_shared_memory_for_a_server_is_told(repository, monkeypatch):
    (repository / "params.yaml").write_text("extract:\n  engine: sglang\n")
    monkeypatch.setattr(runs, "LEAST_SHM_BYTES", 1 << 60)
    (fault,) = runs.preflight(repository, Builder("docker"))
    assert "mount -o remount" in fault


def test_secrets_and_interpreters_of_the_host_stay_outside(repository, monkeypatch):
    for name in ("AWS_SECRET_ACCESS_KEY", "EYAS_SGLANG_PYTHON", "PYTHONHOME"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("EYAS_WATCHDOG_S", "60")
    monkeypatch.setenv("EYAS_WHEELS", "/somewhere/else")
    monkeypatch.setenv("EYAS_TARGETS_DIR", str(repository / "targets"))
    found = runs.environment(repository, repository / "h", "localhost/eyas:cpu", DIGEST)
    assert not {"AWS_SECRET_ACCESS_KEY", "EYAS_SGLANG_PYTHON", "PYTHONHOME"} & set(found)
    assert "EYAS_WHEELS" not in found
    assert found["EYAS_TARGETS_DIR"] == str(repository / "targets")
    assert found["EYAS_WATCHDOG_S"] == "60"
    assert found["EYAS_IMAGE"] == f"localhost/eyas:cpu@{DIGEST}"
    assert found["PYTHONPATH"] == str(repository / "src")


# ── the image is an input ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("pinned", "running", "right"),
    [
        ("", "", True),
        ("", f"localhost/eyas:cpu@{OTHER}", True),
        (f"registry/eyas:1@{DIGEST}", f"localhost/eyas:cpu@{DIGEST}", True),  # the same bytes under another name
        (DIGEST, f"localhost/eyas:cpu@{DIGEST}", True),
        (f"localhost/eyas:cpu@{DIGEST}", f"localhost/eyas:cpu@{OTHER}", False),
        (f"localhost/eyas:cpu@{DIGEST}", "", False),
        (f"localhost/eyas:cpu@{DIGEST}", "localhost/eyas:cpu", False),
    ],
)
def test_another_image_than_the_pinned_one_is_refused(monkeypatch, pinned, running, right):
    monkeypatch.setenv("EYAS_IMAGE", running)
    if right:
        check_image("extract.image", pinned)
    else:
        with pytest.raises(ConfigError, match=r"extract\.image pins .*, this runs in"):
            check_image("extract.image", pinned)


@pytest.mark.parametrize("value", ["eyas:cpu", "eyas@sha256:12", "sha256:" + "g" * 64])
def test_a_pin_names_a_digest(value):
    with pytest.raises(ConfigError, match=r"train\.image"):
        require_pin("train.image", value)
