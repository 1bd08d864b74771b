"""Many conversations: limits, rejects, duplicates, workers, statistics."""

from __future__ import annotations

import functools
import multiprocessing
import time

import pytest
import token_templates as templates

from eyas.contracts import Conversation
from eyas.errors import DataError
from eyas.tokens import pipeline
from eyas.tokens.dataset import make_sample
from eyas.tokens.draft_vocab import build_draft_vocab
from eyas.tokens.pipeline import Outcome, TokenizeRules, tokenize
from eyas.tokens.statistics import Tally, make_report, nearest_rank, report_table, require_samples

chatml = functools.partial(templates.make_tokenizer, templates.CHATML, "<|im_end|>")


def rows(*texts: str, split: str = "train") -> list[Conversation]:
    return [
        Conversation(
            conversation_id=f"{i:016x}",
            source="test",
            split=split,
            messages=({"role": "user", "content": f"question {i}"}, {"role": "assistant", "content": text}),
        )
        for i, text in enumerate(texts)
    ]


def rules(tokenizer, max_tokens: int = 4096, vocab_size: int = 0) -> TokenizeRules:
    return TokenizeRules(
        max_tokens=max_tokens, vocab_size=vocab_size or len(tokenizer), eos_token_ids=(tokenizer.eos_token_id,)
    )


def run(conversations, max_tokens: int = 4096, vocab_size: int = 0, template: str = templates.CHATML) -> list[Outcome]:
    tokenizer = templates.make_tokenizer(template, "<|im_end|>")
    return list(tokenize(conversations, lambda: tokenizer, rules(tokenizer, max_tokens, vocab_size)))


def test_a_rejected_row_is_listed_and_the_others_go_on():
    """Case 1: the template refuses one of three rows."""
    conversations = rows("one", "two", "three")
    conversations[1] = Conversation(
        conversation_id="bad",
        source="test",
        split="train",
        messages=({"role": "system", "content": "x"}, *conversations[1].messages),
    )
    good, bad, last = run(conversations, template=templates.INST.replace("<eos>", "<|im_end|>"))
    assert good.sample
    assert last.sample
    assert (bad.reject.conversation_id, bad.reject.reason) == ("bad", "template")
    assert "only user and assistant" in bad.reject.detail


def test_truncation_keeps_whole_tokens_and_is_counted():
    conversations = rows("東京 \U0001f600 " * 40)
    (whole,) = run(conversations)
    full = whole.sample
    for limit in (45, 60, 61, 62):
        (outcome,) = run(conversations, max_tokens=limit)
        assert outcome.truncated
        assert outcome.sample.input_ids == full.input_ids[:limit]
        assert outcome.sample.loss_mask == full.loss_mask[:limit]
    (exact,) = run(conversations, max_tokens=len(full.input_ids))
    assert not exact.truncated
    assert exact.sample == full


def test_a_sample_without_a_trained_token_is_dropped_and_counted():
    """Case 13: the limit cuts before the answer; such a sample costs no disk."""
    long_prompt = Conversation(
        conversation_id="long",
        source="test",
        split="train",
        messages=({"role": "user", "content": "word " * 100}, {"role": "assistant", "content": "x"}),
    )
    tally = Tally(1000)
    kept = list(tally.keep(run([*rows("one", "two"), long_prompt], max_tokens=60)))
    assert len(kept) == 2
    assert tally.num_dropped == {"no_trained_token": 1}


def test_a_tokenizer_that_does_not_fit_the_model():
    with pytest.raises(DataError, match=r"does not fit the model: .* token id [\d,]+, expected less than 300"):
        run(rows("one"), vocab_size=300)


def test_equal_samples_are_kept_once_and_the_held_out_one_wins():
    tally = Tally(1000)
    both = [*rows("same", split="held_out"), *rows("same", "other")]
    kept = list(tally.keep(run(both)))
    assert [(s.split, s.conversation_id) for s in kept] == [("held_out", f"{0:016x}"), ("train", f"{1:016x}")]
    assert tally.num_dropped == {"duplicate": 1}


def test_no_assistant_turn_anywhere_says_how_to_get_some():
    lonely = Conversation(conversation_id="a", source="t", split="train", messages=({"role": "user", "content": "hi"},))
    tally = Tally(1000)
    assert list(tally.keep(run([lonely]))) == []
    with pytest.raises(DataError, match=r"none of 1 conversations has an assistant turn[\s\S]*respond\.enabled: true"):
        require_samples(tally)


def test_all_dropped_names_the_first_reason():
    tally = Tally(1000)
    list(tally.keep(run(rows("a", "b"), template="{{ raise_exception('no') }}")))
    with pytest.raises(DataError, match=r"template 2.*TemplateError: no"):
        require_samples(tally)


@pytest.mark.slow
def test_eight_workers_finish_a_very_long_row_and_give_the_same_samples(monkeypatch):
    """Case 9: a row above 32,768 tokens, tokenizer threads used before the workers start."""
    monkeypatch.setattr(pipeline, "FEW_CONVERSATIONS", 10)
    long_text = " ".join(f"w{i}" for i in range(20_000))
    conversations = rows("one", long_text, *(f"answer {i}" for i in range(300)))
    tokenizer = chatml()
    limits = rules(tokenizer, max_tokens=100_000)
    alone = list(tokenize(conversations, chatml, limits, num_workers=1))
    assert len(alone[1].sample.input_ids) > 32_768
    assert list(tokenize(conversations, chatml, limits, num_workers=8)) == alone


@pytest.mark.slow
def test_a_worker_that_dies_names_its_rows(monkeypatch):
    monkeypatch.setattr(pipeline, "FEW_CONVERSATIONS", 1)
    with pytest.raises(DataError, match=f"conversations {0:016x} to {1:016x}: a worker process died"):
        list(tokenize(rows("a", "b"), _die, rules(chatml()), num_workers=2))


def _die():
    raise SystemExit(3)


@pytest.mark.slow
def test_a_worker_that_stalls_names_its_rows_and_is_not_waited_for(monkeypatch):
    """Case 9: no answer in time is an error, and the process can end although its worker never would."""
    monkeypatch.setattr(pipeline, "FEW_CONVERSATIONS", 1)
    monkeypatch.setattr(pipeline, "CHUNK_TIMEOUT_S", 1.0)
    with pytest.raises(DataError, match=f"conversations {0:016x} to {1:016x}: no answer in 1 s"):
        list(tokenize(rows("a", "b"), _stall, rules(chatml()), num_workers=2))
    deadline_s = time.monotonic() + 30
    while multiprocessing.active_children() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert multiprocessing.active_children() == []


def _stall():
    time.sleep(600)


def test_statistics_by_hand():
    """Lengths 5, 7, 4 and 4: every figure from arithmetic."""
    tally = Tally(vocab_size=50)
    shapes = [
        ([1, 2, 3, 9, 9], [0, 0, 1, 1, 1]),
        ([1, 1, 1, 1, 1, 8, 9], [0] * 5 + [1, 1]),
        ([4, 5, 6, 9], [0, 1, 1, 1]),
    ]
    outcomes = [_outcome(ids, mask, "train") for ids, mask in shapes]
    outcomes.append(_outcome([7, 7, 7, 9], [0, 0, 1, 1], "held_out", truncated=True))
    assert len(list(tally.keep(outcomes))) == 4
    vocab = build_draft_vocab(tally.counts_V, 5, tally.end_ids)
    report = make_report(tally, vocab, hidden_size=8, num_boundaries=3, tokens_sha256="0" * 64)
    assert (report.num_samples, report.num_tokens, report.mean, report.min, report.max) == (4, 20, 5.0, 4, 7)
    assert report.median == 4.5
    assert report.percentiles == {"p10": 4, "p25": 4, "p75": 5, "p90": 7, "p95": 7, "p99": 7}
    assert (report.num_assistant_tokens, report.assistant_share) == (10, 0.5)
    assert report.hidden_state_bytes == 20 * 4 * 8 * 2
    assert report.num_tokens_by_split == {"held_out": 4, "train": 16}
    assert report.num_truncated == 1
    # Train counts: 9 four times; 3, 5, 6, 8 once. Held-out: 7 is outside, 9 inside.
    assert vocab.target_ids_W.tolist() == [3, 5, 6, 8, 9]
    assert report.draft_vocab_coverage == {"held_out": 0.5, "train": 1.0}
    text = report_table(report, 4, 8)
    assert "average 5.0, min 4, max 7" in text
    assert "1,280 bytes" in text


def test_nearest_rank_of_one_to_a_hundred():
    assert [nearest_rank(list(range(1, 101)), p) for p in (1, 50, 99, 100)] == [1, 50, 99, 100]
    assert nearest_rank([7], 10) == 7


def _outcome(ids: list[int], mask: list[int], split: str, truncated: bool = False) -> Outcome:
    sample = make_sample(ids, mask, conversation_id=str(ids), source="t", split=split, variant="given")
    return Outcome(sample=sample, truncated=truncated, end_ids=(9,))
