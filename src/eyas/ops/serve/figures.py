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
from eyas.ops.serve.offline import Judged


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
    sources: Sequence[str],
    pairs: Sequence[Pair],
    walked: Sequence[WalkedDocument],
    judged: Sequence[Sequence[Judged | None]],
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    """The record.

    Args:
        sources: The set of each prompt that was asked.
        pairs: Per batch size; the walk is over the texts that the first one wrote with the drafter.
        walked: Per prompt, in their order.
        judged: Per batch size and prompt: none where both texts are the same.
        facts: Versions, sizes, digests.
    """
    first = pairs[0]
    found = {
        str(pair.plain.batch_size): _batch(pair, first.plain, [each for each in looked_at if each is not None])
        for pair, looked_at in zip(pairs, judged, strict=True)
    }
    server, offline = server_tau(first.drafted.texts), tau(walked)
    return {
        **facts,
        "tau_server": server,
        "tau_offline": offline,
        "tau_ratio": server / offline if server and offline else None,
        "speedup": {size: batch["speedup"] for size, batch in found.items()},
        "lossless": not any(batch["differing"]["num_faults"] for batch in found.values()),
        "batches": found,
        "sets": _sets(sources, first.drafted.texts, walked),
    }


def _batch(pair: Pair, reference: Pass, differing: Sequence[Judged]) -> dict[str, Any]:
    return {
        "tokens_per_s_plain": pair.plain.tokens_per_s,
        "tokens_per_s_drafted": pair.drafted.tokens_per_s,
        "speedup": pair.drafted.tokens_per_s / pair.plain.tokens_per_s,
        "num_tokens": pair.drafted.num_tokens,
        "tau_server": server_tau(pair.drafted.texts),
        "equality": equality(pair.plain.texts, pair.drafted.texts),
        "equality_plain": equality(reference.texts, pair.plain.texts),
        "differing": {
            "num_answers": len(differing),
            "num_ties": sum(each.num_ties for each in differing),
            "largest_gap": max((each.largest_gap for each in differing), default=0.0),
            "num_faults": sum(bool(each.fault) for each in differing),
            "first_fault": next((each.fault for each in differing if each.fault), ""),
        },
    }


def _sets(sources: Sequence[str], texts: Sequence[Text], walked: Sequence[WalkedDocument]) -> dict[str, dict[str, Any]]:
    found = {}
    for source in sorted(set(sources)):
        chosen = [index for index, each in enumerate(sources) if each == source]
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
            _number(b["tau_server"]), _equal(b["equality"]), b["differing"]["num_ties"], b["differing"]["num_faults"],
            _equal(b["equality_plain"]),
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
        "near ties",
        "faults",
        "plain, to first batch",
    )
    verdict = (
        f"{found['server']}, chain of {found['chain_length']}, {found['dtype']}: server tau {_number(found['tau_server'])}, "
        f"offline tau {_number(found['tau_offline'])} (bonus included); {_losses(found)}"
    )
    return "\n\n".join([console.table(sets, sets_head), console.table(batches, batches_head), verdict])


def _losses(found: Mapping[str, Any]) -> str:
    differing = [batch["differing"] for batch in found["batches"].values()]
    if not any(each["num_answers"] for each in differing):
        return "output equals plain greedy everywhere"
    if found["lossless"]:
        return "output is the target's greedy choice everywhere, near ties aside"
    first = next(each["first_fault"] for each in differing if each["first_fault"])
    return f"output is NOT the target's greedy choice: {first}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _equal(found: Mapping[str, int]) -> str:
    return f"{found['num_identical']}/{found['num_answers']} ({found['num_equal_tokens']:,}/{found['num_tokens']:,} tokens)"
