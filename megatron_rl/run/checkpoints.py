"""Saves and loads a run's checkpoints. A checkpoint is complete, or it does not count.

``checkpoints/step-N/`` has the state after N steps: the trained models (weights, optimizers, schedules), the slot
pool with its unfinished trajectories, and the sampler. ``checkpoint_folder.py`` describes the files and detects
damage. This module decides when they are written, which are kept, and which one a run resumes from.

``policies/step-N/`` is the policy after N steps as a Hugging Face folder, so that policies can be evaluated over time without
spending training time. ``kept.json`` in it, written last, records when: ``{"step": N, "trained_s": seconds}``. A policy is
exported at the first step whose update ends at or after a multiple of ``run.keep_policy_every_s``.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.config.derived import is_due, saves_in_background
from megatron_rl.config.schema import Config, RunConfig
from megatron_rl.errors import UserError
from megatron_rl.parallel.topology import local_device
from megatron_rl.run import checkpoint_folder as folders
from megatron_rl.run.checkpoint_folder import DamagedCheckpoint, candidates, flatten_state, resume_hint
from megatron_rl.system.files.atomic_files import Checksums, write_atomic
from megatron_rl.training.model_checkpoint import CheckpointError, CheckpointSaveError
from megatron_rl.training.trainer_group import TrainerGroup

_POLICIES_FOLDER = "policies"
_EXPORT_NOTE = "kept.json"


class Checkpointer:
    """Writes checkpoints when they are due, removes those that no keep rule covers, and loads one."""

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
            engines: names of the engines that train (value pretraining saves only its critic).
            accuracies: accuracy of each evaluation so far, keyed by steps done; for run.keep_best.
        """
        self._engines = list(engines)
        self._config = config.run
        self._group = group
        self._folder = Path(config.run.output_dir) / "checkpoints"
        self._accuracies = accuracies
        self._in_background = saves_in_background(config.run, local_device().type)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-driver")
        self._pending: tuple[int, Path, bool, Future[Checksums]] | None = None
        """(step, folder, healthy, the driver's files) of a checkpoint that is being written; it does not count yet."""
        self._missed = ""
        self.newest_step = -1
        """Step of the newest checkpoint that this process has written, or -1."""
        self.num_failed = 0
        """Number of checkpoints that could not be written."""
        self.skipped: list[str] = []
        """Checkpoints that ``load`` skipped, with the reasons."""

    def due(self, step: int) -> bool:
        """True after every run.save_every_steps steps, after the last step, and in the step after a failed save."""
        last = step + 1 == self._config.num_steps
        return bool(self._missed) or last or is_due(step + 1, self._config.save_every_steps)

    def save(self, step: int, driver: dict[str, Any], *, weight_version: int, healthy: bool = True) -> str:
        """Save a checkpoint. Returns an empty string, or the problem; the run may continue, and the next step retries.

        ``driver`` is the driver's own state: the pool, the KL controller. ``healthy``: the newest healthy
        checkpoint is kept regardless of the keep rules. With run.async_save the checkpoint counts once
        ``finish_background_save`` finds it complete; this method waits for the previous checkpoint.
        """
        # Only one background save may be in progress.
        problem = self.finish_background_save(wait=True)
        target = self._folder / folders.folder_name(step + 1)
        state, arrays = flatten_state({"num_steps_done": step + 1, "weight_version": weight_version, **driver})
        begin = self._group.start_save if self._in_background else self._group.save_state
        try:
            # Invalidate an older checkpoint of this name before its files change.
            folders.begin(target)
            written = self._writer.submit(folders.write_driver_state, target, state, arrays)
            self._pending = step, target, healthy, written
            for engine in self._engines:
                begin(engine, str(target / engine))
        except (CheckpointSaveError, OSError) as error:
            if self._in_background:
                with suppress(CheckpointSaveError):  # saves that other models have started
                    self._group.finish_saves()
            return self._failed(step, str(error))
        return problem if self._in_background else self.finish_background_save(wait=True)

    def finish_background_save(self, *, wait: bool) -> str:
        """Finish a background save once it is written. Returns an empty string, or the problem."""
        if self._pending is None:
            return ""
        step, target, healthy, written = self._pending
        if not (wait or (written.done() and self._group.saves_are_written())):
            return ""
        try:
            if self._in_background:
                self._group.finish_saves()
            folders.write_manifest(target, self._engines, written.result(), healthy=healthy)
            folders.write_latest(target)
        except (CheckpointSaveError, OSError) as error:
            return self._failed(step, str(error))
        self._pending, self._missed, self.newest_step = None, "", step
        self._remove_old()
        return ""

    def _failed(self, step: int, problem: str) -> str:
        self._missed = f"after step {step + 1}: {problem}"
        self.num_failed += 1
        pending, self._pending = self._pending, None
        if pending is not None:
            _, target, _, written = pending
            # The thread may still write into the folder that is removed next.
            futures.wait([written])
            if not (target / "manifest.json").exists():
                shutil.rmtree(target, ignore_errors=True)
        return self._missed

    def check_saved(self) -> None:
        """Raise UserError if the newest checkpoint could not be written, so that a run without it does not end as a success."""
        if self._missed:
            saved = ", ".join(folder.name for folder in candidates(self._folder)) or "none"
            raise UserError(
                f"run.output_dir: no checkpoint {self._missed}. All steps are done, but {self._folder} lacks the last of them (complete: "
                f"{saved}); free disk space, or give a larger disk, and repeat the run with run.resume=auto"
            )

    @property
    def newest_healthy(self) -> Path | None:
        """The checkpoint to return to after a collapse; waits for one that is being written."""
        self.finish_background_save(wait=True)
        return next(filter(folders.is_healthy, candidates(self._folder)), None)

    def load(self, take: Callable[[dict[str, Any]], None], *, healthy: bool = False) -> dict[str, Any] | None:
        """Load the newest complete checkpoint on every rank. Returns the driver's state, after ``take`` has restored it.

        Returns None if there is none and run.resume=auto. With run.resume=true a damaged newest checkpoint raises
        UserError. ``healthy``: consider only checkpoints saved while training showed no warning sign.
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
                _restore(take, state, folder)
                return state
            except (CheckpointError, DamagedCheckpoint) as error:
                if self._config.resume != "auto":
                    raise UserError(f"{error}\n{resume_hint(self._folder, folder, self._engines)}") from error
                self.skipped.append(f"skipped checkpoint {folder.name}: {error}")
        return None

    def _remove_old(self) -> None:
        for folder in folders.removable(self._folder, self.newest_step + 1, self._config, self._accuracies()):
            shutil.rmtree(folder, ignore_errors=True)


def _restore(take: Callable[[dict[str, Any]], None], state: dict[str, Any], folder: Path) -> None:
    try:
        take(state)
    except UserError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise DamagedCheckpoint(f"{folder / 'driver.json'} does not contain the state of a run: {error!r}") from error


# ------------------------------------------------------------------------------------------------------ exported policies


@dataclass(frozen=True)
class PolicyExport:
    """A policy that a run has exported."""

    folder: Path
    step: int
    """Number of steps done."""
    trained_s: float
    """Seconds from the start of the first step to the end of the policy's update."""


def policy_exports(output_dir: str | Path) -> list[PolicyExport]:
    """The policies that a run has exported, by step; incomplete exports are omitted."""
    policies = []
    for note in Path(output_dir).glob(f"{_POLICIES_FOLDER}/step-*/{_EXPORT_NOTE}"):
        record = json.loads(note.read_text())
        policies.append(PolicyExport(note.parent, int(record["step"]), float(record["trained_s"])))
    return sorted(policies, key=lambda kept: kept.step)


class PolicyExporter:
    """Exports policies when they are due. A resumed run deletes the exports of steps that it repeats."""

    def __init__(self, config: RunConfig, group: TrainerGroup, *, first_step: int) -> None:
        self._every_s = config.keep_policy_every_s
        self._output_dir = Path(config.output_dir)
        self._group = group
        self._kept_s = 0.0
        for kept in policy_exports(config.output_dir):
            if kept.step > first_step:
                shutil.rmtree(kept.folder)
            else:
                self._kept_s = kept.trained_s

    def keep_if_due(self, step: int, trained_s: float) -> None:
        """Export the policy if it is due, collectively over the trainer ranks. ``trained_s``: as in PolicyExport."""
        # Due once per multiple of the interval, regardless of where in it the step ends.
        if not self._every_s or trained_s // self._every_s <= self._kept_s // self._every_s:
            return
        folder = self._output_dir / _POLICIES_FOLDER / f"step-{step + 1}"
        self._group.save_hf("policy", str(folder))
        write_atomic(folder / _EXPORT_NOTE, json.dumps({"step": step + 1, "trained_s": trained_s}))
        self._kept_s = trained_s
