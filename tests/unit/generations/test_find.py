"""Which generation a user means: a prefix of its hash, or a name."""

from __future__ import annotations

import json

import pytest

from eyas.errors import StoreError
from eyas.generations.listing import find
from states_repository import StatesRepository, md5


@pytest.fixture
def repository(tmp_path) -> StatesRepository:
    return StatesRepository(tmp_path / "r")


def shards(*lengths: int) -> dict[str, bytes]:
    return {f"000/shard-{i}": bytes([65 + i]) * length for i, length in enumerate(lengths)}


def test_a_prefix_finds_it_and_too_short_or_unknown_ones_do_not(repository):
    name = repository.publish(shards(10))
    repository.commit()
    for spelt in (name[:6], name[:10], name[:32], name):
        assert find(repository.root, spelt).hash == name
    for spelt in (name[:5], "f" * 12, "", "data/hidden_states"):
        with pytest.raises(StoreError, match=f"{name[:10]}") as error:
            find(repository.root, spelt)
        assert "make generations ALL=1" in (error.value.hint or "")


def test_a_prefix_of_two_is_refused_with_both(repository):
    seen: dict[str, dict[str, bytes]] = {}
    for i in range(100000):  # two lists whose md5 begins alike, by search
        files = {"s": str(i).encode()}
        listing = json.dumps([{"md5": md5(files["s"]), "relpath": "s"}], sort_keys=True).encode()
        prefix = md5(listing)[:6]
        if prefix in seen:
            break
        seen[prefix] = files
    one = repository.publish(seen[prefix])
    repository.commit()
    two = repository.publish(files)
    repository.commit()
    with pytest.raises(StoreError, match="means 2 generations"):
        find(repository.root, prefix)
    assert {find(repository.root, name[:12]).hash for name in (one, two)} == {one, two}


def test_a_generation_of_an_old_commit_is_found(repository):
    old = repository.publish(shards(10))
    repository.commit()
    repository.publish(shards(20))
    repository.commit()
    assert find(repository.root, old[:8]).hash == old
