"""Writes a run to Weights & Biases, online or into the run's folder ``wandb`` (``wandb sync`` uploads it).

Invariants:
- A resumed run continues the W&B run whose id is in ``wandb_run.json``. That file also records the last step sent of each
  metric, so that steps repeated after a kill appear once.
- The x axis is the training step, logged as a metric: values of an earlier step may arrive late.
"""

import importlib
import json
import math
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.system.files.atomic_files import write_atomic
from megatron_rl.tracking.metrics_file import MetricsRow

_RUN_FILE = "wandb_run.json"
_STEP = "step"
_INIT_TIMEOUT_S = 30.0
_EXIT_CODES = {"FINISHED": 0, "FAILED": 1, "KILLED": 255}


class WandbStore:
    """A run in Weights & Biases. ``mode``: online or offline.

    Entity, key and server come from W&B's own variables: WANDB_ENTITY, WANDB_API_KEY, WANDB_BASE_URL.
    """

    name, key = "Weights & Biases", "tracking.wandb=null"

    def __init__(
        self, output_dir: str | Path, *, mode: str, project: str, params: Mapping[str, Any] | None = None, resume: bool = False
    ) -> None:
        self._folder = Path(output_dir).resolve()
        self.place = f"project {project}, {mode}"
        self._mode, self._project = mode, project
        plain = (int, float, str, type(None))
        self._params = {
            name: value if isinstance(value, plain) else json.dumps(value, default=str) for name, value in (params or {}).items()
        }
        self._id, self._last_step = self._earlier() if resume else ("", {})
        self._run: Any = None

    def _earlier(self) -> tuple[str, dict[str, int]]:
        """Returns (run id, last step sent of each metric), or empty values without a readable record."""
        try:
            record = json.loads((self._folder / _RUN_FILE).read_text())
            return str(record["id"]), {str(name): int(step) for name, step in record["last_step"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return "", {}

    def open(self) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")  # the driver displays the run
        wandb = importlib.import_module("wandb")
        self._id = self._id or secrets.token_hex(8)
        self._write_record()
        self._run = wandb.init(
            project=self._project,
            name=self._folder.name,
            id=self._id,
            resume="allow",
            dir=str(self._folder),
            mode=self._mode,
            config=self._params,
            allow_val_change=True,
            settings=wandb.Settings(console="off", save_code=False, init_timeout=_INIT_TIMEOUT_S),
        )
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)

    def send(self, rows: Sequence[MetricsRow]) -> str:
        for row in rows:
            new = {
                name: value
                for name, value in row.metrics.items()
                if math.isfinite(value) and row.step > self._last_step.get(name, -1)
            }
            if new:
                self._run.log({_STEP: row.step, **new})
                self._last_step |= dict.fromkeys(new, row.step)
        self._write_record()
        return ""

    def _write_record(self) -> None:
        write_atomic(self._folder / _RUN_FILE, json.dumps({"id": self._id, "last_step": self._last_step}))

    def send_file(self, path: Path) -> str:
        return ""  # W&B gets the recipe as the run's config and draws its own curves

    def close(self, status: str) -> None:
        self._run.finish(exit_code=_EXIT_CODES[status])
