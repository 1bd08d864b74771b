"""Llama and what shares its file."""

from sglang.srt.models.llama import LlamaForCausalLM  # pyright: ignore[reportMissingImports]

EntryClass = LlamaForCausalLM
