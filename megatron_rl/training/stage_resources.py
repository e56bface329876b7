"""Measures memory and CPU time of the ranks in each trainer stage. Each rank counts its own; the driver collects once per step."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from megatron_rl.system.processes import process_probe
from megatron_rl.system.processes.host_memory import pop_host_peak_gib

_MAX_RANKS = 64
"""Largest number of ranks whose seconds per stage are recorded, because they go into the timeline once per stage and step."""


StageKey = tuple[int, str]
"""(step, name of the stage)."""


class ResourceUse(NamedTuple):
    """Resources that one rank used, or for several ranks the largest memory and the CPU time of all."""

    host_gib: float = 0.0
    """Largest resident memory."""
    device_gib: float = 0.0
    """Peak of PyTorch's allocations; 0 on a CPU."""
    cpu_s: float = 0.0
    """CPU time of the process; the driver's includes its other threads."""
    busy_s: float = 0.0
    """Seconds in the driver's calls, without the waits between calls; for several ranks, the longest."""


class StageMeter:
    """Counts the resources of one rank by stage."""

    def __init__(self) -> None:
        self._stage: StageKey | None = None
        self._uses: dict[StageKey, ResourceUse] = {}
        self._cpu_s = time.process_time()
        self._busy_s = 0.0

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count the block as work of a call."""
        started_s = time.monotonic()
        try:
            yield
        finally:
            self._busy_s += time.monotonic() - started_s

    def start_stage(self, stage: StageKey | None) -> None:
        """Attribute resources to ``stage`` from now on; None: to no stage."""
        if stage == self._stage:
            return
        used = self._take_use()
        if self._stage is not None:
            before = self._uses.get(self._stage, ResourceUse())
            self._uses[self._stage] = _together(before, used)._replace(busy_s=before.busy_s + used.busy_s)
        self._stage = stage
        process_probe.set_status("stage", f"{stage[1]} of step {stage[0] + 1}" if stage else "")

    def take(self) -> dict[StageKey, ResourceUse]:
        """Resources by stage since the last call; ends the present stage."""
        self.start_stage(None)
        uses, self._uses = self._uses, {}
        return uses

    def _take_use(self) -> ResourceUse:
        """Resources since the last call."""
        before_s, self._cpu_s = self._cpu_s, time.process_time()
        device_gib = 0.0
        if torch.cuda.is_available():
            device_gib = torch.cuda.max_memory_allocated() / 1024**3
            torch.cuda.reset_peak_memory_stats()
        busy_s, self._busy_s = self._busy_s, 0.0
        return ResourceUse(pop_host_peak_gib(), device_gib, self._cpu_s - before_s, busy_s)


def of_all_ranks(accounts: Iterable[Mapping[StageKey, ResourceUse]]) -> dict[StageKey, ResourceUse]:
    """Maps each stage to the resources of all ranks, from the results of their ``take``."""
    result: dict[StageKey, ResourceUse] = {}
    for account in accounts:
        for stage, use in account.items():
            result[stage] = _together(result.get(stage, ResourceUse()), use)
    return result


def seconds_by_rank(accounts: Sequence[Mapping[StageKey, ResourceUse]]) -> dict[StageKey, str]:
    """Text ``rank:seconds ...`` of the ranks' own work in each stage; of many ranks only the slowest and the fastest."""
    found: dict[StageKey, list[tuple[float, int]]] = {}
    for rank, account in enumerate(accounts):
        for stage, use in account.items():
            found.setdefault(stage, []).append((use.busy_s, rank))
    words = {}
    for stage, ranks in found.items():
        if len(ranks) > _MAX_RANKS:
            by_time = sorted(ranks)
            ranks = by_time[: _MAX_RANKS // 2] + by_time[-_MAX_RANKS // 2 :]
        words[stage] = " ".join(f"{rank}:{seconds:.4g}" for seconds, rank in sorted(ranks, key=lambda one: one[1]))
    return words


def _together(one: ResourceUse, other: ResourceUse) -> ResourceUse:
    host_gib, device_gib = max(one.host_gib, other.host_gib), max(one.device_gib, other.device_gib)
    return ResourceUse(host_gib, device_gib, one.cpu_s + other.cpu_s, max(one.busy_s, other.busy_s))
