"""First weights from an existing drafter instead of the target's ends.

    resolve_shape → adopt_shape (refuses what does not fit) → init_drafter → load_weights

Every trained tensor is the checkpoint's. Of its head the rows of target ids that both draft vocabs hold are
copied; ids that are new start from the target's head. With ``train.train_head: false`` those rows stay as
they are. Rotary positions and the norms' epsilon come with the weights: they were trained under them.

Letters: V target vocab, W draft vocab, E drafter hidden.
"""

from __future__ import annotations

import dataclasses

import torch

from eyas import console
from eyas.contracts import DrafterShape
from eyas.drafter.foreign import HEAD, ForeignDrafter, expected_shapes
from eyas.drafter.model import Drafter
from eyas.errors import TrainError

SETTABLE = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
SWITCHES = ("fc_norm", "norm_output", "norm_before_residual")
FOREIGN_EMBEDDING = 0.5
"""Relative difference above which an embedding is another model's; one that was trained along moves by less."""


def adopt_shape(shape: DrafterShape, checkpoint: ForeignDrafter) -> DrafterShape:
    """The run's shape with the checkpoint's rotary positions and epsilon.

    Args:
        shape: From ``resolve_shape``.
        checkpoint: From ``read_checkpoint``.

    Raises:
        TrainError: Sizes or switches differ; each is named with the value to set, each tensor with both shapes.
    """
    theirs = checkpoint.shape
    problems = [
        f"drafter.{name}: {getattr(shape, name)}, the checkpoint has {getattr(theirs, name)}: set that"
        for name in (*SETTABLE, *SWITCHES)
        if getattr(shape, name) != getattr(theirs, name)
    ]
    if shape.num_aux != theirs.num_aux:
        problems.append(f"extract.boundaries: {shape.num_aux} of them, the checkpoint reads {theirs.num_aux}")
    if shape.vocab_size != theirs.vocab_size:
        problems.append(f"the target's vocab is {shape.vocab_size:,}, the checkpoint's {theirs.vocab_size:,}")
    if problems:
        ours, found = expected_shapes(shape), expected_shapes(theirs)
        problems += [
            f"{name}: {list(ours[name])}, the checkpoint has {list(found[name])}"
            for name in ours
            if name in found and name != HEAD and ours[name] != found[name]
        ]
        lines = "\n".join(f"- {problem}" for problem in problems)
        raise TrainError(f"train.warm_start is a drafter of another shape:\n{lines}")
    taken = {name: getattr(theirs, name) for name in ("rms_norm_eps", "rope_theta", "rope_scaling")}
    for name, value in taken.items():
        if getattr(shape, name) != value:
            console.log(f"warm start: {name} {value} as in the checkpoint, the target has {getattr(shape, name)}")
    return dataclasses.replace(shape, **taken)


@torch.no_grad()
def load_weights(drafter: Drafter, checkpoint: ForeignDrafter) -> int:
    """Put the checkpoint's weights into a drafter; returns how many head rows are the checkpoint's.

    Args:
        drafter: From ``init_drafter`` with the shape of ``adopt_shape``: embedding and draft vocab are set, and
            the head holds the target's rows.
        checkpoint: From ``read_checkpoint``.

    Raises:
        TrainError: The checkpoint carries the embedding of another model.
    """
    _compare_embeddings(drafter, checkpoint)
    parameters = dict(drafter.named_parameters())
    for name, tensor in checkpoint.weights.items():
        if name != HEAD:
            parameters[name].copy_(tensor)
    head_WE = checkpoint.weights.get(HEAD)
    if head_WE is None:
        return 0
    row_V = torch.full((drafter.shape.vocab_size,), -1)
    row_V[checkpoint.target_ids_W] = torch.arange(len(head_WE))
    W = drafter.shape.draft_vocab_size
    row_W = row_V[drafter.d2t.cpu() + torch.arange(W)]
    known_W = row_W >= 0
    parameters[HEAD][known_W] = head_WE[row_W[known_W]]
    return int(known_W.sum())


def _compare_embeddings(drafter: Drafter, checkpoint: ForeignDrafter) -> None:
    """The drafter reads the target's embedding: a copy is passed over, one trained along said, another's refused."""
    theirs_VE = checkpoint.embedding_VE
    if theirs_VE is None:
        return
    ours_VE: torch.Tensor = drafter.embed_tokens.weight  # type: ignore[assignment]
    if torch.equal(ours_VE, theirs_VE.to(ours_VE.dtype)):
        return
    difference = float((ours_VE.float() - theirs_VE.float()).norm() / ours_VE.float().norm())
    if not difference < FOREIGN_EMBEDDING:
        raise TrainError(
            f"train.warm_start carries an embedding that differs from the target's by {difference:.2g} of its norm, "
            f"expected less than {FOREIGN_EMBEDDING}: it is a drafter of another model"
        )
    trained = " (embed_requires_grad: it was trained along)" if checkpoint.facts.embedding_trained else ""
    console.log(
        f"warm start: the checkpoint's embedding differs from the target's by {difference:.2g} of its norm{trained}; "
        "the target's is used"
    )
