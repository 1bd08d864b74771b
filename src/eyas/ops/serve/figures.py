"""From passes and walks to ``reports/serve.json``.

tau is tokens emitted per forward of the target that checked drafts, the bonus token included, on both sides: the first
token of an answer comes from the prefill and counts on neither, and a round that runs past the end of an answer counts
for the tokens that were kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eyas import console
from eyas.evaluate.summary import WalkedDocument, alpha, loop_share, tau
from eyas.ops.serve.measure import Pass, Text
from eyas.ops.serve.prompts import ServePrompt


@dataclass(frozen=True, slots=True)
class Pair:
    """The same prompts at one batch size, without and with the drafter."""

    plain: Pass
    drafted: Pass


def server_tau(texts: Sequence[Text]) -> float | None:
    """Of the server's own counters; none when no answer had a round."""
    num_rounds = sum(text.num_rounds for text in texts)
    return sum(len(text.ids) - 1 for text in texts) / num_rounds if num_rounds else None


def equality(one: Sequence[Text], other: Sequence[Text]) -> dict[str, int]:
    """How far two passes wrote the same, token by token."""
    pairs = list(zip(one, other, strict=True))
    common = [_num_common(a.ids, b.ids) for a, b in pairs]
    return {
        "num_answers": len(pairs),
        "num_identical": sum(a.ids == b.ids for a, b in pairs),
        "num_tokens": sum(len(a.ids) for a, _ in pairs),
        "num_equal_tokens": sum(common),
    }


def _num_common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def figures(
    prompts: Sequence[ServePrompt], pairs: Sequence[Pair], walked: Sequence[WalkedDocument], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """The record.

    Args:
        prompts: What was asked.
        pairs: Per batch size; the walk is over the texts that the first one wrote with the drafter.
        walked: Per prompt, in their order.
        facts: Versions, sizes, digests.
    """
    first = pairs[0]
    found = {str(pair.plain.batch_size): _batch(pair, first.plain) for pair in pairs}
    server, offline = server_tau(first.drafted.texts), tau(walked)
    return {
        **facts,
        "tau_server": server,
        "tau_offline": offline,
        "tau_ratio": server / offline if server and offline else None,
        "speedup": {size: batch["speedup"] for size, batch in found.items()},
        "lossless": all(b["equality"]["num_identical"] == b["equality"]["num_answers"] for b in found.values()),
        "batches": found,
        "sets": _sets(prompts, first.drafted.texts, walked),
    }


def _batch(pair: Pair, reference: Pass) -> dict[str, Any]:
    return {
        "tokens_per_s_plain": pair.plain.tokens_per_s,
        "tokens_per_s_drafted": pair.drafted.tokens_per_s,
        "speedup": pair.drafted.tokens_per_s / pair.plain.tokens_per_s,
        "num_tokens": pair.drafted.num_tokens,
        "tau_server": server_tau(pair.drafted.texts),
        "equality": equality(pair.plain.texts, pair.drafted.texts),
        "equality_plain": equality(reference.texts, pair.plain.texts),
    }


def _sets(
    prompts: Sequence[ServePrompt], texts: Sequence[Text], walked: Sequence[WalkedDocument]
) -> dict[str, dict[str, Any]]:
    found = {}
    for source in sorted({prompt.source for prompt in prompts}):
        chosen = [index for index, prompt in enumerate(prompts) if prompt.source == source]
        documents = [walked[index] for index in chosen]
        found[source] = {
            "num_prompts": len(chosen),
            "num_tokens": sum(len(texts[index].ids) for index in chosen),
            "num_rounds_server": sum(texts[index].num_rounds for index in chosen),
            "num_rounds_offline": sum(len(document.rounds) for document in documents),
            "num_same_rounds": sum(texts[index].num_rounds == len(walked[index].rounds) for index in chosen),
            "tau_server": server_tau([texts[index] for index in chosen]),
            "tau_offline": tau(documents),
            "alpha_offline": alpha(documents),
            "loop_share": loop_share(documents),
        }
    return found


def table(found: Mapping[str, Any]) -> str:
    """The record for people."""
    sets = [
        (name, f["num_prompts"], f["num_tokens"], _number(f["tau_server"]), _number(f["tau_offline"]), f"{f['loop_share']:.1%}")
        for name, f in found["sets"].items()
    ]  # fmt: skip
    batches = [
        (
            size, f"{b['tokens_per_s_plain']:,.1f}", f"{b['tokens_per_s_drafted']:,.1f}", f"{b['speedup']:.2f}",
            _number(b["tau_server"]), _equal(b["equality"]), _equal(b["equality_plain"]),
        )
        for size, b in found["batches"].items()
    ]  # fmt: skip
    sets_head = ("set", "prompts", "tokens", "server tau", "offline tau", "loops")
    batches_head = (
        "batch",
        "tok/s plain",
        "tok/s drafted",
        "speed-up",
        "tau",
        "equal to plain",
        "plain, to first batch",
    )
    verdict = (
        f"{found['server']}, chain of {found['chain_length']}, {found['dtype']}: server tau {_number(found['tau_server'])}, "
        f"offline tau {_number(found['tau_offline'])} (bonus included); output "
        f"{'equals plain greedy everywhere' if found['lossless'] else 'differs from plain greedy, see the table'}"
    )
    return "\n\n".join([console.table(sets, sets_head), console.table(batches, batches_head), verdict])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _equal(found: Mapping[str, int]) -> str:
    return f"{found['num_identical']}/{found['num_answers']} ({found['num_equal_tokens']:,}/{found['num_tokens']:,} tokens)"
