"""Which ranks can map files of the driver and of its rollout workers: those of its machine, where they may open them."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.parallel import collectives
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


def near_ranks(ranks: Sequence[int], shared: SharedArrays) -> tuple[int, ...]:
    """Those of ``ranks`` that can map the driver's files; the other ranks ``report`` meanwhile."""
    if not ranks:
        return ()
    content = os.urandom(64)
    array = shared.put(np.frombuffer(content, np.uint8))
    address = address_of(array)
    assert address is not None  # it was put there
    reach = Reach(address, content)
    collectives.broadcast_object(reach, what="what it may be able to map")
    found = reach.report()
    return tuple(rank for rank in ranks if found[rank])


def far_note(ranks: Sequence[int], near: Sequence[int]) -> str:
    """What is worth knowing of those of ``ranks`` that are not ``near``; empty where there are none."""
    far = [rank for rank in ranks if rank not in near]
    if not far:
        return ""
    return (
        f"{len(far)} of {len(ranks) + 1} replicas of the trainer (the first is that of rank {far[0]}) cannot map files of rank 0: "
        "they are on other machines, or in containers of their own. What they work on passes rank 0"
    )
