"""Which ranks can map files of the driver and of its rollout workers: those of its machine, where they may open them."""

import os
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from megatron_rl.parallel import collectives
from megatron_rl.parallel.array_server import Service, start_array_server
from megatron_rl.parallel.topology import Replicas
from megatron_rl.system.shared_file import Address, MappedFiles, SharedArrays, address_of


@dataclass(frozen=True)
class Reach:
    """What the driver asks the ranks to look for."""

    address: Address
    content: bytes
    """That lies there: another machine may have a process with the same number."""

    def report(self) -> list[bool]:
        """Every rank calls it; the driver gets, by rank, whether it finds the content."""
        try:
            found = bytes(MappedFiles().at(self.address)) == self.content
        except (OSError, ValueError):
            found = False
        return collectives.gather_objects(found, what="whether it can map the driver's files")


class Ways:
    """How arrays of the driver's machine get to the ranks: those that can map them do, the others fetch them."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self.shared = SharedArrays()
        """What the driver itself puts where others can map it."""

    @cached_property
    def _near(self) -> tuple[int, ...]:
        """The ranks that can map them, rank 0 first; the other ranks ``report`` meanwhile."""
        if self._num_ranks == 1:
            return (0,)
        content = os.urandom(64)
        array = self.shared.put(np.frombuffer(content, np.uint8))
        address = address_of(array)
        assert address is not None  # it was put there
        reach = Reach(address, content)
        collectives.broadcast_object(reach, what="what it may be able to map")
        found = reach.report()
        return tuple(rank for rank in range(self._num_ranks) if found[rank])

    @cached_property
    def _service(self) -> Service | None:
        """Where the others fetch them."""
        return None if len(self._near) == self._num_ranks else start_array_server(os.environ["MASTER_ADDR"])

    def to(self, replicas: Replicas) -> dict[str, Any]:
        """What ``collectives.deliver`` needs to know; collective at first."""
        far = {replica for rank, replica in enumerate(replicas.of_ranks) if rank not in self._near}
        near = tuple(head for head in replicas.heads if replicas.of_ranks[head] not in far)
        return {"near": near, "service": self._service}

    @property
    def note(self) -> str:
        """What is worth knowing of ranks on other machines; empty where there are none. Collective at first."""
        far = sorted(set(range(self._num_ranks)) - set(self._near))
        if self._service is None:
            return ""
        return (
            f"{len(far)} of {self._num_ranks} ranks (the first is rank {far[0]}) cannot map files of rank 0: they are on other machines, "
            f"or in containers of their own. The first rank of each of their replicas takes tokens from {self._service.location}"
        )
