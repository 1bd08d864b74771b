"""``eyas sglang-command``: how to start a server that eyas can attach to, for these parameters."""

from __future__ import annotations

from pathlib import Path

from eyas import config, fs
from eyas.config import resolve_boundaries
from eyas.contracts import TargetIdentity
from eyas.engines.sglang.launch import Wanted, attach_command
from eyas.plan.interpreter import sglang_python, sglang_versions
from eyas.target.locate import ensure

PORT = 30000


def sglang_command(root: Path) -> str:
    """The command of the server, and the variables of the extraction beside it.

    Raises:
        PlanError: No interpreter has SGLang.
        ServerError: The chosen attention does not run here.
    """
    params = config.load(root / config.PARAMS_PATH)
    target = fs.read_record(TargetIdentity, root / "models/target.json")
    wanted = Wanted(
        target=target,
        folder=ensure(target, params.target),
        boundaries=resolve_boundaries(params.extract, target.num_layers),
        dtype=params.target.dtype,
        device=params.target.device,
        version=sglang_versions()["sglang"],
        options=dict(params.extract.engine_options),
        trust_remote_code=params.target.trust_remote_code,
    )
    return attach_command(wanted, sglang_python(), str((root / ".eyas/sglang/capture.sock").resolve()), PORT)
