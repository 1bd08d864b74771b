"""Reading and composing parameters: ``params.yaml`` is Hydra's primary config over the schema.

An unknown key, a wrong type and a value out of range are one-line errors that name the dotted key.
``conf/`` holds presets; ``eyas params`` composes them into a new, complete ``params.yaml``.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from eyas.config.schema import ExtractConfig, Params, require
from eyas.errors import ConfigError

PARAMS_PATH = Path("params.yaml")
SECTIONS = tuple(spec.name for spec in dataclasses.fields(Params))


def load(path: Path = PARAMS_PATH) -> Params:
    """Compose a params file with the schema and check every value.

    Raises:
        ConfigError: The file is missing or damaged; a key is unknown or missing; a value has the
            wrong type or is out of range.
    """
    if not path.is_file():
        raise ConfigError(f"{path} is missing", "run `make params` or `git checkout params.yaml`")
    return _to_params(_compose(path.parent.resolve(), path.stem, []))


def compose_presets(conf: Path, choices: dict[str, str]) -> Params:
    """Compose presets (group -> name) below ``conf/`` into checked parameters.

    Raises:
        ConfigError: A group or preset does not exist, or the composition breaks a rule.
    """
    for group, name in choices.items():
        known = sorted(p.stem for p in (conf / group).glob("*.yaml"))
        require(name in known, group.upper(), name, f"one of {', '.join(known)}")
    return _to_params(_compose(conf.resolve(), "presets", [f"{g}={n}" for g, n in choices.items()]))


def _compose(folder: Path, name: str, overrides: list[str]) -> Any:
    # Imported here so that `eyas --help` and the frozen public surface need no Hydra.
    import yaml
    from hydra import compose, initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    ConfigStore.instance().store(name="schema", node=Params)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(version_base="1.3", config_dir=os.fspath(folder)):
            return compose(config_name=name, overrides=overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_one_line(error), f"see the comments in {name}.yaml and `eyas params --help`") from error
    except yaml.YAMLError as error:
        raise ConfigError(
            f"{name}.yaml is no YAML: {' '.join(str(error).split())}", "mend the line it names"
        ) from error


def _to_params(composed: Any) -> Params:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        missing = sorted(OmegaConf.missing_keys(composed))
        if missing:
            raise ConfigError(
                f"{missing[0]}: no value", "set it in params.yaml, or compose a preset with `make params`"
            )
        params = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise ConfigError(_one_line(error), "see the comments in params.yaml") from error
    assert isinstance(params, Params)
    params.check()
    return params


def _one_line(error: BaseException) -> str:
    """Innermost cause of a Hydra or OmegaConf error, with its dotted key, in one line."""
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    deepest = causes[-1]
    key = getattr(deepest, "full_key", None)
    text = str(deepest).split("\n")[0]
    return f"{key}: {text}" if key and not text.startswith(str(key)) else text


def to_yaml(params: Params) -> str:
    """Complete params text, in section order, as ``eyas params`` writes it."""
    from omegaconf import OmegaConf

    body = OmegaConf.to_yaml(OmegaConf.structured(params))
    return (
        "# Complete parameters of this pipeline, tracked by DVC. Edit values here, or compose presets:\n"
        "#   make params TARGET=... DATA=... MACHINE=... DRAFTER=...\n"
        "# Every key is described in src/eyas/config.py.\n"
        "defaults:\n- schema\n- _self_\n\n" + body
    )


def resolve_boundaries(extract: ExtractConfig, num_layers: int) -> tuple[int, ...]:
    """The aux boundaries of a target with ``num_layers`` layers.

    Raises:
        ConfigError: A boundary does not exist on this target.
    """
    default = sorted({min(2, num_layers - 1), num_layers // 2, max(num_layers - 3, 0)})
    boundaries = tuple(extract.boundaries) or tuple(default)
    beyond = [b for b in boundaries if b > num_layers]
    require(not beyond, "extract.boundaries", beyond, f"at most {num_layers}: the target has {num_layers} layers")
    return boundaries
