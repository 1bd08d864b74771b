"""Which earlier states tell how well new ones will compress."""

from pathlib import Path

import pytest

from eyas import fs
from eyas.plan.budget import Need
from eyas.plan.earlier import earlier_ratio

MANIFEST = Path("hidden_states.json")
CAPTURE = {"target": "t", "codec": "blosc2", "boundaries": [1], "final_hidden": "post_norm", "dtype": "bfloat16"}
NEED = Need(
    num_samples=1000, num_tokens=100_000, num_shards=10, payload_bytes=10_000_000, trained_payload_bytes=5_000_000,
    token_bytes=500_000, codec="blosc2", last_rows="all",
)  # fmt: skip


def ratio(root: Path, stored: dict, wanted: dict, num_tokens: int = 50_000) -> float | None:
    manifest = {
        "identity": "e" * 64, "capture": CAPTURE | stored, "shards": [{}], "num_stored_tokens": num_tokens,
        "stored_bytes": num_tokens * (60 + 5),
    }  # fmt: skip
    fs.write_record(root / MANIFEST, manifest)
    found = earlier_ratio(root, NEED, CAPTURE | wanted, MANIFEST)
    return found.value if found else None


@pytest.mark.parametrize(
    ("stored", "wanted", "expected"),
    [("hf", "hf", 0.6), ("hf", "vllm", 0.6), ("fake", "fake", 0.6), ("fake", "hf", None), ("hf", "fake", None)],
)
def test_states_of_the_engine_without_a_model_tell_of_itself_alone(tmp_path, stored, wanted, expected):
    assert ratio(tmp_path, {"engine": stored}, {"engine": wanted}) == expected


def test_a_codec_whose_bytes_changed_since_tells_nothing(tmp_path):
    assert ratio(tmp_path, {"revision": 1}, {"revision": 2}) is None


@pytest.mark.parametrize(("num_tokens", "expected"), [(1000, 0.6), (999, None)])
def test_a_few_samples_tell_nothing_of_many(tmp_path, num_tokens, expected):
    """From a hundredth of the planned tokens on."""
    assert ratio(tmp_path, {}, {}, num_tokens) == expected
