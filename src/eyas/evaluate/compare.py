"""Some prompts decoded in every mode, one way after the other on one machine: what is lossless, and what is faster.

Plain decoding is one token a forward, without a drafter. Chains and trees are held against it by ``plain.Leads``,
sampled text by ``plain.Draws``. Seconds go into the run record alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from eyas import console
from eyas.config import EvaluateConfig
from eyas.contracts import CheckpointMeta, ModeCheck, TargetIdentity
from eyas.drafter.chain import DraftChain
from eyas.drafter.model import Drafter
from eyas.drafter.tree import DraftTree
from eyas.drafter.walk import spans
from eyas.engines.decode import BlockDecoder
from eyas.engines.sampling import draw_key
from eyas.errors import EvaluateError
from eyas.evaluate.cost import RoundCosts, measure
from eyas.evaluate.decode import Decoded, Mode, Prompt, Rows, speculate
from eyas.evaluate.drafting import draft_and_weigh
from eyas.evaluate.expected import expect
from eyas.evaluate.modes import GreedyChain, GreedyTree, SampledChain
from eyas.evaluate.plain import Draws, Leads, decode_plainly, follow, uniform_p_value
from eyas.evaluate.summary import LONGEST_CHAIN, Interval, bootstrap

SINGLE = "_single"
LEAST_P = 1e-6
"""Below this the sampled text is not the target's."""


@dataclass(slots=True)
class ModeSums:
    """What one mode did with the prompts of one set."""

    temperature: float
    batch_size: int
    decoded: list[Decoded] = field(default_factory=list)
    num_identical: int = 0
    num_ties: int = 0
    largest_gap: float = 0.0
    seconds: float = 0.0
    rival_s: float = 0.0
    """What plain decoding takes for the same texts in the same batches: its seconds a forward by the forwards they need."""
    expected_rounds: float = 0.0
    draws: list[float] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """New tokens."""
        return sum(len(d.ids) for d in self.decoded)

    @property
    def tau(self) -> float:
        """Tokens per round; 1 where every answer is one token."""
        sizes = [size for d in self.decoded for size in d.round_sizes]
        return sum(sizes) / len(sizes) if sizes else 1.0

    def check(self, config: EvaluateConfig) -> ModeCheck:
        """The record."""
        low, high = self._interval(config)
        accepted = [a for d in self.decoded for a in d.round_accepted]
        num_emitted = sum(sum(d.round_sizes) for d in self.decoded)
        return ModeCheck(
            temperature=self.temperature,
            batch_size=self.batch_size,
            num_prompts=len(self.decoded),
            num_identical=self.num_identical,
            num_tokens=self.num_tokens,
            num_rounds=len(accepted),
            tau=self.tau,
            tau_low=low,
            tau_high=high,
            accepted=tuple(accepted.count(a) for a in range(config.chain_length + 1)),
            num_ties=self.num_ties,
            largest_gap=self.largest_gap,
            tau_expected=num_emitted / self.expected_rounds if self.expected_rounds else None,
            p_value=uniform_p_value(self.draws) if self.temperature else None,
        )

    def _interval(self, config: EvaluateConfig) -> Interval:
        pairs = [(float(sum(d.round_sizes)), float(len(d.round_sizes))) for d in self.decoded if d.round_sizes]
        return bootstrap(pairs, config.num_bootstrap, config.seed)


@dataclass(slots=True)
class Compared:
    """Checks by prompt set and mode, and what was measured."""

    sums: dict[str, dict[str, ModeSums]] = field(default_factory=dict)
    plain: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Tokens and seconds of plain decoding, by suffix of the mode."""
    costs: dict[str, RoundCosts] = field(default_factory=dict)
    """By suffix of the mode: of its first batch."""

    def checks(self, config: EvaluateConfig) -> dict[str, dict[str, ModeCheck]]:
        """The records.

        Raises:
            EvaluateError: Sampled text is not of the target's distribution.
        """
        found = {s: {m: sums.check(config) for m, sums in modes.items()} for s, modes in self.sums.items()}
        for source, modes in found.items():
            for mode, check in modes.items():
                if check.p_value is not None and not check.p_value >= LEAST_P:
                    raise EvaluateError(
                        f"speculative sampling ({mode}, {source}) is not lossless: its {check.num_tokens:,} tokens are the "
                        f"target's samples with p = {check.p_value:.2g}, expected {LEAST_P:g} or more",
                        "try another evaluate.seed; if it stays, please report it",
                    )
        return found

    def facts(self, chain_length: int) -> dict[str, Any]:
        """Tokens per second of every mode, the speed-up over plain decoding, and what costs predict."""
        found: dict[str, Any] = {}
        for suffix, (tokens, seconds) in self.plain.items():
            costs, plain = self.costs[suffix], tokens / max(seconds, 1e-9)
            entry: dict[str, Any] = {"batch_size": costs.batch_size, "plain_tokens_per_s": round(plain, 1)}
            for mode in sorted(
                {m for modes in self.sums.values() for m in modes if m.endswith(SINGLE) == bool(suffix)}
            ):
                own = [modes[mode] for modes in self.sums.values() if mode in modes]
                rate = sum(s.num_tokens for s in own) / max(sum(s.seconds for s in own), 1e-9)
                sizes = [n for s in own for d in s.decoded for n in d.round_sizes]
                tau = sum(sizes) / max(len(sizes), 1)
                speedup = sum(s.rival_s for s in own) / max(sum(s.seconds for s in own), 1e-9)
                entry[mode] = {"tokens_per_s": round(rate, 1), "speedup": round(speedup, 3), "tau": round(tau, 3)}
                if not mode.startswith("tree"):
                    entry[mode]["predicted_speedup"] = round(costs.speedup(chain_length, tau), 3)
            found["single" if suffix else "batch"] = entry
        return found


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything that decoding in modes needs."""

    model: Any
    """The target, loaded."""
    drafter: Drafter
    meta: CheckpointMeta
    target: TargetIdentity
    head_VD: torch.Tensor
    """The target's head, in the dtype the target runs it in."""
    config: EvaluateConfig

    @torch.inference_mode()
    def run(self, prompts: Sequence[Prompt]) -> Compared:
        """Decode the first prompts of each set in every mode.

        Raises:
            EvaluateError: A mode emits what the target does not choose.
        """
        found, config = Compared(), self.config
        sources = sorted({p.source for p in prompts})
        counts = [min(config.mode_prompts, sum(p.source == s for p in prompts)) for s in sources]
        num_prompts = sum(counts) + sum(min(config.single_prompts, count) for count in counts)
        progress = console.Progress("evaluate compares modes", num_prompts, unit="prompts")
        for source in sources:
            chosen = [p for p in prompts if p.source == source][: config.mode_prompts]
            for suffix, members, size in (
                ("", chosen, config.batch_size),
                (SINGLE, chosen[: config.single_prompts], 1),
            ):
                for begin in range(0, len(members), size):
                    self._batch(found, source, suffix, members[begin : begin + size])
                    progress.advance(len(members[begin : begin + size]))
        progress.close()
        return found

    def slack(self) -> int:
        """Positions behind an answer that a block may reach."""
        tree_tokens = self.config.tree_tokens if self.config.tree_width else 0
        return max(self.config.chain_length, LONGEST_CHAIN, tree_tokens) + 1

    def _batch(self, found: Compared, source: str, suffix: str, prompts: Sequence[Prompt]) -> None:
        length = max(len(p.ids) for p in prompts) + self.config.max_new_tokens + self.slack()
        decoder = BlockDecoder(self.model, len(prompts), length, self.meta.boundaries)
        bare = BlockDecoder(self.model, len(prompts), length)
        if suffix not in found.costs:
            found.costs[suffix] = measure(decoder, self.drafter, prompts, self.config.chain_length)
        plain, seconds = decode_plainly(bare, prompts, self.config.max_new_tokens, self.target.eos_token_ids)
        before = found.plain.get(suffix, (0, 0.0))
        found.plain[suffix] = before[0] + sum(map(len, plain)), before[1] + seconds
        plain_forward_s = seconds / max(max(map(len, plain)) - 1, 1)
        for name, make in self._modes().items():
            temperature = self.config.temperature if name == "sampled" else 0.0
            modes = found.sums.setdefault(source, {})
            sums = modes.setdefault(name + suffix, ModeSums(temperature, len(prompts)))
            keys = [draw_key(self.config.seed, p.ids) for p in prompts]
            rows = Rows(prompts, self.config.max_new_tokens, frozenset(self.target.eos_token_ids))
            prefill = decoder.prefill([p.ids for p in prompts])
            decoded, seconds = speculate(decoder, make(len(prompts), length, keys), rows, prefill, keys)
            sums.seconds += seconds
            sums.rival_s += plain_forward_s * (max(len(d.ids) for d in decoded) - 1)
            self._judge(sums, name + suffix, bare, decoded, plain)
            sums.decoded += [d.without_states() for d in decoded]

    def _modes(self) -> dict[str, Callable[[int, int, Sequence[bytes]], Mode]]:
        config, drafter = self.config, self.drafter

        def chain(batch_size: int, length: int) -> DraftChain:
            return DraftChain(drafter, config.chain_length, batch_size, length)

        def tree(batch_size: int, length: int, _: Sequence[bytes]) -> Mode:
            sizes = (config.chain_length, config.tree_width, config.tree_tokens, batch_size, length)
            return GreedyTree(DraftTree(drafter, *sizes))

        modes: dict[str, Callable[[int, int, Sequence[bytes]], Mode]] = {
            "chain": lambda batch_size, length, _: GreedyChain(chain(batch_size, length))
        }
        if config.tree_width:
            modes["tree"] = tree
        if config.temperature:
            modes["sampled"] = lambda batch_size, length, keys: SampledChain(
                drafter, chain(batch_size, length), config.temperature, keys
            )
        return modes

    def _judge(
        self,
        sums: ModeSums,
        mode: str,
        bare: BlockDecoder,
        decoded: Sequence[Decoded],
        plain: Sequence[Sequence[int]],
    ) -> None:
        prompts, answers = [d.prompt for d in decoded], [d.ids for d in decoded]
        same = [list(a) == list(b) for a, b in zip(answers, plain, strict=True)]
        sums.num_identical += sum(same)
        if sums.temperature:
            generator = torch.Generator().manual_seed(self.config.seed)
            draws = Draws(answers, sums.temperature, generator)
            follow(bare, prompts, answers, draws)
            sums.draws += draws.values
            sums.expected_rounds += self._expected_rounds(decoded)
        elif not all(same):
            leads = Leads(mode, prompts, answers)
            follow(bare, prompts, answers, leads)
            sums.num_ties += leads.num_ties
            sums.largest_gap = max(sums.largest_gap, leads.largest_gap)

    def _expected_rounds(self, decoded: Sequence[Decoded]) -> float:
        documents = [d.document for d in decoded if d.document is not None]
        steps = self.config.chain_length
        drafted = draft_and_weigh(self.drafter, documents, steps, self.head_VD, self.config.temperature)
        return sum(
            expect(one.shares.of_text_TS, spans(document.mask_T.numpy()), steps).num_rounds
            for one, document in zip(drafted, documents, strict=True)
            if one.shares is not None
        )
