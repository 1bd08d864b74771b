"""Ways of drafting and checking: a greedy chain, a chain that samples, a tree.

- Greedy chain: the target's argmax is compared with each draft.
- Sampled chain, at a temperature: a draft x, drawn from the drafter's q, is accepted with min(1, p(x)/q(x)); after the
  first refusal a token of the residual max(p - q, 0) follows. So every token has the target's distribution p.
- Tree: at every node the target chooses (argmax, or a draw from p), and the round goes on while the choice is a child.
  Its drafts are the drafter's likeliest tokens, which nobody draws, so no residual is needed.

Every draw goes by a hash of (seed, prompt, place in the answer, what it is for): a text depends on nothing that is
decoded beside it, and at a temperature a tree gives the very text of plain sampling.

Letters: B rows, J tokens per row in one forward, S draft steps, A aux streams, D target hidden, V target vocab,
W draft vocab, R rows of any kind.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from eyas.drafter.chain import DraftChain, draw
from eyas.drafter.model import Drafter
from eyas.drafter.tree import DraftTree
from eyas.engines.decode import BlockDecoder, BlockTree
from eyas.engines.sampling import uniform
from eyas.evaluate.decode import Emitted, Rows

DRAFT, ACCEPT, TARGET = range(3)
"""What a uniform number is for."""


def uniforms(keys: Sequence[bytes], places: Sequence[int], purpose: int) -> torch.Tensor:
    """Float64 [R]: one number per (key, place in the answer)."""
    values = [uniform(key, 3 * place + purpose) for key, place in zip(keys, places, strict=True)]
    return torch.tensor(values, dtype=torch.float64)


def choose_tokens(
    logits_RV: torch.Tensor, temperature: float, keys: Sequence[bytes], places: Sequence[int]
) -> torch.Tensor:
    """The target's own token [R], on the CPU: its argmax at temperature 0, else a draw."""
    if not temperature:
        return logits_RV.argmax(-1).cpu()
    share_RV = (logits_RV.float() / temperature).softmax(-1)
    return draw(share_RV, uniforms(keys, places, TARGET).to(share_RV.device)).cpu()


class GreedyChain:
    """Chains of the drafter's likeliest tokens, accepted while they are the target's argmax."""

    def __init__(self, chain: DraftChain) -> None:
        self._chain, self.extend = chain, chain.extend

    def choose(self, logits_RV: torch.Tensor, keys: Sequence[bytes], place: int) -> torch.Tensor:
        """The argmax."""
        return logits_RV.argmax(-1).cpu()

    def round(self, decoder: BlockDecoder, rows: Rows) -> Emitted:
        """See ``decode.Mode``."""
        drafts_BS = self._chain.draft().cpu()
        output = decoder.forward(torch.cat([rows.last_B()[:, None], drafts_BS], dim=1), rows.start_B())
        assert output.aux_BJAD is not None
        choice_BJ = output.logits_BJV.argmax(-1).cpu()
        accepted_B = (choice_BJ[:, :-1] == drafts_BS).long().cumprod(1).sum(1)
        return Emitted(choice_BJ, accepted_B, output.aux_BJAD, output.last_BJD)


class SampledChain:
    """Chains drawn from the drafter, accepted by min(1, p/q).

    Args:
        drafter: Of the chain.
        chain: Fresh.
        temperature: Above 0, of both.
        keys: Per row what its uniform numbers derive from.
    """

    def __init__(self, drafter: Drafter, chain: DraftChain, temperature: float, keys: Sequence[bytes]) -> None:
        self._chain, self.extend = chain, chain.extend
        self._temperature, self._keys = temperature, keys
        self._ids_W = drafter.target_ids(torch.arange(drafter.shape.draft_vocab_size, device=drafter.d2t.device)).cpu()

    def choose(self, logits_RV: torch.Tensor, keys: Sequence[bytes], place: int) -> torch.Tensor:
        """A draw."""
        return choose_tokens(logits_RV, self._temperature, keys, [place] * len(keys))

    def round(self, decoder: BlockDecoder, rows: Rows) -> Emitted:
        """See ``decode.Mode``."""
        place_B = [len(new) for new in rows.new]
        steps = range(self._chain.chain_length)
        draft_u_BS = torch.stack([self._uniforms(place_B, k, DRAFT) for k in steps], 1)
        accept_u_BS = torch.stack([self._uniforms(place_B, k, ACCEPT) for k in steps], 1)
        drafts_BS, q_BSW = (x.cpu() for x in self._chain.draft_sampled(self._temperature, draft_u_BS))
        output = decoder.forward(torch.cat([rows.last_B()[:, None], drafts_BS], dim=1), rows.start_B())
        assert output.aux_BJAD is not None
        p_BJV = (output.logits_BJV.float() / self._temperature).softmax(-1).cpu()
        p_BS = p_BJV[:, :-1].gather(2, drafts_BS[..., None])[..., 0]
        draft_ids_BS = torch.searchsorted(self._ids_W, drafts_BS)
        q_BS = q_BSW.gather(2, draft_ids_BS[..., None])[..., 0]
        accepted_B = (accept_u_BS * q_BS < p_BS).long().cumprod(1).sum(1)
        target_u_B = self._uniforms([p + a for p, a in zip(place_B, accepted_B.tolist(), strict=True)], 0, TARGET)
        final_B = draw(self._residual(p_BJV, q_BSW, accepted_B), target_u_B)
        ids_BJ = torch.cat([drafts_BS, final_B[:, None]], 1).scatter(1, accepted_B[:, None], final_B[:, None])
        return Emitted(ids_BJ, accepted_B, output.aux_BJAD, output.last_BJD)

    def _uniforms(self, places: Sequence[int], ahead: int, purpose: int) -> torch.Tensor:
        return uniforms(self._keys, [place + ahead for place in places], purpose)

    def _residual(self, p_BJV: torch.Tensor, q_BSW: torch.Tensor, accepted_B: torch.Tensor) -> torch.Tensor:
        """What a refused draft leaves of p; all of p behind a chain that was accepted whole."""
        row_B = torch.arange(len(accepted_B))
        p_BV = p_BJV[row_B, accepted_B]
        q_BJW = torch.cat([q_BSW, torch.zeros_like(q_BSW[:, :1])], 1)
        left_BV = p_BV.clone()
        left_BV[:, self._ids_W] -= q_BJW[row_B, accepted_B]
        left_BV.clamp_min_(0.0)
        # p and q alike to the last bit leave nothing, and then nothing was refused but by rounding
        return torch.where(left_BV.sum(1, keepdim=True) > 0, left_BV, p_BV)


class GreedyTree:
    """Trees of the drafter's likeliest tokens; the target's choice is argmax or, at a temperature, a draw.

    Args:
        tree: Fresh.
        temperature: 0 for the argmax.
        keys: Per row what its uniform numbers derive from; unused at temperature 0.
    """

    def __init__(self, tree: DraftTree, temperature: float = 0.0, keys: Sequence[bytes] = ()) -> None:
        self._tree, self.extend = tree, tree.extend
        self._temperature, self._keys = temperature, keys

    def choose(self, logits_RV: torch.Tensor, keys: Sequence[bytes], place: int) -> torch.Tensor:
        """Argmax or draw."""
        return choose_tokens(logits_RV, self._temperature, keys, [place] * len(keys))

    def round(self, decoder: BlockDecoder, rows: Rows) -> Emitted:
        """See ``decode.Mode``."""
        tree, start_B = self._tree.draft(), rows.start_B()
        ids_BJ, depth_BJ = tree.ids_BJ.cpu(), tree.depth_BJ.cpu()
        ids_BJ[:, 0] = rows.last_B()
        output = decoder.forward(ids_BJ, start_B, tree=BlockTree(depth_BJ, tree.seen_BJJ()))
        assert output.aux_BJAD is not None
        B, J = ids_BJ.shape
        places = [len(rows.new[b]) + int(depth) for b in range(B) for depth in depth_BJ[b]]
        keys = [self._keys[b] for b in range(B) for _ in range(J)] if self._keys else []
        choice_BJ = choose_tokens(output.logits_BJV.flatten(0, 1), self._temperature, keys, places).view(B, J)
        paths = [_accepted_path(*(x_BJ[b].tolist() for x_BJ in (ids_BJ, tree.parent_BJ, choice_BJ))) for b in range(B)]
        place_BJ = torch.tensor([[0, *path, *range(len(path) + 1, J)] for path in paths])
        decoder.keep(start_B, place_BJ[:, 1 : self._tree.chain_length + 1])
        row_B1, device_BJ = torch.arange(B)[:, None], place_BJ.to(output.last_BJD.device)
        rows_B1 = row_B1.to(device_BJ.device)
        return Emitted(
            choice_BJ[row_B1, place_BJ],
            torch.tensor([len(path) for path in paths]),
            output.aux_BJAD[rows_B1, device_BJ],
            output.last_BJD[rows_B1, device_BJ],
        )


def _accepted_path(ids_J: Sequence[int], parent_J: Sequence[int], choice_J: Sequence[int]) -> list[int]:
    """Places of the accepted nodes, from the root's child down."""
    path, node = [], 0
    while True:
        children = [j for j in range(node + 1, len(ids_J)) if parent_J[j] == node and ids_J[j] == choice_J[node]]
        if not children:
            return path
        node = children[0]
        path.append(node)
