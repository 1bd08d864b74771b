"""The capture identity: everything that decides the bytes of the hidden states, in one record."""

from __future__ import annotations

import importlib.metadata
from typing import cast

from eyas.config import ExtractConfig, TargetConfig, resolve_boundaries
from eyas.contracts import CaptureIdentity, LastRows, StoredPart, TargetIdentity
from eyas.errors import PlanError
from eyas.plan.interpreter import sglang_versions, vllm_versions

SGLANG = "sglang"
ENGINE_PACKAGES = {
    "hf": ("transformers", "torch"),
    "fake": (),
    SGLANG: ("sglang", "sglang-kernel", "torch"),
    "vllm": ("vllm", "torch"),
}
"""Packages whose version is an engine's; looked up without importing them. ``fake`` is ours alone."""
OWN_VERSION = "1"
STORED: dict[str, StoredPart] = {"store": "all", "stream": "judging"}
"""What is stored, by ``train.source``."""


def capture_identity(
    extract: ExtractConfig,
    target: TargetIdentity,
    runs_as: TargetConfig,
    tokens_sha256: str,
    stored: StoredPart = "all",
) -> CaptureIdentity:
    """Build the identity of a capture.

    Args:
        extract: Parameters of the capture.
        target: Whose states are captured.
        runs_as: Dtype and device the target runs with; both decide bits.
        tokens_sha256: Content hash of the token dataset.
        stored: Which of its samples are stored.

    Raises:
        ConfigError: A boundary does not exist on this target.
        PlanError: The engine's packages are not installed, or an option has a value without a JSON spelling.
    """
    options = {key: extract.engine_options[key] for key in sorted(extract.engine_options)}
    own = {"dtype": runs_as.dtype, "device": runs_as.device}
    for key in sorted(own.keys() & options.keys()):
        raise PlanError(
            f"extract.engine_options.{key}: {options[key]!r}, expected no such key", f"set target.{key} in params.yaml"
        )
    return CaptureIdentity(
        target=target.digest,
        tokens=tokens_sha256,
        boundaries=resolve_boundaries(extract, target.num_layers),
        final_hidden="post_norm",
        dtype="bfloat16",
        codec=extract.codec,
        last_rows=cast("LastRows", extract.last_rows),
        stored=stored,
        engine=extract.engine,
        engine_version=engine_version(extract.engine),
        engine_options={**own, **options},
        image=extract.image,
        shard_bytes=extract.shard_bytes,
        batch_tokens=extract.batch_tokens,
        revision=extract.revision,
    )


def engine_version(engine: str) -> str:
    """Versions of the packages that do an engine's numerics: ``transformers 5.24.0, torch 2.13.0``.

    Raises:
        PlanError: The engine is unknown, or one of its packages is not installed.
    """
    if engine not in ENGINE_PACKAGES:
        raise PlanError(f"extract.engine: {engine!r}, expected one of {', '.join(ENGINE_PACKAGES)}")
    if engine == "vllm":  # in an interpreter of its own
        return ", ".join(f"{name} {version}" for name, version in vllm_versions().items())
    versions = []
    if engine == SGLANG:  # in an interpreter of its own; a CPU needs no kernel package
        found = sglang_versions(ENGINE_PACKAGES[engine])
        return ", ".join(f"{package} {found[package]}" for package in ENGINE_PACKAGES[engine] if package in found)
    for package in ENGINE_PACKAGES[engine]:
        try:
            # The build tag (2.13.0+cpu) is left out: a plan made on one machine is captured on another.
            versions.append(f"{package} {importlib.metadata.version(package).partition('+')[0]}")
        except importlib.metadata.PackageNotFoundError:
            raise PlanError(f"engine {engine}: package {package} is not installed", "run `make setup`") from None
    return ", ".join(versions) or OWN_VERSION
