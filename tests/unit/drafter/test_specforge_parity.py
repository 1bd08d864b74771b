"""SpecForge 0.2.0's training step on a stored batch: same loss, per-step losses and gradients.

The peer's conventions live here and nowhere in the package: its loss mask is not shifted, a
step's loss is a cross entropy averaged over all B x T positions. All else (carried state, teacher-forced
ids, positions + k, attention, targets renormalised on the draft vocab, out-of-vocab rows masked) is ours too.
"""

import json
from pathlib import Path

import pytest
import torch
from peer_rules import specforge_trains
from safetensors.torch import load_file

from eyas.contracts import DrafterShape
from eyas.drafter import loss
from eyas.drafter.model import Drafter
from eyas.drafter.rows import plan_pack
from eyas.drafter.teacher import teacher_ids
from eyas.drafter.ttt import unroll
from eyas.drafter.weights import Weight

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.fixture(scope="module")
def case():
    return load_file(GOLDEN / "specforge_case.safetensors"), json.loads((GOLDEN / "specforge_case.json").read_text())


def make_drafter(tensors, config):
    shape = DrafterShape(
        target_hidden_size=config["hidden_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=384,
        num_attention_heads=config["num_attention_heads"],
        num_key_value_heads=config["num_key_value_heads"],
        head_dim=config["hidden_size"] // config["num_attention_heads"],
        num_aux=3,
        vocab_size=1024,
        draft_vocab_size=512,
        rms_norm_eps=config["rms_norm_eps"],
        rope_theta=config["rope_theta"],
        max_position_embeddings=128,
        fc_norm=False,
        norm_output=False,
    )
    drafter = Drafter(shape)
    drafter.set_target(tensors["weight.embed_tokens.weight"], tensors["weight.d2t"], tensors["weight.t2d"])
    weights = {name: tensors[f"weight.{name}"] for name, _ in drafter.named_parameters()}
    drafter.load_state_dict(weights, strict=False)
    return drafter


def peer_pack(tensors, drafter, head_VD, steps):
    ids_BT, mask_BT = tensors["batch.input_ids"], tensors["batch.loss_mask"].bool()
    B, T = ids_BT.shape
    last_TD = tensors["batch.target"].flatten(0, 1)
    in_vocab_BT = drafter.t2d[teacher_ids(last_TD, head_VD)].view(B, T)
    trains = torch.cat([specforge_trains(*both, steps) for both in zip(mask_BT, in_vocab_BT, strict=True)])
    return plan_pack(
        ids_T=ids_BT.flatten(),
        aux_TAD=[tensors["batch.hidden_state"].view(B * T, 3, -1)],
        last_TD=[last_TD],
        lengths=[T] * B,
        trains_TS=trains,
    )


def test_loss_and_gradients_equal_the_peer(case):
    """Case 64: state carried, ids from the data, positions + k; seven steps."""
    tensors, facts = case
    config, expected = facts["config"], facts["expected"]
    steps, decay = config["ttt_steps"], config["step_decay"]
    drafter, head_VD = make_drafter(tensors, config), tensors["target_lm_head.weight"]
    pack = peer_pack(tensors, drafter, head_VD, steps)
    target_ids = torch.arange(512) + drafter.d2t
    hidden = unroll(drafter, pack)
    num_positions = len(pack.ids_T)
    shares = [count / num_positions for count in pack.num_trained]
    scales = [decay**k / num_positions for k in range(steps)]
    total, report = loss.head_loss(hidden, Weight(drafter.lm_head.weight), pack, head_VD[target_ids], scales, True)
    total.backward()

    log_p_TW = torch.log_softmax(pack.last_TD @ head_VD[target_ids].T, -1)
    entropy_T = -(log_p_TW.exp() * log_p_TW).sum(-1)
    plosses = []
    for k, kl in enumerate(report.losses_S.tolist()):
        rows = pack.rows_R[: pack.num_rows[k]][pack.trains_RS[: pack.num_rows[k], k]]
        plosses.append(kl * shares[k] + float(entropy_T[rows + k + 1].sum()) / num_positions)
    assert plosses == pytest.approx(expected["plosses"], rel=1e-5)
    assert sum(decay**k * x for k, x in enumerate(plosses)) == pytest.approx(expected["loss"], rel=1e-5)

    compared = 0
    for name, parameter in drafter.named_parameters():
        grad = tensors[f"grad.{name}"]
        assert float((parameter.grad - grad).abs().max() / grad.abs().max()) < 5e-6, name
        compared += 1
    assert compared == 13
    norm = torch.stack([p.grad.norm() for p in drafter.parameters()]).norm()
    assert float(norm) == pytest.approx(expected["grad_norm"], rel=1e-5)
