"""From assistant turns in a text to the loss mask of its tokens, verified by decoding it back.

The text is tokenised once, as a whole: tokens before a joint may differ when a prefix is tokenised
alone. A token is trained when it lies wholly inside what the server generates: lead, answer, and the
end-of-turn token behind it.

Letters: T tokens of one sample.
"""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eyas.tokens.render import RejectError, Rendered, Span


@dataclass(frozen=True, slots=True)
class Encoded:
    """Tokens of a text and the characters each covers.

    Shapes: all int64 (T). White space that an offset leaves out in front of a token belongs to it.
    """

    ids_T: np.ndarray
    begin_T: np.ndarray
    end_T: np.ndarray


@dataclass(frozen=True, slots=True)
class Masked:
    """The mask of one sample and what it was made of. Shapes: uint8 (T)."""

    mask_T: np.ndarray
    content_mask_T: np.ndarray
    """The same without leads."""
    end_ids: tuple[int, ...]
    """Trained end-of-turn tokens."""


def closing_ids(tokenizer: Any, eos_token_ids: Sequence[int]) -> np.ndarray:
    """Ids that may end a turn: every eos id of the target and every special token."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = [token_id for token_id, token in added.items() if token.special]
    return np.unique(np.asarray([*eos_token_ids, *tokenizer.all_special_ids, *special], dtype=np.int64))


def encode(tokenizer: Any, rendered: Sequence[Rendered]) -> list[Encoded]:
    """Tokenise whole texts without added tokens, with character offsets.

    Raises:
        RejectError: A tokenizer without offsets merges tokens over the ends of a turn.
    """
    if not tokenizer.is_fast:
        return [_encode_by_pieces(tokenizer, one) for one in rendered]
    batch = tokenizer(
        [one.text for one in rendered],
        add_special_tokens=False,
        return_attention_mask=False,
        return_offsets_mapping=True,
        verbose=False,
    )
    encoded = []
    for ids, offsets in zip(batch["input_ids"], batch["offset_mapping"], strict=True):
        offsets_T2 = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
        end_T = np.maximum.accumulate(offsets_T2[:, 1])
        previous_end_T = np.concatenate([[0], end_T[:-1]])
        begin_T = np.minimum(offsets_T2[:, 0], previous_end_T)
        encoded.append(Encoded(ids_T=np.asarray(ids, dtype=np.int64), begin_T=begin_T, end_T=end_T))
    return encoded


def _encode_by_pieces(tokenizer: Any, rendered: Rendered) -> Encoded:
    """Without offsets: tokenise between the turns' ends, and insist that it equals the whole."""
    text = rendered.text
    cuts = {0, len(text)}
    closing = sorted(set(tokenizer.all_special_tokens), key=len, reverse=True)
    for span in rendered.spans:
        cuts.update((span.start, span.content_start, span.end))
        spaces = len(text[span.end :]) - len(text[span.end :].lstrip())
        token = next((t for t in closing if text.startswith(t, span.end + spaces)), "")
        cuts.update((span.end + spaces, span.end + spaces + len(token)))
    bounds = sorted(cuts)
    ids, begin, end = [], [], []
    for a, b in itertools.pairwise(bounds):
        piece = tokenizer.encode(text[a:b], add_special_tokens=False)
        ids.extend(piece)
        begin.extend([a] * len(piece))
        end.extend([b] * len(piece))
    if ids != tokenizer.encode(text, add_special_tokens=False):
        raise RejectError("mask_not_verified", "tokens reach over the ends of a turn and the tokenizer has no offsets")
    return Encoded(ids_T=np.asarray(ids), begin_T=np.asarray(begin), end_T=np.asarray(end))


def make_mask(
    tokenizer: Any, rendered: Rendered, encoded: Encoded, closing: np.ndarray, eos_token_ids: Sequence[int]
) -> Masked:
    """Mask of all assistant turns.

    Args:
        tokenizer: Decodes the mask back.
        rendered: Text and turns.
        encoded: Tokens of that text.
        closing: Ids that may end a turn.
        eos_token_ids: Ids that stop a server; they cannot stand inside an answer.

    Raises:
        RejectError: The tokens under the mask do not decode to the turn's text.
    """
    mask_T = np.zeros(len(encoded.ids_T), dtype=np.uint8)
    content_mask_T = mask_T.copy()
    closes_T = np.isin(encoded.ids_T, closing)
    end_ids = []
    for span in rendered.spans:
        end, marker = _turn_end(rendered.text, encoded, closes_T, span)
        inside_T = (encoded.begin_T >= span.start) & (encoded.end_T <= end) & (encoded.end_T > span.start)
        _check_decoded(tokenizer, encoded.ids_T[inside_T], rendered.text[span.start : end])
        content_T = inside_T & (encoded.begin_T >= span.content_start)
        if np.isin(encoded.ids_T[content_T], eos_token_ids).any():
            raise RejectError("end_of_turn_inside", "an answer's text spells an end-of-turn token")
        mask_T[inside_T] = 1
        content_mask_T[content_T] = 1
        if marker is not None and not span.cut:
            mask_T[marker] = content_mask_T[marker] = 1
            end_ids.append(int(encoded.ids_T[marker]))
    return Masked(mask_T=mask_T, content_mask_T=content_mask_T, end_ids=tuple(end_ids))


def agrees(masked: Masked, marked_mask_T: np.ndarray, closes_T: np.ndarray, blank_T: np.ndarray) -> bool:
    """Whether a template's own marks name the same tokens, with or without leads.

    End-of-turn tokens and white space are left out: templates differ in whether they mark those, and
    here the rule above decides.
    """
    words_T = ~closes_T & ~blank_T
    return any(
        np.array_equal(own_T[words_T], np.asarray(marked_mask_T)[words_T])
        for own_T in (masked.mask_T, masked.content_mask_T)
    )


def blanks(text: str, encoded: Encoded) -> np.ndarray:
    """Bool (T): the token covers white space alone."""
    pairs = zip(encoded.begin_T.tolist(), encoded.end_T.tolist(), strict=True)
    return np.fromiter((not text[a:b].strip() for a, b in pairs), dtype=bool, count=len(encoded.ids_T))


def _turn_end(text: str, encoded: Encoded, closes_T: np.ndarray, span: Span) -> tuple[int, int | None]:
    """Where the trained text ends, and the index of the end-of-turn token behind it."""
    end = span.end
    behind = int(np.searchsorted(encoded.end_T, end, side="right"))
    if behind < len(closes_T) and closes_T[behind] and encoded.begin_T[behind] <= end:
        return int(encoded.begin_T[behind]), behind
    closing = np.flatnonzero(closes_T[behind:])
    if len(closing) == 0:
        return end, None
    marker = behind + int(closing[0])
    gap = text[end : int(encoded.begin_T[marker])]
    if gap.strip():
        return end, None
    return (end if span.cut else int(encoded.begin_T[marker])), marker


def _check_decoded(tokenizer: Any, ids: np.ndarray, expected: str) -> None:
    decoded = tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if decoded.strip() == expected.strip():
        return
    # Some tokenizers normalise what they read.
    if unicodedata.normalize("NFKC", decoded).strip() != unicodedata.normalize("NFKC", expected).strip():
        raise RejectError("mask_not_verified", f"tokens say {decoded[-60:]!r}, the turn ends in {expected[-60:]!r}")
