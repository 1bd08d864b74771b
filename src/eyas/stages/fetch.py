"""Stage ``fetch``: the target into ``.eyas/targets``, its identity into ``models/target.json``."""

from __future__ import annotations

from collections.abc import Sequence

from eyas import config, console, fs
from eyas.contracts import TargetIdentity
from eyas.stages import common
from eyas.target.fetch import fetch
from eyas.target.locate import target_dir


def main(argv: Sequence[str]) -> None:
    """Run the stage: ``python -m eyas.stages.fetch models/target.json``."""
    (out,) = common.paths("fetch", ("target.json",), argv)
    params = config.load()
    with common.stage_run("fetch", [], [out]) as run:
        identity = fetch(params.target)
        fs.write_record(out, identity)
        run.facts["identity"] = identity.digest
        console.emit(summary(identity))


def summary(identity: TargetIdentity) -> str:
    """The identity as an operator reads it."""
    norm = identity.final_norm
    return console.table(
        [
            ("target", identity.source),
            ("revision", identity.revision),
            ("identity", identity.digest[:16]),
            ("folder", str(target_dir(identity))),
            ("files", f"{len(identity.files)}, {console.human_bytes(sum(f.size_bytes for f in identity.files))}"),
            ("architecture", f"{identity.architecture} ({identity.model_type}), stored in {identity.dtype}"),
            ("shape", f"{identity.num_layers} layers, hidden {identity.hidden_size:,}, vocab {identity.vocab_size:,}"),
            (
                "final norm",
                f"{norm.kind}, eps {norm.eps:g}, offset {norm.weight_offset:g}, {norm.num_zero_scales} zeros",
            ),
            ("end tokens", ", ".join(map(str, identity.eos_token_ids))),
        ]
    )


if __name__ == "__main__":
    console.run_main(main)
