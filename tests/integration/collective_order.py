"""Records the collectives that each rank enqueues, and checks that all ranks enqueue them in one order.

A collective waits for all ranks of its group. Ranks that enqueue those of two groups in different orders may each wait for
the other forever, on GPUs above all, where one collective keeps the next from starting.
"""

import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist

OPERATIONS = (
    "allreduce allreduce_coalesced broadcast allgather _allgather_base allgather_coalesced allgather_into_tensor_coalesced "
    "reduce reduce_scatter _reduce_scatter_base reduce_scatter_tensor_coalesced alltoall_base alltoall gather scatter barrier"
).split()
"""Methods of a process group. Messages between two ranks are not among them."""


class Call(NamedTuple):
    group: str
    """Name of the group, the same on all ranks."""
    members: tuple[int, ...]
    operation: str


@contextmanager
def recorded() -> Iterator[list[Call]]:
    """The collectives of this process, while inside."""
    calls: list[Call] = []

    def recording(name: str) -> Any:
        original = getattr(dist.ProcessGroup, name)

        @functools.wraps(original)
        def method(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            calls.append(Call(group.group_name, tuple(dist.get_process_group_ranks(group)), name))
            return original(group, *args, **kwargs)

        return method

    with ExitStack() as stack:
        for name in filter(functools.partial(hasattr, dist.ProcessGroup), OPERATIONS):
            stack.enter_context(patch.object(dist.ProcessGroup, name, recording(name)))
        yield calls


def disagreements(calls_of_ranks: Mapping[int, Sequence[Call]]) -> list[str]:
    """Return the reasons why ranks could deadlock; empty if there is none."""
    by_group: dict[str, dict[int, list[str]]] = defaultdict(dict)
    before: dict[tuple[str, int], set[tuple[str, int]]] = defaultdict(set)
    members: dict[str, tuple[int, ...]] = {}
    for rank, calls in calls_of_ranks.items():
        previous = None
        for call in calls:
            mine = by_group[call.group].setdefault(rank, [])
            # The n-th call of a group is one event for all of its ranks.
            event = (call.group, len(mine))
            mine.append(call.operation)
            members[call.group] = call.members
            if previous is not None:
                before[event].add(previous)
            previous = event
    problems = [
        f"ranks {ranks} of group {group} made different calls"
        for group, ranks in members.items()
        if len({tuple(by_group[group].get(rank, [])) for rank in ranks}) > 1
    ]
    try:
        TopologicalSorter(before).prepare()
    except CycleError as error:
        problems.append(f"ranks enqueue these in different orders: {error.args[1]}")
    return problems


def of_files(paths: Sequence[Any]) -> dict[int, list[Call]]:
    """Load the records that each rank saved with ``torch.save``."""
    return {rank: [Call(*call) for call in torch.load(path)] for rank, path in enumerate(paths)}
