"""What memory and CPU time the ranks used in each trainer stage. A rank keeps its own account; the driver asks once per step."""

import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from megatron_rl.system import doing
from megatron_rl.system.host_memory import take_host_peak_gib


class StageOfStep(NamedTuple):
    step: int
    name: str


class Use(NamedTuple):
    """Of one rank; of several, the memory of the one that used the most and the CPU time of all."""

    host_gib: float = 0.0
    """Largest resident memory."""
    device_gib: float = 0.0
    """Most that PyTorch allocated; 0 on a CPU."""
    cpu_s: float = 0.0
    """Of the process; the driver's counts what its other threads did meanwhile."""


class StageAccount:
    """Of one rank."""

    def __init__(self) -> None:
        self._stage: StageOfStep | None = None
        self._uses: dict[StageOfStep, Use] = {}
        self._cpu_s = time.process_time()

    def enter(self, stage: StageOfStep | None) -> None:
        """What is used from now on is used in ``stage``; None: between two stages, where nobody counts."""
        if stage == self._stage:
            return
        used = self._take_use()
        if self._stage is not None:
            self._uses[self._stage] = _together(self._uses.get(self._stage, Use()), used)
        self._stage = stage
        doing.note("stage", f"{stage.name} of step {stage.step + 1}" if stage else "")

    def take(self) -> dict[StageOfStep, Use]:
        """All that was counted since the last call; the present stage ends."""
        self.enter(None)
        uses, self._uses = self._uses, {}
        return uses

    def _take_use(self) -> Use:
        """Since the last call."""
        before_s, self._cpu_s = self._cpu_s, time.process_time()
        device_gib = 0.0
        if torch.cuda.is_available():
            device_gib = torch.cuda.max_memory_allocated() / 1024**3
            torch.cuda.reset_peak_memory_stats()
        return Use(take_host_peak_gib(), device_gib, self._cpu_s - before_s)


def of_all_ranks(accounts: Iterable[Mapping[StageOfStep, Use]]) -> dict[StageOfStep, Use]:
    """By stage, of what each rank's ``take`` gave."""
    result: dict[StageOfStep, Use] = {}
    for account in accounts:
        for stage, use in account.items():
            result[stage] = _together(result.get(stage, Use()), use)
    return result


def _together(one: Use, other: Use) -> Use:
    return Use(max(one.host_gib, other.host_gib), max(one.device_gib, other.device_gib), one.cpu_s + other.cpu_s)
