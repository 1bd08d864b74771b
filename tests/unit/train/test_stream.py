"""A streamed training ends in the bytes of one from stored states, within its ring, whatever happens on the way."""

# ruff: noqa: F811 - fixtures

import io
import shutil

import pytest
import stream_world as world
import yaml
from stream_place import (  # noqa: F401 - fixtures
    SRC,
    Watched,
    allocated_bytes,
    least,
    little_calibration,
    patched,
    place,
    project,
    ring_of,
)

from eyas.batches.stream import StreamReader
from eyas.engines import check_start, registry, streamed
from eyas.errors import ServerError
from eyas.shards.ring import Ring


def test_the_smallest_ring_gives_the_drafter_of_the_store(place, monkeypatch):
    """Same order, same bytes, on the CPU to the bit; the disk never holds more than the ring; every sample is counted."""
    root, expected = place
    monkeypatch.setenv("EYAS_RING_BYTES", str(least(root)))
    with Watched(root / ".eyas/ring") as watched:
        found, outcome = world.run_stream(root)
    assert found == expected
    assert 0 < watched.peak_bytes <= least(root)
    assert watched.peak_bytes >= outcome.stream["peak_bytes"] > least(root) / 2, "the look missed what was there"
    first, second = outcome.stream["epochs"]
    assert first["captured"] == first["planned"] == (90, world.num_tokens(root))
    assert second["captured"][0] > 0, "the set fits the ring, so nothing was captured twice"
    assert not (root / ".eyas/ring").exists() or not any((root / ".eyas/ring").iterdir())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_of_eyas_own_in_the_feed_ends_the_training(place, monkeypatch):
    """Or every process would wait for ever for states that nobody captures."""
    root, _ = place
    monkeypatch.setenv("EYAS_RING_BYTES", str(least(root)))

    def broken(*_):
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(Ring, "publish", broken)
    with pytest.raises(ServerError, match="ended by an error of eyas' own"):
        world.run_stream(root)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codec", "last_rows", "changes"),
    [
        ("raw", "trained", {"validation_share": 0.2, "validate_every": 5, "keep": "best"}),
        ("int8", "all", {"anchors": 4, "loss": "lk", "optimizer": "muon"}),
    ],
)
def test_other_codecs_rows_and_trainings(tmp_path, monkeypatch, codec, last_rows, changes):
    """Validation reads the same conversations again and again: they are pinned."""
    root = tmp_path / "project"
    world.make_project(root, last_rows=last_rows, codec=codec)
    monkeypatch.chdir(root)
    monkeypatch.setenv("PYTHONPATH", SRC)
    expected = world.run_store(root, **changes)
    world.capture_set(root, "stream")
    monkeypatch.setenv("EYAS_RING_BYTES", str(10**6 if codec == "raw" else 400_000))
    found, _ = world.run_stream(root, **changes)
    assert found == expected
    metrics = [(root / name / "metrics/metrics.json").read_bytes() for name in ("from_store", "from_stream")]
    assert metrics[0] == metrics[1]


@pytest.mark.slow
def test_a_ring_that_holds_the_set_captures_it_once(place, monkeypatch):
    root, expected = place
    monkeypatch.setenv("EYAS_RING_BYTES", str(10**7))
    found, outcome = world.run_stream(root)
    assert found == expected
    assert [epoch["captured"][0] for epoch in outcome.stream["epochs"]] == [90, 0]


NOTING = """
    from eyas.engines import check_start, registry, streamed

    def noted(word):
        with open("noted", "a") as file:
            file.write(word)

    class Noting(streamed.Parent):
        def take(self, *, wait):
            found = super().take(wait=wait)
            noted("c" * len(found))
            return found

        def say(self, **message):
            if "written" in message:
                noted("w")
            super().say(**message)

    streamed.Parent = Noting
"""


def most_under_way(root):
    """Shards that were asked of the capturing process and not yet written, at most."""
    noted, under_way, most = (root / "noted").read_text(), 0, 0
    for word in noted:
        under_way += 1 if word == "c" else -1
        most = max(most, under_way)
    return most


def test_pinned_shards_wait_in_memory_no_more_than_others(place, monkeypatch, tmp_path):
    """However many samples are read again and again: a few shards are asked for at a time, and no more than fit."""
    root, _ = place
    changes = {"validation_share": 0.5, "num_steps": 2}
    streaming = world.part_of(
        root / "data/tokens", world.manifest_of(root), world.inputs_of(root, world.stored_part(root), **changes).config
    )
    assert len(streaming.pinned) > 6
    monkeypatch.setenv("EYAS_RING_BYTES", str(streaming.need.least_bytes))
    with Watched(root / ".eyas/ring") as watched:
        world.run_stream(root, worker=patched(tmp_path, NOTING), **changes)
    assert most_under_way(root) <= 2
    assert 0 < watched.peak_bytes <= streaming.need.least_bytes


def test_the_target_runs_as_it_ran_for_the_stored_part(place, monkeypatch):
    """Dtype and device decide the bytes and stand in the plan: what params.yaml says by now is not asked."""
    root, _ = place
    capture = world.manifest_of(root).capture
    assert (capture.engine_options["dtype"], capture.engine_options["device"]) == ("bfloat16", "cpu")
    params = yaml.safe_load((root / "params.yaml").read_text())
    params["target"] |= {"dtype": "float32", "device": "cuda"}
    (root / "params.yaml").write_text(yaml.safe_dump(params))
    run_as, make = [], registry.make_engine

    def noted(name, **how):
        run_as.append((how["dtype"], how["device"]))
        return make(name, **how)

    def judged(*_, dtype, **__):
        run_as.append((dtype, ""))
        raise ServerError("seen")

    monkeypatch.setattr(registry, "make_engine", noted)
    monkeypatch.setattr(check_start, "check_start", judged)
    monkeypatch.setattr(check_start, "SERVER_ENGINES", ("fake",))
    for module in (streamed, check_start):
        monkeypatch.setattr(module, "ensure", lambda *_: root)
    parent = streamed.Parent(io.StringIO(), io.StringIO())
    parent.commands.put({"capture": 0, "shard": world.make_plan(root, "store").shards[0].path, "only": None})
    (root / "ring").mkdir()
    with pytest.raises(ServerError, match="seen"):
        streamed.serve(
            parent, root / "models/target.json", root / "data/tokens", root / "stream/hidden_states.json", root / "ring"
        )
    assert run_as == [("bfloat16", "cpu"), ("bfloat16", "")]


def test_a_ring_that_an_earlier_run_left_larger_shrinks(place, monkeypatch):
    """Its shards are used as far as they fit, also when every one that is needed lies there."""
    root, expected = place
    monkeypatch.setenv("EYAS_RING_BYTES", str(10**7))
    monkeypatch.setattr(StreamReader, "give_back", StreamReader.end)
    found, _ = world.run_stream(root)
    left = allocated_bytes(ring_of(root).folder)
    monkeypatch.setenv("EYAS_RING_BYTES", str(least(root)))
    assert left > least(root)
    shutil.rmtree(root / "from_stream")
    seen = []
    follow = StreamReader.follow
    monkeypatch.setattr(
        StreamReader, "follow", lambda *rest: (seen.append(allocated_bytes(ring_of(root).folder)), follow(*rest))[1]
    )
    again, outcome = world.run_stream(root)
    assert found == again == expected
    assert max(seen[0], allocated_bytes(ring_of(root).folder), outcome.stream["peak_bytes"]) <= least(root)
