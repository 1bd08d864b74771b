"""A tiny real target in a folder: byte tokenizer, chat template that refuses some rows, two-layer Llama."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' and not tools %}{{ raise_exception('a tool speaks, no tools') }}"
    "{% endif %}{{ '<|start|>' + m.role + '\n' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
VOCAB_SIZE, EOS, CONTEXT = 260, 2, 160


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory):
    """A target's folder: byte tokenizer, chat template, tiny Llama."""
    path = tmp_path_factory.mktemp("target")
    names = ["<pad>", "<|start|>", "<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|start|>", eos_token="<|end|>", pad_token="<pad>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        eos_token_id=EOS,
    )
    model = AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():
        weight.data.mul_(4)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def many():
    """Rows to answer: two turns each for training, and five prompts held out."""

    def make(count):
        from eyas.contracts import Conversation
        from eyas.conversations.table import conversation_id

        def row(texts, split):
            roles = ("user", "assistant", "user")
            messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
            return Conversation(
                conversation_id=conversation_id(messages), source="x", split=split, messages=tuple(messages)
            )

        train = [row((f"prompt number {i}", "given", f"again {i}"), "train") for i in range(count)]
        return train + [row((f"held out {i}",), "held_out") for i in range(5)]

    return make
