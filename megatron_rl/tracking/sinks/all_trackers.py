"""Combines the trackers of a run: each metric goes to every store."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megatron_rl.config.load import flat_params
from megatron_rl.config.schema import Config
from megatron_rl.tracking.metrics_file import read_metrics
from megatron_rl.tracking.sinks.mlflow import MLflowStore
from megatron_rl.tracking.sinks.tensorboard import TensorBoardStore
from megatron_rl.tracking.sinks.tracker import Tracker, TrackerBackend
from megatron_rl.tracking.sinks.wandb import WandbStore

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
            stores.append(
                WandbStore(folder, mode=mode, project=tracking.experiment, params=flat_params(config), resume=resume)
            )
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
    """A tracker for metrics of kept policies, by step: a child of the run in MLflow. None if the run is not in MLflow."""
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


def upload_metrics(
    output_dir: str | Path, *, uri: str = "", experiment: str = "megatron_rl", timeout_s: float = 600.0
) -> bool:
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
