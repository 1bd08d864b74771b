"""What is read of stored states, against the plan of the loss."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.contracts import StoredSample
from eyas.drafter.rows import Document, pack_documents, rows_to_read
from eyas.shards.reader import StoredStates


@given(st.lists(st.integers(0, 1), min_size=1, max_size=24), st.integers(1, 4))
def test_rows_to_read_are_the_teachers_and_the_keys_of_rows_that_train(mask, steps):
    """From the loss's own plan: where its teachers lie, and the last row that trains."""
    T = len(mask)
    states = torch.zeros(T, 16)
    sample = StoredSample(sample_id="s", num_tokens=T, conversation_id="c", source="s", split="train", variant="greedy")
    stored = StoredStates(
        sample,
        torch.zeros(T, dtype=torch.int32),
        torch.tensor(mask, dtype=torch.uint8),
        states[:, None],
        states,
        T,
        torch.ones(T, dtype=torch.bool),
    )
    pack = pack_documents([Document(stored.input_ids_T, stored.loss_mask_T, states[:, None], states)], steps)
    rows = rows_to_read(stored)
    assert rows.last_L.tolist() == pack.teachers_U.tolist()
    assert rows.num_aux == (int(pack.rows_R.max()) + 1 if len(pack.rows_R) else 0)
