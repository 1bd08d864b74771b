"""Chain lengths, sampling and modes of one evaluation of a tiny target, against evaluations of their own."""

from __future__ import annotations

import dataclasses

import pytest
from evaluate_world import CHAIN, run

from eyas.drafter.judged import target_argmax
from eyas.evaluate.judge import walk_group
from eyas.evaluate.modes import GreedyChain
from eyas.evaluate.report import MODE_HEADERS, held_out, mode_rows
from eyas.evaluate.summary import summarise


def test_a_loop_that_takes_other_rounds_than_the_walk_is_seen(reader, model, drafters, monkeypatch) -> None:
    """The loop refuses every second chain's last draft: same text, other rounds."""
    accept = GreedyChain.round
    calls = iter(range(10**6))

    def stingy(self, decoder, rows):
        found = accept(self, decoder, rows)
        less_B = (found.accepted_B - next(calls) % 2).clamp_min(0)
        return dataclasses.replace(found, accepted_B=less_B)

    monkeypatch.setattr(GreedyChain, "round", stingy)
    report, _ = run(reader, model, drafters, mode_prompts=0, single_prompts=0)
    assert report.lossless
    assert all(check.num_walked_alike < check.num_prompts for check in report.decode.values())


def test_chain_lengths_are_walked_whatever_was_trained(reader, model, drafters, judged) -> None:
    """Two steps were trained; each length of 1 to 7 gives what an evaluation with that chain length gives."""
    report, _ = judged
    chosen = held_out(reader.samples).samples
    stored = [reader.read(s.sample_id) for s in chosen if s.source == "chatterbot"]
    argmaxes = [target_argmax(s, model.get_output_embeddings().weight) for s in stored]
    assert list(report.tau_by_chain) == [str(length) for length in range(1, 8)]
    for length in range(1, 8):
        walked = walk_group(drafters[0], stored, argmaxes, length)
        alone, figures = summarise(walked, 50, 0), report.sets["chatterbot"].chains[str(length)]
        assert (figures.tau, figures.alpha, figures.accepted) == (alone.tau, alone.alpha, alone.accepted)
        assert (figures.tau_low, figures.tau_high) == (alone.tau_low, alone.tau_high)
        assert figures.tau == report.tau_by_chain[str(length)]
        assert sum(figures.accepted) == figures.num_rounds
    assert report.tau == report.tau_by_chain[str(CHAIN)]


def test_sampling_is_judged_beside_greedy(reader, model, drafters, judged) -> None:
    report, _ = judged
    for figures in report.sets.values():
        sampled = figures.sampled
        assert sampled is not None
        assert sampled.tau == sampled.tau_by_chain[str(CHAIN)]
        assert 1.0 <= sampled.tau_low <= sampled.tau <= sampled.tau_high < CHAIN + 1
        assert 0 < sampled.covered_mass < 1
        assert sum(sampled.accepted) == pytest.approx(figures.num_emitted / sampled.tau)
        assert figures.draft_vocab_coverage == pytest.approx(1 - figures.oov_share)
    greedy, _ = run(reader, model, drafters, temperature=0.0, mode_prompts=1)
    assert greedy.tau_sampled is None
    assert {m for modes in greedy.modes.values() for m in modes} == {"chain", "tree", "chain_single", "tree_single"}
    assert greedy.tau == report.tau
    assert report.tau_sampled == pytest.approx(report.modes["chatterbot"]["sampled"].tau_expected)
    cold, _ = run(reader, model, drafters, temperature=0.01, mode_prompts=0, single_prompts=0)
    assert cold.tau_sampled is None
    assert cold.sets["chatterbot"].sampled is not None
    assert cold.sets["chatterbot"].sampled.tau == pytest.approx(report.tau, rel=0.02), "next to 0 sampling is greedy"


def test_every_mode_is_held_against_one_token_a_forward(judged) -> None:
    """In float32 no ties; a tree accepts at least what the chain accepts, one prompt at a time too."""
    report, facts = judged
    for source, modes in report.modes.items():
        assert list(modes) == ["chain", "tree", "sampled", "chain_single", "tree_single", "sampled_single"]
        for name, check in modes.items():
            assert check.batch_size == (1 if name.endswith("single") else min(3, report.decode[source].num_prompts))
            assert check.temperature == (1.0 if name.startswith("sampled") else 0.0)
            assert check.num_ties == 0
            if not check.temperature:
                assert check.num_identical == check.num_prompts
            else:
                assert check.tau_expected is not None
        assert modes["tree"].tau >= modes["chain"].tau
    rows = mode_rows(report, facts["modes"])
    assert [row[:2] for row in rows] == [(source, mode) for source, modes in report.modes.items() for mode in modes]
    assert {len(row) for row in rows} == {len(MODE_HEADERS)}
    assert set(facts["modes"]) == set(facts["costs"]) == {"batch", "single"}
    assert all(float(v) > 0 for v in facts["costs"]["batch"]["predicted_speedup"].values())
