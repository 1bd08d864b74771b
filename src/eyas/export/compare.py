"""Rebuilding a drafter from a written file and comparing its logits with the trainer's.

The rebuilt drafter must equal the trainer's weights rounded to the export dtype exactly, on every step of
the unroll; how far rounding moves the logits from the float32 masters is reported.

Letters: T tokens of the fixed sample, S steps, A aux streams, D target hidden, V target vocab, W draft vocab.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch

from eyas.contracts import DrafterShape
from eyas.drafter.model import Drafter
from eyas.drafter.rows import Document, pack_documents
from eyas.drafter.ttt import unroll
from eyas.errors import ExportError
from eyas.export.tensors import EMBEDDING, MAPS, DrafterTensors, server_to_own

SAMPLE_TOKENS = 24
SAMPLE_STEPS = 3
SAMPLE_SEED = 0


def drafter_tensors(drafter: Drafter) -> DrafterTensors:
    """What of a drafter is exported."""
    return DrafterTensors(
        weights={name: parameter.detach() for name, parameter in drafter.named_parameters()},
        d2t_W=drafter.d2t,
        t2d_V=drafter.t2d,
        embedding_VD=drafter.embed_tokens.weight,  # type: ignore[arg-type]
    )


def require_same_logits(
    server: str, shape: DrafterShape, found: Mapping[str, torch.Tensor], drafter: Drafter, dtype: str
) -> float:
    """Largest difference between the file's logits and the float32 drafter's, on a fixed sample.

    Args:
        server: Whose names ``found`` carries.
        shape: Of the drafter.
        found: Tensors read back from the file.
        drafter: The trainer's, float32.
        dtype: Export dtype.

    Raises:
        ExportError: The file's logits are not those of the trainer's weights rounded to ``dtype``.
    """
    rebuilt = rebuild(server, shape, found, drafter.embed_tokens.weight)  # type: ignore[arg-type]
    rounded = copy.deepcopy(drafter)
    with torch.no_grad():
        for parameter in rounded.parameters():
            parameter.copy_(parameter.to(getattr(torch, dtype)))
    if server == "vllm":  # its file carries the embedding, rounded as well
        rounded.set_target(drafter.embed_tokens.weight.to(getattr(torch, dtype)), drafter.d2t, drafter.t2d)  # type: ignore[operator]
    from_file, expected, exact = (sample_logits(d) for d in (rebuilt, rounded, drafter))
    for step, (found_TW, expected_TW) in enumerate(zip(from_file, expected, strict=True)):
        if not torch.equal(found_TW, expected_TW):
            worst = float((found_TW - expected_TW).abs().max())
            raise ExportError(
                f"{server}: logits of step {step} differ from the trainer's by up to {worst:.3g}, expected 0 "
                f"after rounding to {dtype}"
            )
    worst = max(float((a - b).abs().max()) for a, b in zip(from_file, exact, strict=True))
    return float(f"{worst:.3g}")


def rebuild(
    server: str, shape: DrafterShape, found: Mapping[str, torch.Tensor], target_embedding_VD: torch.Tensor
) -> Drafter:
    """A drafter from a file's tensors alone; SGLang's file shares the target's embedding.

    Raises:
        ExportError: The tensors are not exactly those of this shape.
    """
    drafter = Drafter(shape)
    named = {server_to_own(server, name): tensor for name, tensor in found.items()}
    embedding_VD = named.pop(EMBEDDING, target_embedding_VD)
    d2t_W, t2d_V = (named.pop(name, None) for name in MAPS)
    if d2t_W is None or t2d_V is None:
        d2t_W, t2d_V = torch.zeros(shape.vocab_size, dtype=torch.int64), torch.ones(shape.vocab_size, dtype=torch.bool)
    expected = dict(drafter.named_parameters())
    if set(named) != set(expected):
        raise ExportError(f"{server}: tensors {sorted(set(named) ^ set(expected))} are missing or too many")
    with torch.no_grad():
        for name, parameter in expected.items():
            parameter.copy_(named[name])
    drafter.set_target(embedding_VD, d2t_W, t2d_V)
    return drafter.eval()


@torch.no_grad()
def sample_logits(drafter: Drafter) -> list[torch.Tensor]:
    """Logits of every step on a fixed sample of random states and tokens, [rows of the step, W] each."""
    shape = drafter.shape
    generator = torch.Generator().manual_seed(SAMPLE_SEED)
    ids_T = torch.randint(0, shape.vocab_size, (SAMPLE_TOKENS,), generator=generator)
    aux_TAD = torch.randn(SAMPLE_TOKENS, shape.num_aux, shape.target_hidden_size, generator=generator)
    mask_T = torch.ones_like(ids_T)
    document = Document(ids_T, mask_T, aux_TAD, torch.zeros(SAMPLE_TOKENS, shape.target_hidden_size))
    pack = pack_documents([document], SAMPLE_STEPS)
    return [drafter.logits(normed) for normed in unroll(drafter, pack)]
