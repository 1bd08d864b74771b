"""The documents where a drafter helps least, as text, so that people see what it misses.

walked documents → the lowest tau → answer cut at its rounds → what was accepted, what the target added
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from eyas.contracts import WorstDocument, WorstRound
from eyas.drafter.walk import Round
from eyas.evaluate.summary import WalkedDocument
from eyas.shards.reader import ShardReader

NUM_DOCUMENTS = 6
MIN_ROUNDS = 8
"""A document of fewer says little; where all are so short, they are taken as they are."""
MAX_ROUNDS = 120
"""Of one document that are shown."""
PROMPT_CHARACTERS = 400
"""Of the prompt's end that are shown."""
UNFINISHED = "\ufffd"
"""What a decoder writes for bytes that are no whole character yet."""
DecodeText = Callable[[Sequence[int]], str]


def worst_documents(
    walked: Sequence[WalkedDocument], reader: ShardReader, decode_text: DecodeText
) -> tuple[WorstDocument, ...]:
    """The documents of lowest tau, lowest first.

    Args:
        walked: Held-out documents.
        reader: Of the states that they were walked over.
        decode_text: Ids to text, special tokens included.
    """
    with_rounds = [document for document in walked if document.rounds]
    chosen = [document for document in with_rounds if len(document.rounds) >= MIN_ROUNDS] or with_rounds
    chosen.sort(key=lambda document: (_tau(document), document.sample_id))
    return tuple(
        _shown(document, reader.read(document.sample_id).input_ids_T.tolist(), decode_text)
        for document in chosen[:NUM_DOCUMENTS]
    )


def _tau(document: WalkedDocument) -> float:
    return document.num_emitted / len(document.rounds)


def _shown(document: WalkedDocument, ids: list[int], decode_text: DecodeText) -> WorstDocument:
    """The first answer that has rounds; its first token is the prefill's."""
    rounds = _first_answer(document.rounds)[:MAX_ROUNDS]
    start = rounds[0].row + 1
    cuts = [start, start + 1]
    for one in rounds:
        accepted = min(one.num_accepted, one.num_emitted)
        cuts += [one.row + 2 + accepted, one.row + 2 + one.num_emitted]
    first, *pieces = cut_text(ids, cuts, decode_text)
    return WorstDocument(
        sample_id=document.sample_id,
        source=document.source,
        tau=_tau(document),
        num_rounds=len(document.rounds),
        loop_share=document.loop_share,
        prompt=decode_text(ids[:start])[-PROMPT_CHARACTERS:],
        first=first,
        rounds=tuple(WorstRound(accepted=a, bonus=b) for a, b in zip(pieces[::2], pieces[1::2], strict=True)),
    )


def _first_answer(rounds: Sequence[Round]) -> list[Round]:
    """A round begins where the one before it ended, within an answer."""
    found = [rounds[0]]
    for one in rounds[1:]:
        if one.row != found[-1].row + found[-1].num_emitted:
            break
        found.append(one)
    return found


def cut_text(ids: Sequence[int], cuts: Sequence[int], decode_text: DecodeText) -> list[str]:
    """Text between neighbouring cuts; a character whose bytes lie on both sides belongs to the later piece.

    Args:
        ids: Of the whole document.
        cuts: Places in it, ascending.
        decode_text: Ids to text.
    """
    pieces, before = [], ""
    for cut in cuts[1:]:
        now = decode_text(ids[cuts[0] : cut])
        if cut != cuts[-1]:
            now = now.rstrip(UNFINISHED)
        pieces.append(now[len(before) :])
        before = now
    return pieces
