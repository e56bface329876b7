"""How arrays get to the ranks: ranks on an array's node map it, all others fetch it over Arrow Flight.

A rank can map files of the driver and of its rollout workers if it is on the driver's machine and may open them.
Other nodes may have their own rollout workers and files (``add_node``), which their ranks can map.
"""

import os
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np

from megatron_rl.parallel import collectives
from megatron_rl.parallel.array_server import ArrayServerAddress, Reachability, start_array_server
from megatron_rl.parallel.topology import ReplicaRanks
from megatron_rl.system.files.shared_file import Address, SharedArrays, address_of, bytes_at
from megatron_rl.training.trainer_rank import Call, TrainerRank

MapProbe = tuple[Address, bytes]
"""An array that a rank tries to map: address and content."""


def new_probe(shared: SharedArrays) -> tuple[MapProbe, np.ndarray]:
    """A probe among ``shared``, and its array: the probe is valid for as long as something refers to the array."""
    content = os.urandom(64)  # random: another machine may have a process with the same number
    array = shared.put(np.frombuffer(content, np.uint8))
    address = address_of(array)
    assert address is not None  # it was put there
    return (address, content), array


def can_map(probe: MapProbe) -> bool:
    """True if this process finds the content at the address."""
    address, content = probe
    try:
        return bytes_at(np.array([address]))[0].tobytes() == content
    except (OSError, ValueError):
        return False


def report_probe(rank: TrainerRank, *, probe: MapProbe) -> list[bool]:
    """Tell the driver on which ranks ``can_map`` is true. Collective."""
    return collectives.gather_objects(can_map(probe), what="whether it can map the driver's files")


class ArrayTransport:
    """Knows which ranks can map which node's files, and where the other ranks fetch them."""

    def __init__(self, num_ranks: int, call: Callable[[Call], Any]) -> None:
        """``call``: runs a call on all ranks."""
        self._num_ranks, self.call = num_ranks, call
        self.shared = SharedArrays()
        """The driver's own arrays that other processes can map."""
        self._further: list[tuple[ArrayServerAddress, Sequence[int]]] = []
        """Nodes from 1 on: the array server of the node, and the ranks that can map the node's files."""

    @cached_property
    def near(self) -> tuple[int, ...]:
        """The ranks that can map the driver's files, rank 0 first. The first call is collective."""
        if self._num_ranks == 1:
            return (0,)
        probe, _array = new_probe(self.shared)
        found = self.call(Call("what it may be able to map", partial(report_probe, probe=probe)))
        return tuple(rank for rank in range(self._num_ranks) if found[rank])

    @property
    def has_far(self) -> bool:
        """True if some rank is not on the driver's machine."""
        return len(self.near) < self._num_ranks

    @cached_property
    def _service(self) -> ArrayServerAddress | None:
        """Server from which ranks on other machines fetch the driver's arrays; None if there are no such ranks."""
        return start_array_server(os.environ["MASTER_ADDR"]) if self.has_far else None

    def add_node(self, service: ArrayServerAddress, ranks: Sequence[int]) -> int:
        """Register a node before the first call with its arrays; returns the node's number."""
        # A second attempt of the run registers the same nodes again.
        if (service, ranks) not in self._further:
            self._further.append((service, ranks))
        return self._further.index((service, ranks)) + 1

    def reaches(self, replicas: ReplicaRanks) -> list[Reachability]:
        """The arrays that each replica can map or fetch. The first call is collective."""
        nodes = dict.fromkeys(self.near, 0)
        # A rank that maps the driver's files is on its machine, also if a further node names it.
        nodes |= {rank: node for node, (_, ranks) in enumerate(self._further, 1) for rank in ranks if rank not in nodes}
        services = dict(enumerate([self._service, *(service for service, _ in self._further)]))
        of_replica: dict[int, set[int]] = {}
        for rank, replica in enumerate(replicas.of_ranks):
            of_replica.setdefault(replica, set()).add(nodes.get(rank, -1))
        reaches = []
        for head in replicas.replica_roots:
            node = nodes.get(head, -1)
            reaches.append(Reachability(node, node >= 0 and of_replica[replicas.of_ranks[head]] == {node}, services))
        return reaches

    def nodes(self, replicas: ReplicaRanks) -> list[int]:
        """Node whose files the root of each replica maps; -1: none. The first call is collective."""
        return [reach.node for reach in self.reaches(replicas)]

    @property
    def note(self) -> str:
        """Message about ranks on other machines; empty if there are none. The first call is collective."""
        far = sorted(set(range(self._num_ranks)) - set(self.near))
        if self._service is None:
            return ""
        return (
            f"{len(far)} of {self._num_ranks} ranks (the first is rank {far[0]}) cannot map files of rank 0: they are on other machines, "
            f"or in containers of their own. One rank of each of their replicas fetches tokens from {self._service.location}"
        )
