"""The models of SGLang that the CPU shim runs: named by SGLANG_EXTERNAL_MODEL_PACKAGE, so no other file is imported."""
