"""Checkpoints of a run: what training continues from, complete or not there at all.

``checkpoints/step-N/`` holds the state after N steps: the trained models (weights, optimizers, schedules), the slot
pool with its mid-response trajectories, and the sampler. What is in the folder and how damage is told:
``checkpoint_folder.py``. Here: when they are written, which are kept, and which one a run goes on from.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.config.derived import is_due, saves_in_background
from megatron_rl.config.schema import Config
from megatron_rl.errors import UserError
from megatron_rl.parallel.topology import local_device
from megatron_rl.run import checkpoint_folder as folders
from megatron_rl.run.checkpoint_folder import DamagedCheckpoint
from megatron_rl.run.resume_candidates import candidates, resume_hint
from megatron_rl.run.state_arrays import flatten_state
from megatron_rl.system.files.checksums import Checksums
from megatron_rl.training.model_checkpoint import CheckpointError, CheckpointSaveError
from megatron_rl.training.trainer_group import TrainerGroup


@dataclass(frozen=True)
class _Begun:
    """A checkpoint that lacks what makes it count."""

    step: int
    target: Path
    healthy: bool
    driver: "Future[Checksums]"
    """The driver's files, which a thread writes."""


class Checkpointer:
    """Writes checkpoints when they are due, removes those that the keep rules do not hold, and reads one back."""

    def __init__(
        self,
        config: Config,
        group: TrainerGroup,
        *,
        engines: Sequence[str],
        accuracies: Callable[[], Mapping[int, float]] = dict,
    ) -> None:
        """
        Args:
            engines: names of those that train (value pretraining keeps its critic alone).
            accuracies: of the evaluations so far, by steps done; for run.keep_best.
        """
        self._engines = list(engines)
        self._config = config.run
        self._group = group
        self._folder = Path(config.run.output_dir) / "checkpoints"
        self._accuracies = accuracies
        self._in_background = saves_in_background(config.run, local_device().type)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-driver")
        self._begun: _Begun | None = None
        self._missed = False
        self.newest_step = -1
        """Of the checkpoints that this process has written."""
        self.num_failed = 0
        """Checkpoints that could not be written."""
        self.skipped: list[str] = []
        """What ``load`` passed over, and why."""

    def due(self, step: int) -> bool:
        """After every run.save_every_steps steps, after the last one, and in the step after one that failed."""
        last = step + 1 == self._config.num_steps
        return self._missed or last or is_due(step + 1, self._config.save_every_steps)

    def save(self, step: int, driver: dict[str, Any], *, weight_version: int, healthy: bool = True) -> str:
        """Empty, or why nothing could be saved: the run may go on, and the next step tries again.

        ``driver`` is what the driver itself goes on from: the pool, the KL controller. ``healthy``: the newest such
        checkpoint is kept, whatever the keep rules say. With run.async_save the checkpoint counts once ``settle`` has
        found it written; the one before is waited for here.
        """
        problem = self.finish_background_save(wait=True)
        target = self._folder / folders.folder_name(step + 1)
        state, arrays = flatten_state({"num_steps_done": step + 1, "weight_version": weight_version, **driver})
        begin = self._group.start_save if self._in_background else self._group.save_state
        try:
            folders.begin(target)
            self._begun = _Begun(step, target, healthy, self._writer.submit(folders.write_driver_state, target, state, arrays))
            for engine in self._engines:
                begin(engine, str(target / engine))
        except (CheckpointSaveError, OSError) as error:
            if self._in_background:
                with suppress(CheckpointSaveError):  # what other models have begun
                    self._group.finish_saves()
            return self._failed(step, str(error))
        return problem if self._in_background else self.finish_background_save(wait=True)

    def finish_background_save(self, *, wait: bool) -> str:
        """What was saved in the background counts, once it is written; empty, or why it could not be."""
        begun = self._begun
        if begun is None or not (wait or (begun.driver.done() and self._group.saves_are_written())):
            return ""
        try:
            if self._in_background:
                self._group.finish_saves()
            folders.write_manifest(begun.target, self._engines, begun.driver.result(), healthy=begun.healthy)
            folders.write_latest(begun.target)
        except (CheckpointSaveError, OSError) as error:
            return self._failed(begun.step, str(error))
        self._begun, self._missed, self.newest_step = None, False, begun.step
        self._remove_old()
        return ""

    def _failed(self, step: int, problem: str) -> str:
        self._missed = True
        self.num_failed += 1
        begun, self._begun = self._begun, None
        if begun is not None:
            futures.wait([begun.driver])
        if begun is not None and not (begun.target / "manifest.json").exists():
            shutil.rmtree(begun.target, ignore_errors=True)
        return f"after step {step + 1}: {problem}"

    @property
    def newest_healthy(self) -> Path | None:
        """The checkpoint to return to when training has died; waits for one that is being written."""
        self.finish_background_save(wait=True)
        return next(filter(folders.is_healthy, candidates(self._folder)), None)

    def load(self, take: Callable[[dict[str, Any]], None], *, healthy: bool = False) -> dict[str, Any] | None:
        """Bring every rank back to the newest whole checkpoint; returns the driver's part of it, which ``take`` takes in.

        None with run.resume=auto where there is none. With run.resume=true a newest one that is damaged is refused.
        ``healthy``: only those that were saved while training showed no sign of having died.
        """
        if problem := self.finish_background_save(wait=True):
            self.skipped.append(f"no checkpoint {problem}")
        for folder in candidates(self._folder):
            if healthy and not folders.is_healthy(folder):
                continue
            try:
                folders.check_folder(folder, self._engines)
                state = folders.read_driver(folder)
                for engine in self._engines:
                    self._group.load_state(engine, str(folder / engine))
                _take_in(take, state, folder)
                return state
            except (CheckpointError, DamagedCheckpoint) as error:
                if self._config.resume != "auto":
                    raise UserError(f"{error}\n{resume_hint(self._folder, folder, self._engines)}") from error
                self.skipped.append(f"passed over checkpoint {folder.name}: {error}")
        return None

    def _remove_old(self) -> None:
        for folder in folders.removable(self._folder, self.newest_step + 1, self._config, self._accuracies()):
            shutil.rmtree(folder, ignore_errors=True)


def _take_in(take: Callable[[dict[str, Any]], None], state: dict[str, Any], folder: Path) -> None:
    try:
        take(state)
    except UserError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise DamagedCheckpoint(f"{folder / 'driver.json'} does not hold the state of a run: {error!r}") from error
