"""A Ray cluster of several nodes on this machine, each with processes of its own, for measurements and tests.

The head has no room for workers, every other node for one: a node that is killed takes its worker with it.
"""

from __future__ import annotations

import os
import random
from typing import Any

from eyas.engines.ray.cluster import ADDRESS_VARIABLES, ENVIRONMENT

STORE_BYTES = 100 << 20


class Nodes:
    """A head and so many nodes. Use as a context manager: inside, ``EYAS_RAY_ADDRESS`` names it.

    Args:
        num_nodes: Nodes that have room for a worker.
    """

    def __init__(self, num_nodes: int) -> None:
        for name, value in ENVIRONMENT.items():  # read by what Ray starts
            os.environ.setdefault(name, value)
        from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

        self._cluster: Any = Cluster(initialize_head=True, head_node_args=self._arguments(0))
        self._nodes: list[Any] = []
        self._before = os.environ.get(ADDRESS_VARIABLES[0])
        for _ in range(num_nodes):
            self.add()

    @staticmethod
    def _arguments(num_cpus: int) -> dict[str, Any]:
        return {"num_cpus": num_cpus, "num_gpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False}

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return self._cluster.address

    def add(self) -> None:
        """A node joins; tried again when a driver in another thread leaves Ray meanwhile, which clears what all here share."""
        for is_last in (False, False, True):
            try:
                node = self._cluster.add_node(**self._arguments(1))
            except AssertionError:  # of Ray's, before it starts a process
                if is_last:
                    raise
            else:
                self._nodes.append(node)
                return

    def kill_one(self, dice: random.Random) -> None:
        """A node is gone, without a word, and another joins."""
        node = self._nodes.pop(dice.randrange(len(self._nodes)))
        self._cluster.remove_node(node, allow_graceful=False)
        self.add()

    def __enter__(self) -> Nodes:
        os.environ[ADDRESS_VARIABLES[0]] = self.address
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            os.environ.pop(ADDRESS_VARIABLES[0], None)
        else:
            os.environ[ADDRESS_VARIABLES[0]] = self._before
        self._cluster.shutdown()
