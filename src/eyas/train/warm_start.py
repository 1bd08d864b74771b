"""``train.warm_start``: the folder that params.yaml names, and that it is what params.yaml says it is.

The folder stays outside DVC's dependencies, as the target's weights do: its content hash stands in params.yaml,
so ``dvc status`` sees a new one, and other content under the old hash is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eyas import console
from eyas.config.schema import TrainConfig
from eyas.contracts import TargetIdentity
from eyas.drafter.foreign import ForeignDrafter, content_hash, read_checkpoint
from eyas.drafter.foreign_config import ConfigFacts
from eyas.engines import boundaries as spelled
from eyas.errors import ConfigError, TrainError


def read_warm_start(config: TrainConfig, identity: TargetIdentity, boundaries: Sequence[int]) -> ForeignDrafter | None:
    """The checkpoint to start from, or None.

    Args:
        config: ``train`` section; its paths are relative to the repository.
        identity: The target.
        boundaries: Of the states that are trained on.

    Raises:
        ConfigError: The folder holds other content than ``train.warm_start_sha256`` says.
        StoreError: A file is missing or damaged.
        TrainError: It is no drafter that can be read, or was trained on other boundaries.
    """
    if not config.warm_start:
        return None
    folder = Path(config.warm_start)
    found = content_hash(folder)
    if found != config.warm_start_sha256:
        raise ConfigError(
            f"train.warm_start_sha256: {config.warm_start_sha256!r}, but the content of {folder} is {found}",
            f"if that is the wanted content, set train.warm_start_sha256 to {found} in params.yaml",
        )
    checkpoint = read_checkpoint(folder)
    check_boundaries(checkpoint.facts, identity, boundaries)
    return checkpoint


def written_boundaries(facts: ConfigFacts, identity: TargetIdentity) -> tuple[tuple[int, ...], str]:
    """The boundaries that a checkpoint reads for this target, and how its config says so."""
    if facts.layer_ids is None:
        theirs = facts.default_boundaries(identity.num_layers)
        console.log(f"the checkpoint names no layer ids; taken as {facts.form}'s default {list(theirs)}")
        return theirs, "no layer ids, which means the default"
    theirs = facts.layer_ids
    if facts.spelling != "boundaries":
        theirs = spelled.boundaries_of(theirs, facts.spelling, model_type=identity.model_type)
    return theirs, f"layer ids {list(facts.layer_ids)} in {facts.form}'s spelling"


def check_boundaries(facts: ConfigFacts, identity: TargetIdentity, boundaries: Sequence[int]) -> tuple[int, ...]:
    """The boundaries a checkpoint reads; the states' own, or an error: a wrong layer trains as noise.

    Raises:
        TrainError: They differ; both lists are named.
    """
    theirs, said = written_boundaries(facts, identity)
    if theirs != tuple(boundaries):
        raise TrainError(
            f"train.warm_start was trained on boundaries {list(theirs)} ({said}), the states hold {list(boundaries)}",
            f"capture with extract.boundaries: {list(theirs)}, or start without it",
        )
    return theirs
