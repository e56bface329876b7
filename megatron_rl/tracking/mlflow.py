"""The run in MLflow, written by a thread of its own so that neither a slow nor a dead store touches training.

Invariants:
- ``log`` and ``log_artifact`` only append to a bounded queue; they never block and never raise. When the queue is full
  the newest entry is left out and counted.
- A failure is one warning. The thread keeps its entries and tries again with growing pauses, so a store that comes
  back gets everything that still was in the queue. ``metrics.jsonl`` is complete in any case, and ``upload_metrics``
  brings a store up to date from it.
- A continued run logs every step of a metric once: what the store has of an earlier part of the run is not sent again.
- ``close`` waits at most its ``timeout_s`` for the thread; the thread is a daemon, so it never holds up the exit.
- A resumed run continues the MLflow run whose id stands in ``mlflow_run.json``.
mlflow is imported on the thread: importing it takes seconds, creating its SQLite tables some more.
"""

import importlib
import json
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from megatron_rl.system.files import write_whole
from megatron_rl.tracking.metrics_file import as_numbers, read_metrics

logger = logging.getLogger(__name__)

_MAX_PARAM_CHARACTERS = 500  # the shortest limit among the MLflow servers in use
_MAX_METRICS_PER_REQUEST = 1000  # MLflow's own limits of one log_batch
_MAX_PARAMS_PER_REQUEST = 100
_FIRST_RETRY_S = 2.0
_LAST_RETRY_S = 60.0
_RUN_FILE = "mlflow_run.json"

# Read by mlflow at import. Its defaults retry a dead server for minutes before anyone hears of it, and report usage to
# its makers; what the user sets in the environment wins.
_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}
_CHATTY_LOGGERS = {"alembic": logging.WARNING, "mlflow": logging.WARNING, "urllib3.connectionpool": logging.ERROR}


@dataclass(frozen=True)
class _Point:
    step: int
    time_ms: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class _Artifact:
    path: Path


def _cut(text: str, limit: int = _MAX_PARAM_CHARACTERS) -> str:
    """The text, or its head and tail around a note of its length, at most ``limit`` characters in all."""
    if len(text) <= limit:
        return text
    note = f" ... ({len(text)} characters) ... "
    tail = max(0, (limit - len(note)) // 3)
    head = max(0, limit - len(note) - tail)
    return (text[:head] + note + text[len(text) - tail :])[:limit]


def _flatten(params: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested mappings as dotted names and texts; lists as JSON, enums as their value, None and "" as such.

    Values longer than MLflow takes are cut in the middle.
    """
    flat: dict[str, str] = {}
    for key, value in params.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat.update(_flatten(value, f"{name}."))
        else:
            flat[_valid_name(name)] = _cut(_as_text(value))
    return flat


def _as_text(value: Any) -> str:
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, list | tuple | Mapping):
        return json.dumps(value, default=_as_text, ensure_ascii=False)
    return str(value)


def _valid_name(name: str) -> str:
    """A name that MLflow takes: pass@4 becomes pass_at_4, and what is no letter, digit, _ - . / or blank becomes _."""
    return re.sub(r"[^\w\-. /]", "_", name.replace("@", "_at_"))[:250]


class Tracker:
    """One MLflow run. ``uri`` "" means a SQLite store and an artifact folder in ``output_dir``.

    ``params`` is the configuration as nested dictionaries. ``warn`` receives the warnings; the display of the run, for
    example. ``enabled=False`` makes every method do nothing (other ranks, or a user who wants no MLflow).
    """

    def __init__(
        self,
        output_dir: str | Path,
        *,
        enabled: bool = True,
        uri: str = "",
        experiment: str = "megatron_rl",
        params: Mapping[str, Any] | None = None,
        resume: bool = False,
        max_queue: int = 2000,
        warn: Callable[[str], None] = logger.warning,
    ):
        self._output_dir = Path(output_dir).resolve()
        self._uri = uri or f"sqlite:///{self._output_dir}/mlflow.db"
        self._own_store = not uri
        self._experiment = experiment
        self._params = _flatten(params or {})
        self._resume = resume
        self._max_queue = max_queue
        self._warn = warn
        self._warned = False
        self._queue: deque[_Point | _Artifact] = deque()
        self._num_left_out = 0
        self._changed = threading.Condition()
        self._final_status: str | None = None
        self._client: Any = None
        self._run_id: str | None = None
        self._continues = False
        self._steps_before: dict[str, set[int]] = {}
        self._thread: threading.Thread | None = None
        if enabled:
            self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
            self._thread.start()

    def log(self, step: int, metrics: Mapping[str, Any], *, time_s: float | None = None) -> None:
        """Queue the metrics of a step. ``time_s``: Unix time; pass the time of ``metrics.jsonl`` to tell doubles."""
        numbers, _ = as_numbers(metrics)
        time_ms = int((time.time() if time_s is None else time_s) * 1000)
        self._put(_Point(step, time_ms, {_valid_name(name): value for name, value in numbers.items()}))

    def log_artifact(self, path: str | Path) -> None:
        """Queue a file; it is read when its turn comes, so a file that is rewritten goes up as it is then."""
        self._put(_Artifact(Path(path)))

    def close(self, status: str = "FINISHED", timeout_s: float = 30.0) -> None:
        """End the run (FINISHED, FAILED or KILLED); returns after at most ``timeout_s``. Safe to call twice."""
        if self._thread is None:
            return
        with self._changed:
            self._final_status = status
            self._changed.notify()
        self._thread.join(timeout_s)
        with self._changed:
            num_missing = len(self._queue) + self._num_left_out
        if self._thread.is_alive():
            self._warn_once(f"still not done {timeout_s:.0f} s after the end of the run")
        if num_missing:
            self._warn(
                f"MLflow: {num_missing} entries did not reach {self._uri}; metrics.jsonl has them all, "
                "and megatron_rl.tracking.mlflow.upload_metrics sends them later"
            )
        self._thread = None

    def _put(self, entry: _Point | _Artifact) -> None:
        if self._thread is None:
            return
        with self._changed:
            if len(self._queue) >= self._max_queue:
                self._num_left_out += 1  # the newest, not the oldest: the thread may be sending that one
                return
            self._queue.append(entry)
            self._changed.notify()

    def _warn_once(self, problem: str) -> None:
        if not self._warned:
            self._warned = True
            self._warn(f"MLflow: {problem} ({self._uri}). Training goes on; metrics.jsonl stays complete")

    def _work(self) -> None:
        """The thread: connect, then send what the queue holds until ``close`` was called and the queue is empty."""
        pause_s = _FIRST_RETRY_S
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._run_id is None or self._queue or self._final_status)
                closing = self._final_status
            try:
                if self._run_id is None:
                    self._connect()
                self._send_queue()
                if closing:
                    self._client.set_terminated(self._run_id, status=closing)
                    return
                pause_s = _FIRST_RETRY_S
            except ImportError as error:
                self._warn_once(f"cannot import mlflow: {error}. Install it or set tracking.mlflow=false")
                return
            # Whatever a store, its driver or a plugin raises must not reach training: that is this module's promise.
            except Exception as error:
                self._warn_once(f"{type(error).__name__}: {_cut(str(error), 300)}")
                if closing:
                    return
                with self._changed:
                    self._changed.wait_for(lambda: self._final_status, timeout=pause_s)
                pause_s = min(2 * pause_s, _LAST_RETRY_S)

    def _connect(self) -> None:
        """Import mlflow, open the store, find or create the experiment and the run, log the parameters."""
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        for name, level in _CHATTY_LOGGERS.items():
            logging.getLogger(name).setLevel(level)
        tracking = importlib.import_module("mlflow.tracking")
        logging.getLogger("mlflow").setLevel(_CHATTY_LOGGERS["mlflow"])  # importing mlflow sets its own level
        if self._own_store:
            self._output_dir.mkdir(parents=True, exist_ok=True)
        self._client = tracking.MlflowClient(tracking_uri=self._uri)
        run = self._earlier_run() if self._resume else None
        if run is None:
            run = self._client.create_run(self._experiment_id(), run_name=self._output_dir.name)
        else:
            self._continues = True
            self._client.update_run(run.info.run_id, status="RUNNING")
        self._log_params(run.info.run_id, run.data.params)
        write_whole(self._output_dir / _RUN_FILE, json.dumps({"uri": self._uri, "run_id": run.info.run_id}) + "\n")
        self._run_id = run.info.run_id

    def _earlier_run(self) -> Any:
        """The run to continue; None if the file of its id is missing or the store does not know it any more."""
        exceptions = importlib.import_module("mlflow.exceptions")
        try:
            record = json.loads((self._output_dir / _RUN_FILE).read_text())
            return self._client.get_run(record["run_id"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None
        except exceptions.MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise

    def _experiment_id(self) -> str:
        experiment = self._client.get_experiment_by_name(self._experiment)
        if experiment is not None:
            return experiment.experiment_id
        location = (self._output_dir / "mlflow_artifacts").as_uri() if self._own_store else None
        return self._client.create_experiment(self._experiment, artifact_location=location)

    def _log_params(self, run_id: str, known: Mapping[str, str]) -> None:
        """Parameters of a run cannot change in MLflow: what a resumed run changed becomes a tag ``changed.<name>``."""
        entities = importlib.import_module("mlflow.entities")
        new = [entities.Param(name, value) for name, value in self._params.items() if name not in known]
        for first in range(0, len(new), _MAX_PARAMS_PER_REQUEST):
            self._client.log_batch(run_id, params=new[first : first + _MAX_PARAMS_PER_REQUEST])
        for name, value in self._params.items():
            if name in known and known[name] != value:
                self._client.set_tag(run_id, f"changed.{name}"[:250], value)

    def _send_queue(self) -> None:
        """Send entries in order; an entry leaves the queue once it was sent or the store refused it for good."""
        while True:
            with self._changed:
                head = self._head()
            if not head:
                return
            problem = self._send_artifact(head) if isinstance(head, _Artifact) else self._send_points(head)
            num_sent = 1 if isinstance(head, _Artifact) else len(head)
            if problem:
                self._warn_once(problem)
            with self._changed:
                self._num_left_out += num_sent if problem else 0
                for _ in range(num_sent):
                    self._queue.popleft()

    def _send_points(self, points: list[_Point]) -> str:
        """Log points together; the problem if the store refuses them as invalid, which trying again cannot fix."""
        entities = importlib.import_module("mlflow.entities")
        exceptions = importlib.import_module("mlflow.exceptions")
        metrics = [
            entities.Metric(name, value, point.time_ms, point.step)
            for point in points
            for name, value in point.metrics.items()
            if point.step not in self._known_steps(name)
        ]
        try:
            for first in range(0, len(metrics), _MAX_METRICS_PER_REQUEST):
                self._client.log_batch(self._run_id, metrics=metrics[first : first + _MAX_METRICS_PER_REQUEST])
        except exceptions.MlflowException as error:
            if error.error_code in ("INVALID_PARAMETER_VALUE", "BAD_REQUEST"):
                return f"the store refuses a metric: {_cut(str(error), 300)}"
            raise
        return ""

    def _known_steps(self, name: str) -> set[int]:
        """Steps of a metric that an earlier part of the run has logged: repeated after a resume, they stay single."""
        if not self._continues:
            return set()
        if name not in self._steps_before:
            self._steps_before[name] = {m.step for m in self._client.get_metric_history(self._run_id, name)}
        return self._steps_before[name]

    def _send_artifact(self, artifact: _Artifact) -> str:
        """Upload a file; the problem if that failed. The file stays in the output folder, so it is not tried again."""
        try:
            self._client.log_artifact(self._run_id, str(artifact.path))
        except Exception as error:  # an artifact store has its own drivers, and metrics must not queue behind them
            return f"artifact {artifact.path.name}: {type(error).__name__}: {_cut(str(error), 300)}"
        return ""

    def _head(self) -> _Artifact | list[_Point]:
        """An artifact, or as many points from the head of the queue as fit in one request."""
        points: list[_Point] = []
        num_metrics = 0
        for entry in self._queue:
            if isinstance(entry, _Artifact):
                return points or entry  # the points before it go first: a store shows a run in its own order
            num_metrics += len(entry.metrics)
            if points and num_metrics > _MAX_METRICS_PER_REQUEST:
                break
            points.append(entry)
        return points


def upload_metrics(
    output_dir: str | Path, *, uri: str = "", experiment: str = "megatron_rl", timeout_s: float = 600.0
) -> bool:
    """Bring MLflow up to date from ``metrics.jsonl`` after an outage; True if everything arrived.

    Continues the run of ``mlflow_run.json``, or makes one. Points that are there already stay single.
    """
    rows = read_metrics(Path(output_dir) / "metrics.jsonl")
    problems: list[str] = []
    tracker = Tracker(
        output_dir,
        uri=uri,
        experiment=experiment,
        resume=True,
        max_queue=len(rows) + 1,
        warn=problems.append,
    )
    for row in rows:
        tracker.log(row.step, row.metrics, time_s=row.time_s)
    tracker.close(timeout_s=timeout_s)
    for problem in problems:
        logger.warning(problem)
    return not problems
