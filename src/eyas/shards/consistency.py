"""Whether states and tokens belong together, judged from the values alone.

A checksum says that bytes are those that were written; it cannot say that the right ones were. Three facts can:

- ``last[t]`` predicts ``ids[t+1]``: among the tokens of its own neighbourhood, the head prefers the one that comes
  next. States that are a row late prefer ``ids[t]``, a row early ``ids[t+2]``, another sample's none of them.
- Rows of neighbouring streams resemble each other: of all rows of the next stream, row t's own is the nearest.
- The deepest aux stream and ``last`` correlate about equally in all samples of a set.

Only tokens of the same window of rows are candidates, so that no product over the whole vocab is needed: a token
that is the argmax over the vocab is the argmax here too.

Measured on 773 conversations of SmolLM2-135M-Instruct (102,147 tokens, greedy answers, boundaries 2, 15, 27; per
sample; "swapped" are states of another sample of the same length, 1,500 pairs of 6,066):

    share of rows that prefer ids[t+1]        lowest 0.476, median 0.836   ids[t], ids[t+2]: highest 0.060
    the same, assistant rows                  lowest 0.898, median 0.992   swapped: 99 % 0.22, highest 0.62
    nearest row is the own, boundaries 2-15   lowest 0.168, median 0.596   one row off: highest 0.027
    boundaries 15-27                          lowest 0.255, median 0.802   one row off: highest 0.082
    boundary 27 and last                      lowest 0.390, median 1.000   one row off: highest 0.036
    correlation of boundary 27 and last,
    assistant rows                            lowest 0.491, median 0.652   swapped: 99 % 0.09, highest 0.38

The same set stored with ``int8`` gives 0.513 and 0.838, 0.898 and 0.992, 0.174, 0.255 and 0.384, 0.524 and 0.652; one
row off at most 0.082: the same floors hold.

Letters: T tokens, R rows of a window, A aux streams, D target hidden, V target vocab, C candidate tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from eyas.shards.reader import StoredStates

WINDOW_ROWS = 256
"""Rows judged together; bounds the work to T x WINDOW_ROWS x D."""
MIN_SHIFT_ROWS = 8
MIN_BEATEN_ROWS = 32
MIN_FLOOR_ROWS = 4
MIN_STREAM_ROWS = 16
MIN_COHERENCE_ROWS = 4
GREEDY_FLOOR = 0.75
"""Of assistant rows that prefer the next token, where the target wrote the text greedily."""
COHERENCE_FLOOR = 0.6
"""Of the set's median correlation of the deepest aux stream and ``last``."""
MIN_COHERENCE_SAMPLES = 20
INCOHERENT = "aux and last states correlate by"
"""Begins the one problem that only a whole set shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What one sample's values say; counts of rows, so that scores add up.

    ``num_next`` of ``num_rows`` judged rows prefer the next token; ``num_assistant_next`` of ``num_assistant_rows``
    those whose next token the assistant wrote. ``coherence`` is the correlation of deepest aux stream and ``last``
    in the assistant's rows, None when there are too few.
    """

    num_rows: int = 0
    num_next: int = 0
    num_assistant_rows: int = 0
    num_assistant_next: int = 0
    coherence: float | None = None


@dataclass(frozen=True, slots=True)
class Judged:
    """A sample's score and its faults, one sentence each."""

    score: Score
    problems: tuple[str, ...]


def judge(stored: StoredStates, boundaries: tuple[int, ...], head_VD: torch.Tensor | None) -> Judged:
    """Judge one sample by the rows that are stored.

    Args:
        stored: The sample; its variant ``greedy`` means that the assistant's tokens are the target's own argmax.
        boundaries: Names of the aux streams.
        head_VD: The target's head in any float dtype; without it no token is judged.
    """
    problems: list[str] = []
    score = Score()
    if head_VD is not None:
        score, shifts = _judge_tokens(stored, head_VD)
        problems += shifts
        if stored.sample.variant == "greedy" and not shifts:
            problems += _below_floor(score)
    coherence, streams = _judge_streams(stored, boundaries)
    return Judged(dataclasses.replace(score, coherence=coherence), (*problems, *streams))


def incoherent(scores: Mapping[str, Score]) -> dict[str, str]:
    """Samples whose aux and last states do not belong together by the measure of their own set, and why.

    Args:
        scores: By sample id, damaged samples left out.
    """
    known = {name: score.coherence for name, score in scores.items() if score.coherence is not None}
    if len(known) < MIN_COHERENCE_SAMPLES:
        return {}
    median = float(torch.tensor(sorted(known.values())).median())
    return {
        name: f"{INCOHERENT} {value:.2f}, the set's samples by {median:.2f}: not of one sample"
        for name, value in known.items()
        if value < COHERENCE_FLOOR * median
    }


def _judge_tokens(stored: StoredStates, head_VD: torch.Tensor) -> tuple[Score, list[str]]:
    ids_T, mask_T, last_TD = stored.input_ids_T.long(), stored.loss_mask_T.bool(), stored.last_TD
    num_tokens = len(ids_T)
    rows_all = stored.has_last_T.nonzero().flatten()
    rows_all = rows_all[rows_all < num_tokens - 1]
    counts, problems = [0, 0, 0, 0], []
    for rows_R in rows_all.split(WINDOW_ROWS) if len(rows_all) else ():
        near_C = torch.unique(ids_T[int(rows_R[0]) : int(rows_R[-1]) + 3])
        preferred_R = near_C[(last_TD[rows_R].float() @ head_VD[near_C].float().T).argmax(-1)]
        next_R = preferred_R == ids_T[rows_R + 1]
        assistant_R = mask_T[rows_R + 1]
        found = (len(rows_R), next_R.sum(), assistant_R.sum(), (next_R & assistant_R).sum())
        counts = [count + int(more) for count, more in zip(counts, found, strict=True)]
        problems += _shifted(ids_T, rows_R, preferred_R)
    names = ("num_rows", "num_next", "num_assistant_rows", "num_assistant_next")
    return Score(**dict(zip(names, counts, strict=True))), problems


def _shifted(ids_T: torch.Tensor, rows_R: torch.Tensor, preferred_R: torch.Tensor) -> Iterator[str]:
    """Whether rows prefer the token before or after the one they should."""
    inner_R = rows_R + 2 < len(ids_T)
    rows_R, preferred_R = rows_R[inner_R], preferred_R[inner_R]
    now_R, next_R, after_R = (ids_T[rows_R + offset] for offset in range(3))
    clear_R = (next_R != now_R) & (next_R != after_R)
    num_rows = int(clear_R.sum())
    if num_rows < MIN_SHIFT_ROWS:
        return
    late, right, early = (int((preferred_R == t)[clear_R].sum()) for t in (now_R, next_R, after_R))
    beaten = max(late, early)
    where = f"tokens {int(rows_R[0])} to {int(rows_R[-1])}: of {num_rows} rows of last"
    if beaten - right >= max(3, num_rows // 10):
        way, offset = ("late", 0) if late >= early else ("early", 2)
        yield f"{where} {beaten} predict token t+{offset} and {right} token t+1: states are a row {way}"
    elif num_rows >= MIN_BEATEN_ROWS and right <= beaten:
        yield f"{where} {right} predict the next token, no more than another: not this sample's states"


def _below_floor(score: Score) -> Iterator[str]:
    rows, found = score.num_assistant_rows, score.num_assistant_next
    if rows >= MIN_FLOOR_ROWS and found + 1 < GREEDY_FLOOR * rows:
        yield (
            f"last predicts {found} of {rows} greedy assistant tokens, expected {GREEDY_FLOOR:.0%} or more: "
            "not this sample's states"
        )


def _judge_streams(stored: StoredStates, boundaries: tuple[int, ...]) -> tuple[float | None, list[str]]:
    aux_rows = torch.arange(stored.num_aux_rows)
    last_rows = stored.has_last_T[: stored.num_aux_rows].nonzero().flatten()
    streams = [stored.aux_TAD[:, a] for a in range(len(boundaries))]
    names = [f"boundary {b}" for b in boundaries]
    problems: list[str] = []
    for a in range(len(boundaries) - 1):
        problems += _compare(names[a], names[a + 1], streams[a], streams[a + 1], aux_rows)
    problems += _compare(names[-1], "last", streams[-1], stored.last_TD, last_rows)
    mask_T = stored.loss_mask_T.bool()
    # Prompts begin alike in all samples, so only the assistant's rows tell samples apart.
    is_answer_R = mask_T[last_rows] & mask_T[(last_rows + 1).clamp(max=len(mask_T) - 1)]
    return _coherence(streams[-1], stored.last_TD, last_rows[is_answer_R]), problems


def _coherence(states_TD: torch.Tensor, other_TD: torch.Tensor, rows_all: torch.Tensor) -> float | None:
    """Mean correlation of two streams at equal rows; None for too few."""
    if len(rows_all) < MIN_COHERENCE_ROWS:
        return None
    parts = [
        _standardised(states_TD[rows_R]) * _standardised(other_TD[rows_R]) for rows_R in rows_all.split(WINDOW_ROWS)
    ]
    return round(float(torch.cat(parts).sum(1).mean()), 4)


def _compare(
    name: str, other: str, states_TD: torch.Tensor, other_TD: torch.Tensor, rows_all: torch.Tensor
) -> Iterator[str]:
    """Windows whose rows of one stream fit the other's one row off."""
    for rows_R in rows_all.split(WINDOW_ROWS):
        if len(rows_R) < MIN_STREAM_ROWS:
            continue
        alike_RR = _standardised(states_TD[rows_R]) @ _standardised(other_TD[rows_R]).T
        offset_R = rows_R[alike_RR.argmax(1)] - rows_R
        before, own, after = (int((offset_R == offset).sum()) for offset in (-1, 0, 1))
        if max(before, after) - own >= max(3, len(rows_R) // 20):
            yield (
                f"tokens {int(rows_R[0])} to {int(rows_R[-1])}: of {len(rows_R)} rows of {name} {max(before, after)} "
                f"fit the row {'before' if before >= after else 'after'} of {other} and {own} their own: a row apart"
            )


def _standardised(states_RD: torch.Tensor) -> torch.Tensor:
    """Channels centred and scaled over the rows, then rows of length 1, so that no loud channel decides."""
    states_RD = states_RD.float()
    spread_D, mean_D = torch.std_mean(states_RD, dim=0)
    centred_RD = (states_RD - mean_D) / (spread_D + 1e-6)
    return centred_RD / (centred_RD.norm(dim=1, keepdim=True) + 1e-6)
