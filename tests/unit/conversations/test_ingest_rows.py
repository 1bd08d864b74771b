"""One row of any data set: roles, content, tools, and every reason for a rejection."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.conversations.rows import ROLES, RowError, parse_row

USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


@pytest.mark.parametrize("name", ["gpt", "chatgpt", "bing", "bard", "assistant", "model"])
@pytest.mark.parametrize("asker", ["human", "user"])
def test_case_8_every_spelling_of_the_roles(asker, name):
    row = {"conversations": [{"from": asker, "value": "hi"}, {"from": name.upper(), "value": "hello"}]}
    assert parse_row(row).messages == (USER, ANSWER)


def test_tool_roles_and_system_are_kept():
    row = {
        "messages": [{"role": "system", "content": "s"}, USER, {"role": "function", "name": "f", "content": "1"}],
        "tools": TOOLS,
    }
    parsed = parse_row(row)
    assert parsed.messages == ({"role": "system", "content": "s"}, USER, {"role": "tool", "name": "f", "content": "1"})
    assert parse_row({"system": "s", "conversations": [USER]}).messages[0] == {"role": "system", "content": "s"}


def test_case_2_an_unknown_role_is_named():
    with pytest.raises(RowError, match="unknown role 'kimi'"):
        parse_row({"messages": [USER, {"role": "kimi", "content": "x"}]})


def test_case_5_tools_as_list_and_as_text_are_the_same():
    as_list, as_text = ({"messages": [USER], "tools": tools} for tools in (TOOLS, json.dumps(TOOLS)))
    assert parse_row(as_list) == parse_row(as_text)
    assert parse_row(as_list).tools == tuple(TOOLS)
    assert parse_row({"messages": [USER], "tools": ""}).tools == ()


def test_case_8_model_first_rows_lose_their_leading_answers():
    parsed = parse_row({"messages": [{"role": "system", "content": "s"}, ANSWER, ANSWER, USER, ANSWER]})
    assert parsed.messages == ({"role": "system", "content": "s"}, USER, ANSWER)
    assert parsed.num_dropped_turns == 2


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": []}, "no turns"),
        ({"conversations": []}, "no turns"),
        ({"messages": [{"role": "system", "content": " "}]}, "no turns"),
        ({"messages": [ANSWER]}, "no user turn"),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, "empty assistant turn"),
        ({"messages": [{"role": "user", "content": " \n"}]}, "empty user turn"),
        ({"text": "x"}, "no messages or conversations"),
        ([], "row is a list"),
        (None, "row is a NoneType"),
        ({"messages": "x"}, "messages is text but no JSON"),
        ({"messages": {"a": 1}}, "messages is a dict"),
        ({"messages": ["hi"]}, "turn is a str"),
        ({"messages": [{"content": "hi"}]}, "turn without a role"),
        ({"messages": [{"role": "user", "content": 3}]}, "content is a int"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content part of type 'image_url'"),
        *(
            ({"messages": [USER, ANSWER | {"tool_calls": calls}]}, "tool_calls is no list of calls with a name")
            for calls in ([1], 5, {"name": "f"}, [{"function": "f"}], [{"function": {"name": 3}}], [{}], [[]])
        ),
        ({"messages": [USER, ANSWER | {"tool_calls": "f("}]}, "tool_calls is text but no JSON"),
        ({"messages": "[" * 100_000}, "messages is text but no JSON"),
        ({"messages": [USER], "tools": "{]"}, "tools is text but no JSON"),
        ({"messages": [USER], "tools": ["f"]}, "tools is no list of objects"),
        ({"messages": [USER], "tools": {"a": 1}}, "tools is no list of objects"),
    ],
)
def test_rejections(row, reason):
    with pytest.raises(RowError) as caught:
        parse_row(row)
    assert caught.value.reason.startswith(reason)


def test_text_parts_null_values_and_tool_calls():
    calls = [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]
    row = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, "b"], "name": None},
            {"role": "assistant", "content": None, "tool_calls": calls},
        ]
    }
    assert parse_row(row).messages == (
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "", "tool_calls": calls},
    )
    assert parse_row({"messages": json.dumps([USER])}).messages == (USER,)
    flat = [{"name": "f", "arguments": {}}]
    for given_calls in (flat, json.dumps(flat)):
        (_, called) = parse_row({"messages": [USER, ANSWER | {"tool_calls": given_calls}]}).messages
        assert called["tool_calls"] == flat
    assert parse_row({"messages": [USER, ANSWER | {"tool_calls": []}]}).messages == (USER, ANSWER)


@given(st.recursive(st.none() | st.text() | st.integers(), lambda v: st.lists(v) | st.dictionaries(st.text(), v)))
def test_any_value_is_a_row_or_a_reason(value):
    for row in (value, {"messages": value}, {"conversations": [value]}, {"messages": [USER], "tools": value}):
        try:
            parsed = parse_row(row)
        except RowError:
            pass
        else:
            assert any(m["role"] == "user" for m in parsed.messages)
            assert all(m["role"] in set(ROLES.values()) and isinstance(m["content"], str) for m in parsed.messages)
