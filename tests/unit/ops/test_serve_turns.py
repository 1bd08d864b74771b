"""Later turns follow the answers that were written; the chat template is a real one."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eyas.errors import ConfigError
from eyas.ops.serve.prompts import ServePrompt
from eyas.ops.serve.turns import TEMPLATE_TOKENS, Asker

WORDS = ["?", "<user>", "<assistant>", "<end>", "one", "two", "three", "yes", "no"]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    """A word is a token."""
    found = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="?"))
    found.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=found, eos_token="<end>", unk_token="?")
    fast.chat_template = TEMPLATE
    return fast


def words(ids):
    return " ".join(WORDS[i] for i in ids)


def test_a_later_turn_follows_the_answer_that_was_written(tokenizer):
    asker = Asker(tokenizer, 100, 5)
    prompts = [ServePrompt("mt_bench-0", "mt_bench", "one", ("two", "three")), ServePrompt("gsm8k-0", "gsm8k", "two")]
    first = asker.first(prompts)
    assert [words(one.ids) for one in first] == ["<user> one <end> <assistant>", "<user> two <end> <assistant>"]
    answers = [[WORDS.index("yes"), WORDS.index("<end>")], [WORDS.index("no")]]
    (second,) = asker.next(first, answers)
    assert (second.prompt_id, second.source) == ("mt_bench-0.2", "mt_bench")
    assert words(second.ids) == "<user> one <end> <assistant> yes <end> <user> two <end> <assistant>"
    (third,) = asker.next([second], [[WORDS.index("no")]])
    assert third.prompt_id == "mt_bench-0.3"
    assert words(third.ids).endswith("yes <end> <user> two <end> <assistant> no <end> <user> three <end> <assistant>")
    assert asker.next([third], answers[1:]) == []


def test_room_is_looked_for_before_a_server_starts(tokenizer):
    """First turn: 4 tokens. Behind it an answer of 5 and the template's share, then 5 tokens of the second turn and 1."""
    prompt = ServePrompt("mt_bench-0", "mt_bench", "one", ("two",))
    alone, both = 4, 4 + 5 + TEMPLATE_TOKENS + 5
    asker = Asker(tokenizer, both, 5)
    assert asker.longest(asker.first([prompt])) <= both
    with pytest.raises(ConfigError, match=rf"mt_bench-0 has up to \d+ tokens, expected at most {alone}:"):
        Asker(tokenizer, alone, 5).first([prompt])
    assert Asker(tokenizer, alone, 5).first([ServePrompt("gsm8k-0", "gsm8k", "one")])
