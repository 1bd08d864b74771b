"""Chat templates in the style of well-known model families, and a small tokenizer for all of them."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = (
    "<bos>",
    "<eos>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin|>",
    "<|header|>",
    "<|/header|>",
    "<|eot|>",
    "<|eom|>",
    "[INST]",
    "[/INST]",
    "<turn>",
    "</turn>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "<|end|>",
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|return|>",
    "<|call|>",
)
CORPUS = [
    "What is the capital of France? Paris is the capital of France, and it lies on the Seine.",
    "A system message: you are a helpful assistant. user assistant model tool final analysis",
    "def add(a, b):\n    return a + b\n\n\nprint(add(1, 2))\n",
    "Größe, naïve, 東京, emoji \U0001f600 and \U0001f1eb\U0001f1f7.",
    '{"name": "weather", "arguments": {"city": "Paris"}}',
] * 3


def make_tokenizer(template: str, eos: str, trim_offsets: bool = False) -> Any:
    """A byte-level BPE with merges over spaces and line ends, trained on a few lines."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    if trim_offsets:
        from tokenizers import processors

        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token=eos, chat_template=template, model_max_length=10**9
    )


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou are a model.<|im_end|>\n' }}{% endif %}" + CHATML
)
CHATML_MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HEADERS = (
    "{{ '<|begin|>' }}{% for m in messages %}{{ '<|header|>' + m.role + '<|/header|>\n\n' + m.content | trim }}"
    "{{ '<|eom|>' if m.ends_message else '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|header|>assistant<|/header|>\n\n' }}{% endif %}"
)
INST = (
    "{{ '<bos>' }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content | trim + '<eos>' }}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
TURNS = (
    "{{ '<bos>' }}{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "{{ '<turn>' + role + '\n' + m.content | trim + '</turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}"
)
ROLE_TOKENS = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ '<eos>' }}{% endif %}"
)
PLAIN_WORDS = (
    "{{ '<bos>' }}{% for m in messages %}{% if m.role == 'assistant' %}{{ 'ASSISTANT: ' + m.content + '<eos>' }}"
    "{% else %}{{ m.role | upper + ': ' + m.content + '\n\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
REASONING = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and '</think>' in m.content %}{% set answer = m.content.split('</think>')[-1] %}"
    "{% if loop.index0 > ns.last %}{{ '<think>\n' + m.content.split('</think>')[0].split('<think>')[-1] | trim "
    "+ '\n</think>\n\n' }}{% endif %}{{ answer | trim }}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PROMPTED_THINK = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content.split('</think>')[-1] | trim }}"
    "{% if m.role == 'assistant' %}{{ '<eos>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|><think>\n' }}{% endif %}"
)
CHANNELS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.tool_calls %}{{ '<|start|>assistant<|channel|>commentary to=' + m.tool_calls[0].function.name + '<|message|>'"
    " + m.tool_calls[0].function.arguments | tojson + '<|call|>' }}"
    "{% else %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endif %}"
    "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\ntools: ' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.content %}{{ m.content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ '<tool_call>\n' + call.function | tojson + '\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

FAMILIES: dict[str, tuple[str, str, str]] = {
    # name: template, eos token, end-of-turn token of a middle turn
    "chatml": (CHATML, "<|im_end|>", "<|im_end|>"),
    "chatml_default_system": (CHATML_DEFAULT_SYSTEM, "<|im_end|>", "<|im_end|>"),
    "chatml_marked": (CHATML_MARKED, "<|im_end|>", "<|im_end|>"),
    "headers": (HEADERS, "<|eot|>", "<|eot|>"),
    "inst": (INST, "<eos>", "<eos>"),
    "turns": (TURNS, "<eos>", "</turn>"),
    "role_tokens": (ROLE_TOKENS, "<eos>", "<|end|>"),
    "plain_words": (PLAIN_WORDS, "<eos>", "<eos>"),
    "reasoning": (REASONING, "<|im_end|>", "<|im_end|>"),
    "prompted_think": (PROMPTED_THINK, "<eos>", "<eos>"),
    "channels": (CHANNELS, "<|return|>", "<|end|>"),
    "tools": (TOOLS, "<|im_end|>", "<|im_end|>"),
}
