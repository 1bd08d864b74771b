"""Prompt sets of the server benchmark: each public layout, and what is said of a file that has another one."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eyas.errors import DataError
from eyas.ops.serve.prompts import LAYOUTS, PLACEHOLDER, read_file, read_sets

RECORDS = {
    "alpaca": {"instruction": "Sort these.", "input": "3, 1", "output": "1, 3"},
    "gsm8k": {"question": "How many?", "answer": "two #### 2"},
    "math500": {"problem": "$1+1$", "solution": "2", "answer": "2", "level": 1, "unique_id": "test/1.json"},
    "mt_bench": {"question_id": 81, "category": "writing", "turns": ["Write.", "Shorten it."]},
    "speed_bench": {"question_id": "0" * 32, "category": "coding", "turns": ["Code."], "multiturn": False},
}
TEXTS = {
    "alpaca": "Sort these.\n\n3, 1",
    "gsm8k": "How many?",
    "math500": "$1+1$",
    "mt_bench": "Write.",
    "speed_bench": "Code.",
}


def written(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize("name", LAYOUTS)
def test_first_turn_of_every_public_layout(name: str, tmp_path: Path) -> None:
    lines = written(tmp_path / "a.jsonl", RECORDS[name], RECORDS[name])
    array = tmp_path / "b.json"
    array.write_text(json.dumps([RECORDS[name]] * 2))
    packed = tmp_path / "c.jsonl.gz"
    packed.write_bytes(gzip.compress(lines.read_bytes()))
    table = tmp_path / "d.parquet"
    pq.write_table(pa.Table.from_pylist([RECORDS[name]] * 2), table)
    for path in (lines, array, packed, table):
        found = list(read_file(name, path))
        assert [prompt.text for prompt in found] == [TEXTS[name]] * 2
        assert [prompt.prompt_id for prompt in found] == [f"{name}-0", f"{name}-1"]
        assert {prompt.source for prompt in found} == {name}


def test_an_instruction_without_input_stands_alone(tmp_path: Path) -> None:
    path = written(tmp_path / "a.json", {"instruction": "Name a colour.", "input": "", "output": "red"})
    assert [prompt.text for prompt in read_file("alpaca", path)] == ["Name a colour."]


def test_prepared_speed_bench_has_messages(tmp_path: Path) -> None:
    said = [
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "Go on."},
    ]
    found = list(read_file("speed_bench", written(tmp_path / "a.jsonl", {"messages": said})))
    assert [(prompt.text, prompt.later) for prompt in found] == [("Hello.", ("Go on.",))]


def test_later_turns_are_kept(tmp_path: Path) -> None:
    found = list(read_file("mt_bench", written(tmp_path / "a.jsonl", RECORDS["mt_bench"])))
    assert [(prompt.text, prompt.later) for prompt in found] == [("Write.", ("Shorten it.",))]


@pytest.mark.parametrize(
    ("name", "record", "words"),
    [
        ("gsm8k", {"problem": "x"}, ["record 1", "question: None", "test.jsonl", "question, answer"]),
        ("math500", {"problem": "  "}, ["problem: '  '", "problem, solution, answer"]),
        ("mt_bench", {"turns": "Write."}, ["turns: 'Write.'", "expected a list of texts"]),
        ("mt_bench", {"turns": []}, ["turns: []"]),
        ("mt_bench", {"turns": ["Write.", None]}, ["turns: ['Write.', None]"]),
        ("alpaca", ["instruction"], ["expected an object"]),
        ("speed_bench", {"turns": [f"{PLACEHOLDER} FROM THE SOURCE"]}, ["left out", "prepare script"]),
        ("speed_bench", {"turns": ["Code.", PLACEHOLDER]}, ["left out", "prepare script"]),
        ("speed_bench", {"messages": "x"}, ["expected a list of messages"]),
        ("speed_bench", {"messages": [{"role": "system", "content": "x"}]}, ["none is the user's"]),
    ],
)
def test_another_layout_is_named(name: str, record: object, words: list[str], tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", record)
    with pytest.raises(DataError) as caught:
        list(read_file(name, path))
    assert str(path) in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_a_cut_file_is_named_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(RECORDS["gsm8k"]) + '\n{"question": "How')
    with pytest.raises(DataError, match=r"damaged at line 2.*ends inside a record"):
        list(read_file("gsm8k", path))


@pytest.mark.parametrize(
    ("named", "words"),
    [
        (["gsm8k"], ["no file is named", "gsm8k=FILE", "question, answer"]),
        (["gsm8k=none.jsonl"], ["none.jsonl is no file"]),
        (["humaneval"], ["'humaneval'", "human_eval, held_out"]),
        (["human_eval=x.jsonl"], ["'human_eval=x.jsonl'"]),
        (["human_eval", "human_eval"], ["each once"]),
        ([], ["none, expected one or more"]),
    ],
)
def test_a_wrong_set_is_named(named: list[str], words: list[str], tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        read_sets(tmp_path, named, 0)
    for word in words:
        assert word in str(caught.value)


def test_an_empty_file_and_a_foreign_suffix_are_refused(tmp_path: Path) -> None:
    empty, text = tmp_path / "a.jsonl", tmp_path / "a.txt"
    empty.write_text("")
    text.write_text("{}")
    for path in (empty, text):
        with pytest.raises(DataError, match=path.name):
            read_sets(tmp_path, [f"gsm8k={path}"], 0)


@pytest.mark.parametrize(("count", "expected"), [(0, list(range(10))), (99, list(range(10))), (4, [0, 2, 5, 7])])
def test_prompts_are_evenly_spaced(count: int, expected: list[int], tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", *({"question": f"{i}?"} for i in range(10)))
    found = read_sets(tmp_path, [f"gsm8k={path}"], count)
    assert [prompt.text for prompt in found] == [f"{i}?" for i in expected]
    assert [prompt.prompt_id for prompt in found] == [f"gsm8k-{i}" for i in expected]
