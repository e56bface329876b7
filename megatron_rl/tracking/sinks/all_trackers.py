"""Combines the trackers of a run: each metric goes to every store. Contains the stores of TensorBoard and Weights & Biases.

TensorBoard: event files in the run's folder ``tensorboard``. Each start or resume rewrites the files from
``metrics.jsonl``, so that each step appears once, regardless of earlier kills and rollbacks.

Weights & Biases: online, or in the run's folder ``wandb`` (``wandb sync`` uploads it). Invariants:

- A resumed run continues the W&B run whose id is in ``wandb_run.json``. That file also records the last step sent of each
  metric, so that steps repeated after a kill appear once.
- The x axis is the training step, logged as a metric: values of an earlier step may arrive late.
"""

import contextlib
import importlib
import json
import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megatron_rl.config.load import flat_params
from megatron_rl.config.schema import Config
from megatron_rl.system.files.atomic_files import write_atomic
from megatron_rl.tracking.metrics_file import MetricsRow, read_metrics
from megatron_rl.tracking.sinks.mlflow import MLflowStore
from megatron_rl.tracking.sinks.tracker import Tracker, TrackerBackend

_SUFFIX = ".megatron_rl"
"""Suffix of event files written here; no other files are removed."""


class TensorBoardStore:
    """Event files for ``tensorboard --logdir``; give it the common folder of several runs to see them all."""

    name, key = "TensorBoard", "tracking.tensorboard=false"

    def __init__(self, output_dir: str | Path) -> None:
        self._folder = Path(output_dir) / "tensorboard"
        self.place = str(self._folder)
        self._events: Any = None
        self._writer: Any = None

    def open(self) -> None:
        writers = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._events = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._folder.mkdir(parents=True, exist_ok=True)
        # Listed before the new file exists and removed after it, so that a reader always finds the run.
        earlier = list(self._folder.glob(f"events.out.tfevents.*{_SUFFIX}"))
        self._writer = writers.EventFileWriter(str(self._folder), filename_suffix=f".{time.time_ns()}{_SUFFIX}")
        for path in earlier:
            path.unlink(missing_ok=True)

    def send(self, rows: Sequence[MetricsRow]) -> str:
        for row in rows:
            event = self._events.Event(wall_time=row.time_s, step=row.step)
            for name, value in row.metrics.items():
                with contextlib.suppress(OverflowError):  # the value does not fit float32
                    event.summary.value.add(tag=name, simple_value=value if math.isfinite(value) else math.nan)
            self._writer.add_event(event)
        self._writer.flush()
        return ""

    def send_file(self, path: Path) -> str:
        return ""  # files are next to the event folder already

    def close(self, status: str) -> None:
        self._writer.close()


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
            new = {name: value for name, value in row.metrics.items() if math.isfinite(value) and row.step > self._last_step.get(name, -1)}
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


logger = logging.getLogger(__name__)

_RUN_FILES = ("mlflow_run.json", "wandb_run.json")


class TrackerSet:
    """Holds one tracker per store that the recipe enables."""

    def __init__(self, config: Config, *, resume: bool, warn: Callable[[str], None]) -> None:
        tracking, folder = config.tracking, Path(config.run.output_dir)
        stores: list[TrackerBackend] = []
        if tracking.mlflow:
            stores.append(
                MLflowStore(
                    folder,
                    uri=tracking.mlflow_uri,
                    experiment=tracking.experiment,
                    params=flat_params(config),
                    resume=resume,
                    parent=tracking.mlflow_parent,
                    model=tracking.mlflow_model,
                )
            )
        if tracking.tensorboard:
            stores.append(TensorBoardStore(folder))
        if tracking.wandb is not None:
            mode = tracking.wandb.value
            stores.append(WandbStore(folder, mode=mode, project=tracking.experiment, params=flat_params(config), resume=resume))
        before = read_metrics(folder / "metrics.jsonl") if resume else []
        self._trackers = [Tracker(store, before=before, warn=warn) for store in stores]
        self._takes_model = tracking.mlflow and bool(tracking.mlflow_model)

    def log(self, step: int, metrics: Mapping[str, Any], *, time_s: float | None = None) -> None:
        for tracker in self._trackers:
            tracker.log(step, metrics, time_s=time_s)

    def log_artifact(self, path: str | Path) -> None:
        for tracker in self._trackers:
            tracker.log_artifact(path)

    def register(self, folder: str | Path, while_waiting: Callable[[], None]) -> None:
        """Register a Hugging Face folder as a new version of the model tracking.mlflow_model. Waits for its upload."""
        if self._takes_model:
            self._trackers[0].log_artifact(folder)
            self._trackers[0].wait_until_sent(while_waiting)

    def close(self, status: str, timeout_s: float) -> None:
        """End all runs in parallel; waits at most ``timeout_s`` in total."""
        for tracker in self._trackers:
            tracker.end(status)
        deadline_s = time.monotonic() + timeout_s
        for tracker in self._trackers:
            tracker.close(status, max(0.1, deadline_s - time.monotonic()))


def start_new_runs(folder: Path, prefix: str) -> None:
    """Rename the files of run ids, so that the next ``TrackerSet`` start new runs with all rows of ``metrics.jsonl``."""
    for name in _RUN_FILES:
        with suppress(FileNotFoundError):
            (folder / name).rename(folder / f"{prefix}{name}")


@contextmanager
def tracked_evaluation(config: Config, warn: Callable[[str], None]) -> Iterator[Tracker | None]:
    """Yield a tracker for evaluations of a run's exported policies, by step, or None if the run is not in MLflow.

    The tracker's metrics go to a child of the run in MLflow.
    """
    folder = Path(config.run.output_dir)
    if not config.tracking.mlflow or not (folder / "mlflow_run.json").is_file():
        yield None
        return
    params = {name: value for name, value in flat_params(config).items() if name.startswith("eval.")}
    tracking = config.tracking
    store = MLflowStore(folder, uri=tracking.mlflow_uri, experiment=tracking.experiment, params=params, child="evaluation")
    tracker = Tracker(store, warn=warn)
    try:
        yield tracker
    except BaseException as error:
        tracker.close("KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED", timeout_s=10.0)
        raise
    tracker.close(timeout_s=60.0)


def upload_metrics(output_dir: str | Path, *, uri: str = "", experiment: str = "megatron_rl", timeout_s: float = 600.0) -> bool:
    """Complete MLflow from ``metrics.jsonl`` after an outage. Returns True if everything arrived.

    Continues the run of ``mlflow_run.json``, or creates one. Steps that the store already has are not sent again.
    """
    rows = read_metrics(Path(output_dir) / "metrics.jsonl")
    problems: list[str] = []
    store = MLflowStore(output_dir, uri=uri, experiment=experiment, resume=True)
    tracker = Tracker(store, before=rows, warn=problems.append)
    tracker.close(timeout_s=timeout_s)
    for problem in problems:
        logger.warning(problem)
    return not problems
