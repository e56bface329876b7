"""Checkpoints of a run: what training continues from, complete or not there at all.

``checkpoints/step-N/`` holds the state after N steps: the trained models (weights, optimizers, schedules), the slot
pool with its mid-response trajectories, and the sampler. ``latest.json`` is written last and names the newest one.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_rl.config.schema import Config
from megatron_rl.errors import UserError
from megatron_rl.system.files import write_whole
from megatron_rl.training.trainer_group import TrainerGroup

_NUM_KEPT = 2
"""Newest checkpoints that stay on disk."""


class Saver:
    """Writes checkpoints when they are due and removes old ones; reads the newest."""

    def __init__(self, config: Config, group: TrainerGroup, *, engines: Sequence[str]) -> None:
        """``engines``: names of those that train (value pretraining keeps its critic alone)."""
        self._engines = tuple(engines)
        self._config = config
        self._group = group
        self._folder = Path(config.run.output_dir) / "checkpoints"
        self.newest_step = -1
        """Of the checkpoints that this process has written."""

    def due(self, step: int) -> bool:
        """After every run.save_every_steps steps and after the last one."""
        every = self._config.run.save_every_steps
        return step + 1 == self._config.run.num_steps or (every > 0 and (step + 1) % every == 0)

    def save(self, step: int, driver: dict[str, Any], *, weight_version: int) -> None:
        """``driver`` is what the driver itself goes on from: the pool, the KL controller."""
        target = self._folder / f"step-{step + 1}"
        for engine in self._engines:
            self._group.save_state(engine, str(target / engine))
        state = {"num_steps_done": step + 1, "weight_version": weight_version, **driver}
        write_whole(target / "driver.json", json.dumps(state))
        write_whole(self._folder / "latest.json", json.dumps({"folder": target.name}))
        self.newest_step = step
        self._remove_old()

    def load(self) -> dict[str, Any]:
        """Bring every rank back to the newest checkpoint; returns the driver's part of it."""
        target = _newest_checkpoint(self._config.run.output_dir)
        if target is None:
            raise UserError(
                f"run.resume: {self._folder} holds no complete checkpoint; start without run.resume, or point "
                "run.output_dir at the run to continue"
            )
        for engine in self._engines:
            self._group.load_state(engine, str(target / engine))
        return json.loads((target / "driver.json").read_text())

    def _remove_old(self) -> None:
        saved = sorted(self._folder.glob("step-*"), key=lambda folder: int(folder.name.removeprefix("step-")))
        for folder in saved[:-_NUM_KEPT]:
            shutil.rmtree(folder)


def _newest_checkpoint(output_dir: str | Path) -> Path | None:
    folder = Path(output_dir) / "checkpoints"
    latest = folder / "latest.json"
    return folder / json.loads(latest.read_text())["folder"] if latest.is_file() else None
