"""The report's panels: the metrics of each panel, and how it is drawn. A panel without data shows the reason."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np

from megatron_rl.desk.report import charts
from megatron_rl.desk.report.charts import Series
from megatron_rl.desk.report.health_checks import recent_mean, smooth, smoothing_span
from megatron_rl.desk.report.html_page import ReportPanel, ReportSection
from megatron_rl.desk.report.resource_panels import idle_panel, length_panel, memory_panel, rank_panel
from megatron_rl.desk.report.run_record import RunRecord
from megatron_rl.schedule.table import in_table_order, row_of
from megatron_rl.step.watchdog import MAX_MISMATCH
from megatron_rl.tracking.console import compact, evaluation_sets
from megatron_rl.tracking.timeline import LANES, OVERLAP, Span, overlap_seconds

_NUM_TIMELINE_STEPS = 3
_COLORS = ("orange", "blue", "green", "violet", "teal", "red", "pink", "yellow")


@dataclass(frozen=True)
class Curve:
    """A metric of a panel, and how its line is drawn."""

    metric: str
    label: str
    color: str
    style: str = "line"
    smoothed: bool = False
    """True to draw the raw values faintly, with their exponential mean on top."""
    spread: str = ""
    """Metric used as the half height of a band around the line."""


@dataclass(frozen=True)
class PanelSpec:
    """A panel: its texts, axis and curves."""

    title: str
    says: str
    unit: str
    lines: tuple[Curve, ...]
    missing: str = ""
    """Text of the panel if no step has logged its metrics."""
    percent: bool = False
    log: bool = False
    """True for a logarithmic axis of absolute values; zeros are not drawn."""
    floor: float = -math.inf
    """Smallest value drawn; smaller ones are clipped to it."""
    zero_line: str = ""
    """Label of a dashed line at 0."""
    limit: float = 0.0
    """Value of a dashed line; 0 draws none."""


_LEARNING = (
    PanelSpec(
        "Reward", "Mean reward of the responses that finished in a step.", "reward",
        (
            Curve("reward/mean", "reward", "blue", smoothed=True),
            Curve("dynamic_sampling/reward_mean", "discarded groups included", "teal", smoothed=True),
        ),
        "No step has scored a response yet.",
    ),
    PanelSpec(
        "Accuracy", "Share of responses with the right answer: sampled in training, and on the evaluation "
        "prompts, with a band of one standard error.",
        "% correct",
        (
            Curve("reward/accuracy", "training", "blue", smoothed=True),
            Curve("eval/accuracy", "evaluation", "orange", "points", spread="eval/accuracy_stderr"),
        ),
        "Neither training nor evaluation has logged an accuracy.", percent=True,
    ),
    PanelSpec(
        "Response length", "Tokens of the responses that finished.", "tokens",
        (
            Curve("rollout/response_tokens_mean", "mean", "blue"),
            Curve("rollout/response_tokens_max", "longest", "grey", "faint"),
            Curve("eval/response_tokens_mean", "evaluation", "orange", "points"),
        ),
        "No response has finished yet.",
    ),
    PanelSpec(
        "Finished share", "Fraction of slots whose response finished within the step; the rest continue in the next step.",
        "% of slots",
        (Curve("rollout/finished_share", "finished", "teal", smoothed=True),),
        "The steps have not logged rollout/finished_share.", percent=True,
    ),
)
_LOSSES = (
    PanelSpec(
        "Advantages", "Mean and standard deviation. Unfinished windows should stay near those of finished responses.",
        "advantage",
        (
            Curve("advantage/finished_mean", "finished", "blue", spread="advantage/finished_std"),
            Curve("advantage/unfinished_mean", "unfinished", "orange", spread="advantage/unfinished_std"),
        ),
        "The steps have not logged advantages.", zero_line="0",
    ),
    PanelSpec(
        "Explained variance", "Fraction of the returns' variance that the critic predicts: 0 is as good as their mean. "
        "Values below -1 are clipped.", "explained variance",
        (Curve("critic/explained_variance", "critic", "violet", smoothed=True),),
        "No critic update yet: it takes finished responses (and a critic).", floor=-1.0, zero_line="no better than the mean",
    ),
    PanelSpec(
        "Policy KL", "KL divergence of the updated policy from the policy that generated.", "KL (nats per token)",
        (Curve("policy/kl", "policy KL", "green"),),
        "No policy update yet (critic warm-up?).",
    ),
    PanelSpec(
        "Entropy", "At 0 the policy no longer explores.", "entropy (nats per token)",
        (Curve("policy/entropy", "entropy", "green"),),
        "No policy update yet (critic warm-up?).",
    ),
    PanelSpec(
        "Clip fraction", "Fraction of tokens whose ratio left the clip range.", "% of tokens",
        (
            Curve("policy/clip_fraction", "clipped", "green"),
            Curve("policy/clip_fraction_low", "at the lower bound", "yellow"),
        ),
        "No policy update yet (critic warm-up?).", percent=True,
    ),
    PanelSpec(
        "Gradient norm", "Norm of the gradient before clipping.", "L2 norm",
        (
            Curve("policy/grad_norm", "policy", "green"),
            Curve("critic/grad_norm", "critic", "violet"),
        ),
        "No update yet.", log=True,
    ),
)
_METHODS = (
    PanelSpec(
        "Reference KL", "KL divergence of the generating policy from the reference.", "KL (nats per token)",
        (Curve("kl/reference_per_token", "KL", "green"),),
    ),
    PanelSpec(
        "Groups by outcome", "Dynamic sampling trains only on mixed groups.", "% of groups",
        (
            Curve("dynamic_sampling/useful_share", "mixed", "blue"),
            Curve("dynamic_sampling/all_right_share", "all right", "green"),
            Curve("dynamic_sampling/all_wrong_share", "all wrong", "red"),
        ),
        percent=True,
    ),
    PanelSpec(
        "Dialogues", "Fraction of correct first answers, final answers and verdicts.", "% of dialogues",
        (
            Curve("dialogue/first_accuracy", "first answer", "orange", smoothed=True),
            Curve("dialogue/final_accuracy", "final answer", "blue", smoothed=True),
            Curve("dialogue/verifier_accuracy", "verdict", "violet", smoothed=True),
        ),
        percent=True,
    ),
    PanelSpec(
        "Waiting for the environment", "Seconds of its replies: tools, and programs between two requests.", "seconds",
        (
            Curve("time/tool_s_mean", "mean", "blue", smoothed=True),
            Curve("time/tool_s_max", "longest", "orange"),
        ),
        log=True,
    ),
    PanelSpec(
        "Critic along the response", "Return minus value in the quarters of a response: a slope shows initialization bias.",
        "return - value",
        (
            Curve("critic/advantage_q1", "first quarter", "blue", smoothed=True),
            Curve("critic/advantage_q4", "last quarter", "orange", smoothed=True),
        ),
        zero_line="unbiased",
    ),
    PanelSpec(
        "Judge", "How often both orders of a pair agree, and the gap between them.", "share",
        (
            Curve("reward/swap_consistency", "swap consistency", "green", smoothed=True),
            Curve("reward/position_gap", "position gap", "red", smoothed=True),
        ),
    ),
)
"""Panels shown only if the run logged their metrics."""
_ENGINE = (
    PanelSpec(
        "Servers and trainer", "Absolute difference between SGLang's and Megatron's log-probs of the same tokens. "
        "The curves should stay flat.", "nats",
        (
            Curve("mismatch/max_abs_log_ratio", "largest", "red"),
            Curve("mismatch/kl", "KL", "blue"),
            Curve("mismatch/k3", "k3", "teal"),
        ),
        "The steps have not logged mismatch/*.", log=True, limit=MAX_MISMATCH,
    ),
    PanelSpec(
        "Throughput", "Generated tokens per second of the whole step.", "tokens per second",
        (Curve("step/tokens_per_s", "tokens/s", "blue", smoothed=True),),
        "The steps have not logged step/tokens_per_s.",
    ),
)


SECTIONS = (("Learning", _LEARNING), ("Policy and critic", _LOSSES), ("Methods", _METHODS), ("Servers", _ENGINE))
"""Panels by section, for a page of several runs."""


def report_sections(run: RunRecord) -> tuple[ReportSection, ...]:
    """All panels of a run in the page's order, without the panels of methods that the run does not use."""
    return (
        ("Learning", (*(_panel(run, spec) for spec in _LEARNING), length_panel(run))),
        ("Policy and critic", tuple(_panel(run, spec) for spec in _LOSSES)),
        *_methods(run),
        ("Servers and resources", (*(_panel(run, spec) for spec in _ENGINE), idle_panel(run), memory_panel(run))),
        ("Time", (_stage_panel(run), rank_panel(run), _timeline_panel(run))),
    )


def _methods(run: RunRecord) -> list[ReportSection]:
    logged = [spec for spec in (*_evaluation_specs(run), *_METHODS) if any(len(run.finite(line.metric)) for line in spec.lines)]
    return [("Methods", tuple(_panel(run, spec) for spec in logged))] if logged else []


def _evaluation_specs(run: RunRecord) -> list[PanelSpec]:
    """Panels of evaluations with several sets, or with several responses per prompt."""
    sets = tuple(
        Curve(f"eval/{name}/accuracy", name, color, "points", spread=f"eval/{name}/accuracy_stderr")
        for name, color in zip(evaluation_sets(run.columns), cycle(_COLORS), strict=False)
    )
    best = sorted((name for name in run.columns if name.startswith("eval/pass@")), key=lambda name: int(name[10:]))
    ks = tuple(Curve(name, name[5:], color, "points") for name, color in zip(best, cycle(_COLORS), strict=False))
    return [
        PanelSpec("Evaluation by set", "Accuracy of each set, with a band of one standard error.", "% correct", sets, percent=True),
        PanelSpec("Best of k", "Expected accuracy of the best of k responses to an evaluation prompt.", "% correct", ks, percent=True),
    ]


def _panel(run: RunRecord, spec: PanelSpec) -> ReportPanel:
    scale = 100.0 if spec.percent else 1.0
    series, legend = [], []
    newest = ""
    for line in spec.lines:
        values = run.values(line.metric) * scale
        logged = np.isfinite(values)
        if spec.log:  # log-prob differences are signed, and in many steps exactly 0
            values = np.where(values == 0, np.nan, np.abs(values))
        if not logged.any() or not np.isfinite(values).any():
            continue
        series += _series(run, line, np.maximum(values, spec.floor), scale)
        legend.append((line.label, line.color))
        # The title shows the first line that has data.
        newest = newest or _newest_text(run, line, "%" if spec.percent else "")
    if not series:
        all_zero = spec.log and any(len(run.finite(line.metric)) for line in spec.lines)
        missing = "Every value is 0." if all_zero else spec.missing
        return ReportPanel(spec.title, spec.says, "", missing=missing if len(run.steps) else "No step has finished yet.")
    references = [(0.0, spec.zero_line)] if spec.zero_line else []
    if spec.limit:
        references.append((spec.limit, f"limit of k3 {spec.limit:g}"))
    svg = charts.line_chart(series, spec.unit, log=spec.log, references=references)
    # A single line named like the title needs no legend, unless it is drawn raw and smoothed.
    if len(legend) == 1:
        legend = [(f"{legend[0][0]}, smoothed over {smoothing_span(len(run.steps))} steps", legend[0][1])]
        legend = legend if spec.lines[0].smoothed else []
    return ReportPanel(spec.title, spec.says, svg, tuple(legend), newest)


def _newest_text(run: RunRecord, line: Curve, unit: str) -> str:
    """The last point of an evaluation; otherwise a mean over the newest steps, because a single step says little."""
    values = run.finite(line.metric) * (100.0 if unit else 1.0)
    unit = f" {unit}" if unit else ""
    if line.style == "points":
        return f"{compact(float(values[-1]))}{unit} at step {int(run.steps[np.isfinite(run.values(line.metric))][-1])}"
    span = min(smoothing_span(len(run.steps)), len(values))
    return f"{compact(recent_mean(values))}{unit}{f' (mean of {span} steps)' if span > 1 else ''}"


def _series(run: RunRecord, line: Curve, values: np.ndarray, scale: float) -> list[Series]:
    if line.smoothed:
        present = np.isfinite(values)
        steps, values = run.steps[present], values[present]
        return [
            Series(line.label, line.color, steps, values, "faint"),
            Series(line.label, line.color, steps, smooth(values, smoothing_span(len(run.steps)))),
        ]
    spread = run.values(line.spread) * scale if line.spread else None
    return [Series(line.label, line.color, run.steps, values, line.style, spread)]


def _stage_panel(run: RunRecord) -> ReportPanel:
    title, says = "Stage times", "Stages stacked, the step itself as a dark line: stages above the line ran at the " \
        "same time as others. Very slow steps are clipped."
    logged = {name[5:-2] for name in run.columns if name.startswith("time/") and name.endswith("_s") and len(run.finite(name))}
    stages = {stage: run.values(f"time/{stage}_s") for stage in in_table_order(logged)}
    if not stages:
        return ReportPanel(title, says, "", missing="The steps have not logged time/<stage>_s.", wide=True)
    svg = charts.stage_chart(run.steps, stages, run.values("step/time_s"))
    legend = tuple((stage, row_of(stage).color) for stage in stages)
    totals = {stage: float(np.nansum(seconds)) for stage, seconds in stages.items()}
    longest = max(totals, key=lambda stage: totals[stage])
    share = totals[longest] / (sum(totals.values()) or 1.0)
    return ReportPanel(title, says, svg, legend, f"{longest} takes {share:.0%} of stage time", wide=True)


def _choose_window(spans: Sequence[Span], num_steps: int = _NUM_TIMELINE_STEPS) -> list[Span]:
    """Spans of the newest ``num_steps`` consecutive steps with overlap, or of the newest ones if none overlaps.

    The last step may be in progress and is omitted if enough others exist.
    """
    steps = sorted({span.step for span in spans})
    candidates = steps[:-1] if len(steps) > num_steps else steps
    # Search only the last 50 steps: an older overlap does not show how the run behaves now.
    for end in range(len(candidates), max(num_steps, len(candidates) - 50) - 1, -1):
        chosen = set(candidates[end - num_steps : end])
        window = [span for span in spans if span.step in chosen]
        if overlap_seconds(window, *OVERLAP) > 0:
            return window
    chosen = set(candidates[-num_steps:])
    return [span for span in spans if span.step in chosen]


def _after_the_pause(window: list[Span]) -> list[Span]:
    """The spans after a stop and resume, if the window contains one: the pause would fill the chart."""
    if not window:
        return window
    in_order = sorted(window, key=lambda span: span.start_s)
    ended_s = in_order[0].end_s
    length_s = max(span.end_s for span in window) - in_order[0].start_s
    for number, span in enumerate(in_order):
        if span.start_s - ended_s > 0.5 * length_s:
            return in_order[number:]
        ended_s = max(ended_s, span.end_s)
    return window


def _timeline_panel(run: RunRecord) -> ReportPanel:
    title = "A few steps in detail"
    says = "Each lane is a resource, each bar a stage and its step. Shaded: the critic updates while the next window " \
        "is generated. The whole trace opens in ui.perfetto.dev: timeline.json."
    window = _after_the_pause(_choose_window([span for span in run.spans if span.lane in LANES]))
    if not window:
        return ReportPanel(title, says, "", missing="timeline.json is missing or has no spans.", wide=True)
    present = {span.lane for span in window}
    lanes = [lane for lane in LANES if lane in present] + sorted(present - set(LANES))
    overlap_s = overlap_seconds(window, *OVERLAP)
    critic_s = overlap_seconds(window, OVERLAP[1], OVERLAP[1])
    latest = f"{overlap_s:.2g} of {critic_s:.2g} s of critic updates hidden" if critic_s > 0 else "no critic update in these steps"
    stages = in_table_order({span.name for span in window})
    legend = tuple((stage, row_of(stage).color) for stage in stages)
    return ReportPanel(title, says, charts.timeline_chart(window, lanes, OVERLAP), legend, latest, wide=True)
