"""Writes ``report.html``: the course of a run in one self-contained file.

Reads ``metrics.jsonl``, ``timeline.json``, ``config.yaml`` and ``summary.json`` from the run's folder. Each may be
missing: a panel without data shows the reason. The run may still be running. Safe to call from a thread or another
process: figures are plain objects, and the file appears atomically. Takes one to two seconds, mostly to import
matplotlib and to draw.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron_rl.config.load import flat_params
from megatron_rl.desk.report.health_checks import health_checks
from megatron_rl.desk.report.html_page import ReportPage, render
from megatron_rl.desk.report.run_record import RunRecord, load_run
from megatron_rl.desk.report.sample_panel import samples_html
from megatron_rl.desk.report.smoothing import smooth, smoothing_span
from megatron_rl.desk.report.training_panels import report_sections
from megatron_rl.system.files.atomic_files import write_atomic
from megatron_rl.tracking.terminal.console import accuracy_text, compact, duration
from megatron_rl.tracking.timeline import OVERLAP, Span, overlap_seconds


def write_report(output_dir: str | Path, path: str | Path | None = None) -> Path:
    """Write ``report.html`` into the run's folder, or to ``path``. Returns its path. Raises FileNotFoundError and OSError."""
    run = load_run(output_dir)
    written = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    preset = run.setting("preset")
    page = ReportPage(
        title=run.name,
        subtitle=f"megatron_rl{f' · {preset}' if preset else ''} · written {written}",
        headline=_headline(run),
        checks=health_checks(run),
        sections=report_sections(run),
        summary=tuple(
            (key, f"{value:.6g}" if isinstance(value, float) else str(value))
            for key, value in flat_params(run.summary).items()
        ),
        config_text=run.config_text,
        samples=samples_html(output_dir),
    )
    return write_atomic(path or Path(output_dir) / "report.html", render(page))


def _headline(run: RunRecord) -> tuple[tuple[str, str, str], ...]:
    tiles = []
    evaluations = run.finite("eval/accuracy")
    if len(evaluations):
        remark = f"from {evaluations[0]:.1%}" if len(evaluations) > 1 else "one evaluation"
        errors = run.values("eval/accuracy_stderr")[np.isfinite(run.values("eval/accuracy"))]
        newest = accuracy_text(evaluations[-1], float(errors[-1]) if np.isfinite(errors[-1]) else None)
        tiles.append(("Evaluation accuracy", newest, remark))
    rewards = run.finite("reward/mean")
    if len(rewards):
        smoothed = smooth(rewards, smoothing_span(len(rewards)))
        tiles.append(("Reward", f"{smoothed[-1]:.3f}", f"from {rewards[0]:.3f}, smoothed"))
    total = run.setting("run.num_steps")
    last_step = int(run.steps[-1]) if len(run.steps) else 0
    tiles.append(("Step", str(last_step), f"of {total}" if total else ""))
    if len(run.steps):
        seconds = run.finite("step/time_s")
        median = f"{np.median(seconds):.2g} s per step (median)" if len(seconds) else ""
        tiles.append(("Training time", duration(run.hours()[-1] * 3600), median))
    tokens = run.finite("step/tokens_generated")
    speed = run.finite("step/tokens_per_s")
    if len(tokens):
        remark = f"{compact(np.median(speed))} per second (median)" if len(speed) else ""
        tiles.append(("Tokens generated", compact(tokens.sum()), remark))
    hidden = _hidden_share(run.spans)
    if hidden is not None:
        tiles.append(("Critic update hidden", f"{hidden:.0%}", "by generation"))
    return tuple(tiles)


def _hidden_share(spans: Sequence[Span]) -> float | None:
    """Fraction of critic update time during which generation ran, 0 to 1; None without critic updates."""
    total_s = overlap_seconds(spans, OVERLAP[1], OVERLAP[1])
    return overlap_seconds(spans, *OVERLAP) / total_s if total_s > 0 else None
