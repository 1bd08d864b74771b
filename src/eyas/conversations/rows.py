"""One row of any chat data set as messages and tools, or the reason why not.

The rules, all counted by the caller:

- Roles go through one alias table; an unknown role rejects the row and is named.
- Tool calls are a list of objects with a name; anything else rejects the row.
- No turn at all, or a user, assistant or tool turn without text and without tool calls, rejects the row.
  Empty system messages are left out.
- Assistant turns before the first user turn are left out: nobody asked for them. A row of which nothing
  remains is rejected.
- A row may end in a user turn: it is a prompt.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
"""Every spelling of a role that is understood."""
SHAREGPT_KEYS = {"from": "role", "value": "content"}


class RowError(Exception):
    """A row that cannot be used.

    Args:
        reason: Short and countable; the same for all rows of its kind.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class ParsedRow:
    """A usable row."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]
    num_dropped_turns: int
    """Assistant turns before the first user turn."""


def parse_row(row: Any) -> ParsedRow:
    """Messages and tools of an OpenAI (``messages``) or ShareGPT (``conversations``) row.

    Raises:
        RowError: With the reason.
    """
    if not isinstance(row, dict):
        raise RowError(f"row is a {_kind(row)}, expected an object")
    key = next((key for key in ("messages", "conversations", "conversation") if row.get(key) is not None), None)
    if key is None:
        raise RowError("no messages or conversations")
    turns = _from_text(row[key], key)
    if not isinstance(turns, list):
        raise RowError(f"{key} is a {_kind(turns)}, expected a list")
    messages = [message for turn in turns if (message := _message(turn)) is not None]
    if (
        isinstance(row.get("system"), str)
        and row["system"].strip()
        and (not messages or messages[0]["role"] != "system")
    ):
        messages.insert(0, {"role": "system", "content": row["system"]})
    if not messages:
        raise RowError("no turns")
    kept, num_dropped = _drop_leading_answers(messages)
    return ParsedRow(tuple(kept), _tools(row.get("tools")), num_dropped)


def _message(turn: Any) -> dict[str, Any] | None:
    """One turn in OpenAI's keys, without null values; None for an empty system message."""
    if not isinstance(turn, dict):
        raise RowError(f"turn is a {_kind(turn)}, expected an object")
    message: dict[str, Any] = {
        SHAREGPT_KEYS.get(str(key), str(key)): value for key, value in turn.items() if value is not None
    }
    if "role" not in message:
        raise RowError("turn without a role")
    role = ROLES.get(str(message["role"]).strip().lower())
    if role is None:
        raise RowError(f"unknown role {str(message['role'])[:40]!r}")
    content = _text(message.get("content", ""))
    message = _with_tool_calls(message)
    if not content.strip() and "tool_calls" not in message:
        if role == "system":
            return None
        raise RowError(f"empty {role} turn")
    return message | {"role": role, "content": content}


def _with_tool_calls(message: dict[str, Any]) -> dict[str, Any]:
    """Calls as templates walk through them: objects with a name, in OpenAI's ``function`` or flat; none is no key."""
    calls = _from_text(message.get("tool_calls"), "tool_calls")
    if not calls:
        return {key: value for key, value in message.items() if key != "tool_calls"}
    functions = [_function(call) for call in calls] if isinstance(calls, list) else [None]
    if not all(isinstance(function, dict) and isinstance(function.get("name"), str) for function in functions):
        raise RowError("tool_calls is no list of calls with a name")
    return message | {"tool_calls": calls}


def _function(call: Any) -> Any:
    return call.get("function", call) if isinstance(call, dict) else None


def _text(content: Any) -> str:
    """Content as text; a list of text parts is joined as templates do, without a separator."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowError(f"content is a {_kind(content)}, expected text")
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, dict) else _kind(part)
            raise RowError(f"content part of type {str(kind)[:40]!r}, expected text")
    return "".join(texts)


def _drop_leading_answers(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    first_user = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if first_user is None:
        raise RowError("no user turn")
    kept = [m for i, m in enumerate(messages) if i >= first_user or m["role"] == "system"]
    return kept, len(messages) - len(kept)


def _tools(tools: Any) -> tuple[dict[str, Any], ...]:
    tools = _from_text(tools, "tools")
    if not tools:
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowError("tools is no list of objects")
    return tuple(tools)


def _from_text(value: Any, key: str) -> Any:
    """Some data sets store lists as JSON text."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise RowError(f"{key} is text but no JSON") from None


def _kind(value: Any) -> str:
    return type(value).__name__
