"""A drafter that has learned a tiny target's own texts by heart, trained in seconds: good enough that rounds differ."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch

from eyas.contracts import DrafterShape, TargetIdentity, TokenSample
from eyas.drafter.init import init_drafter
from eyas.drafter.loss import ttt_loss
from eyas.drafter.model import Drafter
from eyas.drafter.rows import Document, pack_documents
from eyas.engines.hf import HfEngine
from eyas.target.load import read_ends

STEPS = 3


def prompts(num: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Random ids, 3 to 12 of them."""
    rng = random.Random(seed)
    return [[rng.randrange(3, vocab_size) for _ in range(rng.randrange(3, 13))] for _ in range(num)]


def greedy(model: torch.nn.Module, ids: Sequence[int], num_tokens: int) -> list[int]:
    """Prompt and plain greedy continuation without a cache."""
    found = list(ids)
    with torch.no_grad():
        for _ in range(num_tokens):
            found.append(int(model(torch.tensor([found])).logits[0, -1].argmax()))
    return found


def shape_of(target: TargetIdentity, num_heads: int) -> DrafterShape:
    """A drafter of the target's width over the whole vocab but its last ids."""
    return DrafterShape(
        target_hidden_size=target.hidden_size, hidden_size=target.hidden_size, intermediate_size=2 * target.hidden_size,
        num_attention_heads=num_heads, num_key_value_heads=num_heads, head_dim=target.hidden_size // num_heads, num_aux=3,
        vocab_size=target.vocab_size, draft_vocab_size=target.vocab_size - 8, rms_norm_eps=1e-5, rope_theta=10_000.0,
        max_position_embeddings=target.max_position_embeddings, fc_norm=True, norm_output=True,
    )  # fmt: skip


def learn(
    folder: Path, target: TargetIdentity, boundaries: tuple[int, ...], num_steps: int = 60, num_texts: int = 8
) -> Drafter:
    """Train on greedy texts of prompts of seed 0."""
    engine = HfEngine(target, folder, boundaries, dtype="float32")
    engine.open()
    samples = []
    for index, ids in enumerate(prompts(num_texts, target.vocab_size)):
        text = greedy(engine.model, ids, 40)
        mask = (0,) * len(ids) + (1,) * 40
        samples.append(
            TokenSample(
                sample_id=str(index), conversation_id="c", source="s", split="train", variant="greedy",
                input_ids=tuple(text), loss_mask=mask,
            )
        )  # fmt: skip
    captured = [next(engine.capture([sample])) for sample in samples]
    shape, ends = shape_of(target, 4), read_ends(folder)
    d2t_W, t2d_V = torch.zeros(shape.draft_vocab_size, dtype=torch.long), torch.arange(shape.vocab_size)
    drafter = init_drafter(shape, ends, d2t_W, t2d_V < shape.draft_vocab_size, captured[0].aux_TAD, 0)
    documents = [
        Document(got.input_ids_T, torch.tensor(sample.loss_mask), got.aux_TAD, got.last_TD)
        for got, sample in zip(captured, samples, strict=True)
    ]
    pack = pack_documents(documents, STEPS)
    teacher_WD = ends.head_VD[: shape.draft_vocab_size].float()
    optimizer = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], lr=6e-3)
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss, _ = ttt_loss(drafter, pack, teacher_WD, 0.8)
        loss.backward()
        optimizer.step()
    return drafter
