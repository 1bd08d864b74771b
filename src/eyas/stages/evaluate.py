"""Stage evaluate: models/drafter on held-out hidden states and prompts → reports/acceptance.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch

from eyas import config, console, fs
from eyas.contracts import ShardManifest, TargetIdentity
from eyas.drafter.init import init_drafter
from eyas.errors import EvaluateError
from eyas.evaluate import report
from eyas.evaluate.judge import judge
from eyas.shards.reader import ShardReader
from eyas.shards.shard_cache import shard_cache
from eyas.stages import common
from eyas.target import locate
from eyas.target.load import load_model, load_tokenizer, read_ends
from eyas.tokens.draft_vocab import DraftVocab
from eyas.train.checkpoint import load_drafter
from eyas.train.data import calibration_slice

NAMES = ("TARGET_JSON", "DRAFT_VOCAB", "STATES", "MANIFEST", "DRAFTER", "REPORT")
RETRAIN = "`dvc repro train`"


def main(argv: Sequence[str]) -> None:
    """Walk every held-out document, decode every held-out prompt both ways, print the table."""
    target_path, vocab_path, states_path, manifest_path, drafter_path, out = common.paths("evaluate", NAMES, argv)
    params = config.load()
    with common.stage_run("evaluate", [target_path, vocab_path, manifest_path, drafter_path], [out]) as run:
        target = fs.read_record(TargetIdentity, target_path)
        folder = locate.ensure(target, params.target)
        ends = read_ends(folder)
        scale_D = ends.final_norm_D.float() + target.final_norm.weight_offset
        ends = dataclasses.replace(ends, final_norm_D=scale_D)  # as it multiplies: what the drafter starts from
        drafter, meta = load_drafter(drafter_path, ends.embedding_VD)
        manifest = fs.read_record(ShardManifest, manifest_path)
        reader = ShardReader(states_path, manifest, shard_cache(Path.cwd(), manifest))
        vocab = DraftVocab.read(vocab_path)
        if not (torch.equal(vocab.d2t_W, drafter.d2t) and torch.equal(vocab.t2d_V, drafter.t2d)):
            raise EvaluateError(f"{drafter_path} was trained with another draft vocab than {vocab_path}", RETRAIN)
        result, facts = judge(
            drafter=drafter,
            untrained=init_drafter(meta.shape, ends, vocab.d2t_W, vocab.t2d_V, calibration_slice(reader), meta.seed),
            meta=meta,
            ends=ends,
            reader=reader,
            target=target,
            load_target=lambda: load_model(
                folder, params.evaluate.dtype, params.target.device, params.target.trust_remote_code
            ),
            config=params.evaluate,
            decode_text=load_tokenizer(folder, params.target.trust_remote_code).decode,
        )
        fs.write_record(out, result)
        run.num_tokens, run.work_s = facts["decode"]["num_tokens"], facts["decode"]["speculative_s"]
        run.facts.update(facts)
    console.emit(console.table(report.table_rows(result), report.TABLE_HEADERS))
    if result.modes:
        console.emit(console.table(report.mode_rows(result, facts["modes"]), report.MODE_HEADERS))
    console.emit(
        f"held out: tau {result.tau:.3f} (bonus included, chain of {result.chain_length}; "
        f"{'none' if result.tau_loop_free is None else f'{result.tau_loop_free:.3f}'} without loops), "
        f"untrained {result.tau_untrained:.3f}; speculative output equals plain greedy for all "
        f"{sum(c.num_prompts for c in result.decode.values())} prompts, and the walk takes its rounds for "
        f"{sum(c.num_walked_alike for c in result.decode.values())} of them"
    )


if __name__ == "__main__":
    console.run_main(main)
