"""How arrays get to the ranks: ranks on an array's node map it, all others fetch it over Arrow Flight.

A rank can map files of the driver and of its rollout workers if it is on the driver's machine and may open them. Other nodes
may have rollout workers and files of their own (``add_node``), which their ranks can map.
"""

import os
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from megatron_rl.parallel import collectives
from megatron_rl.parallel.array_server import ArrayServerAddress, Reachability, start_array_server
from megatron_rl.parallel.topology import ReplicaRanks
from megatron_rl.system.files.shared_file import Address, SharedArrays, address_of, bytes_at
from megatron_rl.training.trainer_rank import Call, TrainerRank


class MapProbe(NamedTuple):
    """An array that a rank tries to map."""

    address: Address
    content: bytes
    """Random: another machine may have a process with the same number."""

    def succeeds(self) -> bool:
        """This rank finds the content at the address."""
        try:
            return bytes_at(np.array([self.address]))[0].tobytes() == self.content
        except (OSError, ValueError):
            return False


def report_probe(rank: TrainerRank, *, probe: MapProbe) -> list[bool]:
    """Tell the driver on which ranks the probe succeeds. Collective."""
    return collectives.gather_objects(probe.succeeds(), what="whether it can map the driver's files")


class ArrayTransport:
    """Knows which ranks can map which node's files, and where the other ranks fetch them."""

    def __init__(self, num_ranks: int, call: Callable[[Call], Any]) -> None:
        """``call``: runs a call on all ranks."""
        self._num_ranks, self.call = num_ranks, call
        self.shared = SharedArrays()
        """Arrays of the driver itself that others can map."""
        self._further: list[tuple[ArrayServerAddress, Sequence[int]]] = []
        """Nodes from 1 on: where others fetch their arrays, and the ranks that map them."""

    @cached_property
    def near(self) -> tuple[int, ...]:
        """The ranks that can map the driver's files, rank 0 first. Collective at first."""
        if self._num_ranks == 1:
            return (0,)
        content = os.urandom(64)
        array = self.shared.put(np.frombuffer(content, np.uint8))
        address = address_of(array)
        assert address is not None  # it was put there
        probe = partial(report_probe, probe=MapProbe(address, content))
        found = self.call(Call("what it may be able to map", probe))
        return tuple(rank for rank in range(self._num_ranks) if found[rank])

    @property
    def has_far(self) -> bool:
        """Not all ranks are on the driver's machine."""
        return len(self.near) < self._num_ranks

    @cached_property
    def _service(self) -> ArrayServerAddress | None:
        """The server from which ranks of other machines fetch the driver's arrays."""
        return start_array_server(os.environ["MASTER_ADDR"]) if self.has_far else None

    def add_node(self, service: ArrayServerAddress, ranks: Sequence[int]) -> int:
        """The number of a further node. Before the first call about arrays of that node."""
        if (service, ranks) not in self._further:
            self._further.append((service, ranks))
        return self._further.index((service, ranks)) + 1

    def reaches(self, replicas: ReplicaRanks) -> list[Reachability]:
        """The arrays that each replica can map or fetch. Collective at first."""
        nodes = dict.fromkeys(self.near, 0)
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
        """The node whose files the receiving rank of each replica maps; -1: none. Collective at first."""
        return [reach.node for reach in self.reaches(replicas)]

    @property
    def note(self) -> str:
        """A message about ranks on other machines; empty if there are none. Collective at first."""
        far = sorted(set(range(self._num_ranks)) - set(self.near))
        if self._service is None:
            return ""
        return (
            f"{len(far)} of {self._num_ranks} ranks (the first is rank {far[0]}) cannot map files of rank 0: they are on other machines, "
            f"or in containers of their own. One rank of each of their replicas takes tokens from {self._service.location}"
        )
