"""The vllm engine: hidden states out of a real vLLM, in a process and an interpreter of its own."""
