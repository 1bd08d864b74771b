"""Stage ``tokenize``: conversations → ids, loss masks, the draft vocab and the token report."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

from eyas import config, console, fs
from eyas.contracts import TargetIdentity
from eyas.conversations.table import read_conversations
from eyas.stages import common
from eyas.target.load import load_tokenizer
from eyas.target.locate import ensure
from eyas.tokens.dataset import write_tokens
from eyas.tokens.draft_vocab import build_draft_vocab, check_size
from eyas.tokens.pipeline import TokenizeRules, tokenize
from eyas.tokens.statistics import Tally, make_report, report_table, require_samples

PATHS = ("TARGET_JSON", "CONVERSATIONS", "TOKENS", "DRAFT_VOCAB", "REPORT_JSON")


def main(argv: Sequence[str]) -> None:
    """Tokenize as ``params.yaml`` says."""
    target_path, conversations, tokens, draft_vocab, report_path = common.paths("tokenize", PATHS, argv)
    params = config.load()
    identity = fs.read_record(TargetIdentity, target_path)
    check_size(params.tokenize.draft_vocab_size, identity.vocab_size)  # before the work, not after it
    boundaries = config.resolve_boundaries(params.extract, identity.num_layers)
    rules = TokenizeRules(
        max_tokens=params.tokenize.max_tokens,
        vocab_size=identity.vocab_size,
        eos_token_ids=identity.eos_token_ids,
    )
    with common.stage_run("tokenize", [target_path, conversations], [tokens, draft_vocab, report_path]) as run:
        folder = ensure(identity, params.target)
        load = functools.partial(load_tokenizer, folder, params.target.trust_remote_code)
        tally = Tally(identity.vocab_size)
        outcomes = tokenize(read_conversations(conversations), load, rules, num_workers())
        samples = tally.keep(outcomes)
        first = list(itertools.islice(samples, 1))
        require_samples(tally)
        tokens_sha256 = write_tokens(tokens, itertools.chain(first, samples), tally.rejects)
        vocab = build_draft_vocab(tally.counts_V, params.tokenize.draft_vocab_size, tally.end_ids)
        vocab.write(draft_vocab)
        report = make_report(
            tally,
            vocab,
            hidden_size=identity.hidden_size,
            num_boundaries=len(boundaries),
            tokens_sha256=tokens_sha256,
        )
        fs.write_record(report_path, report)
        run.num_tokens = report.num_tokens
    console.emit(report_table(report, len(boundaries) + 1, identity.hidden_size))


def num_workers() -> int:
    """Worker processes from ``EYAS_WORKERS``; the usable cores, at most 8, when it is not set."""
    return config.knob("EYAS_WORKERS", min(config.cores(), 8))


if __name__ == "__main__":
    console.run_main(main)
