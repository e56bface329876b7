"""Summarizes a finished run: summary.json, and the table printed at the end."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_rl.config.schema import Config, WandbMode
from megatron_rl.run.recorder import Evaluation, Recorder
from megatron_rl.system.files.atomic_files import write_atomic
from megatron_rl.tracking.console import accuracy_text, duration, summary_table
from megatron_rl.tracking.timeline import OVERLAP

_NO_WRAP = 1000
"""Columns of a table that goes to a file or a pipe."""


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
