"""Every preset composes with every other into parameters that pass their own checks."""

from __future__ import annotations

import itertools
import subprocess
from pathlib import Path

import pytest

from eyas import config
from eyas.config.schema import ExtractConfig
from eyas.errors import ConfigError

ROOT = Path(__file__).parents[3]
CONF = ROOT / "conf"
GROUPS = ("target", "data", "machine", "drafter")
PRESETS = {group: sorted(path.stem for path in (CONF / group).glob("*.yaml")) for group in GROUPS}


def test_the_presets_that_the_documents_name_exist() -> None:
    assert PRESETS["target"] == ["kimi_k2_5", "llama3_1_8b", "qwen3_8b", "smollm2_135m"]
    assert PRESETS["data"] == ["chatterbot", "hub", "jsonl", "sharegpt"]
    assert PRESETS["machine"] == ["cpu", "h200", "rtx_pro_6000_x8"]
    assert PRESETS["drafter"] == ["eagle3", "smoke"]


@pytest.mark.parametrize(("group", "name"), [(group, name) for group in GROUPS for name in PRESETS[group]])
def test_every_preset_composes(group: str, name: str) -> None:
    params = config.compose_presets(CONF, {group: name})
    params.check()


@pytest.mark.slow
@pytest.mark.parametrize("target", PRESETS["target"])
def test_every_combination_composes_and_survives_its_own_yaml(tmp_path: Path, target: str) -> None:
    rest = [PRESETS[group] for group in GROUPS[1:]]
    for data, machine, drafter in itertools.product(*rest):
        choices = {"target": target, "data": data, "machine": machine, "drafter": drafter}
        params = config.compose_presets(CONF, choices)
        assert params.target.name == target
        assert params.data.name == data
    (tmp_path / "params.yaml").write_text(config.to_yaml(params))
    assert config.load(tmp_path / "params.yaml") == params


def test_committed_params_are_the_default_presets() -> None:
    """A changed preset must reach params.yaml: DVC sees nothing else. `make params` writes it."""
    command = ["git", "diff", "--quiet", "HEAD", "--", "params.yaml"]
    if subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode:
        pytest.skip("params.yaml is being edited, or this is no git repository")
    assert (ROOT / "params.yaml").read_text() == config.to_yaml(config.compose_presets(CONF, {}))


def test_kimi_has_the_published_shape_and_boundaries() -> None:
    params = config.compose_presets(CONF, {"target": "kimi_k2_5"})
    assert (params.target.shape.num_layers, params.target.shape.hidden_size) == (61, 7168)
    assert config.resolve_boundaries(params.extract, 61) == (3, 31, 59)


@pytest.mark.parametrize(
    ("num_layers", "boundaries"), [(30, (2, 15, 27)), (32, (2, 16, 29)), (36, (2, 18, 33)), (1, (0,))]
)
def test_default_boundaries(num_layers: int, boundaries: tuple[int, ...]) -> None:
    """Low, middle and high: 2, n // 2, n - 3; of a one-layer target only its entry is left."""
    assert config.resolve_boundaries(ExtractConfig(), num_layers) == boundaries


def test_boundary_beyond_the_target_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"extract\.boundaries: \[31\], expected at most 30"):
        config.resolve_boundaries(ExtractConfig(boundaries=[2, 31]), 30)


def test_unknown_preset_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="TARGET: 'gpt', expected one of kimi_k2_5, llama3_1_8b"):
        config.compose_presets(CONF, {"target": "gpt"})
