"""conversations.parquet: rows back, order, bytes, refusals."""

from __future__ import annotations

import hashlib
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eyas.contracts import Answer, Conversation
from eyas.conversations import table
from eyas.errors import DataError

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
ROWS = st.lists(
    st.builds(
        Conversation,
        conversation_id=TEXT,
        source=st.sampled_from(["a", "é", "Z"]),
        split=st.sampled_from(["train", "held_out"]),
        messages=st.lists(st.dictionaries(TEXT, TEXT | st.integers() | st.none()), max_size=3).map(tuple),
        tools=st.lists(st.dictionaries(TEXT, TEXT), max_size=2).map(tuple),
        variant=st.sampled_from(["given", "greedy", "sample-0"]),
        answers=st.lists(
            st.builds(Answer, finish=st.just("stop"), num_tokens=st.integers(0, 9), loop_share=st.floats(0, 1))
        ).map(tuple),
    ),
    min_size=1,
    max_size=12,
    unique_by=lambda r: (r.split, r.source, r.conversation_id, r.variant),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=ROWS, data=st.data())
def test_rows_come_back_sorted_and_bytes_do_not_depend_on_order(tmp_path, monkeypatch, rows, data):
    monkeypatch.setattr(table, "GROUP_ROWS", 3)
    table.write_conversations(tmp_path / "one", rows)
    table.write_conversations(tmp_path / "two", data.draw(st.permutations(rows)))
    expected = sorted(rows, key=lambda r: (r.split, r.source, r.conversation_id, r.variant))
    assert list(table.read_conversations(tmp_path / "one")) == expected
    assert (tmp_path / "one" / table.FILE_NAME).read_bytes() == (tmp_path / "two" / table.FILE_NAME).read_bytes()
    assert [p.name for p in (tmp_path / "one").iterdir()] == [table.FILE_NAME]


def test_a_users_own_values_come_back_whatever_their_size(tmp_path):
    """An argument of a tool may be any number that JSON can write; counts of ours have 64 bits."""
    row = Conversation(conversation_id="x", source="s", split="train", messages=({"n": 2**63, "m": [-(10**400)]},))
    table.write_conversations(tmp_path / "one", [row])
    assert list(table.read_conversations(tmp_path / "one")) == [row]


def one(**more) -> Conversation:
    return Conversation(conversation_id="x", source="s", split="train", messages=({"role": "user"},), **more)


def test_the_id_is_the_digest_of_messages_and_tools():
    text = '[[{"content":"é","role":"user"}],[]]'
    expected = hashlib.sha256(text.encode()).hexdigest()[:16]
    assert table.conversation_id([{"role": "user", "content": "é"}]) == expected


def test_twice_the_same_row_or_none_is_refused_and_nothing_is_published(tmp_path):
    for rows, message in (([one(), one()], "comes twice"), ([], "no conversation")):
        with pytest.raises(DataError, match=message):
            table.write_conversations(tmp_path / "out", rows)
        assert list(tmp_path.iterdir()) == []
    table.write_conversations(tmp_path / "out", [one(), one(variant="greedy")])


def test_a_damaged_or_foreign_file_is_refused(tmp_path):
    with pytest.raises(DataError, match="is missing"):
        list(table.read_conversations(tmp_path))
    table.write_conversations(tmp_path / "out", [one()])
    path = tmp_path / "out" / table.FILE_NAME
    whole = path.read_bytes()
    for keep in (0, 10, len(whole) - 1):
        path.write_bytes(whole[:keep])
        with pytest.raises(DataError, match="is damaged after 0 rows"):
            list(table.read_conversations(tmp_path / "out"))
    pq.write_table(pa.table({"messages": [json.dumps([])]}), path)
    with pytest.raises(DataError, match="has columns messages, expected split"):
        list(table.read_conversations(tmp_path / "out"))


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_changed_byte_is_refused_or_harmless(tmp_path, data):
    """Parquet itself lets most of them through."""
    rows = [one(variant=f"sample-{i}") for i in range(20)]
    table.write_conversations(tmp_path / "out", rows)
    path = tmp_path / "out" / table.FILE_NAME
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    try:
        found = list(table.read_conversations(tmp_path / "out"))
    except DataError:
        return
    assert sorted(found, key=lambda r: r.variant) == sorted(rows, key=lambda r: r.variant)
