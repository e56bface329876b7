"""The report's panels of resources: response lengths, seconds per rank, memory, idle times."""

from collections.abc import Iterator, Sequence

import numpy as np

from megatron_rl.desk.report import charts
from megatron_rl.desk.report.charts import Series
from megatron_rl.desk.report.html_page import ReportPanel
from megatron_rl.desk.report.run_record import RunRecord
from megatron_rl.schedule.table import GENERATE, ROWS, in_table_order, row_of
from megatron_rl.tracking.console import compact
from megatron_rl.tracking.timeline import Span

_NUM_RECENT_STEPS = 20
"""Newest steps that the panel of ranks averages over."""
_LANE_COLORS = {"rollout": "blue", "trainer": "green"}


def length_panel(run: RunRecord) -> ReportPanel:
    """Lengths of finished responses, at the start and at the end of the run."""
    title, says = "Lengths", "Tokens of the responses that finished in the first and the last fifth of the recorded steps; " \
        "dashed: the budget."
    early, late = early_and_late_lengths(run)
    groups = [group for group in (("first steps", "grey", early), ("last steps", "blue", late)) if len(group[2])]
    if not groups:
        return ReportPanel(title, says, "", missing="timeline.json has no finished responses.")
    limit = run.setting("batch.max_response_tokens")
    svg = charts.histogram_chart(
        [(color, values) for _, color, values in groups], "tokens", limit=float(limit) if isinstance(limit, int) else 0.0
    )
    newest = groups[-1][2]
    return ReportPanel(title, says, svg, tuple((label, color) for label, color, _ in groups), f"median {compact(float(np.median(newest)))}")


def early_and_late_lengths(run: RunRecord) -> tuple[np.ndarray, np.ndarray]:
    """Lengths of the responses that finished in the first and the last fifth of the recorded steps; a single step counts as last."""
    steps = sorted({span.step for span in run.spans if span.name == GENERATE})
    fifth = max(1, len(steps) // 5)
    first = steps[:fifth] if len(steps) > 1 else []
    return finished_lengths(run.spans, set(first)), finished_lengths(run.spans, set(steps[-fifth:]))


def finished_lengths(spans: Sequence[Span], steps: set[int]) -> np.ndarray:
    """Lengths [N] in tokens of the responses that finished in these steps, if the timeline has rows for them."""
    lengths: list[int] = []
    for span in spans:
        if span.name != GENERATE or span.step not in steps:
            continue
        for work in span.args.get("rounds", ()):
            held, new, ended = (list(map(int, str(work.get(name, "")).split())) for name in ("held", "new", "ended"))
            if len(held) == len(new) == len(ended):  # the timeline of an earlier version lacks some columns
                lengths += [h + n for h, n, e in zip(held, new, ended, strict=True) if e]
    return np.array(lengths, dtype=np.int64)


def rank_panel(run: RunRecord) -> ReportPanel:
    title, says = "Stage times by rank", "Mean seconds of a rank's work on a stage in the newest steps, without its wait for the next " \
        "command. A rank above the others delays them. With more than 64 ranks: the slowest and the fastest."
    newest = sorted({span.step for span in run.spans})[-_NUM_RECENT_STEPS:]
    seconds: dict[str, dict[int, list[float]]] = {}
    for span in run.spans:
        if span.step in newest:
            for rank, value in _rank_seconds(span):
                seconds.setdefault(span.name, {}).setdefault(rank, []).append(value)
    stages = {}
    for stage in in_table_order(seconds):
        ranks = sorted(seconds[stage])
        means = np.array([np.mean(seconds[stage][rank]) for rank in ranks])
        if len(ranks) and means.max() > 0:
            stages[stage] = (np.array(ranks), means)
    if not stages:
        return ReportPanel(title, says, "", missing="timeline.json has no times by rank: an earlier version wrote it.", wide=True)
    spread = {stage: float(means.max() / means.mean() - 1) for stage, (_, means) in stages.items() if means.sum() > 0}
    heaviest = max(stages, key=lambda stage: stages[stage][1].sum())
    of_heaviest, means = stages[heaviest]
    latest = f"{heaviest}: rank {of_heaviest[means.argmax()]} takes {spread[heaviest]:.0%} more than the mean"
    legend = tuple((stage, row_of(stage).color) for stage in stages)
    return ReportPanel(title, says, charts.rank_chart(stages), legend, latest if len(means) > 1 else "one rank", wide=True)


def _rank_seconds(span: Span) -> Iterator[tuple[int, float]]:
    for word in str(span.args.get("rank_s", "")).split():
        rank, _, value = word.partition(":")
        yield int(rank), float(value)


def memory_panel(run: RunRecord) -> ReportPanel:
    """Device memory if there is a device, otherwise host memory of the processes."""
    device = [name for name in run.columns if name.endswith("_device_gib") and run.finite(name).max(initial=0.0) > 0]
    kind = "device" if device else "host"
    title = "Memory by stage"
    says = f"Largest {'allocated device' if device else 'resident host'} memory during a stage, on the rank that used the most."
    series, legend, peaks = [], [], {}
    stages = [row.name for row in ROWS if len(run.finite(f"memory/{row.name}_{kind}_gib"))]
    for stage in stages:
        color, values = row_of(stage).color, run.values(f"memory/{stage}_{kind}_gib")
        series.append(Series(stage, color, run.steps, values))
        legend.append((stage, color))
        peaks[stage] = float(np.nanmax(values))
    if not series:
        return ReportPanel(title, says, "", missing="The steps have not logged memory/<stage>_host_gib.")
    highest = max(peaks, key=lambda stage: peaks[stage])
    return ReportPanel(title, says, charts.line_chart(series, "GiB"), tuple(legend), f"at most {peaks[highest]:.3g} GiB, {highest}")


def idle_panel(run: RunRecord) -> ReportPanel:
    title, says = "Idle shares", "Fraction of a step in which nothing ran on the servers, and on the trainer ranks."
    series, legend, latest = [], [], []
    for lane, color in _LANE_COLORS.items():
        values = 100.0 * run.values(f"time/{lane}_idle_share")
        if np.isfinite(values).any():
            label = "servers" if lane == "rollout" else "trainer"
            series.append(Series(label, color, run.steps, values))
            legend.append((label, color))
            latest.append(f"{label} {np.nanmedian(values):.0f} %")
    if not series:
        return ReportPanel(title, says, "", missing="The steps have not logged time/rollout_idle_share.")
    svg = charts.line_chart(series, "% of the step", y_range=(0.0, None))
    return ReportPanel(title, says, svg, tuple(legend), f"median: {', '.join(latest)}")
