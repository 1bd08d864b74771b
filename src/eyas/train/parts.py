"""Who updates what, when several processes train: everything alike, equal parts, or whole matrices.

Each way says which places of a flat tensor [P] this rank updates, sums gradients into them and puts the values of
all ranks together again. Places that no rank has alone are updated by all of them alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from eyas.train.distributed import World


class Everything:
    """Every rank updates all values.

    Args:
        world: The ranks.
        num_values: P.
    """

    def __init__(self, world: World, num_values: int) -> None:
        self._world = world
        self.slices = [slice(0, num_values)]
        """Places that this rank updates, in their order."""

    def summed_norm(self, grad_P: torch.Tensor) -> torch.Tensor:
        """Sum gradients over ranks, in the places of this rank at least; the norm of the whole sum."""
        self._world.sum_(grad_P)
        return norm_of(grad_P).to(grad_P.dtype)

    def join_(self, values_P: torch.Tensor) -> None:
        """Give every rank what each of them has at its own places."""


class EqualParts(Everything):
    """An equal part for each rank; what does not divide belongs to all."""

    def __init__(self, world: World, num_values: int) -> None:
        super().__init__(world, num_values)
        size = num_values // world.size
        self._own = slice(world.rank * size, (world.rank + 1) * size)
        self._divided, self._rest = slice(size * world.size), slice(size * world.size, num_values)
        self.slices = [part for part in (self._own, self._rest) if part.stop > part.start]

    def summed_norm(self, grad_P: torch.Tensor) -> torch.Tensor:
        """As ``Everything``."""
        own_Y = torch.empty_like(grad_P[self._own])
        self._world.sum_part(grad_P[self._divided], own_Y)
        self._world.sum_(grad_P[self._rest])
        grad_P[self._own] = own_Y
        total = norm_of(own_Y).square()
        self._world.sum_(total)
        return (total + norm_of(grad_P[self._rest]).square()).sqrt().to(grad_P.dtype)

    def join_(self, values_P: torch.Tensor) -> None:
        """As ``Everything``."""
        self._world.join_parts(values_P[self._own].clone(), values_P[self._divided])


class WholeMatrices(Everything):
    """Each matrix belongs to one rank; what is no matrix belongs to all.

    Args:
        world: The ranks.
        num_values: P.
        matrices: Their places, one behind another; dealt from the largest on to the rank that has least.
    """

    def __init__(self, world: World, num_values: int, matrices: Sequence[slice]) -> None:
        super().__init__(world, num_values)
        self._matrices = dealt(matrices, world.size)
        self._own = [matrix for matrix, owner in self._matrices if owner == world.rank]
        ends = [0, *(place for matrix in matrices for place in (matrix.start, matrix.stop)), num_values]
        between = [slice(*ends[i : i + 2]) for i in range(0, len(ends), 2)]
        self._shared = [part for part in between if part.stop > part.start]
        self.slices = sorted([*self._own, *self._shared], key=lambda part: part.start)

    def summed_norm(self, grad_P: torch.Tensor) -> torch.Tensor:
        """As ``Everything``; a matrix's sum is on its owner alone."""
        for matrix, owner in self._matrices:
            self._world.sum_on_(grad_P[matrix], owner)
        for part in self._shared:
            self._world.sum_(grad_P[part])
        own, shared = (self._squares(grad_P, parts) for parts in (self._own, self._shared))
        self._world.sum_(own)
        return (own + shared).sqrt().to(grad_P.dtype)

    @staticmethod
    def _squares(grad_P: torch.Tensor, parts: Sequence[slice]) -> torch.Tensor:
        return torch.stack([norm_of(grad_P[part]).square() for part in [slice(0), *parts]]).sum()

    def join_(self, values_P: torch.Tensor) -> None:
        """As ``Everything``."""
        for matrix, owner in self._matrices:
            self._world.send_(values_P[matrix], owner)


def dealt(matrices: Sequence[slice], num_ranks: int) -> list[tuple[slice, int]]:
    """Matrices with their ranks."""
    loads, owners = [0] * num_ranks, []
    for matrix in sorted(matrices, key=lambda matrix: matrix.start - matrix.stop):
        rank = loads.index(min(loads))
        loads[rank] += matrix.stop - matrix.start
        owners.append((matrix, rank))
    return owners


def norm_of(values_X: torch.Tensor) -> torch.Tensor:
    """Their norm; a CPU adds a million float32 squares up to 1e-4 only, so it does in float64."""
    return torch.linalg.vector_norm(values_X, dtype=torch.float64 if values_X.device.type == "cpu" else None)
