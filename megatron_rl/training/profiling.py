"""Time, memory and traces of the ranks in each trainer stage.

In every step each rank counts its memory and CPU time by stage, and the driver collects them once. In the steps that the
recipe names, PyTorch's profiler writes traces and memory snapshots:

    profile/step-3/rank-0/update_policy.json.gz        Chrome trace: ui.perfetto.dev opens it
    profile/step-3/rank-0/update_policy.memory.pickle  pytorch.org/memory_viz opens it; only with a GPU

A stage is profiled from its first call to the next stage's first call, so a trace shows a rank's waits. Writing a
trace takes seconds and happens between two stages. A failure is logged as a warning, and training continues without
the trace.
"""

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from megatron_rl.config.schema import Config
from megatron_rl.system.processes import process_probe
from megatron_rl.system.processes.host_memory import pop_host_peak_gib

logger = logging.getLogger(__name__)

_MAX_MEMORY_EVENTS = 500_000
"""Allocations that a snapshot remembers; about 200 MB of host memory."""
_MAX_RANKS = 64
"""Largest number of ranks whose seconds per stage are recorded, because they go into the timeline once per stage and step."""
StageKey = tuple[int, str]
"""(step, name of the stage)."""


def stage_profiler(config: Config, rank: int) -> "StageProfiler | None":
    """Return the rank's profiler, or None if it profiles nothing."""
    if not config.profile.steps or rank not in config.profile.ranks:
        return None
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # otherwise it reports every start and stop on standard error
    return StageProfiler(config, rank)


def memory_note(config: Config) -> str:
    """Note on how profile.memory is handled without a GPU, or an empty string."""
    if not (config.profile.memory and config.profile.steps) or torch.cuda.is_available():
        return ""
    return (
        "profile.memory: memory snapshots need a GPU, and there is none here: traces only "
        "(memory/<stage>_host_gib has the memory of each stage)"
    )


class StageProfiler:
    """Profiles the chosen stages of one rank."""

    def __init__(self, config: Config, rank: int) -> None:
        self._settings = config.profile
        self._folder = Path(config.run.output_dir) / "profile"
        self._rank = rank
        self._with_gpu = torch.cuda.is_available()
        self._stage: StageKey | None = None
        self._profile: profile | None = None
        self._num_written: dict[StageKey, int] = {}

    def start_stage(self, stage: StageKey | None) -> None:
        """Count the following work to ``stage``, or to no stage if None."""
        if stage == self._stage:
            return
        self._end()
        self._stage = stage
        if stage is not None and self._wants(stage):
            self._attempt(self._begin)

    def _wants(self, stage: StageKey) -> bool:
        settings = self._settings
        step, name = stage
        return step + 1 in settings.steps and (not settings.stages or name in settings.stages)

    def _begin(self) -> None:
        gpu = [ProfilerActivity.CUDA] if self._with_gpu else []
        if self._with_gpu and self._settings.memory:
            torch.cuda.memory._record_memory_history(max_entries=_MAX_MEMORY_EVENTS)
        started = profile(activities=[ProfilerActivity.CPU, *gpu], record_shapes=True)
        started.start()
        self._profile = started

    def _end(self) -> None:
        """Stop the profiler, if it runs, and write its trace."""
        if self._profile is None or self._stage is None:
            return
        stage, finished, self._profile = self._stage, self._profile, None
        number = self._num_written[stage] = self._num_written.get(stage, 0) + 1
        step, name = stage
        folder = self._folder / f"step-{step + 1}" / f"rank-{self._rank}"
        # A stage that another stage interrupts gets one file for each of its parts.
        name += f"-{number}" if number > 1 else ""

        def write() -> None:
            if self._with_gpu:
                torch.cuda.synchronize()  # kernels that were launched belong to this stage
            finished.stop()
            folder.mkdir(parents=True, exist_ok=True)
            finished.export_chrome_trace(str(folder / f"{name}.json.gz"))
            if self._with_gpu and self._settings.memory:
                torch.cuda.memory._dump_snapshot(str(folder / f"{name}.memory.pickle"))
                torch.cuda.memory._record_memory_history(enabled=None)

        self._attempt(write)

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except (OSError, RuntimeError) as error:
            logger.warning("rank %d: no profile of %s: %s", self._rank, self._stage, error)


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
    texts = {}
    for stage, ranks in found.items():
        if len(ranks) > _MAX_RANKS:
            by_time = sorted(ranks)
            ranks = by_time[: _MAX_RANKS // 2] + by_time[-_MAX_RANKS // 2 :]
        texts[stage] = " ".join(f"{rank}:{seconds:.4g}" for seconds, rank in sorted(ranks, key=lambda one: one[1]))
    return texts


def _together(one: ResourceUse, other: ResourceUse) -> ResourceUse:
    host_gib, device_gib = max(one.host_gib, other.host_gib), max(one.device_gib, other.device_gib)
    return ResourceUse(host_gib, device_gib, one.cpu_s + other.cpu_s, max(one.busy_s, other.busy_s))
