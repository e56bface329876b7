"""Summarizes a finished run from its files: summary.json, the table printed at the end, and the model card of a trained model."""

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from megatron_rl import __version__
from megatron_rl.config.schema import Config, WandbMode
from megatron_rl.errors import UserError
from megatron_rl.run.recorder import Evaluation, Recorder
from megatron_rl.system.files.atomic_files import write_atomic
from megatron_rl.tracking.console import accuracy_text, duration, summary_table
from megatron_rl.tracking.metrics_file import read_metrics
from megatron_rl.tracking.timeline import OVERLAP

_NO_WRAP = 1000
"""Columns of a table that goes to a file or a pipe."""
_RECIPE = "config.yaml"
_RECORDS = "*_training.json"
"""Files that sft, dpo and reward-train write next to the weights."""
_SHOWN = ("eval/", "reward/", "policy/", "response/", "train/")
"""Prefixes of the metrics that a card shows."""
_CACHED = re.compile(r"(models|datasets)--([\w.-]+?)--([\w.-]+)/snapshots/(\w+)")
_PACKAGES = ("torch", "megatron-core", "transformers", "sglang")
_GIT_TIMEOUT_S = 10


@dataclass(frozen=True)
class RunSummary:
    """Contents of summary.json."""

    mode: str
    num_steps: int
    wall_s: float
    tokens_generated: int
    evaluations: Sequence[Evaluation]
    stage_seconds: dict[str, float]
    """Seconds by stage; stages overlap, so the sum may exceed wall_s."""
    critic_overlap_s: float
    """Seconds in which a critic update ran during generation of a window."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_generated / self.wall_s if self.wall_s else 0.0


def summarize(config: Config, recorder: Recorder) -> RunSummary:
    return RunSummary(
        mode=config.schedule.mode.value,
        num_steps=recorder.num_steps_done,
        wall_s=recorder.elapsed_s,
        tokens_generated=recorder.num_tokens_generated,
        evaluations=tuple(recorder.evaluations),
        stage_seconds=recorder.stage_seconds,
        critic_overlap_s=recorder.timeline.overlap_seconds(*OVERLAP),
    )


def write_summary(folder: str | Path, summary: RunSummary) -> None:
    write_atomic(Path(folder) / "summary.json", json.dumps(asdict(summary), indent=2))


def print_summary(config: Config, summary: RunSummary) -> None:
    folder, tracking = Path(config.run.output_dir), config.tracking
    rows: list[tuple[str, str]] = []
    if summary.evaluations:
        first, last = summary.evaluations[0], summary.evaluations[-1]
        points = 100 * (last.accuracy - first.accuracy)
        rows.append(
            (
                "accuracy on held-out prompts",
                f"{accuracy_text(first.accuracy, first.accuracy_stderr)} before, "
                f"{accuracy_text(last.accuracy, last.accuracy_stderr)} after ({points:+.1f} points)",
            )
        )
    rows += [
        ("steps", f"{summary.num_steps}"),
        ("wall-clock time", duration(summary.wall_s)),
        ("tokens generated", f"{summary.tokens_generated:,} ({summary.tokens_per_s:,.0f} per second)"),
        ("critic update hidden by generation", duration(summary.critic_overlap_s)),
        ("report", str(folder / "report.html")),
        ("timeline", f"{folder / 'timeline.json'} (open it in Perfetto)"),
    ]
    if tracking.mlflow:
        rows.append(("MLflow", tracking.mlflow_uri or f"mlflow ui --backend-store-uri sqlite:///{folder / 'mlflow.db'}"))
    if tracking.tensorboard:
        rows.append(("TensorBoard", f"tensorboard --logdir {folder / 'tensorboard'}"))
    if tracking.wandb is WandbMode.offline:
        rows.append(("Weights & Biases", f"wandb sync {folder / 'wandb'}/offline-run-*"))
    if config.profile.steps:
        rows.append(("profile", f"{folder / 'profile'} (open a trace in Perfetto)"))
    rows.append(("policy", str(folder / "policy")))
    # A file or a pipe has no width: a path stays on one line, where it can be copied.
    console = Console(width=None if sys.stdout.isatty() else _NO_WRAP)
    console.print(summary_table(rows, title="result"))
    console.print(_stage_table(summary))


def _stage_table(summary: RunSummary) -> Table:
    table = Table(title="wall-clock time by stage (stages overlap)", title_justify="left")
    for name in ("stage", "seconds", "share"):
        table.add_column(name, justify="left" if name == "stage" else "right")
    for name, seconds in sorted(summary.stage_seconds.items(), key=lambda item: -item[1]):
        if seconds >= 0.01 * summary.wall_s:
            table.add_row(name, f"{seconds:.1f}", f"{seconds / summary.wall_s:.0%}")
    return table


def find_run(model: Path) -> Path | None:
    """The run that wrote ``model``: the nearest of three parents with a recipe."""
    return next((folder for folder in list(Path(model).resolve().parents)[:3] if (folder / _RECIPE).is_file()), None)


def model_card(name: str, model: Path, run: Path | None) -> str:
    """Markdown of README.md. ``run``: the run's folder; None: the record next to the weights, if any. Raises UserError."""
    recipe, metrics, text = _of_run(run) if run else _of_record(model)
    files = dict.fromkeys(_strings(recipe, ("train_files", "eval_files", "files")))
    base = _base_model(recipe)
    hub = [found for found in map(_CACHED.search, map(str, [base, *files])) if found]
    header: dict[str, Any] = {"library_name": "transformers", "tags": ["megatron_rl"]}
    names = {kind: sorted({f"{found[2]}/{found[3]}" for found in hub if found[1] == kind}) for kind in ("models", "datasets")}
    header |= {key: names[kind] for key, kind in (("base_model", "models"), ("datasets", "datasets")) if names[kind]}
    values = "\n".join(f"| {key} | {value:.6g} |" for key, value in metrics.items())
    parts = [
        f"---\n{yaml.safe_dump(header, sort_keys=False)}---\n\n# {name}\n\nTrained with megatron_rl from `{base or 'an unknown model'}`.",
        f"## Recipe\n\n{text}" if text else "",
        "## Data\n\n| file | bytes | SHA-256 |\n|---|---|---|\n" + "\n".join(map(_file_row, files)) if files else "",
        f"## Metrics\n\n| metric | value |\n|---|---|\n{values}" if metrics else "",
        f"## Versions\n\nOf the installation that wrote this card:\n\n```text\n{_versions()}\n{_commit()}\n```",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _of_run(folder: Path) -> tuple[Mapping[str, Any], dict[str, float], str]:
    """(recipe, metrics of the last step and of the last evaluation, the recipe's text)."""
    try:
        text = (folder / _RECIPE).read_text(encoding="utf-8")
        recipe = yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"--run: {folder} has no readable {_RECIPE} ({str(error).splitlines()[0]}); give a run's output folder") from error
    if not isinstance(recipe, Mapping):
        raise UserError(f"--run: expected sections in {folder / _RECIPE}, got {type(recipe).__name__}; give a run's output folder")
    metrics: dict[str, float] = {}
    for row in read_metrics(folder / "metrics.jsonl"):
        metrics |= {"step": row.step} | {key: value for key, value in row.metrics.items() if key.startswith(_SHOWN)}
    return recipe, metrics, f"```yaml\n{text.rstrip()}\n```"


def _of_record(model: Path) -> tuple[Mapping[str, Any], dict[str, float], str]:
    """The same from a record next to the weights, which contains settings and history."""
    for path in sorted(model.glob(_RECORDS)):
        record = json.loads(path.read_text(encoding="utf-8"))
        history = record.pop("history", [])
        metrics = {key: value for row in history for key, value in row.items() if key == "step" or key.startswith(_SHOWN)}
        return record, metrics, f"```json\n{json.dumps(record, indent=1)}\n```"
    return {}, {}, ""


def _base_model(recipe: Mapping[str, Any]) -> str:
    policy = recipe.get("policy")
    return str(recipe.get("base_model") or (policy.get("path", "") if isinstance(policy, Mapping) else ""))


def _strings(node: Any, keys: Sequence[str]) -> Iterator[str]:
    """All texts in lists under any of ``keys``."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from (str(item) for item in value) if key in keys and isinstance(value, list) else _strings(value, keys)


def _file_row(name: str) -> str:
    path = Path(name)
    if not path.is_file():
        return f"| `{name}` | {'folder' if path.is_dir() else 'not here'} | |"
    with path.open("rb") as file:
        return f"| `{name}` | {path.stat().st_size:,} | `{hashlib.file_digest(file, 'sha256').hexdigest()}` |"


def _versions() -> str:
    lines = [f"megatron-rl {__version__}", f"python {sys.version.split()[0]}"]
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            lines.append(f"{name} {version(name)}")
    return "\n".join(lines)


def _commit() -> str:
    """The commit of this source tree, with a mark if files differ from it."""
    command = ["git", "-C", str(Path(__file__).parents[2])]
    try:
        prefix, commit = (
            subprocess.run([*command, *words], capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True).stdout.strip()
            for words in (["rev-parse", "--show-prefix"], ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"])
        )
    except (OSError, subprocess.SubprocessError):
        prefix = commit = ""
    # An installed package may lie inside another repository.
    return f"commit {commit}" if commit and not prefix else "commit unknown (not a checkout)"
