"""A tiny random target, real shards of its greedy texts, and a drafter fitted to them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eyas.config import EvaluateConfig
from eyas.contracts import (
    CaptureIdentity,
    CheckpointMeta,
    DrafterShape,
    EngineFacts,
    FinalNorm,
    ShardManifest,
    TargetIdentity,
    TokenSample,
)
from eyas.drafter.model import Drafter
from eyas.drafter.rows import Document, pack_documents
from eyas.drafter.ttt import unroll
from eyas.evaluate.judge import judge
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


def make_model() -> LlamaForCausalLM:
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


def store(model: LlamaForCausalLM, folder: Path, codec: str, last_rows: str) -> ShardReader:
    """States of greedy texts of the tiny target in real shards."""
    kinds = [("chatterbot", "train")] * 2 + [("chatterbot", "held_out")] * 7 + [("human_eval", "held_out")] * 2
    tokens = {s.sample_id: s for s in (greedy_sample(model, i, *kind) for i, kind in enumerate(kinds))}
    capture = CaptureIdentity(
        target=tiny_target().digest,
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
