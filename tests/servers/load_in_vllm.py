"""Run inside vLLM's interpreter: one EAGLE-3 folder through vLLM's own loader on a CPU; as ``load_in_sglang``.

load_in_vllm.py TARGET DRAFTER DTYPE CASE OUT
"""

from __future__ import annotations

import json
import sys

import torch
from safetensors.torch import load_file, save_file
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import base_loader, get_model
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config


class CausalAttention(torch.nn.Module):
    """Plain attention over the rows of one call, in place of the one that needs a KV cache."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim

    def forward(self, q, k, v, *_unused, **_named):
        q, k, v = (
            x.view(-1, n, self.head_dim).transpose(0, 1)
            for x, n in ((q, self.heads), (k, self.kv_heads), (v, self.kv_heads))
        )
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return mixed.transpose(0, 1).reshape(-1, self.heads * self.head_dim)


def main() -> None:
    target, drafter, dtype, case_path, out = sys.argv[1:]
    arguments = EngineArgs(
        model=target,
        dtype=dtype,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=1024,
        speculative_config={"method": "eagle3", "model": drafter, "num_speculative_tokens": 3},
    )
    config = arguments.create_engine_config()
    create = base_loader.BaseModelLoader.create_model

    def poisoned(self, *given, **named):
        model = create(self, *given, **named)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan") if parameter.is_floating_point() else -1)
        return model

    base_loader.BaseModelLoader.create_model = poisoned
    torch.accelerator.empty_cache = lambda: None  # as vLLM's own worker has it on a CPU
    parameters, process = {}, base_loader.process_weights_after_loading

    def copied(model, *given, **named):
        parameters.update({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
        process(model, *given, **named)

    base_loader.process_weights_after_loading = copied  # it packs them into a form of the processor's
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, "tcp://127.0.0.1:0", 0, backend="gloo")
        initialize_model_parallel(1, 1)
        model = get_model(vllm_config=config, model_config=config.speculative_config.draft_model_config)
    left = sorted(
        name
        for name, parameter in parameters.items()
        if bool((parameter.isnan() if parameter.is_floating_point() else parameter == -1).any())
    )
    case = load_file(case_path)
    draft_dtype = config.speculative_config.draft_model_config.dtype
    with torch.no_grad(), set_current_vllm_config(config):
        attention = model.model.layers[0].self_attn
        attention.attn = CausalAttention(attention.num_heads, attention.num_kv_heads, attention.head_dim)
        hidden_TE = model.combine_hidden_states(case["aux_TX"].to(draft_dtype))
        normed_TE, carried_TE = model.model.forward(case["ids_T"], case["positions_T"], hidden_TE)
        logits_TV = model.compute_logits(normed_TE)
    found = parameters | {"logits_TV": logits_TV, "carried_TE": carried_TE}
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, out)
    ids = get_eagle3_aux_layers_from_config(config.speculative_config)
    print(json.dumps({"left": left, "ids": list(ids or ()), "dtype": str(draft_dtype)}))


if __name__ == "__main__":
    main()
