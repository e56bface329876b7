"""PyTorch's profiler and memory snapshots of one rank, a file for each trainer stage of the steps that the recipe names.

    profile/step-3/rank-0/update_policy.json.gz        Chrome trace: ui.perfetto.dev opens it
    profile/step-3/rank-0/update_policy.memory.pickle  pytorch.org/memory_viz opens it; only with a GPU

A stage is profiled from its first call to the next stage's first call, so a trace shows a rank's waits. Writing a
trace takes seconds and happens between two stages. A failure is logged as a warning, and training continues without
the trace.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from megatron_rl.config.schema import Config
from megatron_rl.training.stage_resources import StageKey

logger = logging.getLogger(__name__)

_MAX_MEMORY_EVENTS = 500_000
"""Allocations that a snapshot remembers; about 200 MB of host memory."""


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
