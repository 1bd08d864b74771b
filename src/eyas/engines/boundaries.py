"""Boundaries in the layer-id spellings of servers and trainers.

eyas stores boundaries alone: b is the residual stream entering decoder layer b (Hugging Face
``hidden_states[b]``), and b = L the last layer's output before the final norm. Others count differently, and
SGLang does so by model file; this is the one table between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from eyas.errors import PlanError

Spelling = Literal["sglang", "vllm", "output_of_layer"]

SGLANG_AS_IS = (
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "kimi_k2",
    "kimi_k25",
    "kimi_vl",
)
"""Model types that SGLang runs with its DeepSeek class, or one with the same rule: ids are taken as they are.
Read in 0.5.14 and 0.5.23; every other model with EAGLE-3 adds one to each."""


def layer_ids(boundaries: Sequence[int], spelling: Spelling, *, model_type: str, num_layers: int) -> tuple[int, ...]:
    """A server's or trainer's list for these boundaries.

    Args:
        boundaries: Rising boundaries, 0 to L.
        spelling: ``sglang``; ``vllm`` (boundaries themselves); ``output_of_layer`` (b - 1: SpecForge
            configurations, early speculators).
        model_type: The target's ``model_type``, which decides SGLang's rule.
        num_layers: L.

    Raises:
        PlanError: A boundary does not exist, or the spelling cannot name it.
    """
    listed = tuple(boundaries)
    beyond = [b for b in listed if not 0 <= b <= num_layers]
    if beyond:
        raise PlanError(f"boundaries {beyond} do not exist: the target has {num_layers} layers, expected 0 to L")
    if spelling == "vllm":
        return listed
    if spelling == "sglang":
        _refuse_final(listed, num_layers)
        if model_type in SGLANG_AS_IS:
            _refuse_shifted(listed)
            return listed
    if 0 in listed:
        raise PlanError(
            f"boundaries {list(listed)}: 0 (the embeddings) cannot be asked of {spelling}, whose ids name a layer's "
            "output",
            "choose boundaries from 1, for example the default",
        )
    return tuple(b - 1 for b in listed)


def boundaries_of(ids: Sequence[int], spelling: Spelling, *, model_type: str) -> tuple[int, ...]:
    """The boundaries that a server or trainer takes for its list of ids; the inverse of ``layer_ids``.

    Args:
        ids: As written in a configuration.
        spelling: Whose configuration.
        model_type: The target's ``model_type``, which decides SGLang's rule.
    """
    as_is = spelling == "vllm" or (spelling == "sglang" and model_type in SGLANG_AS_IS and list(ids)[:1] != [1])
    return tuple(ids) if as_is else tuple(i + 1 for i in ids)


def _refuse_final(listed: tuple[int, ...], num_layers: int) -> None:
    # SGLang copies the state at the entry of a layer, and there is no layer L: the stream would be missing.
    if num_layers in listed:
        raise PlanError(
            f"boundaries {list(listed)}: sglang cannot capture {num_layers}, the last layer's output before the final "
            f"norm, and {num_layers - 1} would be another state; expected boundaries below {num_layers}",
            "the last hidden state after the final norm is stored beside the aux streams in any case",
        )


def _refuse_shifted(listed: tuple[int, ...]) -> None:
    if listed and listed[0] in (0, 1):
        raise PlanError(
            f"boundaries {list(listed)}: sglang's DeepSeek file shifts a list that starts with 1 by one layer, and "
            "0 names the embeddings; expected a first boundary of 2 or more",
            "choose extract.boundaries from 2",
        )
