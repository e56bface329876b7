"""Writes a run to MLflow.

Invariants:
- A continued run logs every step of a metric once: values that the store already has are not sent again.
- A resumed run continues the MLflow run whose id is in ``mlflow_run.json``.
mlflow is imported by ``open``: the import takes seconds, and creating its SQLite tables takes longer.
"""

import importlib
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.system.files.atomic_files import write_atomic
from megatron_rl.tracking.metrics_file import MetricsRow
from megatron_rl.tracking.sinks.tracker import MAX_METRICS_PER_REQUEST, shortened

_MAX_PARAM_CHARACTERS = 500  # smallest limit of the MLflow servers in use
_MAX_PARAMS_PER_REQUEST = 100  # MLflow's limit per log_batch
_RUN_FILE = "mlflow_run.json"
_PARENT_TAG = "mlflow.parentRunId"

# mlflow reads these at import. Its defaults retry a dead server for minutes before any error appears, and report usage
# to its makers. Values that the user sets in the environment win.
_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}
_CHATTY_LOGGERS = {"alembic": logging.WARNING, "mlflow": logging.WARNING, "urllib3.connectionpool": logging.ERROR}


def _as_text(value: Any) -> str:
    """The value as text, lists and mappings as JSON; shortened in the middle to MLflow's limit."""
    text = json.dumps(value, default=str, ensure_ascii=False) if isinstance(value, list | Mapping) else str(value)
    return shortened(text, _MAX_PARAM_CHARACTERS)


def _valid_name(name: str) -> str:
    """A name that MLflow accepts: pass@4 becomes pass_at_4; characters other than letters, digits, _ - . / and blanks become _."""
    return re.sub(r"[^\w\-. /]", "_", name.replace("@", "_at_"))[:250]


class MLflowStore:
    """An MLflow run. ``uri`` "" means a SQLite store and an artifact folder in ``output_dir``.

    ``params``: the configuration from ``flat_params``. ``parent``: name of the run that this one is listed under;
    created if the experiment lacks it. ``model``: registered model that gets a new version for each folder sent.
    ``child``: name of a child run to create under the run in ``output_dir``, instead of a separate run.
    """

    name, key = "MLflow", "tracking.mlflow=false"

    def __init__(
        self,
        output_dir: str | Path,
        *,
        uri: str = "",
        experiment: str = "megatron_rl",
        params: Mapping[str, Any] | None = None,
        resume: bool = False,
        parent: str = "",
        model: str = "",
        child: str = "",
    ):
        self._output_dir = Path(output_dir).resolve()
        self.place = uri or f"sqlite:///{self._output_dir}/mlflow.db"
        self._own_store = not uri
        self._experiment = experiment
        self._params = {_valid_name(name): _as_text(value) for name, value in (params or {}).items()}
        self._resume = resume
        self._parent = parent
        self._model = model
        self._child = child
        self._client: Any = None
        self._run_id = ""
        self._continues = False
        self._steps_before: dict[str, set[int]] = {}

    def open(self) -> None:
        """Import mlflow, open the store, find or create the experiment and the run, log the parameters."""
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        for name, level in _CHATTY_LOGGERS.items():
            logging.getLogger(name).setLevel(level)
        tracking = importlib.import_module("mlflow.tracking")
        logging.getLogger("mlflow").setLevel(_CHATTY_LOGGERS["mlflow"])  # the import has set mlflow's own level
        if self._own_store:
            self._output_dir.mkdir(parents=True, exist_ok=True)
        self._client = tracking.MlflowClient(tracking_uri=self.place)
        if self._child:
            self._run_id = self._child_run()
            return
        run = self._earlier_run() if self._resume else None
        if run is None:
            experiment_id = self._experiment_id()
            tags = {_PARENT_TAG: self._parent_id(experiment_id)} if self._parent else {}
            run = self._client.create_run(experiment_id, run_name=self._output_dir.name, tags=tags)
        else:
            self._continues = True
            self._client.update_run(run.info.run_id, status="RUNNING")
        self._log_params(run.info.run_id, run.data.params)
        write_atomic(self._output_dir / _RUN_FILE, json.dumps({"uri": self.place, "run_id": run.info.run_id}) + "\n")
        self._run_id = run.info.run_id

    def _child_run(self) -> str:
        parent = self._earlier_run()
        experiment_id = parent.info.experiment_id if parent else self._experiment_id()
        tags = {_PARENT_TAG: parent.info.run_id} if parent else {}
        run = self._client.create_run(experiment_id, run_name=self._child, tags=tags)
        self._log_params(run.info.run_id, {})
        return str(run.info.run_id)

    def _earlier_run(self) -> Any:
        """The run to continue, or None if its id file is missing or the store no longer has it."""
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
        """Log parameters. They cannot change in MLflow: a value that a resumed run changed becomes a tag ``changed.<name>``."""
        entities = importlib.import_module("mlflow.entities")
        new = [entities.Param(name, value) for name, value in self._params.items() if name not in known]
        for first in range(0, len(new), _MAX_PARAMS_PER_REQUEST):
            self._client.log_batch(run_id, params=new[first : first + _MAX_PARAMS_PER_REQUEST])
        for name, value in self._params.items():
            if name in known and known[name] != value:
                self._client.set_tag(run_id, f"changed.{name}"[:250], value)

    def send(self, rows: Sequence[MetricsRow]) -> str:
        """Log rows in one batch. Returns the problem if the store rejects them as invalid, which a retry cannot fix."""
        entities = importlib.import_module("mlflow.entities")
        exceptions = importlib.import_module("mlflow.exceptions")
        metrics = [
            entities.Metric(name, value, int(row.time_s * 1000), row.step)
            for row in rows
            for name, value in ((_valid_name(name), value) for name, value in row.metrics.items())
            if row.step not in self._known_steps(name)
        ]
        try:
            for first in range(0, len(metrics), MAX_METRICS_PER_REQUEST):
                self._client.log_batch(self._run_id, metrics=metrics[first : first + MAX_METRICS_PER_REQUEST])
        except exceptions.MlflowException as error:
            if error.error_code in ("INVALID_PARAMETER_VALUE", "BAD_REQUEST"):
                return f"the store rejects a metric: {shortened(str(error), 300)}"
            raise
        return ""

    def _known_steps(self, name: str) -> set[int]:
        """Steps of a metric that an earlier part of the run has logged; they are not logged again after a resume."""
        if not self._continues:
            return set()
        if name not in self._steps_before:
            self._steps_before[name] = {m.step for m in self._client.get_metric_history(self._run_id, name)}
        return self._steps_before[name]

    def send_file(self, path: Path) -> str:
        """Upload a file, or register an exported model (a folder). A failure is not retried: the output folder has the file."""
        try:
            if path.is_dir():
                self._register(path)
            else:
                self._client.log_artifact(self._run_id, str(path))
        except Exception as error:  # artifact stores raise their own errors, and must not block metrics
            return f"{path.name}: {type(error).__name__}: {shortened(str(error), 300)}"
        return ""

    def close(self, status: str) -> None:
        self._client.set_terminated(self._run_id, status=status)

    def _register(self, folder: Path) -> None:
        """Create a version of the registered model. The folder is uploaded first: a server only accepts artifacts of the run."""
        exceptions = importlib.import_module("mlflow.exceptions")
        try:
            self._client.create_registered_model(self._model)
        except exceptions.MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        source = folder.as_uri()
        if not self._own_store:
            self._client.log_artifacts(self._run_id, str(folder), folder.name)
            source = f"{self._client.get_run(self._run_id).info.artifact_uri}/{folder.name}"
        version = self._client.create_model_version(self._model, source, run_id=self._run_id)
        self._client.set_tag(self._run_id, "registered_model", f"{self._model} version {version.version}")

    def _parent_id(self, experiment_id: str) -> str:
        """Id of the top-level run named ``parent``; created if it does not exist."""
        quoted = self._parent.replace("'", "")
        runs = self._client.search_runs([experiment_id], f"attributes.run_name = '{quoted}'", order_by=["attributes.start_time ASC"])
        for run in runs:
            if _PARENT_TAG not in run.data.tags:
                return str(run.info.run_id)
        run = self._client.create_run(experiment_id, run_name=self._parent)
        self._client.set_terminated(run.info.run_id)  # the parent only groups its children
        return str(run.info.run_id)
