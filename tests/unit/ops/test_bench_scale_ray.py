"""What ``bench.scale`` says of Ray: medians of turns here, and both parts once on a real Ray."""

import json

import pytest

from eyas.ops.bench import scale_overhead, scale_ray
from eyas.ops.bench.scale_cases import fake_case


def test_turns_alternate_and_their_medians_are_compared(monkeypatch, tmp_path):
    """Seconds here 100, 90, 200 and with Ray 104, 103, 110: 104 / 100; CPU seconds 180 / 160 with Ray's own, 168 without."""
    seconds = {"local": iter([100.0, 90.0, 200.0]), "ray": iter([104.0, 103.0, 110.0])}
    turns = []

    def timed(case, work, is_ray):
        turns.append("ray" if is_ray else "local")
        cpu_s = {"cpu_s": 168.0 if is_ray else 160.0, "daemons_cpu_s": 12.0 * is_ray, "others_cpu_s": 0.0}
        return {"start_s": 1.0, "wall_s": next(seconds[turns[-1]]), **cpu_s}

    monkeypatch.setattr(scale_overhead, "_timed", timed)
    monkeypatch.setattr(scale_overhead, "long_case", lambda *_: fake_case())
    *_, found = scale_overhead.overhead(tmp_path, tmp_path, 1, 3)
    assert turns == ["local", "ray", "ray", "local", "local", "ray"]
    assert found["ray_overhead"] == pytest.approx(0.04)
    assert found["ray_overhead_cpu"] == pytest.approx(0.125)
    assert found["ray_overhead_cpu_without_daemons"] == pytest.approx(0.05)
    assert [row["wall_s"] for row in found["overhead_rows"]] == [100, 104, 103, 90, 200, 110]


@pytest.mark.timeout(300)
def test_a_turn_with_ray_and_one_without_are_measured(monkeypatch, tmp_path):
    pytest.importorskip("ray", reason="`make test-ray` installs Ray and runs these")
    monkeypatch.delenv("EYAS_RAY_ADDRESS", raising=False)
    monkeypatch.setattr(scale_overhead, "long_case", lambda *_: fake_case())
    monkeypatch.setattr(scale_overhead, "TICK_S", 0.05)
    *_, found = scale_overhead.overhead(tmp_path / "work", tmp_path, 1, 1)
    here, there = found["overhead_rows"]
    assert here["daemons_cpu_s"] == 0
    assert there["daemons_cpu_s"] >= 0
    assert min(there["wall_s"], there["cpu_s"], here["wall_s"], here["cpu_s"]) > 0
    assert there["start_s"] > here["start_s"]
    assert not (tmp_path / "work").exists()
    json.dumps(found)


@pytest.mark.timeout(300)
def test_a_run_with_kills_is_counted(tmp_path):
    pytest.importorskip("ray", reason="`make test-ray` installs Ray and runs these")
    (found,) = scale_ray.kills(tmp_path / "work", 1, seed=3)
    assert (found["kill_runs"], found["lost"]) == (1, 0)
    assert found["kills"] == sum(found["kill_kinds"].values()) > 0
