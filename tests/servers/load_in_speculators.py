"""Run inside an interpreter that has speculators: one folder through its own loader; as ``load_in_sglang``.

    load_in_speculators.py TARGET DRAFTER DTYPE CASE OUT

It opens the target too, whose name the config may hold: for copies of head and norm that only a trainer wants. ``left`` names what the file does
not give.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorModelConfig
from speculators.models.attention import create_float_mask

TRAINERS = {"verifier_lm_head.weight", "verifier_norm.weight"}


def main() -> None:
    target, drafter, _dtype, case_path, out = sys.argv[1:]
    config = SpeculatorModelConfig.from_pretrained(drafter)
    config.speculators_config.verifier.name_or_path = target  # where export.target_name names none
    model = SpeculatorModel.from_pretrained(drafter, config=config).eval()
    loaded = {name: tensor for name, tensor in model.state_dict().items() if name not in TRAINERS}
    written = load_file(Path(drafter) / "model.safetensors")
    case, heard = load_file(case_path), []
    model.lm_head.register_forward_hook(lambda module, given, logits: heard.append(logits))
    rows = len(case["ids_T"])
    model._attn_impl = model.config.transformer_layer_config._attn_implementation = "eager"
    model._create_mask_fn = create_float_mask
    with torch.no_grad():
        model(
            hidden_states=case["aux_TX"].to(model.fc.weight.dtype)[None],
            input_ids=case["ids_T"][None],
            document_ids=torch.zeros(1, rows, dtype=torch.long),
            position_ids=case["positions_T"][None],
            ttt_steps=1,
        )
    found = {name: tensor.clone().contiguous() for name, tensor in loaded.items()} | {
        "logits_TW": heard[0][0].contiguous()
    }
    save_file(found, out)
    ids = list(model.config.eagle_aux_hidden_state_layer_ids)
    print(json.dumps({"left": sorted(set(loaded) - set(written)), "ids": ids, "dtype": str(model.fc.weight.dtype)}))


if __name__ == "__main__":
    main()
