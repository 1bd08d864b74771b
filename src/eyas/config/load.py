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
from eyas.config.structure import check_structure
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
    check_structure(_read_yaml(path), path.name)
    return _to_params(_compose(path.parent.resolve(), path.stem, []))


def _read_yaml(path: Path) -> Any:
    # OmegaConf's reader, because PyYAML takes 1e-4 for text.
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except OmegaConfBaseException as error:
        reason = str(error).split("\n")[0]
        where = f", {error.full_key}" if error.full_key else ""
        raise ConfigError(f"{path.name}{where}: {reason}", "mend it, or `git checkout params.yaml`") from error
    except RecursionError as error:
        raise ConfigError(
            f"{path.name}: an alias stands inside its own anchor", "write the value out, or `git checkout params.yaml`"
        ) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or " ".join(str(error).split())
        raise ConfigError(
            f"{path.name}{where}: no YAML: {reason}", "mend that line, or `git checkout params.yaml`"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path.name}: {error}", "run `make params`, or `git checkout params.yaml`") from error


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
        raise ConfigError(_one_line(error), "the schema is src/eyas/config/schema.py") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}.yaml or a preset is no YAML: {_one_line(error)}", "mend that line") from error


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
        raise ConfigError(_one_line(error), "the schema is src/eyas/config/schema.py") from error
    if not isinstance(params, Params):
        raise ConfigError("params.yaml: its sections are moved by an `@package` line", "remove that line")
    params.check()
    # Here and not where the target is known first: that is after its answers are written.
    resolve_boundaries(params.extract, params.target.shape.num_layers)
    return params


def _one_line(error: BaseException) -> str:
    """The innermost cause that says something, in one line, with the dotted key if any cause knows it."""
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    texts = [text for cause in reversed(causes) if (text := str(cause).strip().split("\n")[0])]
    keys = [key for cause in reversed(causes) if (key := getattr(cause, "full_key", None))]
    text = texts[0] if texts else type(error).__name__
    return f"{keys[0]}: {text}" if keys and not text.startswith(str(keys[0])) else text


def to_yaml(params: Params) -> str:
    """Complete params text, in section order with a comment each, as ``eyas params`` writes it."""
    from omegaconf import OmegaConf

    lines = OmegaConf.to_yaml(OmegaConf.structured(params)).splitlines()
    body = []
    for line in lines:
        if not line.startswith((" ", "-")):
            section = getattr(params, line.partition(":")[0])
            body += ["", f"# {(section.__doc__ or '').splitlines()[0]}"]
        body.append(line)
    return _HEAD + "\n".join(body) + "\n"


_HEAD = """\
# Complete parameters of this pipeline, tracked by DVC. Edit values here, or compose presets:
#   make params TARGET=... DATA=... MACHINE=... DRAFTER=...
# Every key is described in src/eyas/config/schema.py and training.py.
defaults:
- schema
- _self_
"""


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
