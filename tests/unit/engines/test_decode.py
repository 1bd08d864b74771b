"""The block decoder against transformers' own forward and generate, and its promises of bit equality."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from eyas.engines.decode import BlockDecoder
from eyas.errors import CaptureError
from eyas.target.load import load_model

B, L = 5, 48


@pytest.fixture
def model(folders, kind):
    return load_model(folders[kind], "float32")


def prompts(seed=0, lengths=(9, 4, 12, 1, 7), vocab=300):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab, (n,), generator=generator).tolist() for n in lengths]


def test_prefill_and_blocks_equal_a_plain_forward(model):
    """Rows of unlike length and start, three tokens at a time, against one forward per row."""
    rows, tail = prompts(), torch.randint(3, 300, (B, 6), generator=torch.Generator().manual_seed(1))
    decoder = BlockDecoder(model, B, L, (0, 2, 4))
    filled = decoder.prefill(rows)
    start = torch.tensor([len(row) for row in rows])
    blocks = [decoder.forward(tail[:, :3], start), decoder.forward(tail[:, 3:], start + 3)]
    for b, row in enumerate(rows):
        ids = torch.tensor([row + tail[b].tolist()])
        with torch.no_grad():
            plain = model(ids, output_hidden_states=True)
        n = len(row)
        torch.testing.assert_close(filled.logits_RV[b], plain.logits[0, n - 1], atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(filled.last_RPD[b, :n], plain.hidden_states[-1][0, :n], atol=2e-5, rtol=1e-4)
        logits = torch.cat([block.logits_BJV[b] for block in blocks])
        torch.testing.assert_close(logits, plain.logits[0, n:], atol=2e-4, rtol=1e-4)
        aux = torch.cat([block.aux_BJAD[b] for block in blocks])
        torch.testing.assert_close(aux[:, 1], plain.hidden_states[2][0, n:], atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(aux[:, 0], plain.hidden_states[0][0, n:], atol=0, rtol=0)
        torch.testing.assert_close(model.model.norm(aux[:, 2]), plain.hidden_states[-1][0, n:], atol=2e-5, rtol=1e-4)


def test_a_rolled_back_row_equals_one_that_never_ran_ahead(model):
    rows = prompts()
    start = torch.tensor([len(row) for row in rows])
    wrong, right = torch.full((B, 3), 7), torch.full((B, 3), 11)
    straight, rolled = BlockDecoder(model, B, L), BlockDecoder(model, B, L)
    straight.prefill(rows)
    rolled.prefill(rows)
    rolled.forward(wrong, start)
    rolled.forward(wrong, start + 3)
    assert torch.equal(straight.forward(right, start).logits_BJV, rolled.forward(right, start).logits_BJV)


def random_model(dtype):
    """Head shapes and widths of a real small model, few layers, so that its kernels are the real ones."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=3,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=512,
    )
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False).to(getattr(torch, dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("batch", "block", "length"), [(5, 3, 100), (16, 1, 192), (8, 6, 150)])
def test_bit_equality_whatever_the_companions_place_and_block(dtype, batch, block, length):
    """What respond (companions, place) and evaluate (place in the block) rely on: exactly equal logits."""
    model = random_model(dtype)
    decoder = BlockDecoder(model, batch, length)
    generator = torch.Generator().manual_seed(2)
    ids, other = torch.randint(0, 4096, (2, batch, length), generator=generator)
    starts = torch.tensor([20 + row % 5 for row in range(batch)])

    def run(ids_BT, starts_B):
        decoder.prefill([row[:n].tolist() for row, n in zip(ids_BT, starts_B.tolist(), strict=True)], length=25)
        here = torch.stack([row[n : n + block] for row, n in zip(ids_BT, starts_B.tolist(), strict=True)])
        return decoder.forward(here, starts_B).logits_BJV

    expected = run(ids, starts)
    for row in (0, batch // 2, batch - 1):
        alone = other.clone()
        alone[row] = ids[row]
        assert torch.equal(run(alone, starts)[row], expected[row]), "companions"
    turned = torch.roll(torch.arange(batch), 2)
    assert torch.equal(run(ids[turned], starts[turned]), expected[turned]), "place in the batch"
    run(ids, starts)
    for j in range(block):
        junk = other[:, :block].clone()
        junk[:, 0] = torch.stack([row[n + j] for row, n in zip(ids, starts.tolist(), strict=True)])
        assert torch.equal(decoder.forward(junk, starts + j).logits_BJV[:, 0], expected[:, j]), "place in the block"


def test_lengths_that_do_not_fit_are_refused(model):
    with pytest.raises(CaptureError, match=r"300 positions .* context has 256"):
        BlockDecoder(model, 2, 300)
    with pytest.raises(CaptureError, match="0 to 3 tokens"):
        BlockDecoder(model, 2, 16).prefill([[], [1, 2, 3]])


def test_a_model_of_an_older_transformers_fills_the_cache_too(model, monkeypatch):
    """Its forward calls the cache ``past_key_values``, and passes over names that it does not know."""
    forward = model.model.forward

    def older(input_ids, position_ids=None, attention_mask=None, past_key_values=None, use_cache=None, **kwargs):
        return forward(
            input_ids=input_ids, position_ids=position_ids, attention_mask=attention_mask,
            past_key_values=past_key_values, use_cache=use_cache,
        )  # fmt: skip

    rows, start = prompts(), torch.tensor([len(row) for row in prompts()])
    newer = BlockDecoder(model, B, L)
    newer.prefill(rows)
    expected = newer.forward(torch.full((B, 3), 7), start).logits_BJV
    monkeypatch.setattr(model.model, "forward", older)
    decoder = BlockDecoder(model, B, L)
    decoder.prefill(rows)
    assert torch.equal(decoder.forward(torch.full((B, 3), 7), start).logits_BJV, expected)


def test_a_model_that_takes_no_cache_is_refused(model, monkeypatch):
    monkeypatch.setattr(model.model, "forward", lambda input_ids, attention_mask=None, **kwargs: None)
    with pytest.raises(CaptureError, match=r"forward takes input_ids, attention_mask, kwargs: no cache"):
        BlockDecoder(model, B, L)
