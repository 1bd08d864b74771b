"""The arithmetic of the server benchmark, and how many requests are under way."""

from __future__ import annotations

import queue
from types import SimpleNamespace

import pytest

from eyas.drafter.walk import Round
from eyas.engines.sglang import versions
from eyas.engines.sglang.client import Reply, classify
from eyas.engines.sglang.session import Answered
from eyas.errors import ConfigError, ServerError
from eyas.evaluate.summary import WalkedDocument
from eyas.ops.serve import measure
from eyas.ops.serve.figures import Pair, equality, figures, server_tau, table
from eyas.ops.serve.measure import Pass, Text, make_requests, run_pass
from eyas.ops.serve.offline import Judged
from eyas.ops.serve.run import ServeRequest, serve_bench


def text(num_tokens, num_rounds=0, start=0):
    return Text(ids=tuple(range(start, start + num_tokens)), num_rounds=num_rounds)


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([text(17, 4)], 4.0),  # a perfect drafter of three: the prefill's token and 4 rounds of 4
        ([text(17, 16)], 1.0),  # a useless one
        ([text(9, 2), text(9, 8)], 1.6),  # half at a = 3 and half at a = 0: 16 tokens in 10 rounds, not 2.5
        ([text(1), text(5, 4)], 1.0),  # an answer of one token has no round
        ([text(1)], None),
    ],
)
def test_tau_of_the_server(texts, expected):
    assert server_tau(texts) == expected


def test_equality_counts_tokens_up_to_the_first_difference():
    one = [text(5), text(5), text(3)]
    other = [text(5), Text(ids=(0, 1, 9, 3, 4), num_rounds=0), text(4)]
    assert equality(one, other) == {"num_answers": 3, "num_identical": 1, "num_tokens": 13, "num_equal_tokens": 10}


def test_rounds_are_read_from_the_reply():
    body = b'{"output_ids": [5, 6], "meta_info": {"prompt_tokens": 3, "finish_reason": {"type": "length"}%s}}'
    assert classify(200, body % b', "spec_verify_ct": 7').num_verifications == 7
    assert classify(200, body % b"").num_verifications == 0


def document(index, source, sizes):
    rounds = tuple(Round(row=i, num_asked=3, num_accepted=n - 1, num_emitted=n) for i, n in enumerate(sizes))
    return WalkedDocument(
        sample_id=str(index), source=source, rounds=rounds, loop_share=0.0, num_tokens=sum(sizes), num_covered=0,
        num_oov=0, hits_S=(0, 0, 0), rows_S=(0, 0, 0),
    )  # fmt: skip


def test_the_record_and_its_table():
    walked = [document(0, "a", [4, 4]), document(1, "b", [1, 2, 1])]
    drafted = (text(9, 2), text(5, 3))
    plain = (text(9), text(5))

    def pair(size, plain_s, drafted_s, texts):
        return Pair(
            Pass(batch_size=size, seconds=plain_s, texts=plain), Pass(batch_size=size, seconds=drafted_s, texts=texts)
        )

    other = (text(9, 2), text(5, 4, start=1))
    facts = {"server": "sglang 0", "chain_length": 3, "dtype": "float32"}
    refused = Judged(num_ties=1, largest_gap=0.5, fault="b-0, new token 0: 1, the target's choice is 0")
    pairs = [pair(1, 2.0, 1.0, drafted), pair(8, 1.0, 2.0, other)]
    found = figures(["a", "b"], pairs, walked, [[None, None], [None, refused]], facts)
    assert found["tau_server"] == found["tau_offline"] == 12 / 5
    assert found["tau_ratio"] == 1.0
    assert found["speedup"] == {"1": 2.0, "8": 0.5}
    assert found["batches"]["1"]["tokens_per_s_drafted"] == 14.0
    assert found["batches"]["8"]["equality"]["num_equal_tokens"] == 9
    assert not found["lossless"]
    assert found["sets"]["a"]["tau_server"] == 4.0
    assert found["sets"]["b"]["tau_offline"] == 4 / 3
    assert found["sets"]["b"]["num_same_rounds"] == 1
    printed = table(found)
    assert "2.400" in printed
    assert "1/2 (9/14 tokens)" in printed
    assert "NOT the target's greedy choice: b-0, new token 0" in printed


@pytest.mark.parametrize(
    ("judged", "words"),
    [
        (None, "output equals plain greedy everywhere"),
        (Judged(num_ties=1, largest_gap=0.06, fault=""), "the target's greedy choice everywhere, near ties aside"),
    ],
)
def test_a_difference_that_is_a_tie_is_lossless(judged, words):
    """Case of bfloat16: another text, each token of which is the target's own choice or one that rounding may choose."""
    one = Pair(*(Pass(batch_size=1, seconds=1.0, texts=(text(5, rounds, rounds),)) for rounds in (0, 4)))
    facts = {"server": "sglang 0", "chain_length": 3, "dtype": "bfloat16"}
    found = figures(["a"], [one], [document(0, "a", [1] * 4)], [[judged]], facts)
    assert found["lossless"]
    assert found["batches"]["1"]["differing"]["num_ties"] == (judged.num_ties if judged else 0)
    assert words in table(found)


class Double:
    """A session whose server answers the oldest request when the next event is asked for."""

    def __init__(self, reply):
        self.waiting, self.most, self.sent, self.end, self.server = [], 0, [], "", None
        self.reply, self.client, self.events = reply, self, SimpleNamespace(get=self.get)

    def send(self, number, body):
        self.sent.append(body)
        self.waiting.append(number)
        self.most = max(self.most, len(self.waiting))

    def get(self, timeout):
        if not self.waiting or self.reply is None:
            raise queue.Empty
        number = self.waiting.pop(-1 if len(self.waiting) > 1 else 0)  # not in their order
        return 0.0, Answered(number, self.reply(number), 0.0)


def done(number):
    return Reply(kind="done", output_ids=(number,) * 3, finish={"type": "length"}, num_verifications=number)


@pytest.mark.parametrize("batch_size", [1, 3, 20])
def test_so_many_are_under_way_and_answers_keep_their_prompt(batch_size):
    session = Double(done)
    requests = make_requests([[i, i] for i in range(10)], 3)
    found = run_pass(session, requests, batch_size, (2,))  # type: ignore[arg-type]
    assert session.most == min(batch_size, 10)
    assert [each.ids for each in found.texts] == [(i,) * 3 for i in range(10)]
    assert [each.num_rounds for each in found.texts] == list(range(10))
    assert found.num_tokens == 30
    assert session.sent[4] == {
        "input_ids": [4, 4],
        "sampling_params": {"max_new_tokens": 3, "temperature": 0.0, "stop_token_ids": [2]},
    }


def test_what_goes_wrong_is_told(monkeypatch):
    requests = make_requests([[1]], 3)
    refused = Double(lambda number: Reply(kind="refused", message="HTTP 400: too long"))
    with pytest.raises(ServerError, match="prompt 0: refused: HTTP 400: too long"):
        run_pass(refused, requests, 1, ())  # type: ignore[arg-type]
    silent = Double(None)
    monkeypatch.setenv("EYAS_WATCHDOG_S", "0")
    monkeypatch.setattr(measure.config, "watchdog_s", lambda: 0)
    with pytest.raises(ServerError, match="no answer for 0 s"):
        run_pass(silent, requests, 1, ())  # type: ignore[arg-type]
    silent.end = "the server: it was ended by SIGKILL"
    with pytest.raises(ServerError, match="SIGKILL"):
        run_pass(silent, requests, 1, ())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"batch_sizes": (8, 1)}, "batch-sizes"),
        ({"batch_sizes": ()}, "batch-sizes"),
        ({"batch_sizes": (0, 1)}, "batch-sizes"),
        ({"num_prompts": -1}, "num-prompts"),
        ({"max_new_tokens": 1}, "max-new-tokens"),
        ({"chain_length": 0}, "chain-length"),
        ({"dtype": "float16"}, "dtype"),
    ],
)
def test_values_out_of_range_are_refused(values, words):
    with pytest.raises(ConfigError, match=words):
        ServeRequest(sets=("human_eval",), **values).check()


def test_a_running_server_is_not_taken(monkeypatch, tmp_path):
    monkeypatch.setenv("EYAS_SGLANG_URL", "http://127.0.0.1:30000")
    with pytest.raises(ConfigError, match="unset EYAS_SGLANG_URL"):
        serve_bench(tmp_path, ServeRequest(sets=("human_eval",)))


def test_a_drafting_server_is_told_its_chain():
    arguments = versions.drafting_arguments("/x/sglang", 3)
    told = dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert told == {
        "--speculative-algorithm": "EAGLE3",
        "--speculative-draft-model-path": "/x/sglang",
        "--speculative-num-steps": "3",
        "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": "4",
    }
