"""Which foreign samples are held out."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from eyas.contracts import TokenSample
from eyas.ops.exchange.hold_out import hold_out
from eyas.tokens.dataset import make_sample


def sample(opening: int, answer: int) -> TokenSample:
    """Two ids of the opening, two of the answer."""
    ids = (opening, opening + 1, answer, answer + 1)
    return make_sample(ids, (0, 0, 1, 1), conversation_id="", source="peer", split="train", variant="given")


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), max_size=40, unique=True), st.floats(0.01, 0.99))
def test_openings_stay_on_one_side_and_both_sides_have_some(pairs: list[tuple[int, int]], share: float) -> None:
    samples = [sample(*pair) for pair in pairs]
    split = hold_out(samples, share)
    sides: dict[int, set[str]] = {}
    for one in split:
        sides.setdefault(one.input_ids[0], set()).add(one.split)
    assert all(len(side) == 1 for side in sides.values())
    num_held_out, num = sum(side == {"held_out"} for side in sides.values()), len(sides)
    assert num_held_out == (min(max(round(share * num), 1), num - 1) if num else 0)
    assert [one.sample_id for one in split] == [one.sample_id for one in samples]


def test_the_order_of_files_decides_nothing() -> None:
    samples = [sample(opening, answer) for opening in range(20) for answer in range(3)]
    shuffled = random.Random(0).sample(samples, len(samples))
    assert {s.sample_id: s.split for s in hold_out(samples, 0.2)} == {
        s.sample_id: s.split for s in hold_out(shuffled, 0.2)
    }


def test_a_sample_without_a_mask_is_its_own_opening() -> None:
    bare = [
        make_sample((i, i, i), (0, 0, 0), conversation_id="", source="peer", split="train", variant="given")
        for i in range(2)
    ]
    assert sorted(one.split for one in hold_out(bare, 0.5)) == ["held_out", "train"]
