"""The stage: what the cards say is of the drafter that is exported, or nothing is written."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from test_export_write import SHAPE, make_drafter, make_meta, make_target
from test_import_round_trip import ROOT, make_ends
from test_model_card import make_evidence

from eyas import fs
from eyas.canonical import digest
from eyas.errors import ExportError
from eyas.stages import export as stage
from eyas.tokens.draft_vocab import DraftVocab
from eyas.train.checkpoint import publish_drafter

PATHS = ["models/target.json", "data/draft_vocab", "data/hidden_states.json", "models/drafter"]
ARGV = [*PATHS, "reports/acceptance.json", "models/export"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A trained and judged drafter."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("eyas.stages.export.locate.ensure", lambda identity, config: tmp_path)
    monkeypatch.setattr("eyas.stages.export.read_ends", lambda folder: make_ends())
    shutil.copy(ROOT / "params.yaml", tmp_path)
    drafter = make_drafter(SHAPE)
    meta = publish_drafter(Path("models/drafter"), drafter, make_meta(SHAPE))
    evidence = make_evidence()
    fs.write_record(Path("models/target.json"), make_target())
    fs.write_record(Path("data/hidden_states.json"), evidence.manifest)
    fs.write_record(Path("reports/acceptance.json"), dataclasses.replace(evidence.acceptance, drafter=digest(meta)))
    DraftVocab(drafter.d2t, drafter.t2d).write(Path("data/draft_vocab"))
    return tmp_path


def test_the_cards_hold_this_drafters_numbers(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stage.main(ARGV)
    assert "boundaries [2, 6, 9] (sglang [1, 5, 8], vllm [2, 6, 9])" in capsys.readouterr().out
    for server in ("sglang", "vllm"):
        text = (run / f"models/export/{server}/README.md").read_text()
        assert "| chat | 1,200 | 4,000 | 2.125 | 2.000 to 2.250 |" in text
        assert "license: apache-2.0" in text
    record = json.loads((run / "reports/runs/export.json").read_text())
    assert record["facts"]["max_logit_difference"] > 0


@pytest.mark.parametrize(
    ("path", "key", "message"),
    [
        ("reports/acceptance.json", "drafter", "acceptance.json is of drafter 000"),
        ("data/hidden_states.json", "identity", "hidden_states.json is capture 000"),
    ],
)
def test_numbers_or_states_of_another_drafter_are_refused(run: Path, path: str, key: str, message: str) -> None:
    """Figures of one drafter on the card of another would be a lie."""
    fs.write_bytes(Path(path), json.dumps(json.loads(Path(path).read_text()) | {key: "0" * 64}).encode())
    with pytest.raises(ExportError, match=message):
        stage.main(ARGV)
    assert not Path("models/export").exists()


def test_an_imported_drafter_is_exported_with_its_numbers(run: Path) -> None:
    """It was trained on no states of ours: those that lie here are not said to be its own."""
    drafter = make_drafter(SHAPE)
    imported = dataclasses.replace(make_meta(SHAPE), capture_identity="", tokens="", num_steps=0, warm_start="c" * 64)
    meta = publish_drafter(Path("models/imported"), drafter, imported)
    evidence = make_evidence()
    judged = dataclasses.replace(evidence.acceptance, drafter=digest(meta), capture_identity="")
    fs.write_record(Path("reports/imported.json"), judged)
    stage.main([*PATHS[:3], "models/imported", "reports/imported.json", "models/export"])
    text = (run / "models/export/sglang/README.md").read_text()
    assert "| chat | 1,200 | 4,000 | 2.125 | 2.000 to 2.250 |" in text
    assert "| capture identity | not known: it was trained elsewhere |" in text
    assert "773 samples" not in text
