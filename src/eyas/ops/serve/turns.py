"""What a server is asked: prompts as the target's chat template writes them, a turn at a time.

A later turn follows answers that the target has to write first. They are those of the server without a drafter, so
both servers are asked the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eyas.errors import ConfigError
from eyas.ops.serve.prompts import ServePrompt

TEMPLATE_TOKENS = 16
"""Room for what an answer's text may take beyond the tokens it was written in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request."""

    prompt_id: str
    """The prompt's; from the second turn on ``.2`` follows."""
    source: str
    ids: tuple[int, ...]
    """Prompt, earlier turns and their answers included."""
    messages: tuple[dict[str, str], ...]
    later: tuple[str, ...]
    """Turns of the user that follow."""


@dataclass(frozen=True, slots=True)
class Asker:
    """Writes prompts for one target.

    Args:
        tokenizer: The target's.
        most_tokens: That a prompt may have: the context less what is written and drafted.
        max_new_tokens: Of an answer.
    """

    tokenizer: Any
    most_tokens: int
    max_new_tokens: int

    def first(self, prompts: Sequence[ServePrompt]) -> list[Asked]:
        """The first turns.

        Raises:
            ConfigError: A prompt, or a later turn behind the longest answers, does not fit the context.
        """
        asked = []
        for prompt in prompts:
            one = self._ask(prompt.prompt_id, prompt.source, ({"role": "user", "content": prompt.text},), prompt.later)
            self._check(prompt.prompt_id, self.longest([one]))
            asked.append(one)
        return asked

    def next(self, asked: Sequence[Asked], answers: Sequence[Sequence[int]]) -> list[Asked]:
        """The turns that follow these answers; answers to a last turn are let go.

        Raises:
            ConfigError: One does not fit the context.
        """
        found = []
        for one, ids in zip(asked, answers, strict=True):
            if not one.later:
                continue
            text = self.tokenizer.decode(list(ids), skip_special_tokens=True)
            said = ({"role": "assistant", "content": text}, {"role": "user", "content": one.later[0]})
            name, _, turn = one.prompt_id.partition(".")
            following = self._ask(f"{name}.{int(turn or 1) + 1}", one.source, (*one.messages, *said), one.later[1:])
            self._check(following.prompt_id, len(following.ids))
            found.append(following)
        return found

    def longest(self, asked: Sequence[Asked]) -> int:
        """Tokens of the longest prompt of their conversations, every answer taken as long as it may be."""
        longest = 0
        for one in asked:
            silent = [{"role": "assistant", "content": ""}] * len(one.later)
            turns = [{"role": "user", "content": text} for text in one.later]
            messages = [*one.messages, *(each for pair in zip(silent, turns, strict=True) for each in pair)]
            room = (self.max_new_tokens + TEMPLATE_TOKENS) * len(one.later)
            longest = max(longest, (len(self._ids(messages)) if one.later else len(one.ids)) + room)
        return longest

    def _ask(self, prompt_id: str, source: str, messages: tuple[dict[str, str], ...], later: tuple[str, ...]) -> Asked:
        ids = tuple(self._ids(messages))
        return Asked(prompt_id=prompt_id, source=source, ids=ids, messages=messages, later=later)

    def _ids(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return list(
            self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
            )
        )

    def _check(self, prompt_id: str, num_tokens: int) -> None:
        if num_tokens > self.most_tokens:
            raise ConfigError(
                f"prompt {prompt_id} has up to {num_tokens:,} tokens, expected at most {self.most_tokens:,}: the context "
                "less what is written and drafted",
                "lower --max-new-tokens, or leave the set out",
            )
