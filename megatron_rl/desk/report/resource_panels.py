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
_LEAST_SHARE = 0.02
"""Share of all stages' seconds from which a stage counts as uneven."""
_ALIKE = 0.02
"""Relative difference of the stages' memory below which one line shows all of them."""
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
    # A stage of a few milliseconds may vary much without delaying a step.
    total_s = sum(float(means.max()) for _, means in stages.values())
    excess = {stage: float(means.max() / means.mean() - 1) for stage, (_, means) in stages.items() if means.max() >= _LEAST_SHARE * total_s}
    uneven = max(excess, key=lambda stage: excess[stage])
    ranks_of_uneven, means = stages[uneven]
    latest = f"{uneven}: rank {ranks_of_uneven[means.argmax()]} takes {excess[uneven]:.0%} more than the mean"
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
    by_stage = {row.name: run.values(f"memory/{row.name}_{kind}_gib") for row in ROWS if len(run.finite(f"memory/{row.name}_{kind}_gib"))}
    if not by_stage:
        return ReportPanel(title, says, "", missing="The steps have not logged memory/<stage>_host_gib.")
    peaks = {stage: float(np.nanmax(values)) for stage, values in by_stage.items()}
    highest = max(peaks, key=lambda stage: peaks[stage])
    stacked = np.stack(list(by_stage.values()))
    largest, smallest = np.fmax.reduce(stacked), np.fmin.reduce(stacked)
    if len(by_stage) > 1 and bool(np.all((largest - smallest <= _ALIKE * largest) | ~np.isfinite(largest))):
        # Processes keep memory that they free, so all stages of a small run have the same peak.
        says = f"{says} All {len(by_stage)} stages have the same: the processes keep what they free, so the line rises to a plateau."
        svg = charts.line_chart([Series("every stage", "blue", run.steps, largest)], "GiB")
        return ReportPanel(title, says, svg, latest=f"at most {peaks[highest]:.3g} GiB")
    series = [Series(stage, row_of(stage).color, run.steps, values) for stage, values in by_stage.items()]
    legend = tuple((stage, row_of(stage).color) for stage in by_stage)
    return ReportPanel(title, says, charts.line_chart(series, "GiB"), legend, f"at most {peaks[highest]:.3g} GiB, {highest}")


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
