"""The whole evaluation of a tiny random target: stored states → walk, prompts → both decodings."""

from __future__ import annotations

import copy
import dataclasses

import pytest
from evaluate_world import CHAIN, CONFIG, CONTEXT, run, store

from eyas.canonical import canonical_json
from eyas.contracts import (
    StoredSample,
)
from eyas.drafter.judged import target_argmax
from eyas.errors import EvaluateError
from eyas.evaluate import drafting
from eyas.evaluate.judge import read_prompts, walk_group
from eyas.evaluate.report import held_out


def test_walk_and_real_decoding_agree_document_by_document(judged) -> None:
    """The offline walk is exact: same text, same rounds, same tau as the loop that really drafts."""
    report, facts = judged
    assert facts["rounds"] == {"num_documents": 9, "num_same_text": 9, "num_same_rounds": 9}
    assert report.lossless
    assert 1.5 < report.tau < 3.9, "rounds of many sizes, or the test shows little"
    assert report.tau_untrained < 1.3
    for source, check in report.decode.items():
        assert check.tau == report.sets[source].tau
        assert check.num_rounds == report.sets[source].num_rounds
        assert check.num_identical == check.num_prompts == report.sets[source].num_documents
        assert check.num_walked_alike == check.num_prompts
        assert sum(a * n for a, n in enumerate(check.accepted)) > check.num_rounds // 2
        assert (*check.accepted, 0, 0, 0)[: CHAIN + 1] == report.sets[source].accepted


def test_headline_is_of_the_trained_sets_and_every_set_is_listed(judged) -> None:
    report, _ = judged
    assert set(report.tau_by_set) == {"chatterbot", "human_eval"}
    assert report.tau == report.tau_by_set["chatterbot"]
    assert report.num_rounds == report.sets["chatterbot"].num_rounds
    assert report.sets["chatterbot"].num_documents == 7
    assert report.tau_untrained >= 1.0


def test_report_is_equal_to_the_byte_when_made_again(reader, model, drafters, judged) -> None:
    """Case 76: seeds and digests are inside, and nothing else varies."""
    first, second = (canonical_json(r) for r in (judged[0], run(reader, model, drafters)[0]))
    assert first == second
    report = judged[0]
    assert (report.capture_identity, report.seed) == (reader.manifest.identity, CONFIG.seed)
    assert len(report.drafter) == 64
    for figures in report.sets.values():
        assert figures.tau_low <= figures.tau <= figures.tau_high
        assert figures.coverage > 0.9, "greedy text, up to the rounding of stored states"


def test_trained_rows_alone_give_the_same_report(reader, model, drafters, judged, tmp_path) -> None:
    """Rows that no training reads decide nothing here either: only the names of capture and checkpoint differ."""
    some = store(model, tmp_path, "blosc2", "trained")
    stored = [some.read(s.sample_id) for s in some.samples]
    assert not any(bool(s.has_last_T.all()) or s.num_aux_rows == s.sample.num_tokens for s in stored)
    report, facts = run(some, model, drafters)
    named = {"capture_identity": judged[0].capture_identity, "drafter": judged[0].drafter}
    assert canonical_json(dataclasses.replace(report, **named)) == canonical_json(judged[0])
    assert facts["rounds"] == judged[1]["rounds"]


def test_packs_filled_up_walk_the_same(reader, model, drafters, monkeypatch) -> None:
    """Rows that fill up lie behind the documents: no document sees one, and none takes a document's place."""
    stored = [reader.read(s.sample_id) for s in reader.samples if s.split == "held_out"]
    argmaxes = [target_argmax(s, model.get_output_embeddings().weight) for s in stored]
    walked = {}
    for multiple in (1, 64):
        monkeypatch.setattr(drafting, "FILL_MULTIPLE", multiple)
        walked[multiple] = walk_group(drafters[0], stored, argmaxes, CHAIN)
    assert sum(d.num_emitted for d in walked[1]) == sum(d.num_tokens for d in walked[1]) > 0
    assert walked[64] == walked[1]


def test_decode_prompts_limits_each_set(reader, model, drafters) -> None:
    report, facts = run(reader, model, drafters, decode_prompts=1, mode_prompts=0, single_prompts=0)
    assert {s: c.num_prompts for s, c in report.decode.items()} == {"chatterbot": 1, "human_eval": 1}
    assert facts["rounds"]["num_documents"] == 2
    assert report.sets["chatterbot"].num_documents == 7


def test_shorter_limit_decodes_a_prefix(reader, model, drafters) -> None:
    report, facts = run(reader, model, drafters, max_new_tokens=7, mode_prompts=0, single_prompts=0)
    assert report.decode["chatterbot"].num_tokens <= 7 * 7
    assert facts["rounds"] == {"num_documents": 9, "num_same_text": 9, "num_same_rounds": 9}


def test_states_of_another_capture_are_refused(reader, model, drafters) -> None:
    with pytest.raises(EvaluateError, match="trained on states cccc"):
        run(reader, model, drafters, meta={"capture_identity": "c" * 64})


def test_a_drafter_of_another_target_is_refused(reader, model, drafters) -> None:
    with pytest.raises(EvaluateError, match="trained for target cccc"):
        run(reader, model, drafters, meta={"target": "c" * 64})


def test_an_imported_drafter_is_judged_and_the_record_says_so(reader, model, drafters, judged) -> None:
    """It names no states of ours, so those of its target at its boundaries are right; others are refused."""
    quick = {"decode_prompts": 1, "mode_prompts": 0, "single_prompts": 0}
    report, _ = run(reader, model, drafters, meta={"capture_identity": ""}, **quick)
    assert report.capture_identity == ""
    assert report.sets == judged[0].sets
    with pytest.raises(EvaluateError, match=r"reads boundaries \[1, 2, 4\], the states have \[1, 2, 3\]"):
        run(reader, model, drafters, meta={"capture_identity": "", "boundaries": (1, 2, 4)})


def broken(module, name: str):
    copied = copy.deepcopy(module)
    dict(copied.named_parameters())[name].data.fill_(float("nan"))
    return copied


def test_a_broken_target_is_not_lossless_and_a_broken_drafter_is_not_poor(reader, model, drafters) -> None:
    """Two texts of NaN are equal, and the argmax of NaN is a token like any other."""
    with pytest.raises(EvaluateError, match="the target's logits hold NaN"):
        run(reader, broken(model, "model.layers.3.mlp.down_proj.weight"), drafters)
    with pytest.raises(EvaluateError, match=r"the drafter's lm_head\.weight holds NaN"):
        run(reader, model, (broken(drafters[0], "lm_head.weight"), drafters[1]))


def test_states_of_another_target_are_refused(reader, model, drafters) -> None:
    """An imported drafter of the right target says nothing of whose states lie there."""
    capture = dataclasses.replace(reader.manifest.capture, target="c" * 64)
    other = copy.copy(reader)
    other.manifest = dataclasses.replace(reader.manifest, capture=capture)
    with pytest.raises(EvaluateError, match="the states are of target cccc"):
        run(other, model, drafters, meta={"capture_identity": ""})


def test_prompts_that_leave_no_room_are_not_decoded(reader, model, drafters) -> None:
    """The walk judges them all the same; none left is an error that names the parameter."""
    with pytest.raises(EvaluateError, match="has a prompt of 1 to") as caught:
        run(reader, model, drafters, max_new_tokens=CONTEXT)
    assert "evaluate.max_new_tokens" in (caught.value.hint or "")
    chosen = held_out(reader.samples)
    lengths = [reader.read(s.sample_id).loss_mask_T.tolist().index(1) for s in chosen.samples]
    room = sorted(lengths)[len(lengths) // 2]
    prompts, answers = read_prompts(reader, chosen, 0, room)
    assert [len(p.ids) for p in prompts] == [n for n in lengths if n <= room]
    assert len(answers) == len(prompts)


def stored(source: str, split: str, variant: str, name: str) -> StoredSample:
    return StoredSample(sample_id=name, num_tokens=3, conversation_id=name, source=source, split=split, variant=variant)


def test_held_out_takes_greedy_answers_and_given_text_only_without_them() -> None:
    train = stored("a", "train", "sample-0", "t")
    greedy, given, sampled = (stored("a", "held_out", v, v) for v in ("greedy", "given", "sample-0"))
    assert held_out([train, greedy, given, sampled]).samples == (greedy,)
    assert held_out([train, given]).samples == (given,)
    with pytest.raises(EvaluateError, match="none of a set that was trained on"):
        held_out([train, stored("b", "held_out", "greedy", "x")])
