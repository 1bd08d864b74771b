"""Answers written by an engine: resuming, identity, rejects, multi-turn; with the fake engine and a tiny model."""

import os
import signal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eyas.config import RespondConfig
from eyas.contracts import Conversation, FinalNorm, TargetIdentity
from eyas.conversations.journal import Journal
from eyas.conversations.loops import loop_share
from eyas.conversations.respond import REJECTS_NAME, Responder, pass_through
from eyas.conversations.table import conversation_id, read_conversations, write_conversations
from eyas.engines.registry import make_engine
from eyas.errors import DataError
from eyas.target.load import load_tokenizer

VOCAB_SIZE, EOS, CONTEXT = 260, 2, 160


@pytest.fixture
def folder(tiny_target):
    return tiny_target


def identity():
    return TargetIdentity(
        source="directory:",
        revision="0",
        files=(),
        architecture="LlamaForCausalLM",
        model_type="llama",
        num_layers=2,
        hidden_size=32,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        dtype="float32",
        final_norm=FinalNorm(kind="rms_norm", eps=1e-6, weight_offset=0.0, num_zero_scales=0),
        eos_token_ids=(EOS,),
        tokenizer_sha256="",
        chat_template_sha256="",
    )


def turns(*texts, first="user"):
    roles = ("user", "assistant") if first == "user" else ("assistant", "user")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def row(messages, split="train", source="x", tools=()):
    return Conversation(
        conversation_id=conversation_id(messages, tools),
        source=source,
        split=split,
        messages=tuple(messages),
        tools=tuple(tools),
    )


def many(count=30):
    rows = [row(turns(f"prompt number {i}", "given", f"again {i}")) for i in range(count)]
    return rows + [row(turns(f"held out {i}"), split="held_out") for i in range(5)]


class Run:
    """Runs of respond in one folder, counting what the engine was asked."""

    def __init__(self, tmp_path, target_folder, engine="fake"):
        self.tmp_path, self.asked = tmp_path, []
        self.tokenizer = load_tokenizer(target_folder)
        self.engine = make_engine(
            engine, target=identity(), folder=target_folder, boundaries=(), dtype="float32", batch_size=4
        )

    def __call__(self, rows, out="out", **changes):
        config = RespondConfig(**({"max_new_tokens": 12, "num_samples": 1} | changes))
        write_conversations(self.tmp_path / "in", rows)
        self.engine.open()

        def generate(requests):
            self.asked += [request.prompt_ids for request in requests]
            return self.engine.generate(requests)

        with Journal(self.tmp_path / "a" / "b" / "journal.jsonl") as journal:
            responder = Responder(config, self.tokenizer, CONTEXT, generate, journal)
            self.summary = responder.respond(self.tmp_path / "in", self.tmp_path / out)
        return list(read_conversations(self.tmp_path / out))

    def bytes(self, out="out"):
        return {path.name: path.read_bytes() for path in sorted((self.tmp_path / out).iterdir())}


@pytest.fixture
def run(tmp_path, folder):
    return Run(tmp_path, folder)


def test_every_turn_is_written_after_the_rewritten_history(run):
    rows = run([row(turns("one", "given answer", "two", "given again", "three"))], num_samples=2)
    assert [r.variant for r in rows] == ["greedy", "sample-0", "sample-1"]
    texts = set()
    for written in rows:
        assert [m["role"] for m in written.messages] == ["user", "assistant"] * 3
        assert len(written.answers) == 3
        assert not any("given" in m["content"] for m in written.messages)
        texts.add(written.messages[1]["content"])
    assert len(texts) == 3
    history = run.tokenizer.apply_chat_template(
        list(rows[0].messages[:3]), add_generation_prompt=True, return_dict=False
    )
    assert tuple(history) in run.asked


def test_held_out_conversations_get_the_greedy_answer_only(run):
    rows = run([row(turns("a"), split="held_out"), row(turns("b"))], num_samples=3)
    assert [r.variant for r in rows if r.split == "held_out"] == ["greedy"]
    assert len([r for r in rows if r.split == "train"]) == 4


def test_reordering_and_adding_rows_reuses_answers_and_changes_no_byte(run):
    """Case 4: identity is the content; the parent folder is made."""
    rows = many()
    run(rows[:4])
    num_first = len(run.asked)
    run(rows, "grown")
    assert run.summary.num_reused_answers >= num_first
    assert len(run.asked) == len(set(run.asked)) + 30  # each train prompt once greedy, once sampled; then turn two
    before, grown = len(run.asked), run.bytes("grown")
    run(rows[::-1], "reordered")
    assert len(run.asked) == before
    assert run.bytes("reordered") == grown


def test_cut_answers_are_flagged(run):
    """Case 4: an answer at the token limit says so, others end with the end-of-turn token."""
    answers = [a for r in run(many()) for a in r.answers]
    assert {a.finish for a in answers} == {"stop", "length"}
    assert all(a.num_tokens == 12 for a in answers if a.finish == "length")
    assert run.summary.finishes["greedy: length"] > 0


def test_a_row_that_the_template_rejects_is_listed_and_the_run_goes_on(run):
    """Case 1: two rows kept, the third with its id and the template's reason."""
    bad = row([*turns("x"), {"role": "tool", "content": "42"}])
    rows = run([row(turns("a")), bad, row(turns("b"))], num_samples=1)
    assert {r.messages[0]["content"] for r in rows} == {"a", "b"}
    listed = (run.tmp_path / "out" / REJECTS_NAME).read_text()
    assert bad.conversation_id in listed
    assert "a tool speaks, no tools" in listed
    assert listed.count("\n") == 1
    assert run.summary.rejected["chat template"] == 1


def test_when_every_row_is_rejected_the_error_says_why(run):
    with pytest.raises(
        DataError, match=r"every one of 2 conversations was rejected, one for: prompt longer than the context"
    ):
        run([row(turns("a")), row(turns("b"))], max_new_tokens=CONTEXT)
    assert not (run.tmp_path / "out").exists()


@pytest.mark.parametrize(
    "fault", ["{{ [] | first | length // 0 }}", "{{ 1 // 0 }}", "{{ messages[0].content.nope() }}"]
)
def test_no_fault_of_a_template_ends_in_a_traceback(run, fault):
    run.tokenizer.chat_template = fault
    with pytest.raises(DataError, match="every one of 1 conversations was rejected, one for: chat template"):
        run([row(turns("a"))])


def test_a_prompt_beyond_the_context_is_listed_with_both_numbers(run):
    """Case 53 for answers: no truncation, the others go on."""
    rows = run([row(turns("y" * CONTEXT)), row(turns("a"))])
    assert {r.messages[0]["content"] for r in rows} == {"a"}
    reason = (run.tmp_path / "out" / REJECTS_NAME).read_text()
    # 160 bytes and the template's own: start, "user", newline, end, start, "assistant", newline.
    assert f"{CONTEXT + 1 + 5 + 1 + 1 + 10} tokens, expected at most {CONTEXT - 12}" in reason


def test_a_prompt_that_comes_twice_is_answered_once(run):
    rows = run([row(turns("same"), source="x"), row(turns("same"), source="y")], num_samples=0)
    assert len(rows) == 2
    assert rows[0].answers == rows[1].answers
    assert len(run.asked) == 1


def test_turns_that_call_tools_stay_as_given(run):
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    messages = [*turns("q"), call, {"role": "tool", "content": "42"}, {"role": "assistant", "content": "given"}]
    (written,) = run([row(messages, tools=[{"type": "function"}])], num_samples=0)
    assert written.messages[1] == call
    assert written.messages[3]["content"] != "given"
    assert len(written.answers) == 1


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 10_000), flip=st.booleans())
def test_a_journal_cut_or_damaged_anywhere_gives_the_same_bytes(run, cut, flip):
    rows = many(12)
    run(rows, "whole")
    path = run.tmp_path / "a" / "b" / "journal.jsonl"
    data = bytearray(path.read_bytes())
    at = cut % len(data)
    if flip:
        data[at] ^= 1
    path.write_bytes(data if flip else data[:at])
    run(rows, "again")
    assert run.bytes("again") == run.bytes("whole")


def die_after(count, generate):
    """Kill this process, without any goodbye, once it has taken in so many answers."""

    def dying(requests):
        nonlocal count
        for answer in generate(requests):
            if not count:
                os.kill(os.getpid(), signal.SIGKILL)
            count -= 1
            yield answer

    return dying


def in_a_child(work):
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_killed_runs_go_on_to_the_same_bytes(tmp_path, folder):
    kill_and_resume(tmp_path, folder, "fake", (1, 37, 20))


@pytest.mark.slow
def test_killed_runs_of_a_real_model_go_on_to_the_same_bytes(tmp_path, folder):
    kill_and_resume(tmp_path, folder, "hf", (1, 23, 41))


def kill_and_resume(tmp_path, folder, engine, kill_after):
    for count in kill_after:

        def dies(count=count):
            dying = Run(tmp_path, folder, engine)
            dying.engine.generate = die_after(count, dying.engine.generate)
            dying(many())

        assert in_a_child(dies) == -signal.SIGKILL
        assert not (tmp_path / "out").exists()
    resumed, unbroken = Run(tmp_path, folder, engine), Run(tmp_path / "unbroken", folder, engine)
    resumed(many())
    unbroken(many())
    assert resumed.summary.num_new_answers == unbroken.summary.num_new_answers - sum(kill_after)
    assert unbroken.bytes() == resumed.bytes()


def test_a_real_model_gives_the_same_rows_in_any_company(tmp_path, folder):
    rows = many(9)
    full = Run(tmp_path / "full", folder, "hf")(rows, temperature=1.0)
    few = Run(tmp_path / "few", folder, "hf")(rows[3:5], temperature=1.0)
    by_key = {(r.conversation_id, r.variant): r for r in full}
    assert few == [by_key[r.conversation_id, r.variant] for r in few]
    assert len({a.num_tokens for r in full for a in r.answers}) > 1


def test_switched_off_passes_rows_through(tmp_path):
    write_conversations(tmp_path / "in", many(3))
    assert pass_through(tmp_path / "in", tmp_path / "out").num_rows == 8
    assert list(read_conversations(tmp_path / "out")) == list(read_conversations(tmp_path / "in"))


def test_loop_share_counts_repeated_8_grams():
    """20 times the same token: 13 grams, 12 of them seen before. A period of 4 over 16: 9 grams, 4 distinct."""
    assert loop_share([5] * 20) == 12 / 13
    assert loop_share([1, 2, 3, 4] * 4) == 5 / 9
    assert loop_share(list(range(40))) == 0
    assert loop_share([5] * 8) == 0
