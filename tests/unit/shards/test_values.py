"""Rows that are no numbers and rows of zeros, against torch's own answers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.shards.values import row_faults

EVERY_BITS = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def expected(states_TD):
    return (~states_TD.isfinite()).any(1).tolist(), (states_TD == 0).all(1).tolist()


def found(states_TD):
    return tuple(rows_T.tolist() for rows_T in row_faults(states_TD))


def test_every_bfloat16_alone_and_beside_each_kind_of_neighbour():
    for neighbour in (0.0, -0.0, 1.0, -1.0, -3.0e38):
        other_T = torch.full_like(EVERY_BITS, neighbour)
        for columns in ((EVERY_BITS,), (EVERY_BITS, other_T), (other_T, EVERY_BITS, other_T)):
            states_TD = torch.stack(columns, dim=1)
            assert found(states_TD) == expected(states_TD)


def test_finite_rows_whose_sum_overflows_are_numbers():
    assert found(torch.full((2, 64), 3.0e38, dtype=torch.bfloat16)) == ([False, False], [False, False])
    assert found(torch.full((2, 64), 3.0e38)) == ([False, False], [False, False])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@given(
    st.lists(
        st.lists(
            st.sampled_from([0.0, -0.0, 1e-7, -2.0, float("nan"), float("inf"), -float("inf")]), min_size=3, max_size=3
        ),
        max_size=5,
    )
)
def test_any_dtype_and_a_view_of_a_wider_tensor(dtype, rows):
    states_TD = torch.tensor(rows, dtype=dtype).reshape(-1, 3)
    assert found(states_TD) == expected(states_TD)
    wide_TAD = torch.stack([states_TD, torch.full_like(states_TD, float("nan"))], dim=1)
    assert found(wide_TAD[:, 0]) == expected(states_TD)
