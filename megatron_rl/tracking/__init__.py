"""Keeping track of a run: metrics on disk, MLflow, the timeline of stages, the terminal and the report.

None of it raises into training, and none of it makes a step wait for a store, a disk or a terminal.
"""

from megatron_rl.tracking.console import TrainingConsole, summary_table
from megatron_rl.tracking.metrics_file import MetricsRow, MetricsWriter, read_metrics
from megatron_rl.tracking.mlflow import Tracker, upload_metrics
from megatron_rl.tracking.timeline import Span, Timeline, overlap_seconds, read_timeline

__all__ = [
    "MetricsRow",
    "MetricsWriter",
    "Span",
    "Timeline",
    "Tracker",
    "TrainingConsole",
    "overlap_seconds",
    "read_metrics",
    "read_timeline",
    "summary_table",
    "upload_metrics",
]
