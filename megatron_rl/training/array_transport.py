"""Which ranks can map files of the driver and of its rollout workers: those of its machine, where they may open them.

Other nodes may have rollout workers and files of their own (``add_node``), which their ranks can map.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from megatron_rl.parallel import collectives
from megatron_rl.parallel.array_server import ArrayServerAddress, start_array_server
from megatron_rl.parallel.collectives import Reachability
from megatron_rl.parallel.topology import ReplicaRanks
from megatron_rl.system.files.shared_file import Address, MappedFiles, SharedArrays, address_of


class Errand(ABC):
    """What the driver asks of every rank that concerns no engine. It is pickled."""

    @abstractmethod
    def report(self) -> list[Any]:
        """Every rank calls it; the driver gets what each one found, by rank. Collective."""


def ask(errand: Errand, what: str) -> list[Any]:
    """On the driver: the other ranks ``report`` meanwhile."""
    collectives.broadcast_object(errand, what=what)
    return errand.report()


@dataclass(frozen=True)
class Reach(Errand):
    """What the driver asks the ranks to look for."""

    address: Address
    content: bytes
    """That lies there: another machine may have a process with the same number."""

    def sees(self) -> bool:
        """This rank finds the content."""
        try:
            return bytes(MappedFiles().at(self.address)) == self.content
        except (OSError, ValueError):
            return False

    def report(self) -> list[bool]:
        """By rank, whether it finds the content."""
        return collectives.gather_objects(self.sees(), what="whether it can map the driver's files")


class ArrayTransport:
    """How arrays of the driver's machine and of other nodes get to the ranks: those that can map them do, the others fetch them."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self.shared = SharedArrays()
        """What the driver itself puts where others can map it."""
        self._further: list[tuple[ArrayServerAddress, Sequence[int]]] = []
        """Nodes from 1 on: where others fetch what lies there, and the ranks that map it."""

    @cached_property
    def near(self) -> tuple[int, ...]:
        """The ranks that can map the driver's files, rank 0 first; the other ranks ``report`` at first."""
        if self._num_ranks == 1:
            return (0,)
        content = os.urandom(64)
        array = self.shared.put(np.frombuffer(content, np.uint8))
        address = address_of(array)
        assert address is not None  # it was put there
        found = ask(Reach(address, content), what="what it may be able to map")
        return tuple(rank for rank in range(self._num_ranks) if found[rank])

    @property
    def has_far(self) -> bool:
        """Not all ranks are on the driver's machine."""
        return len(self.near) < self._num_ranks

    @cached_property
    def _service(self) -> ArrayServerAddress | None:
        """Where the others fetch them."""
        return start_array_server(os.environ["MASTER_ADDR"]) if self.has_far else None

    def add_node(self, service: ArrayServerAddress, ranks: Sequence[int]) -> int:
        """Its number. Before the first command about arrays that lie there."""
        if (service, ranks) not in self._further:
            self._further.append((service, ranks))
        return self._further.index((service, ranks)) + 1

    def to(self, replicas: ReplicaRanks) -> dict[str, Any]:
        """What ``collectives.scatter_payloads`` needs to know; collective at first."""
        nodes = dict.fromkeys(self.near, 0)
        nodes |= {rank: node for node, (_, ranks) in enumerate(self._further, 1) for rank in ranks if rank not in nodes}
        services = dict(enumerate([self._service, *(service for service, _ in self._further)]))
        of_replica: dict[int, set[int]] = {}
        for rank, replica in enumerate(replicas.of_ranks):
            of_replica.setdefault(replica, set()).add(nodes.get(rank, -1))
        sights = []
        for head in replicas.replica_roots:
            node = nodes.get(head, -1)
            sights.append(Reachability(node, node >= 0 and of_replica[replicas.of_ranks[head]] == {node}, services))
        return {"sights": sights}

    def nodes(self, replicas: ReplicaRanks) -> list[int]:
        """By replica: the node whose files its receiving rank maps, -1: of none. Collective at first."""
        return [sight.node for sight in self.to(replicas)["sights"]]

    @property
    def note(self) -> str:
        """What is worth knowing of ranks on other machines; empty where there are none. Collective at first."""
        far = sorted(set(range(self._num_ranks)) - set(self.near))
        if self._service is None:
            return ""
        return (
            f"{len(far)} of {self._num_ranks} ranks (the first is rank {far[0]}) cannot map files of rank 0: they are on other machines, "
            f"or in containers of their own. One rank of each of their replicas takes tokens from {self._service.location}"
        )
