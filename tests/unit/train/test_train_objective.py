"""Runs with other losses and with anchors: what the parameters say is what trains."""

import json

import pytest
import train_world as world
from safetensors.torch import load_file


def trained(folder, **changes):
    """Weights and last metrics of a run."""
    world.run(folder, world.make_inputs(folder, **changes))
    (weights,) = (folder / "drafter").glob("*.safetensors")
    return load_file(weights), json.loads((folder / "metrics" / "metrics.json").read_text())


def equal(a, b):
    return a.keys() == b.keys() and all(bool((a[name] == b[name]).all()) for name in a)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("dense"))


@pytest.mark.parametrize("changes", [{"loss": "ce"}, {"loss": "lk"}, {"top_k": 3}, {"anchors": 2}], ids=str)
def test_every_option_trains_something_else(tmp_path, dense, changes):
    weights, metrics = trained(tmp_path, **changes)
    assert not equal(weights, dense[0])
    assert metrics["loss"]["step_0"] != dense[1]["loss"]["step_0"]
    # a fact of the data, whatever trains
    assert metrics["oov_share"] == dense[1]["oov_share"]


def test_as_many_anchors_as_rows_train_the_same_to_the_bit(tmp_path, dense):
    weights, metrics = trained(tmp_path, anchors=1000)
    assert equal(weights, dense[0])
    assert metrics == dense[1]


def test_a_resumed_run_throws_the_same_anchors(tmp_path):
    """Anchors follow from the step's number, which a checkpoint holds."""
    options = {"anchors": 2, "loss": "lk", "num_steps": 8}
    expected, _ = trained(tmp_path / "whole", **options)
    inputs = world.make_inputs(tmp_path / "broken", **options)
    with pytest.MonkeyPatch.context() as patch:
        crash_at(patch, 6)
        with pytest.raises(RuntimeError, match="power cut"):
            world.run(tmp_path / "broken", inputs)
    assert equal(trained(tmp_path / "broken", **options)[0], expected)


def crash_at(patch, call):
    """The loss fails at a call: two steps after the checkpoint at step 4."""
    from eyas.train import loop

    real, calls = loop.ttt_loss, []

    def crashing(*args, **kwargs):
        calls.append(1)
        if len(calls) == call:
            raise RuntimeError("power cut")
        return real(*args, **kwargs)

    patch.setattr(loop, "ttt_loss", crashing)
