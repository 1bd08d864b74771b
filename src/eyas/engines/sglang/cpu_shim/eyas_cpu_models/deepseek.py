"""DeepSeek V2 and V3 on plain torch attention.

SGLang gives a backend that it has no rule for Triton's: keys and values of a prompt's first chunk straight from the
layer. Plain torch attention reads them from the latent cache, which fits the absorbed form alone.
"""

from sglang.srt.models.deepseek_common.attention_backend_handler import (  # pyright: ignore[reportMissingImports]
    AttentionBackendRegistry,
)
from sglang.srt.models.deepseek_common.attention_forward_methods import (  # pyright: ignore[reportMissingImports]
    AttnForwardMethod,
)
from sglang.srt.models.deepseek_v2 import (  # pyright: ignore[reportMissingImports]
    DeepseekV2ForCausalLM,
    DeepseekV3ForCausalLM,
)


def _absorbed(_attention: object, _batch: object) -> AttnForwardMethod:
    return AttnForwardMethod.MLA


AttentionBackendRegistry.register("torch_native", _absorbed)
EntryClass = [DeepseekV2ForCausalLM, DeepseekV3ForCausalLM]
