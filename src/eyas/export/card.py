"""The model card: what the folder holds, for which target, and what its numbers mean.

It holds only what is deterministic, so that equal exports are equal bytes; measured acceptance is in
``reports/acceptance.json``, which is made beside the export and not before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from eyas.contracts import CheckpointMeta, TargetIdentity

LOAD_COMMANDS = {
    "sglang": "python -m sglang.launch_server --model-path TARGET --speculative-algorithm EAGLE3 \\\n"
    "    --speculative-draft-model-path sglang --speculative-num-steps 3 --speculative-eagle-topk 1 \\\n"
    "    --speculative-num-draft-tokens 4",
    "vllm": "vllm serve TARGET --speculative-config "
    '\'{"method": "eagle3", "model": "vllm", "num_speculative_tokens": 3}\'',
}


def model_card(
    meta: CheckpointMeta, drafter: str, target: TargetIdentity, layer_ids: Mapping[str, Sequence[int]], dtype: str
) -> str:
    """Text of ``README.md``.

    Args:
        meta: Of the exported checkpoint.
        drafter: Digest of that record.
        target: The model the drafter speaks for.
        layer_ids: Per server, the boundaries in its spelling.
        dtype: Of the weights.
    """
    shape = meta.shape
    servers = "\n".join(
        f"## {server}\n\nAux layer ids in its spelling: {list(ids)}.\n\n```sh\n{LOAD_COMMANDS[server]}\n```\n"
        for server, ids in layer_ids.items()
    )
    return f"""# EAGLE-3 drafter for {target.source}

One decoder layer that drafts tokens for the target in speculative decoding; the target checks every one,
so its greedy output does not change.

| | |
|---|---|
| target | {target.source}, revision {target.revision}, {target.architecture} |
| target identity | {meta.target} |
| drafter checkpoint | {drafter} |
| hidden states trained on | capture identity {meta.capture_identity} |
| tokens trained on | {meta.tokens} |
| boundaries | {list(meta.boundaries)} (the residual stream entering these decoder layers) |
| sizes | hidden {shape.hidden_size}, inner {shape.intermediate_size}, heads {shape.num_attention_heads}/\
{shape.num_key_value_heads} x {shape.head_dim}, draft vocab {shape.draft_vocab_size} of {shape.vocab_size} |
| switches | fc_norm {shape.fc_norm}, norm_output {shape.norm_output}, \
norm_before_residual {shape.norm_before_residual} |
| training | {meta.num_steps} steps, {meta.ttt_steps} TTT steps, {meta.num_trained_rows} trained rows, seed {meta.seed} |
| weights | {dtype} |

{servers}
## Numbers

`tau` is tokens emitted per forward of the target, the bonus token included: 1 is useless, chain length + 1
perfect. `alpha_k` is the share of accepted k-th draft tokens among rounds whose earlier ones were accepted.
`reports/acceptance.json` of the run that made this folder holds both, per prompt set, with intervals.

## Licence

The weights are derived from the target and from text that it wrote: the target's licence applies to them.
"""
