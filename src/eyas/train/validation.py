"""Validation: conversations that are never trained on, judged with the weights of the moment.

    validation documents → loss per TTT step (as in training)
                         → greedy drafts of every row → exact walk → tau; acceptance per step

Acceptance is of every row that a server may ask, against what the target chose; a target outside the draft vocab
is a miss. ``alpha_k`` is conditional on all steps before, ``joint_k`` is not.

Letters: T tokens of a document or pack, R rows, S TTT steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from eyas.batches.loader import BatchLoader, Reader, plan_once
from eyas.drafter.judged import ahead, target_choice
from eyas.drafter.loss import Workspace, ttt_loss
from eyas.drafter.model import Drafter
from eyas.drafter.objective import Objective
from eyas.drafter.rows import Pack
from eyas.drafter.ttt import draft_tokens
from eyas.drafter.walk import spans, trained_rows, walk
from eyas.drafter.weights import FlatWeights
from eyas.errors import DataError, EyasError, StoreError, TrainError
from eyas.train.data import Packer, check_states
from eyas.train.distributed import World
from eyas.train.metrics import DIGITS

if TYPE_CHECKING:
    from eyas.contracts import StoredSample
    from eyas.shards.reader import StoredStates


class Validator:
    """Judges a drafter on a fixed set of documents.

    Args:
        samples: Validation samples.
        reader: Their states.
        batch_tokens: Most tokens of a pack.
        ttt_steps: S, also the length of the walked chains.
        packer: Makes packs and asks the target's head.
        teacher_WD: The head's rows of the draft vocab, in the dtype of products.
        world: Ranks that share the work.
        objective: The loss of a row that training minimises.

    Raises:
        TrainError: There is nothing to judge: told before hours of steps, not after them.
    """

    def __init__(
        self,
        samples: Sequence[StoredSample],
        reader: Reader,
        batch_tokens: int,
        ttt_steps: int,
        packer: Packer,
        teacher_WD: torch.Tensor,
        world: World,
        objective: Objective,
    ) -> None:
        self._samples = sorted(samples, key=lambda sample: sample.sample_id)
        self._reader, self._batch_tokens, self._ttt_steps = reader, batch_tokens, ttt_steps
        self._packer, self._teacher_WD, self._world = packer, teacher_WD, world
        self._objective, self._workspace = objective, Workspace()
        self._argmaxes: dict[str, np.ndarray] = {}
        if not any(map(self._may_be_judged, self._samples)):
            raise self._nothing({})

    def _may_be_judged(self, sample: StoredSample) -> bool:
        try:
            states = self._reader.read(sample.sample_id)
        except (StoreError, DataError):
            return True  # a validation counts and names it
        return bool(trained_rows(spans(states.loss_mask_T.numpy()), sample.num_tokens, 1).any())

    def _nothing(self, damaged: Mapping[str, str]) -> TrainError:
        if not self._samples:
            return TrainError(
                "no conversation is left to validate with: train.validation_share needs two in the training split",
                "set train.validation_share to 0 and train.keep to last, or add conversations, then `dvc repro`",
            )
        broken = f"; {len(damaged):,} of them are damaged: {list(damaged.values())[-1]}" if damaged else ""
        return TrainError(
            f"none of {len(self._samples):,} validation samples has two assistant tokens in a row to draft{broken}",
            "`make verify` lists the damage and how to repair it"
            if damaged
            else "raise train.validation_share, or check the loss mask in reports/tokens.json",
        )

    @torch.no_grad()
    def __call__(self, drafter: Drafter, weights: FlatWeights) -> tuple[dict[str, float], dict[str, str]]:
        """Metrics by name, the same on every rank, and the damaged samples with the reason.

        Raises:
            TrainError: No document has a row to judge.
        """
        sums: dict[str, float] = {}
        damaged: dict[str, str] = {}
        failed: EyasError | None = None
        try:
            self._judge_all(drafter, weights, sums, damaged)
        except EyasError as error:
            failed = error
        told = self._world.gather((sums, damaged, None if failed is None else (failed.message, failed.hint)))
        if failed is not None:
            raise failed
        for rank, (_, _, other) in enumerate(told):
            if other is not None:
                raise TrainError(f"rank {rank}: {other[0]}", other[1])
        names = sorted({name for part, _, _ in told for name in part})
        total = {name: sum(part.get(name, 0.0) for part, _, _ in told) for name in names}
        everywhere = {name: why for _, part, _ in told for name, why in part.items()}
        if not total.get("rounds"):
            raise self._nothing(everywhere)
        return self._metrics(total), everywhere

    def _judge_all(
        self, drafter: Drafter, weights: FlatWeights, sums: dict[str, float], damaged: dict[str, str]
    ) -> None:
        plan = plan_once(self._samples, self._batch_tokens, self._world.rank, self._world.size)
        with BatchLoader(self._reader, plan, check_states) as loader:
            for batch in loader:
                damaged |= {one.sample_id: one.error.message for one in batch.damaged}
                if batch.documents:
                    self._ask(batch.documents)
                    self._add_loss(drafter, weights, batch.documents, sums)
                    self._add_walks(drafter, weights, batch.documents, sums)

    def _ask(self, documents: Sequence[StoredStates]) -> None:
        """The target's choices, once a run; the packer then knows which of them are in the draft vocab."""
        new = [stored for stored in documents if stored.sample.sample_id not in self._argmaxes]
        for stored, argmax_T in zip(new, self._packer.argmaxes(new), strict=True):
            self._argmaxes[stored.sample.sample_id] = argmax_T

    def _add_loss(
        self, drafter: Drafter, weights: FlatWeights, documents: Sequence[StoredStates], sums: dict[str, float]
    ) -> None:
        pack = self._packer(documents, self._ttt_steps)
        if not any(pack.num_trained):
            return
        device_pack = pack.to(str(self._world.device))
        _, measured = ttt_loss(
            drafter,
            device_pack,
            self._teacher_WD,
            1.0,
            weights=weights,
            measure=True,
            workspace=self._workspace,
            objective=self._objective,
        )
        assert measured is not None
        for k, (loss, count) in enumerate(zip(measured.losses_S.tolist(), pack.num_trained, strict=False)):
            _add(sums, f"loss_{k}", loss * count)
            _add(sums, f"trained_{k}", count)

    def _add_walks(
        self, drafter: Drafter, weights: FlatWeights, documents: Sequence[StoredStates], sums: dict[str, float]
    ) -> None:
        pack = self._packer(documents, self._ttt_steps, mask_oov=False)
        drafts_TS = self._drafts(drafter, weights, pack)
        for states, span in zip(documents, pack.documents, strict=True):
            self._add_document(states, drafts_TS[span.start : span.end], sums)

    def _drafts(self, drafter: Drafter, weights: FlatWeights, pack: Pack) -> np.ndarray:
        drafts_TS = torch.full((len(pack.ids_T), self._ttt_steps), -1)
        if any(pack.num_trained):
            # a GPU holds the frozen head in the dtype of products alone
            layer = weights.products() if self._world.device.type == "cuda" else None
            drafts_TS[pack.rows_R] = draft_tokens(drafter, pack.to(str(self._world.device)), layer)
        return drafts_TS.numpy()

    def _add_document(self, states: StoredStates, drafts_TS: np.ndarray, sums: dict[str, float]) -> None:
        S = self._ttt_steps
        ids_T, found = states.input_ids_T.numpy().astype(np.int64), spans(states.loss_mask_T.numpy())
        choice_T = target_choice(states.sample.variant, ids_T, self._argmaxes[states.sample.sample_id])
        asked_TS = trained_rows(found, len(ids_T), S)
        agree_TS = asked_TS & (drafts_TS == ahead(choice_T, S))
        joint_TS = np.logical_and.accumulate(agree_TS, axis=1)
        for k in range(S):
            before_T = joint_TS[:, k - 1] if k else np.ones(len(ids_T), dtype=bool)
            _add(sums, f"asked_{k}", int(asked_TS[:, k].sum()))
            _add(sums, f"chained_{k}", int((asked_TS[:, k] & before_T).sum()))
            _add(sums, f"joint_{k}", int(joint_TS[:, k].sum()))
        for start, end in found:
            rounds = walk(agree_TS, start, end)
            _add(sums, "rounds", len(rounds))
            _add(sums, "emitted", sum(one.num_emitted for one in rounds))

    def _metrics(self, total: dict[str, float]) -> dict[str, float]:
        values = {"validation/tau": total["emitted"] / total["rounds"]}
        for k in range(self._ttt_steps):
            values[f"validation/alpha/step_{k}"] = total[f"joint_{k}"] / max(1, total[f"chained_{k}"])
            values[f"validation/joint/step_{k}"] = total[f"joint_{k}"] / max(1, total[f"asked_{k}"])
            if f"loss_{k}" in total:
                values[f"validation/loss/step_{k}"] = total[f"loss_{k}"] / max(1, total[f"trained_{k}"])
        return {name: round(value, DIGITS) for name, value in values.items()}


def _add(sums: dict[str, float], name: str, value: float) -> None:
    sums[name] = sums.get(name, 0) + value
