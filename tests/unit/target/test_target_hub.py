"""fetch from a hub: the real client over real HTTP against a small hub on this machine."""

from __future__ import annotations

import dataclasses

import pytest
from local_hub import COMMIT, LocalHub
from tiny_targets import SHAPE

from eyas import fs
from eyas.config import TargetConfig
from eyas.errors import DiskError, TargetError
from eyas.target import locate
from eyas.target.fetch import fetch


@pytest.fixture
def hub(model_folder, monkeypatch, tmp_path):
    (model_folder / "original").mkdir()
    (model_folder / "original" / "params.json").write_text("{}")
    (model_folder / "pytorch_model.bin").write_bytes(b"not wanted")
    (model_folder / "README.md").write_text("not wanted")
    from huggingface_hub import constants

    served = LocalHub("models", "me/tiny", model_folder)
    with served.serve() as url:
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
        yield served


@pytest.fixture
def config() -> TargetConfig:
    return TargetConfig(name="tiny", source="hub", location="me/tiny", revision=COMMIT, shape=SHAPE)


def test_a_pinned_commit_is_downloaded_whole_and_only_what_is_needed(hub, config, model_folder):
    identity = fetch(config)
    folder = locate.target_dir(identity)
    kept = {f.path for f in identity.files}
    assert (identity.source, identity.revision) == ("hub:me/tiny", COMMIT)
    assert kept == {p.name for p in folder.iterdir()}
    assert kept & {"README.md", "pytorch_model.bin", "original"} == set()
    for name in kept:
        assert (folder / name).read_bytes() == (model_folder / name).read_bytes()
    asked = len(hub.requests)
    assert locate.ensure(identity, config) == folder
    assert fetch(config) == identity
    assert len(hub.requests) == asked


@pytest.mark.parametrize("revision", ["", "main", COMMIT[:12]])
def test_anything_that_can_move_is_refused_and_the_commit_is_named(hub, config, revision):
    with pytest.raises(TargetError) as caught:
        fetch(dataclasses.replace(config, revision=revision))
    assert caught.value.message.startswith(f"target.revision: {revision!r}, expected a commit of me/tiny")
    if revision != COMMIT[:12]:  # this hub does not know short commits
        assert f"set target.revision: {COMMIT}" in caught.value.hint


def test_without_a_hub_the_refusal_says_how_to_find_the_commit(config, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(TargetError, match=r"git ls-remote https://huggingface\.co/me/tiny main"):
        fetch(dataclasses.replace(config, revision="main"))


def test_an_unknown_commit_is_a_clear_error(hub, config):
    with pytest.raises(TargetError, match="cannot be downloaded"):
        fetch(dataclasses.replace(config, revision=COMMIT[::-1]))


def test_a_broken_download_publishes_nothing_and_goes_on(hub, config, tmp_path, monkeypatch):
    import time

    monkeypatch.setattr(time, "sleep", lambda _: None)  # the client's waits between its own attempts
    hub.fail_on = "model.safetensors"
    with pytest.raises(TargetError, match="goes on"):
        fetch(config)
    assert not list((tmp_path / "targets").glob("*.json"))
    assert [p.suffix for p in (tmp_path / "targets").iterdir() if p.is_dir()] == [fs.PART_SUFFIX]
    hub.fail_on = ""
    hub.requests.clear()
    fetch(config)
    assert not [r for r in hub.requests if r.startswith("GET") and r.endswith("/tokenizer.json")]  # was there already


def test_no_room_is_said_before_the_download(hub, config, monkeypatch):
    monkeypatch.setattr(fs, "free_bytes", lambda _: 10)
    with pytest.raises(DiskError, match="10 are free"):
        fetch(config)
    assert not [r for r in hub.requests if "/resolve/" in r]
