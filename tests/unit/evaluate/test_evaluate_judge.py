"""The whole evaluation of a tiny random target: stored states → walk, prompts → both decodings."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eyas.canonical import canonical_json
from eyas.config import EvaluateConfig
from eyas.contracts import (
    CaptureIdentity,
    CheckpointMeta,
    DrafterShape,
    EngineFacts,
    FinalNorm,
    ShardManifest,
    StoredSample,
    TargetIdentity,
    TokenSample,
)
from eyas.drafter.judged import target_argmax
from eyas.drafter.model import Drafter
from eyas.drafter.rows import Document, pack_documents
from eyas.drafter.ttt import unroll
from eyas.errors import EvaluateError
from eyas.evaluate import drafting
from eyas.evaluate.judge import judge, read_prompts, walk_group
from eyas.evaluate.modes import GreedyChain
from eyas.evaluate.report import MODE_HEADERS, held_out, mode_rows
from eyas.evaluate.summary import summarise
from eyas.plan.build import build_plan
from eyas.shards.codecs import make_codec
from eyas.shards.encode import Encoder
from eyas.shards.reader import ShardReader
from eyas.shards.writer import ShardAssembly
from eyas.target.load import TargetEnds
from eyas.tokens.dataset import make_sample

V, D, BOUNDARIES, LIMIT, CHAIN, EOS = 61, 32, (1, 2, 3), 14, 3, 5
CONTEXT = 128
CONFIG = EvaluateConfig(
    chain_length=CHAIN,
    max_new_tokens=LIMIT,
    dtype="float32",
    batch_size=4,
    tree_width=3,
    tree_tokens=8,
    mode_prompts=3,
    single_prompts=1,
    num_bootstrap=50,
)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=D,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.4,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def greedy_sample(model: LlamaForCausalLM, index: int, source: str, split: str) -> TokenSample:
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(6, V, (3 + index % 5,), generator=generator).tolist()
    prompt = len(ids)
    while len(ids) < prompt + LIMIT and ids[-1] != EOS:
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    mask = [int(i >= prompt) for i in range(len(ids))]
    return make_sample(ids, mask, conversation_id=f"{index:016x}", source=source, split=split, variant="greedy")


@pytest.fixture(scope="module")
def reader(model, tmp_path_factory) -> ShardReader:
    return store(model, tmp_path_factory.mktemp("states"), "raw", "all")


def store(model: LlamaForCausalLM, folder: Path, codec: str, last_rows: str) -> ShardReader:
    """States of greedy texts of the tiny target in real shards."""
    kinds = [("chatterbot", "train")] * 2 + [("chatterbot", "held_out")] * 7 + [("human_eval", "held_out")] * 2
    tokens = {s.sample_id: s for s in (greedy_sample(model, i, *kind) for i, kind in enumerate(kinds))}
    capture = CaptureIdentity(
        target="a" * 64,
        tokens="b" * 64,
        boundaries=BOUNDARIES,
        final_hidden="post_norm",
        dtype="bfloat16",
        codec=codec,
        last_rows=last_rows,
        engine="hf",
        engine_version="1",
        engine_options={},
        image="",
        shard_bytes=1 << 20,
        batch_tokens=64,
        revision=1,
    )
    plan = build_plan([(s.sample_id, len(s.input_ids)) for s in tokens.values()], capture, D)
    entries = []
    encoder = Encoder(make_codec(capture.codec))
    for planned in plan.shards:
        assembly = ShardAssembly(planned, capture, D, tokens, encoder)
        for place in planned.samples:
            sample = tokens[place.sample_id]
            ids_BT = torch.tensor([sample.input_ids])
            output = model(ids_BT, output_hidden_states=True)
            aux_TAD = torch.stack([output.hidden_states[b][0] for b in BOUNDARIES], 1).bfloat16()
            assembly.add(sample.sample_id, ids_BT[0].int(), aux_TAD, output.hidden_states[-1][0].bfloat16())
        entries.append(assembly.write(folder).entry)
    manifest = ShardManifest(
        identity=capture.digest,
        capture=capture,
        engine=EngineFacts(name="hf", version="1", options={}, deterministic=True),
        hidden_size=D,
        num_planned_samples=plan.num_samples,
        num_planned_tokens=plan.num_tokens,
        num_stored_samples=plan.num_samples,
        num_stored_tokens=plan.num_tokens,
        stored_bytes=sum(e.size_bytes for e in entries),
        shards=tuple(entries),
    )
    return ShardReader(folder, manifest)


W = 24


def make_drafter(reader: ShardReader, model: LlamaForCausalLM, num_steps: int) -> Drafter:
    """A drafter over the commonest tokens of the target's texts, fitted to them for a few steps."""
    torch.manual_seed(3)
    shape = DrafterShape(
        target_hidden_size=D,
        hidden_size=D,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_aux=3,
        vocab_size=V,
        draft_vocab_size=W,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        max_position_embeddings=CONTEXT,
        fc_norm=False,
        norm_output=False,
    )
    drafter = Drafter(shape)
    stored = [reader.read(s.sample_id) for s in reader.samples]
    common_W = torch.bincount(torch.cat([s.input_ids_T for s in stored]).long(), minlength=V).topk(W).indices.sort()[0]
    t2d_V = torch.zeros(V, dtype=torch.bool)
    t2d_V[common_W] = True
    drafter.set_target(model.get_input_embeddings().weight, common_W - torch.arange(W), t2d_V)
    pack = pack_documents([Document(s.input_ids_T, s.loss_mask_T, s.aux_TAD, s.last_TD) for s in stored], 2)
    draft_id_V = torch.where(t2d_V, t2d_V.cumsum(0) - 1, -100)  # -100 is ignored by the loss
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
    for _ in range(num_steps):
        losses = [
            torch.nn.functional.cross_entropy(
                drafter.logits(normed), draft_id_V[pack.ids_T[pack.rows_R[: len(normed)] + k + 2]]
            )
            for k, normed in enumerate(unroll(drafter, pack))
        ]
        optimizer.zero_grad()
        sum(losses).backward()
        optimizer.step()
    return drafter.eval()


@pytest.fixture(scope="module")
def drafters(reader, model) -> tuple[Drafter, Drafter]:
    return make_drafter(reader, model, num_steps=40), make_drafter(reader, model, num_steps=0)


@pytest.fixture(scope="module")
def judged(reader, model, drafters):
    return run(reader, model, drafters)


def tiny_target() -> TargetIdentity:
    return TargetIdentity(
        source="directory:tiny",
        revision="0",
        files=(),
        architecture="LlamaForCausalLM",
        model_type="llama",
        num_layers=4,
        hidden_size=D,
        vocab_size=V,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        dtype="float32",
        final_norm=FinalNorm(kind="rms_norm", eps=1e-6, weight_offset=0.0, num_zero_scales=0),
        eos_token_ids=(EOS,),
        tokenizer_sha256="",
        chat_template_sha256="",
    )


def run(reader: ShardReader, model: LlamaForCausalLM, drafters: tuple[Drafter, Drafter], **changes):
    drafter, untrained = drafters
    target = tiny_target()
    meta = CheckpointMeta(
        shape=drafter.shape,
        boundaries=BOUNDARIES,
        capture_identity=reader.manifest.identity,
        target=target.digest,
        tokens="b" * 64,
        num_steps=1,
        num_trained_rows=1,
        ttt_steps=3,
        seed=0,
        revision=1,
        files=(),
    )
    ends = TargetEnds(
        embedding_VD=model.get_input_embeddings().weight,
        head_VD=model.get_output_embeddings().weight,
        final_norm_D=model.model.norm.weight,
    )
    return judge(
        drafter=drafter,
        untrained=untrained,
        meta=dataclasses.replace(meta, **changes.pop("meta", {})),
        ends=ends,
        reader=reader,
        target=target,
        load_target=lambda: model,
        config=dataclasses.replace(CONFIG, **changes),
    )


def test_walk_and_real_decoding_agree_document_by_document(judged) -> None:
    """The offline walk is exact: same text, same rounds, same tau as the loop that really drafts."""
    report, facts = judged
    assert facts["rounds"] == {"num_documents": 9, "num_same_text": 9, "num_same_rounds": 9}
    assert report.lossless
    assert 1.5 < report.tau < 3.9, "rounds of many sizes, or the test shows little"
    assert report.tau_untrained < 1.3
    for source, check in report.decode.items():
        assert check.tau == report.sets[source].tau
        assert check.num_rounds == report.sets[source].num_rounds
        assert check.num_identical == check.num_prompts == report.sets[source].num_documents
        assert check.num_walked_alike == check.num_prompts
        assert sum(a * n for a, n in enumerate(check.accepted)) > check.num_rounds // 2
        assert (*check.accepted, 0, 0, 0)[: CHAIN + 1] == report.sets[source].accepted


def test_a_loop_that_takes_other_rounds_than_the_walk_is_seen(reader, model, drafters, monkeypatch) -> None:
    """The loop refuses every second chain's last draft: same text, other rounds."""
    accept = GreedyChain.round
    calls = iter(range(10**6))

    def stingy(self, decoder, rows):
        found = accept(self, decoder, rows)
        less_B = (found.accepted_B - next(calls) % 2).clamp_min(0)
        return dataclasses.replace(found, accepted_B=less_B)

    monkeypatch.setattr(GreedyChain, "round", stingy)
    report, _ = run(reader, model, drafters, mode_prompts=0, single_prompts=0)
    assert report.lossless
    assert all(check.num_walked_alike < check.num_prompts for check in report.decode.values())


def test_chain_lengths_are_walked_whatever_was_trained(reader, model, drafters, judged) -> None:
    """Two steps were trained; each length of 1 to 7 gives what an evaluation with that chain length gives."""
    report, _ = judged
    chosen = held_out(reader.samples).samples
    stored = [reader.read(s.sample_id) for s in chosen if s.source == "chatterbot"]
    argmaxes = [target_argmax(s, model.get_output_embeddings().weight) for s in stored]
    assert list(report.tau_by_chain) == [str(length) for length in range(1, 8)]
    for length in range(1, 8):
        walked = walk_group(drafters[0], stored, argmaxes, length)
        alone, figures = summarise(walked, 50, 0), report.sets["chatterbot"].chains[str(length)]
        assert (figures.tau, figures.alpha, figures.accepted) == (alone.tau, alone.alpha, alone.accepted)
        assert (figures.tau_low, figures.tau_high) == (alone.tau_low, alone.tau_high)
        assert figures.tau == report.tau_by_chain[str(length)]
        assert sum(figures.accepted) == figures.num_rounds
    assert report.tau == report.tau_by_chain[str(CHAIN)]


def test_sampling_is_judged_beside_greedy(reader, model, drafters, judged) -> None:
    report, _ = judged
    for figures in report.sets.values():
        sampled = figures.sampled
        assert sampled is not None
        assert sampled.tau == sampled.tau_by_chain[str(CHAIN)]
        assert 1.0 <= sampled.tau_low <= sampled.tau <= sampled.tau_high < CHAIN + 1
        assert 0 < sampled.covered_mass < 1
        assert sum(sampled.accepted) == pytest.approx(figures.num_emitted / sampled.tau)
        assert figures.draft_vocab_coverage == pytest.approx(1 - figures.oov_share)
    greedy, _ = run(reader, model, drafters, temperature=0.0)
    assert greedy.tau_sampled is None
    assert {m for modes in greedy.modes.values() for m in modes} == {"chain", "tree", "chain_single", "tree_single"}
    assert greedy.tau == report.tau
    assert report.tau_sampled == pytest.approx(report.modes["chatterbot"]["sampled"].tau_expected)
    cold, _ = run(reader, model, drafters, temperature=0.01, mode_prompts=0, single_prompts=0)
    assert cold.tau_sampled is None
    assert cold.sets["chatterbot"].sampled is not None
    assert cold.sets["chatterbot"].sampled.tau == pytest.approx(report.tau, rel=0.02), "next to 0 sampling is greedy"


def test_every_mode_is_held_against_one_token_a_forward(judged) -> None:
    """In float32 no ties; a tree accepts at least what the chain accepts, one prompt at a time too."""
    report, facts = judged
    for source, modes in report.modes.items():
        assert list(modes) == ["chain", "tree", "sampled", "chain_single", "tree_single", "sampled_single"]
        for name, check in modes.items():
            assert check.batch_size == (1 if name.endswith("single") else min(3, report.decode[source].num_prompts))
            assert check.temperature == (1.0 if name.startswith("sampled") else 0.0)
            assert check.num_ties == 0
            if not check.temperature:
                assert check.num_identical == check.num_prompts
            else:
                assert check.tau_expected is not None
        assert modes["tree"].tau >= modes["chain"].tau
    rows = mode_rows(report, facts["modes"])
    assert [row[:2] for row in rows] == [(source, mode) for source, modes in report.modes.items() for mode in modes]
    assert {len(row) for row in rows} == {len(MODE_HEADERS)}
    assert set(facts["modes"]) == set(facts["costs"]) == {"batch", "single"}
    assert all(float(v) > 0 for v in facts["costs"]["batch"]["predicted_speedup"].values())


def test_headline_is_of_the_trained_sets_and_every_set_is_listed(judged) -> None:
    report, _ = judged
    assert set(report.tau_by_set) == {"chatterbot", "human_eval"}
    assert report.tau == report.tau_by_set["chatterbot"]
    assert report.num_rounds == report.sets["chatterbot"].num_rounds
    assert report.sets["chatterbot"].num_documents == 7
    assert report.tau_untrained >= 1.0


def test_report_is_equal_to_the_byte_when_made_again(reader, model, drafters, judged) -> None:
    """Case 76: seeds and digests are inside, and nothing else varies."""
    first, second = (canonical_json(r) for r in (judged[0], run(reader, model, drafters)[0]))
    assert first == second
    report = judged[0]
    assert (report.capture_identity, report.seed) == (reader.manifest.identity, CONFIG.seed)
    assert len(report.drafter) == 64
    for figures in report.sets.values():
        assert figures.tau_low <= figures.tau <= figures.tau_high
        assert figures.coverage > 0.9, "greedy text, up to the rounding of stored states"


def test_trained_rows_alone_give_the_same_report(reader, model, drafters, judged, tmp_path) -> None:
    """Rows that no training reads decide nothing here either: only the names of capture and checkpoint differ."""
    some = store(model, tmp_path, "blosc2", "trained")
    stored = [some.read(s.sample_id) for s in some.samples]
    assert not any(bool(s.has_last_T.all()) or s.num_aux_rows == s.sample.num_tokens for s in stored)
    report, facts = run(some, model, drafters)
    named = {"capture_identity": judged[0].capture_identity, "drafter": judged[0].drafter}
    assert canonical_json(dataclasses.replace(report, **named)) == canonical_json(judged[0])
    assert facts["rounds"] == judged[1]["rounds"]


def test_packs_filled_up_walk_the_same(reader, model, drafters, monkeypatch) -> None:
    """Rows that fill up lie behind the documents: no document sees one, and none takes a document's place."""
    stored = [reader.read(s.sample_id) for s in reader.samples if s.split == "held_out"]
    argmaxes = [target_argmax(s, model.get_output_embeddings().weight) for s in stored]
    walked = {}
    for multiple in (1, 64):
        monkeypatch.setattr(drafting, "FILL_MULTIPLE", multiple)
        walked[multiple] = walk_group(drafters[0], stored, argmaxes, CHAIN)
    assert sum(d.num_emitted for d in walked[1]) == sum(d.num_tokens for d in walked[1]) > 0
    assert walked[64] == walked[1]


def test_decode_prompts_limits_each_set(reader, model, drafters) -> None:
    report, facts = run(reader, model, drafters, decode_prompts=1)
    assert {s: c.num_prompts for s, c in report.decode.items()} == {"chatterbot": 1, "human_eval": 1}
    assert facts["rounds"]["num_documents"] == 2
    assert report.sets["chatterbot"].num_documents == 7


def test_shorter_limit_decodes_a_prefix(reader, model, drafters) -> None:
    report, facts = run(reader, model, drafters, max_new_tokens=7)
    assert report.decode["chatterbot"].num_tokens <= 7 * 7
    assert facts["rounds"] == {"num_documents": 9, "num_same_text": 9, "num_same_rounds": 9}


def test_states_of_another_capture_are_refused(reader, model, drafters) -> None:
    with pytest.raises(EvaluateError, match="trained on states cccc"):
        run(reader, model, drafters, meta={"capture_identity": "c" * 64})


def test_a_drafter_of_another_target_is_refused(reader, model, drafters) -> None:
    with pytest.raises(EvaluateError, match="trained for target cccc"):
        run(reader, model, drafters, meta={"target": "c" * 64})


def test_prompts_that_leave_no_room_are_not_decoded(reader, model, drafters) -> None:
    """The walk judges them all the same; none left is an error that names the parameter."""
    with pytest.raises(EvaluateError, match="has a prompt of 1 to") as caught:
        run(reader, model, drafters, max_new_tokens=CONTEXT)
    assert "evaluate.max_new_tokens" in (caught.value.hint or "")
    chosen = held_out(reader.samples)
    lengths = [reader.read(s.sample_id).loss_mask_T.tolist().index(1) for s in chosen.samples]
    room = sorted(lengths)[len(lengths) // 2]
    prompts, answers = read_prompts(reader, chosen, 0, room)
    assert [len(p.ids) for p in prompts] == [n for n in lengths if n <= room]
    assert len(answers) == len(prompts)


def stored(source: str, split: str, variant: str, name: str) -> StoredSample:
    return StoredSample(sample_id=name, num_tokens=3, conversation_id=name, source=source, split=split, variant=variant)


def test_held_out_takes_greedy_answers_and_given_text_only_without_them() -> None:
    train = stored("a", "train", "sample-0", "t")
    greedy, given, sampled = (stored("a", "held_out", v, v) for v in ("greedy", "given", "sample-0"))
    assert held_out([train, greedy, given, sampled]).samples == (greedy,)
    assert held_out([train, given]).samples == (given,)
    with pytest.raises(EvaluateError, match="none of a set that was trained on"):
        held_out([train, stored("b", "held_out", "greedy", "x")])
