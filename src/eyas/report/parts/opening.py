"""The head of the page: the figure that matters, what it must be compared with, and whether the output stays exact."""

from __future__ import annotations

from collections.abc import Iterator

from eyas.report.charts import interval
from eyas.report.figures import Figures, other_sets
from eyas.report.html import Markup, badge, nothing, text, tiles
from eyas.report.parts.words import count, number, share, span
from eyas.report.sources import Sources


def opening(sources: Sources) -> Iterator[str]:
    """Title, tau and its company."""
    name = sources.params.target.name if sources.params else "target"
    yield f'<header class="top"><p class="brand">eyas</p><h1>Drafter for {text(name)}</h1>{_subtitle(sources)}</header>'
    acceptance = sources.acceptance
    if acceptance is None:
        yield nothing("Acceptance was not measured yet: make evaluate.")
        return
    yield f'<div class="hero">{_tau(acceptance)}{_company(acceptance)}</div>'


def _subtitle(sources: Sources) -> str:
    run = Figures.of(sources.runs.get("train") or sources.runs.get("evaluate"))
    git, machine = run.group("git"), run.group("machine")
    words = [run.words("started_at").replace("T", " ").replace("Z", " UTC")]
    if git.words("commit"):
        words.append(f"commit {git.words('commit')[:12]}{' with changes' if git.flag('dirty') else ''}")
    if machine.words("cpu"):
        words.append(f"{machine.words('cpu')}, {count(machine.number('cores'))} cores")
    return f'<p class="muted">{text(" · ".join(word for word in words if word))}</p>'


def _tau(acceptance: Figures) -> str:
    tau, chain = acceptance.number("tau") or 0.0, acceptance.number("chain_length") or 0.0
    low, high = acceptance.number("tau_low"), acceptance.number("tau_high")
    drawn = ""
    if low is not None and high is not None:
        drawn = interval(low, tau, high, 1.0, chain + 1, width=340, ticks=True)
    return (
        f'<div class="tau"><p class="eyebrow">tau, held out</p><p class="figure">{number(tau)}</p>{drawn}'
        f"<p>{text(f'95 % interval {span(acceptance)}. ' if drawn else '')}Tokens per forward of the target, bonus token included: "
        f"1 is of no use, {chain + 1:g} perfect.</p><p>{_verdict(acceptance)}</p></div>"
    )


def _verdict(acceptance: Figures) -> str:
    checks = acceptance.groups("decode").values()
    num_prompts = sum(check.number("num_prompts") or 0 for check in checks)
    num_identical = sum(check.number("num_identical") or 0 for check in checks)
    if not num_prompts:
        return badge("not compared", "quiet") + " Speculative decoding was not compared with plain greedy decoding."
    is_lossless = acceptance.flag("lossless") is True
    mark = badge("lossless", "good") if is_lossless else badge("NOT lossless", "bad")
    return Markup(
        f"{mark} Speculative decoding gave exactly the tokens of plain greedy decoding for {count(num_identical)} of "
        f"{count(num_prompts)} prompts."
    )


def _company(acceptance: Figures) -> str:
    alpha = acceptance.numbers("alpha")
    untrained, tau = acceptance.number("tau_untrained"), acceptance.number("tau") or 0.0
    gain = f"training gave {tau / untrained:.2f} times as much" if untrained else ""
    sets = [(f"tau, {name}", number(tau), "another prompt set") for name, tau in other_sets(acceptance).items()]
    chain = count(acceptance.number("chain_length"))
    length = f"drafts of up to {chain} tokens" if chain else ""
    return tiles(
        (
            ("tau without loops", number(acceptance.number("tau_loop_free")), "documents that repeat less than 5 %"),
            ("tau, untrained", number(acceptance.number("tau_untrained")), gain),
            ("alpha 1", share(alpha[0]) if alpha else None, "first draft token accepted"),
            ("loop share", share(acceptance.number("loop_share")), "of the text; repetition inflates tau"),
            ("rounds", count(acceptance.number("num_rounds")), length),
            *sets[:1],
        )
    )
