"""Run inside SGLang's interpreter: one EAGLE-3 folder through SGLang's own loader on a CPU.

    load_in_sglang.py TARGET DRAFTER DTYPE CASE OUT

CASE (safetensors): ``ids_T``, ``positions_T``, ``aux_TX`` (streams side by side), ``embedding_VD``. OUT gets every
parameter as loaded, ``hot_token_id`` and ``logits_TW`` of one causal pass over the rows; a JSON line on stdout names
what the loader left as it was. The parameters are filled with NaN first, so what is not loaded shows.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
from sglang.srt.layers.dp_attention import initialize_dp_attention_flags
from sglang.srt.model_loader import loader as loaders
from sglang.srt.runtime_context import get_parallel, publish
from sglang.srt.server_args import ServerArgs


class CausalAttention(torch.nn.Module):
    """Plain attention over the rows of one call, in place of the one that needs a KV pool."""

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


def start(target: str, drafter: str, dtype: str) -> ServerArgs:
    """One process that is a whole server's worth of parallel groups."""
    arguments = ServerArgs(
        model_path=target,
        device="cpu",
        dtype=dtype,
        attention_backend="torch_native",
        skip_tokenizer_init=True,
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path=drafter,
        speculative_num_steps=3,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=4,
    )
    publish(arguments, role="engine")
    init_distributed_environment(
        backend="gloo", world_size=1, rank=0, local_rank=0, distributed_init_method="tcp://127.0.0.1:0"
    )
    get_parallel().override_permanently(
        tp_rank=0,
        pp_size=1,
        pp_rank=0,
        attn_dp_size=1,
        attn_dp_rank=0,
        attn_tp_size=1,
        attn_tp_rank=0,
        attn_cp_rank=0,
        attn_dcp_size=1,
        moe_ep_size=1,
        moe_ep_rank=0,
        moe_dp_size=1,
        moe_tp_size=1,
    )
    initialize_model_parallel()
    initialize_dp_attention_flags(arguments)
    return arguments


def main() -> None:
    target, drafter, dtype, case_path, out = sys.argv[1:]
    arguments = start(target, drafter, dtype)
    config = ModelConfig.from_server_args(arguments, model_path=drafter, is_draft_model=True)
    initialize = loaders._initialize_model

    def poisoned(*given, **named):
        model = initialize(*given, **named)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
        return model

    loaders._initialize_model = poisoned
    model = loaders.get_model_loader(LoadConfig(), config).load_model(
        model_config=config, device_config=DeviceConfig(device="cpu")
    )
    parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    left = sorted(name for name, parameter in parameters.items() if bool(parameter.isnan().any()))
    case = load_file(case_path)
    eagle = config.hf_config.eagle_config
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(case["embedding_VD"])  # the server shares the target's
        attention = model.model.layers[0].self_attn
        attention.attn = CausalAttention(attention.num_heads, attention.num_kv_heads, attention.head_dim)
        aux_TX = case["aux_TX"].to(config.dtype)
        batch = SimpleNamespace(mm_input_embeds=None, spec_info=SimpleNamespace(hidden_states=aux_TX))
        batch.forward_mode = SimpleNamespace(is_extend=lambda: False)
        normed_TE, carried = model.model(case["ids_T"], case["positions_T"], batch)
        logits_TW = normed_TE @ model.lm_head.weight.T
    found = parameters | {"logits_TW": logits_TW, "carried_TE": carried[0]}
    if model.hot_token_id is not None:
        found["hot_token_id"] = model.hot_token_id
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, out)
    print(json.dumps({"left": left, "ids": eagle["eagle_aux_hidden_state_layer_ids"], "dtype": str(config.dtype)}))


if __name__ == "__main__":
    main()
