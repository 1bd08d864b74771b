"""Parameters of the pipeline: schema, loading, presets."""

from eyas.config.knobs import cores, knob, start_s, watchdog_s
from eyas.config.load import PARAMS_PATH, SECTIONS, compose_presets, load, resolve_boundaries, to_yaml
from eyas.config.machine import machine, settings
from eyas.config.schema import (
    DataConfig,
    DrafterConfig,
    EvaluateConfig,
    ExportConfig,
    ExtractConfig,
    Params,
    PromptSetConfig,
    RespondConfig,
    TargetConfig,
    TokenizeConfig,
    TrainConfig,
    tracked_extract_keys,
)

__all__ = [
    "PARAMS_PATH",
    "SECTIONS",
    "DataConfig",
    "DrafterConfig",
    "EvaluateConfig",
    "ExportConfig",
    "ExtractConfig",
    "Params",
    "PromptSetConfig",
    "RespondConfig",
    "TargetConfig",
    "TokenizeConfig",
    "TrainConfig",
    "compose_presets",
    "cores",
    "knob",
    "load",
    "machine",
    "resolve_boundaries",
    "settings",
    "start_s",
    "to_yaml",
    "tracked_extract_keys",
    "watchdog_s",
]
