"""Loss masks over many template shapes: what is trained, decoded back, is what the assistant said."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
import token_templates as templates
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.canonical import digest
from eyas.contracts import Answer, Conversation
from eyas.target.template import pin_date
from eyas.tokens.pipeline import Outcome, TokenizeRules, tokenize_chunk


@functools.cache
def family(name: str, trim_offsets: bool = False):
    template, eos, middle_end = templates.FAMILIES[name]
    return templates.make_tokenizer(template, eos, trim_offsets), middle_end


def conversation(*turns: tuple[str, str], answers=(), tools=(), **extra) -> Conversation:
    messages = tuple({"role": role, "content": content} for role, content in turns)
    return Conversation(
        conversation_id=digest([messages])[:16],
        source="test",
        split="train",
        messages=messages,
        answers=answers,
        tools=tools,
        **extra,
    )


def run(tokenizer, row: Conversation, max_tokens: int = 4096, eos: tuple[str, ...] = ()) -> Outcome:
    eos_ids = tuple(tokenizer.convert_tokens_to_ids(token) for token in (tokenizer.eos_token, *eos))
    rules = TokenizeRules(max_tokens=max_tokens, vocab_size=len(tokenizer), eos_token_ids=eos_ids)
    (outcome,) = tokenize_chunk(tokenizer, [row], rules)
    return outcome


def spans(tokenizer, outcome: Outcome) -> list[str]:
    """Decoded text of every run of trained tokens."""
    assert outcome.sample is not None, outcome.reject
    pairs = zip(outcome.sample.input_ids, outcome.sample.loss_mask, strict=True)
    runs = [[i for i, _ in group] for trained, group in itertools.groupby(pairs, key=lambda pair: pair[1]) if trained]
    return [tokenizer.decode(ids) for ids in runs]


THREE_TURNS = (
    ("user", "What is the capital of France?"),
    ("assistant", "Paris is the capital of France."),
    ("user", "Say it in Japanese"),
    ("assistant", "東京? No: パリ \U0001f600"),
    ("user", "assistant"),
    ("assistant", "user assistant\n\nassistant"),
)
LAST_END = {"channels": "<|return|>"}
LEAD = {"channels": "<|channel|>final<|message|>"}


@pytest.mark.parametrize("trim_offsets", [False, True])
@pytest.mark.parametrize("name", sorted(templates.FAMILIES))
def test_three_turns_decode_to_the_assistant_text(name, trim_offsets):
    """Cases 10 and 11: no template is known to the code, the mask decodes to what was said."""
    tokenizer, end = family(name, trim_offsets)
    outcome = run(tokenizer, conversation(*THREE_TURNS))
    said = [content for role, content in THREE_TURNS if role == "assistant"]
    ends = [end, end, LAST_END.get(name, end)]
    lead = LEAD.get(name, "")
    expected = [lead + text + closing for text, closing in zip(said, ends, strict=True)]
    assert [span.strip() for span in spans(tokenizer, outcome)] == expected


@pytest.mark.parametrize("name", sorted(templates.FAMILIES))
def test_ids_are_those_of_the_template_up_to_the_last_trained_token(name):
    tokenizer, _ = family(name)
    row = conversation(*THREE_TURNS)
    outcome = run(tokenizer, row)
    ids = tokenizer.apply_chat_template(list(row.messages), tokenize=True, return_dict=True)["input_ids"]
    sample = outcome.sample
    assert list(sample.input_ids) == ids[: len(sample.input_ids)]
    assert sample.loss_mask[-1] == 1


@given(
    texts=st.lists(
        st.text(st.characters(exclude_categories=("Cs", "Co")), min_size=1, max_size=30).filter(str.strip),
        min_size=2,
        max_size=4,
    ),
    blank=st.sampled_from(["", " ", "\n", "\n\n "]),
)
@settings(max_examples=60, deadline=None)
def test_both_implementations_agree_on_any_text(texts, blank):
    """Case 11: the template's own marks and the marks found from its renders name the same tokens."""
    tokenizer, _ = family("chatml_marked")
    turns = [("user" if i % 2 == 0 else "assistant", blank + text) for i, text in enumerate(texts)]
    row = conversation(*turns)
    outcome = run(tokenizer, row)
    if outcome.sample is None:
        assert outcome.reject.reason in ("mask_not_verified", "end_of_turn_inside")
        return
    marked = tokenizer.apply_chat_template(
        list(row.messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    mine = np.zeros(len(marked["input_ids"]), dtype=int)
    mine[: len(outcome.sample.loss_mask)] = outcome.sample.loss_mask
    theirs = np.asarray(marked["assistant_masks"])
    differing = np.asarray(marked["input_ids"])[mine != theirs]
    # A token that straddles the header and leading white space is marked there, and is the prompt's here.
    assert tokenizer.decode(differing.tolist()).strip() == ""


@given(text=st.text(st.characters(exclude_categories=("Cs", "Co")), max_size=40))
@settings(max_examples=60, deadline=None)
def test_a_mask_decodes_to_the_text_or_the_row_is_rejected(text):
    tokenizer, end = family("headers")
    outcome = run(tokenizer, conversation(("user", "hello"), ("assistant", text)))
    if outcome.sample is not None:
        (span,) = spans(tokenizer, outcome)
        assert span.strip() == (text.strip() + end).strip()
    else:
        assert outcome.reject.detail


def test_marks_of_the_template_that_name_other_tokens_are_a_reject():
    """Case 11: two implementations that disagree never give a sample."""
    wrong = templates.CHATML_MARKED.replace("m.role == 'assistant'", "m.role == 'user'")
    outcome = run(templates.make_tokenizer(wrong, "<|im_end|>"), conversation(("user", "one"), ("assistant", "two")))
    assert outcome.reject.reason == "mask_not_verified"


def test_two_end_tokens_both_end_a_span():
    """Case 12: a target with two eos ids."""
    tokenizer, _ = family("headers")
    row = conversation(("user", "a"), ("assistant", "first"), ("user", "b"), ("assistant", "second"))
    row.messages[1]["ends_message"] = True
    outcome = run(tokenizer, row, eos=("<|eom|>",))
    assert spans(tokenizer, outcome) == ["first<|eom|>", "second<|eot|>"]
    assert set(outcome.end_ids) == set(tokenizer.convert_tokens_to_ids(["<|eom|>", "<|eot|>"]))


def test_an_answer_that_spells_an_end_token_is_rejected():
    """Case 12: no server could have gone on behind it."""
    tokenizer, _ = family("chatml")
    outcome = run(tokenizer, conversation(("user", "a"), ("assistant", "one <|im_end|> two")))
    assert outcome.reject.reason == "end_of_turn_inside"


def test_a_cut_last_answer_ends_with_its_last_content_token():
    tokenizer, _ = family("chatml")
    cut = Answer(finish="length", num_tokens=3, loop_share=0.0)
    outcome = run(tokenizer, conversation(("user", "a"), ("assistant", "Paris is the"), answers=(cut,)))
    assert spans(tokenizer, outcome) == ["Paris is the"]
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") not in outcome.sample.input_ids[-2:]
    assert tokenizer.decode(outcome.sample.input_ids).endswith("Paris is the")
    assert outcome.end_ids == ()


def test_a_cut_middle_answer_keeps_its_end_token_untrained():
    tokenizer, _ = family("chatml")
    answers = (
        Answer(finish="length", num_tokens=3, loop_share=0.0),
        Answer(finish="stop", num_tokens=3, loop_share=0.0),
    )
    turns = (("user", "a"), ("assistant", "Paris is"), ("user", "b"), ("assistant", "the Seine"))
    outcome = run(tokenizer, conversation(*turns, answers=answers))
    assert spans(tokenizer, outcome) == ["Paris is", "the Seine<|im_end|>"]
    assert "Paris is<|im_end|>\n" in tokenizer.decode(outcome.sample.input_ids)


def test_answers_that_do_not_belong_to_the_turns_are_rejected():
    tokenizer, _ = family("chatml")
    answers = (Answer(finish="stop", num_tokens=3, loop_share=0.0),) * 2
    outcome = run(tokenizer, conversation(("user", "a"), ("assistant", "b"), answers=answers))
    assert outcome.reject.reason == "answers_mismatch"


def test_reasoning_is_trained_where_the_template_keeps_it():
    """A template that strips the reasoning of earlier turns: only what the text really holds is trained."""
    tokenizer, _ = family("reasoning")
    thought = "<think>\nlet me see\n</think>\n\nParis"
    outcome = run(tokenizer, conversation(("user", "a"), ("assistant", thought), ("user", "b"), ("assistant", thought)))
    assert spans(tokenizer, outcome) == ["Paris<|im_end|>", thought + "<|im_end|>"]


def test_a_generation_prompt_that_the_text_does_not_have_is_no_start():
    """The prompt opens the reasoning, the history does not show it."""
    tokenizer, _ = family("prompted_think")
    outcome = run(tokenizer, conversation(("user", "a"), ("assistant", "<think>\nhm\n</think>\nParis")))
    assert spans(tokenizer, outcome) == ["Paris<eos>"]


@pytest.mark.parametrize("name", ["tools", "channels"])
@pytest.mark.parametrize("arguments", [{"city": "Paris"}, '{"city": "Paris"}'])
def test_tool_calls_are_what_the_assistant_wrote(name, arguments):
    """Case 5: arguments as a value or as JSON text give the same tokens."""
    tokenizer, _ = family(name)
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages = (
        {"role": "user", "content": "How is the weather?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "sunny"},
        {"role": "assistant", "content": "Sunny."},
    )
    row = Conversation(conversation_id="x", source="t", split="train", messages=messages, tools=({"name": "weather"},))
    first, second = spans(tokenizer, run(tokenizer, row, eos=("<|call|>",)))
    expected = {
        "tools": '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>',
        "channels": '<|channel|>commentary to=weather<|message|>{"city": "Paris"}<|call|>',
    }
    assert first == expected[name]
    assert second.endswith({"tools": "Sunny.<|im_end|>", "channels": "<|message|>Sunny.<|return|>"}[name])


def test_content_in_parts():
    template = templates.CHATML.replace("m.content", "(m.content if m.content is string else m.content[0].text)")
    tokenizer = templates.make_tokenizer(template, "<|im_end|>")
    messages = ({"role": "user", "content": "a"}, {"role": "assistant", "content": [{"type": "text", "text": "parts"}]})
    row = Conversation(conversation_id="x", source="t", split="train", messages=messages)
    assert spans(tokenizer, run(tokenizer, row)) == ["parts<|im_end|>"]


def test_a_template_that_writes_the_answer_twice_is_rejected():
    tokenizer = templates.make_tokenizer(templates.CHATML + "{{ messages[-1].content }}", "<|im_end|>")
    outcome = run(tokenizer, conversation(("user", "a"), ("assistant", "b")))
    assert outcome.reject.reason == "turn_not_found"


def test_a_template_that_changes_the_answer_is_rejected():
    """Case 11: the decoded mask must be the assistant's text, not something like it."""
    tokenizer = templates.make_tokenizer(templates.CHATML.replace("m.content", "m.content | upper"), "<|im_end|>")
    outcome = run(tokenizer, conversation(("user", "a"), ("assistant", "small letters")))
    assert outcome.reject.reason == "mask_not_verified"


def test_tokens_of_a_date_do_not_change_over_night():
    dated = "{{ 'Today is ' + strftime_now('%d %B %Y') + '\n' }}" + templates.CHATML
    tokenizer = templates.make_tokenizer(pin_date(dated), "<|im_end|>")
    outcome = run(tokenizer, conversation(("user", "a"), ("assistant", "b")))
    assert tokenizer.decode(outcome.sample.input_ids).startswith("Today is 26 July 2024\n<|im_start|>")


def test_a_tokenizer_without_offsets_gives_the_same_sample():
    """Tokenizers in Python have no offsets: pieces between the turns' ends must equal the whole."""
    tokenizer, _ = family("chatml")

    class WithoutOffsets:
        is_fast = False

        def __getattr__(self, name):
            return getattr(tokenizer, name)

        def __len__(self):
            return len(tokenizer)

    row = conversation(*THREE_TURNS)
    assert run(WithoutOffsets(), row) == run(tokenizer, row)
