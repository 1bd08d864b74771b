"""Fixtures of the room train."""

import pytest
import train_world as world
from warm_world import FORMS

from eyas.config.schema import ExportConfig
from eyas.export.write import export
from eyas.target.load import read_ends
from eyas.train.checkpoint import load_drafter


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """A trained drafter with a head of its own, and its export: (folder, drafter)."""
    folder = tmp_path_factory.mktemp("made")
    world.run(folder, world.make_inputs(folder, train_head=True, lr=0.05))
    drafter, meta = load_drafter(folder / "drafter", read_ends(folder / "target").embedding_VD)
    export(drafter, meta, world.make_identity(), ExportConfig(dtype="float32"), folder / "export")
    return folder, drafter


@pytest.fixture
def place(made, tmp_path, monkeypatch):
    """A repository that holds a copy of the drafter in every form."""
    for form, path in FORMS.items():
        (tmp_path / form).mkdir()
        for file in (made[0] / path).iterdir():
            (tmp_path / form / file.name).write_bytes(file.read_bytes())
    monkeypatch.chdir(tmp_path)
    return tmp_path
