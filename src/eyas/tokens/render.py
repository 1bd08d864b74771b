"""Text of a conversation and where in it the assistant speaks, for any chat template.

Nothing is known of the template but what it renders:

- the whole conversation gives the text;
- the same conversation with one answer replaced by a private-use character gives, by what stands
  before and after that character, where the answer is;
- the messages before the answer, rendered with the generation prompt, give where a server starts to
  generate. Whatever a template puts between there and the answer (a channel name) the server writes too.

A template that rewrites earlier turns is met by comparing with the whole text only. Positions are
characters of the text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

from eyas.contracts import Conversation

TEMPLATE_ERRORS = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip
"""Templates are programs: besides their own refusals, they stumble over values they did not expect."""
PRIVATE_USE = range(0xE000, 0xF8FF)
THINK_END = "</think>"


class RejectError(Exception):
    """This conversation gives no sample; others go on."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


@dataclass(frozen=True, slots=True)
class Span:
    """One assistant turn in the text: lead, answer; the end-of-turn token comes after ``end``."""

    start: int
    """Where a server starts to generate."""
    content_start: int
    """Where the answer itself starts, behind what the template writes before it."""
    end: int
    """Behind the answer; may lie inside the end-of-turn token when a template has several of them."""
    cut: bool
    """The target was stopped here and never wrote an end-of-turn token."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text."""

    text: str
    spans: tuple[Span, ...]


def render(tokenizer: Any, conversation: Conversation) -> Rendered:
    """Render a conversation and find its assistant turns.

    Raises:
        RejectError: The template refuses it, there is no assistant turn, or one cannot be found.
    """
    messages = [_with_parsed_arguments(message) for message in conversation.messages]
    turns = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    if not turns:
        raise RejectError("no_assistant_turn", f"{len(messages)} messages, none of the assistant")
    answers = conversation.answers
    if answers and len(answers) != len(turns):
        raise RejectError("answers_mismatch", f"{len(answers)} answers noted for {len(turns)} assistant turns")
    tools = list(conversation.tools) or None
    text = _apply(tokenizer, messages, tools)
    spans: list[Span] = []
    for number, turn in enumerate(turns):
        cut = bool(answers) and answers[number].finish == "length"
        span = _find(tokenizer, messages, tools, turn, text, cut)
        if spans and span.start < spans[-1].end:
            raise RejectError("turn_not_found", f"message {turn} overlaps the assistant turn before it")
        _check_text(text, span, messages[turn], turn)
        spans.append(span)
    return Rendered(text=text, spans=tuple(spans))


def generation_mask(tokenizer: Any, conversation: Conversation) -> tuple[list[int], list[int]] | None:
    """Ids and mask by the template's own ``{% generation %}`` marks; None when it has none."""
    tools = list(conversation.tools) or None
    if "generation %}" not in tokenizer.get_chat_template(tools=tools).replace("-%}", "%}"):
        return None
    messages = [_with_parsed_arguments(message) for message in conversation.messages]
    marked = tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return marked["input_ids"], marked["assistant_masks"]


def message_text(message: dict[str, Any]) -> str:
    """Text of a message whose content is a string, a list of parts, or nothing."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


def _with_parsed_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Templates write tool arguments as JSON themselves, so JSON text becomes the value it spells."""
    if not message.get("tool_calls"):
        return message
    return {**message, "tool_calls": [_with_parsed_call(call) for call in message["tool_calls"]]}


def _with_parsed_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    except (ValueError, RecursionError) as error:
        raise RejectError("tool_arguments", f"arguments are no JSON: {error}") from None


def _apply(tokenizer: Any, messages: Sequence[dict[str, Any]], tools: list | None, prompt: bool = False) -> str:
    try:
        return tokenizer.apply_chat_template(list(messages), tools=tools, tokenize=False, add_generation_prompt=prompt)
    except TEMPLATE_ERRORS as error:
        raise RejectError("template", f"{type(error).__name__}: {' '.join(str(error).split())}") from None


def _find(tokenizer: Any, messages: list[dict[str, Any]], tools: list | None, turn: int, text: str, cut: bool) -> Span:
    mark = next(char for char in map(chr, PRIVATE_USE) if char not in text)
    message = {key: value for key, value in messages[turn].items() if key != "tool_calls"}
    content = [{"type": "text", "text": mark}] if isinstance(message.get("content"), list) else mark
    marked = _apply(tokenizer, [*messages[:turn], {**message, "content": content}, *messages[turn + 1 :]], tools)
    if marked.count(mark) != 1:
        raise RejectError(
            "turn_not_found", f"the template writes the text of message {turn} {marked.count(mark)} times"
        )
    before, after = marked.split(mark)
    content_start = _common_length(text, before)
    end = len(text) - _common_length(text[::-1], after[::-1])
    if end < content_start:
        raise RejectError("turn_not_found", f"message {turn} is not where the template puts its text")
    start = _generation_start(tokenizer, messages[:turn], tools, text, content_start)
    return Span(start=start, content_start=content_start, end=end, cut=cut)


def _common_length(a: str, b: str) -> int:
    """Length of the longest common beginning."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _generation_start(
    tokenizer: Any, earlier: list[dict[str, Any]], tools: list | None, text: str, content_start: int
) -> int:
    """End of the generation prompt where the text really continues it, else the answer's own start."""
    if not earlier:
        return content_start
    try:
        prompt = _apply(tokenizer, earlier, tools, prompt=True)
    except RejectError:
        return content_start
    return len(prompt) if text.startswith(prompt) and len(prompt) <= content_start else content_start


def _check_text(text: str, span: Span, message: dict[str, Any], turn: int) -> None:
    """The span must hold the message's words, apart from white space at its ends."""
    whole, body = text[span.start : span.end].strip(), text[span.content_start : span.end].strip()
    expected = message_text(message).strip()
    if expected in (whole, body):
        return
    if message.get("tool_calls"):
        names = [call.get("function", call).get("name", "") for call in message["tool_calls"]]
        if all(part in whole for part in (expected, *names)):
            return
    if THINK_END in expected:
        # Reasoning models' templates re-space the reasoning, or leave it out of earlier turns.
        answer = expected.rsplit(THINK_END, 1)[1]
        squeezed = {"".join(part.split()) for part in (whole, body)}
        if {"".join(expected.split()), "".join(answer.split())} & squeezed:
            return
    raise RejectError("mask_not_verified", f"message {turn} says {expected[:60]!r}, its span says {body[:60]!r}")
