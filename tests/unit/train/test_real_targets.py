"""Shape and first weights of a drafter for real tiny transformers models of every kind of target."""

import json
from types import SimpleNamespace

import pytest
import torch
import train_world as world
import transformers

from eyas.config.schema import DrafterConfig
from eyas.contracts import FinalNorm
from eyas.drafter.init import init_drafter, resolve_shape
from eyas.drafter.rope import inverse_frequencies
from eyas.target.facts import final_norm
from eyas.target.load import TensorFiles, text_config
from eyas.train.run import target_ends

V, D, W, A = 40, 32, 10, 3
SIZES = {
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
MOE = {"n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2}
TARGETS = {
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama untied": ("Llama", {"tie_word_embeddings": False, "rope_theta": 5e5, "rope_scaling": LLAMA3}),
    "llama wide heads": ("Llama", {"head_dim": 16, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "llama one kv head": ("Llama", {"num_key_value_heads": 1}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True, "rope_theta": 1e6}),
    "qwen2 yarn": ("Qwen2", {"tie_word_embeddings": False, "rope_scaling": YARN}),
    "qwen3": ("Qwen3", {"head_dim": 16, "rope_theta": 1e6}),
    "gemma2": ("Gemma2", {"head_dim": 16}),
    "gemma3": ("Gemma3", {"head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]}),
    "deepseek": ("DeepseekV3", {**MLA, **MOE, "num_key_value_heads": 4, "rope_scaling": YARN}),
}
EXPLICIT = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 24}


def save(folder, kind, options):
    """A random model in transformers' own layout; gives the model."""
    suffix = {"Gemma3": "TextConfig"}.get(kind, "Config")
    config = getattr(transformers, kind + suffix)(**{**SIZES, **options})
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    return model


def make(folder, kind, options, drafter):
    model = save(folder, kind, options)
    text = text_config(json.loads((folder / "config.json").read_text()))
    norm: FinalNorm = final_norm(text, TensorFiles(folder))
    identity = SimpleNamespace(hidden_size=D, vocab_size=V, max_position_embeddings=256, final_norm=norm)
    shape = resolve_shape(DrafterConfig(**drafter), identity, folder, A, W)
    ends = target_ends(SimpleNamespace(target_folder=folder, identity=identity))
    t2d_V = torch.zeros(V, dtype=torch.bool)
    t2d_V[torch.arange(W) * 3] = True
    calibration = torch.randn(8, A, D, generator=torch.Generator().manual_seed(0))
    return model, init_drafter(shape, ends, torch.arange(W) * 2, t2d_V, calibration, seed=0)


@pytest.mark.parametrize("name", TARGETS)
@torch.no_grad()
def test_first_weights_and_shape_are_the_models(tmp_path, name):
    """Embedding, head and norm as the model itself computes them, tied or not; positions as its own attention."""
    kind, options = TARGETS[name]
    latent = kind == "DeepseekV3"
    model, drafter = make(tmp_path, kind, options, EXPLICIT if latent else {})
    assert torch.equal(drafter.embed_tokens.weight.float(), model.get_input_embeddings().weight.bfloat16().float())
    hidden = torch.randn(5, D)
    ids = torch.arange(W) * 3
    expected = model.get_output_embeddings()(hidden)[:, ids]
    assert torch.allclose(drafter.logits(hidden), expected, atol=1e-5)
    # the norm with its offset: y = scale x / rms(x)
    shape, config = drafter.shape, model.config
    normed = drafter.norm.weight * hidden / (hidden.square().mean(-1, keepdim=True) + shape.rms_norm_eps).sqrt()
    assert torch.allclose(normed, model.model.norm(hidden), atol=1e-4)
    assert shape.rms_norm_eps == config.rms_norm_eps
    if latent:
        assert {key: getattr(shape, key) for key in EXPLICIT} == EXPLICIT
        assert shape.rope_scaling is None
        assert shape.rope_theta == config.rope_parameters["rope_theta"]
        return
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "head_dim"):
        assert getattr(shape, key) == getattr(config, key, None) or (key, shape.head_dim) == ("head_dim", D // 4)
    rotary = model.model.rotary_emb
    names = dict(rotary.named_buffers())
    theirs = names.get("inv_freq", names.get("full_attention_inv_freq"))
    found, factor = inverse_frequencies(shape.head_dim, shape.rope_theta, shape.rope_scaling)
    assert torch.allclose(found, theirs.double(), rtol=1e-5)
    assert factor == pytest.approx(getattr(rotary, "attention_scaling", 1.0))


@pytest.mark.parametrize("options", [{"head_dim": 12}, {"num_key_value_heads": 4}, {"num_attention_heads": 8}])
def test_explicit_sizes_win_over_the_models(tmp_path, options):
    _, drafter = make(tmp_path, "Qwen3", {"head_dim": 16}, options)
    for key, value in options.items():
        assert getattr(drafter.shape, key) == value
    heads, kv_heads = drafter.shape.num_attention_heads, drafter.shape.num_key_value_heads
    attention = drafter.midlayer.self_attn
    assert attention.q_proj.weight.shape == (heads * drafter.shape.head_dim, 2 * D)
    assert attention.k_proj.weight.shape == (kv_heads * drafter.shape.head_dim, 2 * D)


def test_a_type_that_a_drafter_cannot_have_leaves_plain_positions(tmp_path, capsys):
    """Said in a line: the drafter's own attention is free to turn otherwise than the target's."""
    options = {"rope_theta": 7e4, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    _, drafter = make(tmp_path, "Llama", options, {})
    assert (drafter.shape.rope_theta, drafter.shape.rope_scaling) == (7e4, None)
    assert "plain rotary positions with the target's theta: rope type 'dynamic'" in capsys.readouterr().err


def test_the_old_schema_gives_the_same_shape(tmp_path):
    """Files written before transformers 5 hold rope_theta and rope_scaling at the top."""
    _, drafter = make(tmp_path / "new", "Llama", {"rope_theta": 5e5, "rope_scaling": LLAMA3}, {})
    path = tmp_path / "new/config.json"
    config = json.loads(path.read_text())
    nested = config.pop("rope_parameters")
    config |= {"rope_theta": nested.pop("rope_theta"), "rope_scaling": nested}
    path.write_text(json.dumps(config))
    identity = world.make_identity()
    identity = SimpleNamespace(hidden_size=D, vocab_size=V, max_position_embeddings=256, final_norm=identity.final_norm)
    assert resolve_shape(DrafterConfig(), identity, tmp_path / "new", A, W) == drafter.shape
    assert drafter.shape.rope_scaling is not None
