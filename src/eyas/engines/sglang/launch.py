"""How a server is started: what it is for, program, arguments and variables; and what a user types to start one."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.contracts import TargetIdentity
from eyas.engines.boundaries import layer_ids
from eyas.engines.sglang import preflight, versions, wire

URL_VARIABLE = "EYAS_SGLANG_URL"
CPU_POOL_TOKENS = 16384


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a session is for."""

    target: TargetIdentity
    folder: Path
    boundaries: tuple[int, ...]
    """Empty for a server that only writes answers."""
    dtype: str
    device: str
    version: str
    """Of sglang."""
    options: dict[str, str | int]
    trust_remote_code: bool = False
    label: str = ""
    """Begins the names of its logs, where several engines run in one folder."""
    drafting: tuple[str, ...] = ()
    """``versions.drafting_arguments`` of a server that drafts; such a one captures nothing."""

    @property
    def layout(self) -> wire.Layout:
        """Of a sample in the arena."""
        return wire.Layout(len(self.boundaries), self.target.hidden_size, self.dtype)

    @property
    def layers(self) -> tuple[int, ...]:
        """The boundaries in SGLang's spelling."""
        target = self.target
        return layer_ids(self.boundaries, "sglang", model_type=target.model_type, num_layers=target.num_layers)


def command(wanted: Wanted, python: str, port: int, num_tokens: int = 0, capability: float = 0.0) -> list[str]:
    """Program and arguments of a server.

    Args:
        wanted: What it is for.
        python: Interpreter.
        port: Of this machine alone.
        num_tokens: Of the longest request.
        capability: Of the GPU; 0 on a CPU, and where it is not known.
    """
    options = dict(wanted.options)
    named = options.pop("attention_backend", None)
    attention = None if named is None else str(named)
    if wanted.device != "cpu":
        attention = preflight.check_attention(attention, capability, wanted.target.model_type)
    numbers: dict[str, Any] = {name: int(value) for name, value in options.items()}
    arguments = versions.server_arguments(
        wanted.version,
        versions.ServerOptions(
            model_path=str(wanted.folder.resolve()),
            port=port,
            device=wanted.device,
            dtype=wanted.dtype,
            attention_backend=attention,
            max_total_tokens=max(CPU_POOL_TOKENS, num_tokens + 1024) if wanted.device == "cpu" else None,
            decode=not wanted.boundaries,
            further=[
                *(["--trust-remote-code"] if wanted.trust_remote_code else []),
                *wanted.drafting,
                *preflight.more_arguments(),
            ],
            **numbers,
        ),
    )
    return [python, "-m", "sglang.launch_server", *arguments]


def environment(wanted: Wanted, plugin_folder: Path, socket_path: Path) -> dict[str, str]:
    """Variables that a server needs beside this process' own."""
    python_path = os.pathsep.join(filter(None, [str(plugin_folder), os.environ.get("PYTHONPATH", "")]))
    found = {"PYTHONPATH": python_path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if wanted.device == "cpu":
        shim = plugin_folder / "eyas/engines/sglang/cpu_shim"
        found |= versions.cpu_environment(str(shim), python_path, int(wanted.options.get("tp_size", 1)))
    if wanted.boundaries:
        found |= {
            wire.SOCKET_VARIABLE: str(socket_path),
            wire.LAYERS_VARIABLE: str(list(wanted.layers)),
        }
    return found


def key_arguments(key: str, folder: Path) -> list[str]:
    """Arguments that give a server its key, without showing it in the list of processes: SGLang reads a file.

    Args:
        key: Without which nobody gets an answer.
        folder: Of this server alone, readable by its owner.
    """
    path = folder / "server.yaml"
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(f'api-key: "{key}"\n')  # one of digits alone would be a number
    return ["--config", str(path)]


def attach_command(wanted: Wanted, python: str, socket_path: str, port: int) -> str:
    """What a user types to start a server that eyas can attach to, and eyas with it."""
    folder = Path(__file__).parents[3]
    variables = environment(wanted, folder, Path(socket_path))
    capability = min((gpu.capability for gpu in preflight.gpus()), default=0.0) if wanted.device != "cpu" else 0.0
    started: Sequence[str] = command(wanted, python, port, capability=capability)
    set_them = [f"{name}={shlex.quote(value)}" for name, value in sorted(variables.items())]
    server = " \\\n  ".join([*set_them, shlex.join(started)])
    return (
        f"# the server; its python needs eyas: {python} -m pip install --no-deps -e .\n{server}\n\n# and then eyas\n"
        f"{URL_VARIABLE}=http://127.0.0.1:{port} {wire.SOCKET_VARIABLE}={shlex.quote(socket_path)} make extract"
    )
