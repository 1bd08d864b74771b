"""The probe passes the real engine and names what is wrong with a mended one."""

import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from eyas.contracts import TokenSample
from eyas.engines.probe import TOLERANCE, probe
from eyas.engines.registry import make_engine
from eyas.errors import CaptureError
from eyas.target.load import load_model

WANTED = (1, 2)


@pytest.fixture(scope="module")
def samples():
    generator = torch.Generator().manual_seed(7)
    made = []
    for n in (13, 29, 8):
        ids = tuple(torch.randint(3, 320, (n,), generator=generator).tolist())
        made.append(
            TokenSample(
                sample_id=f"s{n}",
                conversation_id="c",
                source="x",
                split="train",
                variant="given",
                input_ids=ids,
                loss_mask=(1,) * n,
            )
        )
    return made


class Altered:
    """The real engine with one fault."""

    def __init__(self, engine, fault):
        self.engine, self.fault = engine, fault

    def capture(self, batch):
        for got in self.engine.capture(batch):
            yield self.fault(got)


@pytest.fixture
def reference(folders, kind):
    return load_model(folders[kind], "bfloat16")


@pytest.fixture
def engine_of(identity, folders, kind):
    def make(boundaries):
        engine = make_engine("hf", target=identity, folder=folders[kind], boundaries=boundaries, dtype="bfloat16")
        engine.open()
        return engine

    return make


def test_the_hf_engine_passes(engine_of, reference, samples):
    fits = probe(engine_of(WANTED), reference, samples, WANTED)
    assert [fit.stream for fit in fits] == ["aux stream 0", "aux stream 1", "last"]
    assert max(fit.distance for fit in fits) < 0.03


@pytest.mark.parametrize(
    ("captured", "message"), [((2, 3), "it is boundary 2"), ((0, 1), "it is boundary 0"), ((2, 1), "it is boundary 2")]
)
def test_a_layer_too_late_or_early_or_swapped_is_named(engine_of, reference, samples, captured, message):
    """Cases 50 and 57: off by one in either direction, streams in another order."""
    with pytest.raises(CaptureError, match=rf"aux stream 0 should be boundary 1 .*: {message}$"):
        raise_one_line(lambda: probe(engine_of(captured), reference, samples, WANTED))


def raise_one_line(work):
    try:
        work()
    except CaptureError as error:
        raise CaptureError(error.message) from None


def with_last(change):
    return lambda got: dataclasses.replace(got, last_TD=change(got))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("not normed", "last should be the last state after the final norm .*: it is boundary 4$"),
        ("normed twice", "it is the last state normed twice$"),
        ("aux normed", "aux stream 0 .*: it is boundary 1 after the final norm$"),
        ("rows rolled", "aux stream 0 .*: its rows are in another order"),
        ("channel", "aux stream 1 .*: channel 5 is off by .*, 1 such channels$"),
    ],
)
def test_a_wrong_norm_order_or_channel_is_named(engine_of, reference, samples, fault, message):
    """Case 57 and the traps of the final norm."""
    norm = reference.model.norm
    whole = engine_of((1, 2, 4)) if fault == "not normed" else engine_of(WANTED)

    def change(got):
        aux, last = got.aux_TAD, got.last_TD
        if fault == "not normed":
            aux, last = aux[:, :2], aux[:, 2]
        if fault == "normed twice":
            last = norm(last)
        if fault == "aux normed":
            aux = torch.stack([norm(aux[:, 0]), aux[:, 1]], dim=1)
        if fault == "rows rolled":
            aux = aux.roll(1, dims=0)
        if fault == "channel":
            aux = aux.clone()
            aux[:, 1, 5] = aux[:, 1, 6]
        return dataclasses.replace(got, aux_TAD=aux, last_TD=last)

    with pytest.raises(CaptureError, match=message):
        raise_one_line(lambda: probe(Altered(whole, change), reference, samples, WANTED))


@pytest.fixture(scope="module")
def with_outliers(tmp_path_factory):
    """A deep model with small steps from layer to layer, and two channels that outweigh all others in every row."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320, hidden_size=96, intermediate_size=128, num_hidden_layers=8, num_attention_heads=6,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(50)
        model.model.embed_tokens.weight[:, [3, 70]] += torch.tensor([700.0, -400.0])
        for name, weight in model.named_parameters():
            if "down_proj" in name or "o_proj" in name:
                weight.mul_(30)
    folder = tmp_path_factory.mktemp("outliers")
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("captured", "named"), [((2, 5), 2), ((4, 5), 4), ((3, 4), 4), ((3, 6), 6)])
def test_neighbours_are_told_apart_behind_outlier_channels(identity, with_outliers, samples, captured, named):
    """Issue item 4: the length of a row is that of its outliers, which no layer changes."""
    reference = load_model(with_outliers, "bfloat16")
    engine = make_engine(
        "hf",
        target=dataclasses.replace(identity, num_layers=8),
        folder=with_outliers,
        boundaries=captured,
        dtype="bfloat16",
    )
    engine.open()
    states = {got.sample_id: got for got in engine.capture(samples)}
    right = make_engine("hf", target=identity, folder=with_outliers, boundaries=(3, 5), dtype="bfloat16")
    right.open()
    wanted = {got.sample_id: got for got in right.capture(samples)}
    place = 0 if captured[0] != 3 else 1
    name = samples[0].sample_id
    difference = (states[name].aux_TAD[:, place] - wanted[name].aux_TAD[:, place]).float().norm(dim=1)
    hidden = float((difference / wanted[name].aux_TAD[:, place].float().norm(dim=1)).median())
    assert hidden < TOLERANCE, "the plain norm would have seen it"
    generator = torch.Generator().manual_seed(0)

    def rounded(got):
        """Another engine's kernels: each value a little off, the outliers in absolute terms the most."""
        noise = 1 + 0.006 * torch.randn(got.aux_TAD.shape, generator=generator)
        return dataclasses.replace(got, aux_TAD=(got.aux_TAD * noise).to(torch.bfloat16))

    with pytest.raises(CaptureError, match=rf"aux stream {place} .*: it is boundary {named}$"):
        raise_one_line(lambda: probe(Altered(engine, rounded), reference, samples, (3, 5)))
    probe(Altered(right, rounded), reference, samples, (3, 5))
