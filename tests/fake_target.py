"""The target that the fake engine stands for: it has sizes and no weights."""

from eyas.contracts import FinalNorm, TargetIdentity

HIDDEN_SIZE = 16


def make_target() -> TargetIdentity:
    return TargetIdentity(
        source="wheel:none==1",
        revision="0" * 64,
        files=(),
        architecture="LlamaForCausalLM",
        model_type="llama",
        num_layers=6,
        hidden_size=HIDDEN_SIZE,
        vocab_size=1000,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        dtype="bfloat16",
        final_norm=FinalNorm(kind="rms_norm", eps=1e-5, weight_offset=0.0, num_zero_scales=0),
        eos_token_ids=(2,),
        tokenizer_sha256="0" * 64,
        chat_template_sha256="0" * 64,
    )
