"""The pool of an ingest: deduplicates by content, chooses and splits by content hash, on disk.

Nothing here depends on the order in which rows come in. Rows of one opening (the messages before the first
answer, and the tools) stay in one split, so that no held-out prompt is trained on with another answer.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any

from eyas.canonical import canonical_json
from eyas.contracts import Conversation
from eyas.conversations.table import conversation_id


class Pool:
    """Conversations in a scratch database.

    Args:
        database: Empty.
        seed: Enters the hashes that choose and split.
    """

    def __init__(self, database: sqlite3.Connection, seed: int) -> None:
        self._database, self._seed = database, seed
        database.execute(
            "CREATE TABLE pool (id TEXT PRIMARY KEY, source TEXT, evaluation INT, held_out INT DEFAULT 0,"
            " choice BLOB, opening BLOB, messages TEXT, tools TEXT) WITHOUT ROWID"
        )

    def add(
        self, source: str, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], evaluation: bool
    ) -> bool:
        """Add a conversation unless an equal one is there.

        Args:
            source: Name of its prompt set.
            messages: OpenAI style.
            tools: OpenAI style.
            evaluation: Always held out and never left out.

        Returns:
            Whether it was new.

        Raises:
            ValueError: A text is no valid Unicode or a number is not finite.
        """
        identifier = conversation_id(messages, tools)
        first_answer = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), len(messages))
        opening = canonical_json([messages[:first_answer], tools])
        done = self._database.execute(
            "INSERT OR IGNORE INTO pool (id, source, evaluation, choice, opening, messages, tools)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                identifier,
                source,
                int(evaluation),
                self._hash("choose", identifier),
                self._hash("split", opening),
                canonical_json(messages),
                canonical_json(tools),
            ),
        )
        return done.rowcount == 1

    def _hash(self, purpose: str, text: str) -> bytes:
        return hashlib.blake2b(f"{purpose}:{self._seed}:{text}".encode(), digest_size=16).digest()

    def choose(self, max_conversations: int, held_out_share: float) -> None:
        """Keep the wanted number and split.

        Args:
            max_conversations: Beside evaluation prompts; 0 keeps all.
            held_out_share: Of openings, rounded; at least one opening on either side when there are two.
        """
        run = self._database.execute
        run("UPDATE pool SET held_out = 1 WHERE evaluation = 1")
        if max_conversations:
            run(
                "DELETE FROM pool WHERE evaluation = 0 AND id NOT IN"
                " (SELECT id FROM pool WHERE evaluation = 0 ORDER BY choice, id LIMIT ?)",
                (max_conversations,),
            )
        (num_openings,) = run("SELECT COUNT(DISTINCT opening) FROM pool WHERE evaluation = 0").fetchone()
        num_held_out = min(max(round(held_out_share * num_openings), 1), num_openings - 1)
        run(
            "UPDATE pool SET held_out = 1 WHERE opening IN"
            " (SELECT DISTINCT opening FROM pool WHERE evaluation = 0 ORDER BY opening LIMIT ?)"
            " OR opening IN (SELECT opening FROM pool WHERE evaluation = 1)",
            (max(num_held_out, 0),),
        )

    def counts(self) -> list[tuple[str, str, int]]:
        """(source, split, conversations), sorted."""
        return self._database.execute(
            "SELECT source, CASE held_out WHEN 1 THEN 'held_out' ELSE 'train' END, COUNT(*) FROM pool"
            " GROUP BY 1, 2 ORDER BY 1, 2"
        ).fetchall()

    def num_rows(self) -> int:
        """Conversations that are no evaluation prompts."""
        return self._database.execute("SELECT COUNT(*) FROM pool WHERE evaluation = 0").fetchone()[0]

    def rows(self) -> Iterator[Conversation]:
        """All conversations."""
        for identifier, source, held_out, messages, tools in self._database.execute(
            "SELECT id, source, held_out, messages, tools FROM pool"
        ):
            yield Conversation(
                conversation_id=identifier,
                source=source,
                split="held_out" if held_out else "train",
                messages=tuple(json.loads(messages)),
                tools=tuple(json.loads(tools)),
            )
