"""What a prediction is made from: machines, target, drafter and work, as a YAML file describes them.

Every rate is one that was measured on such a machine; shares say how much of the products' rate a stage reaches.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from eyas.canonical import from_plain
from eyas.errors import ConfigError
from eyas.plan.budget import CODEC_RATIO

HINT = "docs/simulate.md has an example with every key"
PRESETS = Path("conf/target")
STAGES = ("respond", "tokenize", "extract", "train", "evaluate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU; zero where nobody measured it."""

    matmul_tflops: float = 0.0
    """Dense bfloat16 products."""
    prefill_share: float = 0.4
    """Of that rate, reached by the target's prefill."""
    train_share: float = 0.5
    """Of that rate, reached by the drafter's training."""
    decode_tokens_per_s: float = 0.0
    """Of the target, at the batch that it answers with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """The volume that the states lie on: each node's own, or one for all."""

    write_gb_per_s: float
    read_gb_per_s: float
    size_gb: float
    shared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """Processors of a node; zero where nobody measured it."""

    cores: int
    tokenize_tokens_per_s: float = 0.0
    """Of a core."""
    encode_gb_per_s: float = 0.0
    """Of a core: bf16 states into the codec."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The target, as far as it decides work and bytes."""

    hidden_size: int
    vocab_size: int
    active_parameters: float = 0.0
    """That a token passes through."""
    num_boundaries: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterPlan:
    """The drafter and how it trains; widths of 0 are the target's hidden size, or what follows from it."""

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    draft_vocab_size: int = 32000
    ttt_steps: int = 3
    epochs: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is to be done."""

    conversations: int
    mean_tokens: float
    """Of a conversation, prompt and answers."""
    assistant_share: float = 0.67
    """Tokens that the target wrote."""
    respond: bool = True
    codec: str = "blosc2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """A cluster and its work."""

    nodes: int
    gpus_per_node: int
    disk: Disk
    cpu: Cpu
    target: Target
    drafter: DrafterPlan
    work: Work
    gpu: Gpu = field(default_factory=Gpu)
    network_gb_per_s: float = 0.0
    """Of a node, to a shared disk; 0: the disk is the node's own."""
    rates: dict[str, float] = field(default_factory=dict)
    """Tokens a second of one GPU, by stage, measured with this very target: they win over what follows from products."""
    start_s: dict[str, float] = field(default_factory=dict)
    """Seconds before a stage's first token, by stage."""

    @property
    def num_gpus(self) -> int:
        """Of all nodes."""
        return self.nodes * self.gpus_per_node


def read_description(
    path: Path, target: str = "", conversations: int | None = None, mean_tokens: float | None = None
) -> Description:
    """Read a description; what is given here wins over the file.

    Args:
        path: The YAML file.
        target: A preset below ``conf/target``, for the target's shape; empty takes the file's.
        conversations: Number of conversations.
        mean_tokens: Of a conversation.

    Raises:
        ConfigError: The file is missing, no YAML, or describes what cannot be.
    """
    value = _read_yaml(path)
    given = {"conversations": conversations, "mean_tokens": mean_tokens}
    sections = {"work": {key: number for key, number in given.items() if number is not None}}
    sections["target"] = _preset(target) if target else {}
    for name, own in sections.items() if isinstance(value, dict) else ():
        if own and isinstance(value.get(name, {}), dict):
            value[name] = value.get(name, {}) | own
    try:
        found = from_plain(Description, value)
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{path}: {error}", HINT) from None
    check(found)
    return found


def _read_yaml(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", HINT) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no YAML: {' '.join(str(error).split())}", HINT) from None


def _preset(name: str) -> dict[str, int]:
    """Shape of a target as its preset tells it."""
    known = sorted(path.stem for path in PRESETS.glob("*.yaml"))
    if name not in known:
        raise ConfigError(f"target {name!r}, expected one of {', '.join(known) or 'none'}", f"ls {PRESETS}")
    value = _read_yaml(PRESETS / f"{name}.yaml")
    shape, boundaries = value["target"]["shape"], value.get("extract", {}).get("boundaries", [])
    own = {"hidden_size": shape["hidden_size"], "vocab_size": shape["vocab_size"]}
    return own | ({"num_boundaries": len(boundaries)} if boundaries else {})


def check(found: Description) -> None:
    """Refuse what no machine and no work is like.

    Raises:
        ConfigError: The key, its value and what was expected.
    """
    _positive("", found, ("nodes", "gpus_per_node"))
    _positive("disk.", found.disk, ("write_gb_per_s", "read_gb_per_s", "size_gb"))
    _positive("cpu.", found.cpu, ("cores",))
    _positive("target.", found.target, ("hidden_size", "vocab_size", "num_boundaries"))
    _positive("work.", found.work, ("conversations", "mean_tokens"))
    _positive("drafter.", found.drafter, tuple(f.name for f in dataclasses.fields(found.drafter)))
    for key in ("gpu.prefill_share", "gpu.train_share", "work.assistant_share"):
        section, name = key.split(".")
        share = getattr(getattr(found, section), name)
        if not 0 < share <= 1:
            raise _refused(key, share, "a share above 0, at most 1")
    optional = {
        "gpu.matmul_tflops": found.gpu.matmul_tflops,
        "gpu.decode_tokens_per_s": found.gpu.decode_tokens_per_s,
        "cpu.tokenize_tokens_per_s": found.cpu.tokenize_tokens_per_s,
        "cpu.encode_gb_per_s": found.cpu.encode_gb_per_s,
        "target.active_parameters": found.target.active_parameters,
        "network_gb_per_s": found.network_gb_per_s,
        **{f"start_s.{stage}": seconds for stage, seconds in found.start_s.items()},
    }
    for key, number in optional.items():
        if not 0 <= number < math.inf:
            raise _refused(key, number, "a finite number from 0")
    for key in (*found.rates, *found.start_s):
        if key not in STAGES:
            raise _refused("rates or start_s", key, f"one of {', '.join(STAGES)}")
    for stage, rate in found.rates.items():
        if not 0 < rate < math.inf:
            raise _refused(f"rates.{stage}", rate, "tokens a second above 0")
    if found.work.codec not in CODEC_RATIO:
        raise _refused("work.codec", found.work.codec, f"one of {', '.join(CODEC_RATIO)}")
    if found.disk.shared and not found.network_gb_per_s:
        raise _refused("network_gb_per_s", 0, "what a node gets from the shared disk")


def _positive(prefix: str, section: Any, names: tuple[str, ...]) -> None:
    for name in names:
        number = getattr(section, name)
        if not 0 < number < math.inf:
            raise _refused(f"{prefix}{name}", number, "a finite number above 0")


def _refused(key: str, value: object, expected: str) -> ConfigError:
    return ConfigError(f"{key}: {value!r}, expected {expected}", HINT)
