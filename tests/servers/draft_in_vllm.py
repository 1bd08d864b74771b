"""Run inside vLLM's interpreter: answers without or with an EAGLE-3 folder, and vLLM's own counter, into OUT.json.

draft_in_vllm.py TARGET CASE.json OUT.json [DRAFTER CHAIN_LENGTH]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams


def main() -> None:
    target, case_path, out, *drafting = sys.argv[1:]
    case = json.loads(Path(case_path).read_text())
    named = {}
    if drafting:
        folder, length = drafting
        named["speculative_config"] = {"method": "eagle3", "model": folder, "num_speculative_tokens": int(length)}
    llm = LLM(
        model=target, dtype="float32", skip_tokenizer_init=True, enforce_eager=True, enable_prefix_caching=False,
        max_model_len=512, max_num_seqs=4, disable_log_stats=False, **named,
    )  # fmt: skip
    wanted = SamplingParams(
        temperature=0.0, max_tokens=case["max_new_tokens"], stop_token_ids=case["eos_ids"], detokenize=False
    )
    answers = llm.generate([{"prompt_token_ids": ids} for ids in case["prompts"]], wanted)
    counters = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    said = {
        "answers": [list(answer.outputs[0].token_ids) for answer in answers],
        "num_verifications": counters.get("vllm:spec_decode_num_drafts"),
    }
    Path(out).write_text(json.dumps(said))


if __name__ == "__main__":
    main()
