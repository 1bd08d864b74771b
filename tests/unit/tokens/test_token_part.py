"""Which samples of a token dataset are stored when the others are streamed, and samples by id."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from eyas.rows import CALIBRATION_ROWS, stored_rows
from eyas.tokens.dataset import make_sample, read_lengths, read_names, read_tokens, write_tokens
from eyas.tokens.part import calibration_samples, planned_part


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    dice = random.Random(3)
    samples = []
    for i in range(2500):
        T = 4 + dice.randrange(12)
        mask = [0, 0] + [1] * (T - 2)
        source = "rare" if i % 500 == 7 else "s"
        split = "held_out" if i % 20 == 0 else "train"
        ids = [dice.randrange(1000) for _ in range(T)]
        samples.append(make_sample(ids, mask, conversation_id=f"c{i}", source=source, split=split, variant="greedy"))
    write_tokens(tmp_path / "tokens", samples)
    return tmp_path / "tokens"


def test_the_judging_part_is_held_out_calibration_and_one_of_each_source(folder: Path) -> None:
    samples = {s.sample_id: s for s in read_tokens(folder)}
    found = planned_part(folder, "judging")
    chosen = dict(found.lengths)
    training = sorted(name for name, s in samples.items() if s.split == "train")
    rows, calibration = 0, []
    for name in training:
        calibration.append(name)
        rows += stored_rows(samples[name].loss_mask, "trained").num_aux
        if rows >= CALIBRATION_ROWS:
            break
    assert rows >= CALIBRATION_ROWS
    assert calibration_samples(folder, read_names(folder)) == set(calibration)
    held_out = {name for name, s in samples.items() if s.split == "held_out"}
    first_rare = min(name for name in training if samples[name].source == "rare")
    assert set(chosen) == held_out | set(calibration) | {first_rare}
    assert chosen == {name: len(samples[name].input_ids) for name in chosen}
    counts = [stored_rows(samples[name].loss_mask, "trained").counts for name in chosen]
    assert found.trained_rows == tuple(map(sum, zip(*counts, strict=True)))
    assert planned_part(folder, "all").lengths == read_lengths(folder)
