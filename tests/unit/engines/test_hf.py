"""The hf engine: captures equal transformers' own hidden states bit for bit; answers equal its generate."""

import pytest
import torch

from eyas.contracts import TokenSample
from eyas.conversations.generation import GenerateRequest
from eyas.engines.checks import check_captured
from eyas.engines.generate import bucket_rows
from eyas.engines.registry import make_engine
from eyas.errors import CaptureError, ConfigError
from eyas.target.load import load_model

BOUNDARIES = (0, 1, 3, 4)


def sample(ids, name="s"):
    return TokenSample(
        sample_id=name,
        conversation_id="c",
        source="x",
        split="train",
        variant="given",
        input_ids=tuple(ids),
        loss_mask=(1,) * len(ids),
    )


def samples(lengths=(11, 5, 17)):
    generator = torch.Generator().manual_seed(3)
    return [sample(torch.randint(3, 320, (n,), generator=generator).tolist(), f"s{n}") for n in lengths]


def opened(identity, folder, dtype="float32", boundaries=BOUNDARIES, batch_size=4, **options):
    engine = make_engine(
        "hf",
        target=identity,
        folder=folder,
        boundaries=boundaries,
        dtype=dtype,
        batch_size=batch_size,
        options=options,
    )
    engine.open()
    return engine


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_capture_equals_hidden_states_bit_for_bit(identity, folders, kind, dtype):
    """Every boundary below L, and the post-norm last state, of one padded batch on each kind of model."""
    batch = samples()
    captured = {c.sample_id: c for c in opened(identity, folders[kind], dtype).capture(batch)}
    model = load_model(folders[kind], dtype)
    ids = torch.zeros(3, 17, dtype=torch.long)
    mask = torch.zeros(3, 17, dtype=torch.long)
    for row, s in enumerate(batch):
        ids[row, : len(s.input_ids)], mask[row, : len(s.input_ids)] = torch.tensor(s.input_ids), 1
    pre_norm = []
    model.model.norm.register_forward_pre_hook(lambda module, args: pre_norm.append(args[0]))
    hidden = model(ids, attention_mask=mask, output_hidden_states=True).hidden_states
    assert len(hidden) == 5
    for row, s in enumerate(batch):
        got, n = captured[s.sample_id], len(s.input_ids)
        check_captured(got, s, len(BOUNDARIES), 96)
        for place, boundary in enumerate(BOUNDARIES[:-1]):
            assert torch.equal(got.aux_TAD[:, place], hidden[boundary][row, :n].bfloat16()), boundary
        assert torch.equal(got.last_TD, hidden[-1][row, :n].bfloat16())
        assert torch.equal(got.aux_TAD[:, 3], pre_norm[0][row, :n].bfloat16())
        assert not torch.equal(got.aux_TAD[:, 3], got.last_TD)


def test_states_do_not_depend_on_the_batch(identity, folders, kind):
    """Case 45: two lengths in one batch equal each alone; repeated calls give the same bytes."""
    engine, batch = opened(identity, folders[kind]), samples((30, 6))
    together, again = list(engine.capture(batch)), list(engine.capture(batch))
    for got, same, s in zip(together, again, batch, strict=True):
        (alone,) = engine.capture([s])
        torch.testing.assert_close(got.aux_TAD, alone.aux_TAD, atol=1e-2, rtol=1e-2)
        assert torch.equal(got.aux_TAD, same.aux_TAD)
        assert torch.equal(got.last_TD, same.last_TD)


def test_a_sample_beyond_context_or_vocab_is_named_with_both_numbers(identity, folders):
    """Case 53."""
    engine = opened(identity, folders["llama"])
    with pytest.raises(CaptureError, match=r"sample long: 257 tokens, expected 1 to 256"):
        list(engine.capture([sample([5] * 257, "long")]))
    with pytest.raises(CaptureError, match=r"sample odd: token ids 5 to 320, expected 0 to 319"):
        list(engine.capture([sample([5, 320], "odd")]))
    with pytest.raises(CaptureError, match=r"boundaries \[5\] do not exist"):
        list(opened(identity, folders["llama"], boundaries=(1, 5)).capture(samples()))


def test_unknown_options_and_engines_are_refused(identity, folders):
    with pytest.raises(ConfigError, match=r"engine_options.flash: unknown to engine hf, expected one of attention"):
        opened(identity, folders["llama"], flash=1)
    with pytest.raises(ConfigError, match=r"attention: 'flash', expected one of sdpa, eager"):
        opened(identity, folders["llama"], attention="flash")
    with pytest.raises(ConfigError, match="engine: 'tgi', expected one of hf, sglang, vllm, fake"):
        make_engine("tgi", target=identity, folder=None, boundaries=(), dtype="float32")


def requests(count, temperature=0.0, new=20, seed=0, top_p=1.0, first=0):
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 90, (first + count,), generator=generator).tolist()
    made = [torch.randint(3, 320, (n,), generator=generator).tolist() for n in lengths]
    return [
        GenerateRequest(
            request_id=f"r{i}",
            prompt_ids=tuple(made[i]),
            max_new_tokens=new,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
        )
        for i in range(first, first + count)
    ]


def by_id(engine, wanted):
    return {answer.request_id: answer for answer in engine.generate(wanted)}


def test_greedy_text_equals_transformers_generate(identity, folders, kind):
    """More requests than rows, two buckets, in float32: token for token, and every request answered once."""
    wanted = requests(11)
    answers = by_id(opened(identity, folders[kind]), wanted)
    model = load_model(folders[kind], "float32")
    finishes = set()
    assert len(answers) == len(wanted)
    for request in wanted:
        prompt = torch.tensor([request.prompt_ids])
        plain = model.generate(prompt, max_new_tokens=20, do_sample=False)[0, prompt.shape[1] :].tolist()
        answer = answers[request.request_id]
        assert list(answer.ids) == plain
        assert answer.finish == ("stop" if plain[-1] == 2 else "length")
        finishes.add(answer.finish)
    assert "length" in finishes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_answers_do_not_depend_on_companions_or_order(identity, folders, dtype, top_p):
    """Half the requests, reversed, greedy ones between: the same answers, sampled or not."""
    engine = opened(identity, folders["llama"], dtype)
    sampled = requests(12, temperature=0.9, seed=4, top_p=top_p)
    full = by_id(engine, sampled)
    half = by_id(engine, [*reversed(sampled[::2]), *requests(3, first=20)])
    for request in sampled[::2]:
        assert half[request.request_id] == full[request.request_id]
    assert by_id(engine, requests(12, temperature=0.9, seed=5, top_p=top_p)) != full


def test_a_request_beyond_the_context_is_refused_before_anything_runs(identity, folders):
    """Case 53 for prompts: both numbers in the message."""
    long = GenerateRequest(request_id="q", prompt_ids=(5,) * 250, max_new_tokens=7, temperature=0, top_p=1, seed=0)
    with pytest.raises(CaptureError, match=r"request q: 250 prompt tokens and up to 7 new ones are 257, .* is 256"):
        list(opened(identity, folders["llama"]).generate([long]))


@pytest.mark.parametrize(
    ("batch_size", "padded", "rows"), [(128, 64, 128), (128, 512, 32), (512, 512, 64), (16, 512, 16), (64, 2048, 32)]
)
def test_long_prompts_get_fewer_rows_by_a_rule_of_their_length_alone(batch_size, padded, rows):
    """Rows x padded length stays at batch_size x 64, with at least 32 rows and never more than asked for."""
    assert bucket_rows(batch_size, padded) == rows
