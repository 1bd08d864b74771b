"""Prompts of the benchmark: HumanEval out of its wheel, this run's held-out ones, public sets out of local files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.conversations.bundled import prompt_set
from eyas.conversations.readers import DamageError, Record, read_json_records, read_parquet_records
from eyas.errors import DataError

HELD_OUT = "held_out"
CONVERSATIONS = Path("data/conversations")
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"
"""What SPEED-Bench's public files hold in place of texts under other licences."""
SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet")


@dataclass(frozen=True, slots=True)
class ServePrompt:
    """What a user says."""

    prompt_id: str
    """``gsm8k-17``: the set and the place in its file, from 0."""
    source: str
    text: str
    """The first turn."""
    later: tuple[str, ...] = ()
    """Further turns of the user; what stands between them the target has to write first."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A public set's own layout."""

    describes: str
    """For people: which file, which fields."""
    read: Callable[[Mapping[str, Any]], Sequence[str]]
    """The user's turns, one or more; raises ``_LayoutError``."""


class _LayoutError(Exception):
    """A record is not what the layout says."""


def _object(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _LayoutError(f"{value!r:.60}, expected an object")
    return value


def _text(record: Mapping[str, Any], name: str) -> str:
    value = record.get(name)
    if not isinstance(value, str) or not value.strip():
        raise _LayoutError(f"{name}: {value!r:.60}, expected text")
    return value


def _turns(record: Mapping[str, Any]) -> Sequence[str]:
    turns = record.get("turns")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise _LayoutError(f"turns: {turns!r:.60}, expected a list of texts")
    return turns


def _instruction(record: Mapping[str, Any]) -> Sequence[str]:
    given = record.get("input")
    return (_text(record, "instruction") + (f"\n\n{given}" if given else ""),)


def _speed_bench(record: Mapping[str, Any]) -> Sequence[str]:
    messages = record.get("messages")
    if messages is None:
        turns = _turns(record)
    elif isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages):
        turns = [_text(message, "content") for message in messages if message.get("role", "user") == "user"]
    else:
        raise _LayoutError(f"messages: {messages!r:.60}, expected a list of messages")
    if not turns:
        raise _LayoutError("messages: none is the user's")
    if any(turn.startswith(PLACEHOLDER) for turn in turns):
        raise _LayoutError("its text is left out of the published file, fill it with the set's own prepare script")
    return turns


LAYOUTS = {
    "alpaca": Layout("alpaca_data.json: instruction, input (may be empty), output", _instruction),
    "gsm8k": Layout("test.jsonl or its parquet: question, answer", lambda record: (_text(record, "question"),)),
    "math500": Layout("test.jsonl: problem, solution, answer", lambda record: (_text(record, "problem"),)),
    "mt_bench": Layout("question.jsonl: question_id, category, turns (a list of texts)", _turns),
    "speed_bench": Layout("a split's parquet: turns; or its prepared jsonl: messages", _speed_bench),
}


def read_sets(root: Path, named: Sequence[str], num_prompts: int) -> list[ServePrompt]:
    """Prompts of every named set.

    Args:
        root: The repository.
        named: ``human_eval``, ``held_out``, or ``NAME=FILE`` for a set of ``LAYOUTS``.
        num_prompts: Of each set, evenly spaced over it; 0, or more than there are, takes all.

    Raises:
        DataError: A set is unknown or named twice, its file is missing, damaged or of another layout, or it is empty.
    """
    names = [each.partition("=")[0] for each in named]
    if not names or len(set(names)) != len(names):
        raise DataError(f"sets: {' '.join(named) or 'none'}, expected one or more, each once", f"they are {_known()}")
    return [prompt for each in named for prompt in _spaced(list(_read_set(root, each)), num_prompts)]


def _known() -> str:
    return f"human_eval, {HELD_OUT}, {', '.join(f'{name}=FILE' for name in LAYOUTS)}"


def _read_set(root: Path, named: str) -> Iterator[ServePrompt]:
    name, _, path = named.partition("=")
    if name in LAYOUTS:
        if not path:
            raise DataError(f"set {name}: no file is named, expected {name}=FILE", f"FILE is {LAYOUTS[name].describes}")
        return read_file(name, Path(path))
    if name not in ("human_eval", HELD_OUT) or path:
        raise DataError(f"set {named!r}, expected one of {_known()}")
    texts = prompt_set(name, 0) if name == "human_eval" else _held_out(root)
    return (ServePrompt(f"{name}-{index}", name, text) for index, text in enumerate(texts))


def _held_out(root: Path) -> list[str]:
    """First turns of this run's held-out conversations of sets that were trained on."""
    from eyas.conversations.table import read_conversations  # needs pyarrow, which a GPU's environment may lack

    rows = list(read_conversations(root / CONVERSATIONS))
    trained = {row.source for row in rows if row.split == "train"}
    texts = [
        str(row.messages[0]["content"])
        for row in rows
        if row.split == "held_out" and row.source in trained and row.messages[0]["role"] == "user"
    ]
    if not texts:
        raise DataError(f"{CONVERSATIONS} holds out no conversation", "raise data.held_out_share, then `make repro`")
    return texts


def read_file(name: str, path: Path) -> Iterator[ServePrompt]:
    """Prompts of a public set's file, in its order.

    Raises:
        DataError: The file is missing, damaged, empty, or a record of it has another layout.
    """
    layout, num_read = LAYOUTS[name], 0
    hint = f"{name} is {layout.describes}"
    for record in _records(name, path, hint):
        try:
            first, *later = layout.read(_object(record.value))
        except _LayoutError as error:
            raise DataError(f"{path}, record {record.place:,}: {error}", hint) from None
        yield ServePrompt(f"{name}-{num_read}", name, first, tuple(later))
        num_read += 1
    if not num_read:
        raise DataError(f"{path} holds no record", hint)


def _records(name: str, path: Path, hint: str) -> Iterator[Record]:
    if not path.is_file() or not path.name.endswith(SUFFIXES):
        raise DataError(f"set {name}: {path} is no file that ends with {', '.join(SUFFIXES)}", hint)
    try:
        yield from read_parquet_records(path) if path.suffix == ".parquet" else read_json_records(path)
    except DamageError as damage:
        raise DataError(f"{path} is damaged at {damage.where}: {damage.reason}", "get the file again") from damage


def _spaced(prompts: list[ServePrompt], num_prompts: int) -> list[ServePrompt]:
    count = min(num_prompts or len(prompts), len(prompts))
    return [prompts[index * len(prompts) // count] for index in range(count)]
