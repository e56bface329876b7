"""``report.html``: what a run did, in one file that opens anywhere; and a picture of its learning curve.

Reads ``metrics.jsonl``, ``timeline.json``, ``config.yaml`` and ``summary.json`` from the run's folder; each may be
missing, and a panel without data says why. Also right for a run that is still going. Safe to call from a thread or
another process: figures are plain objects, the files appear in one move. Takes one to two seconds, most of it to
import matplotlib and to draw.
"""

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from matplotlib.ticker import MaxNLocator

from megatron_rl.system.files import write_whole
from megatron_rl.tracking import charts
from megatron_rl.tracking.charts import LIGHT, Series, reduce_points, smooth
from megatron_rl.tracking.console import STAGE_STYLES, compact, duration
from megatron_rl.tracking.metrics_file import MetricsRow, read_metrics
from megatron_rl.tracking.page import Check, Page, Panel, Section, render
from megatron_rl.tracking.timeline import LANES, Span, overlap_seconds, read_timeline

_OVERLAP = ("generate", "update_critic")
_NUM_TIMELINE_STEPS = 3


@dataclass(frozen=True)
class _RunRecord:
    """What the run's folder holds."""

    name: str
    steps: np.ndarray
    """[N] step numbers, ascending, each once."""
    columns: Mapping[str, np.ndarray]
    """Metric name to [N] values, NaN where a step lacks the metric."""
    times_s: np.ndarray
    """[N] Unix times of the lines."""
    spans: Sequence[Span]
    config: Mapping[str, Any]
    config_text: str
    summary: Mapping[str, Any]

    def values(self, name: str) -> np.ndarray:
        """[N] float64; all NaN if no step has the metric."""
        return self.columns.get(name, np.full(len(self.steps), np.nan))

    def finite(self, name: str) -> np.ndarray:
        """[M] the finite values in order."""
        values = self.values(name)
        return values[np.isfinite(values)]

    def setting(self, dotted: str) -> Any:
        """A configuration value, None if the file does not have it."""
        node: Any = self.config
        for key in dotted.split("."):
            node = node.get(key) if isinstance(node, Mapping) else None
        return node

    def hours(self) -> np.ndarray:
        """[N] training time in hours at the end of each step: pauses between a crash and its resume do not count."""
        step_s = self.values("step/time_s")
        if np.isfinite(step_s).any():
            return np.cumsum(np.nan_to_num(step_s)) / 3600
        return (self.times_s - self.times_s[:1]) / 3600


@dataclass(frozen=True)
class Line:
    metric: str
    label: str
    color: str
    style: str = "line"
    smoothed: bool = False
    """Draw the raw values faintly and their exponential mean over them."""
    spread: str = ""
    """Metric that is the half height of a band around the line."""


@dataclass(frozen=True)
class _PanelSpec:
    title: str
    says: str
    unit: str
    lines: tuple[Line, ...]
    missing: str
    percent: bool = False
    log: bool = False
    """Draws sizes, without signs; zeros have no place on the axis."""
    floor: float = -math.inf
    """Values below are cut off."""
    zero_line: str = ""
    """Words at a dashed line at 0."""
    limit_setting: str = ""
    """Configuration key whose value, if above 0, is drawn as a dashed line."""


_LEARNING = (
    _PanelSpec(
        "Reward", "Mean reward of the responses that finished in a step.", "reward",
        (
            Line("reward/mean", "reward", "blue", smoothed=True),
            Line("dynamic_sampling/reward_mean", "with the groups that were sorted out", "teal", smoothed=True),
        ),
        "No step has scored a response yet.",
    ),
    _PanelSpec(
        "Accuracy", "Share of responses with the right answer: sampled in training, and on the evaluation prompts.",
        "% correct",
        (
            Line("reward/accuracy", "training", "blue", smoothed=True),
            Line("eval/accuracy", "evaluation", "orange", "points"),
        ),
        "Neither training nor evaluation has logged an accuracy.", percent=True,
    ),
    _PanelSpec(
        "Response length", "Tokens of the responses that finished.", "tokens",
        (
            Line("rollout/response_tokens_mean", "mean", "blue"),
            Line("rollout/response_tokens_max", "longest", "grey", "faint"),
            Line("eval/response_tokens_mean", "evaluation", "orange", "points"),
        ),
        "No response has finished yet.",
    ),
    _PanelSpec(
        "Finished share", "Part of the slots whose response finished within the step; the others are carried on.",
        "% of slots",
        (Line("rollout/finished_share", "finished", "teal", smoothed=True),),
        "The steps have not logged rollout/finished_share.", percent=True,
    ),
)
LOSSES = (
    _PanelSpec(
        "Advantages", "Mean and standard deviation. Unfinished windows should stay near those of finished responses.",
        "advantage",
        (
            Line("advantage/finished_mean", "finished", "blue", spread="advantage/finished_std"),
            Line("advantage/unfinished_mean", "unfinished", "orange", spread="advantage/unfinished_std"),
        ),
        "The steps have not logged advantages.", zero_line="0",
    ),
    _PanelSpec(
        "Explained variance", "How much of the returns the critic foresees: 1 is all, 0 is no better than their mean. "
        "Below -1 is cut off.", "explained variance",
        (Line("critic/explained_variance", "critic", "violet", smoothed=True),),
        "No critic update yet: it takes finished responses (and a critic).", floor=-1.0, zero_line="no better than the mean",
    ),
    _PanelSpec(
        "Policy KL", "How far an update moves the policy from the one that generated.", "KL (nats per token)",
        (Line("policy/kl", "policy KL", "green"),),
        "No policy update yet (critic warm-up?).",
    ),
    _PanelSpec(
        "Entropy", "A fall to 0 means that the policy no longer explores.", "entropy (nats per token)",
        (Line("policy/entropy", "entropy", "green"),),
        "No policy update yet (critic warm-up?).",
    ),
    _PanelSpec(
        "Clip fraction", "Share of tokens whose ratio left the clip range.", "% of tokens",
        (
            Line("policy/clip_fraction", "clipped", "green"),
            Line("policy/clip_fraction_low", "at the lower bound", "yellow"),
        ),
        "No policy update yet (critic warm-up?).", percent=True,
    ),
    _PanelSpec(
        "Gradient norm", "Before clipping.", "L2 norm",
        (
            Line("policy/grad_norm", "policy", "green"),
            Line("critic/grad_norm", "critic", "violet"),
        ),
        "No update yet.", log=True,
    ),
)
_METHODS = (
    _PanelSpec(
        "Reference KL", "Distance of the policy that generated from the reference.", "KL (nats per token)",
        (Line("kl/reference_per_token", "KL", "green"),), "",
    ),
    _PanelSpec(
        "Groups by outcome", "Dynamic sampling trains on mixed groups only.", "% of groups",
        (
            Line("dynamic_sampling/useful_share", "mixed", "blue"),
            Line("dynamic_sampling/all_right_share", "all right", "green"),
            Line("dynamic_sampling/all_wrong_share", "all wrong", "red"),
        ),
        "", percent=True,
    ),
    _PanelSpec(
        "Dialogues", "First and final answers that are right, verdicts that are true.", "% of dialogues",
        (
            Line("dialogue/first_accuracy", "first answer", "orange", smoothed=True),
            Line("dialogue/final_accuracy", "final answer", "blue", smoothed=True),
            Line("dialogue/verifier_accuracy", "verdict", "violet", smoothed=True),
        ),
        "", percent=True,
    ),
    _PanelSpec(
        "Critic along the response", "Return minus value in the quarters of a response: a slope is initialisation bias.",
        "return - value",
        (
            Line("critic/advantage_q1", "first quarter", "blue", smoothed=True),
            Line("critic/advantage_q4", "last quarter", "orange", smoothed=True),
        ),
        "", zero_line="unbiased",
    ),
    _PanelSpec(
        "Judge", "How often both orders of a pair agree, and how far they are apart.", "share",
        (
            Line("reward/swap_consistency", "swap consistency", "green", smoothed=True),
            Line("reward/position_gap", "position gap", "red", smoothed=True),
        ),
        "",
    ),
)
"""Shown where the run logged them."""
_ENGINE = (
    _PanelSpec(
        "Engine and trainer", "Difference between SGLang's and Megatron's log-probs of the same tokens, as sizes. "
        "It should stay flat.", "nats",
        (
            Line("mismatch/max_abs_log_ratio", "largest", "red"),
            Line("mismatch/kl", "KL", "blue"),
            Line("mismatch/k3", "k3", "teal"),
        ),
        "The steps have not logged mismatch/*.", log=True, limit_setting="rollout.max_logprob_difference",
    ),
    _PanelSpec(
        "Throughput", "Generated tokens over the time of the whole step.", "tokens per second",
        (Line("step/tokens_per_s", "tokens/s", "blue", smoothed=True),),
        "The steps have not logged step/tokens_per_s.",
    ),
)


def _load_run(output_dir: str | Path) -> _RunRecord:
    """Read the run's folder. Raises FileNotFoundError if there is no such folder; damaged files count as missing."""
    folder = Path(output_dir)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: expected the output folder of a run (run.output_dir), found none")
    by_step: dict[int, MetricsRow] = {}
    for row in read_metrics(folder / "metrics.jsonl"):
        earlier = by_step[row.step].metrics if row.step in by_step else {}
        by_step[row.step] = MetricsRow(row.step, row.time_s, {**earlier, **row.metrics})
    rows = [by_step[step] for step in sorted(by_step)]
    columns: dict[str, np.ndarray] = {}
    for index, row in enumerate(rows):
        for name, value in row.metrics.items():
            columns.setdefault(name, np.full(len(rows), np.nan))[index] = value
    config_text = _text(folder / "config.yaml")
    return _RunRecord(
        name=folder.resolve().name,
        steps=np.array([row.step for row in rows], dtype=np.int64),
        columns=columns,
        times_s=np.array([row.time_s for row in rows]),
        spans=read_timeline(folder / "timeline.json"),
        config=_mapping(yaml.safe_load, config_text, yaml.YAMLError),
        config_text=config_text,
        summary=_mapping(json.loads, _text(folder / "summary.json"), ValueError),
    )


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _mapping(parse: Any, text: str, error: type[Exception]) -> Mapping[str, Any]:
    try:
        parsed = parse(text) if text else {}
    except error:
        return {}
    return parsed if isinstance(parsed, Mapping) else {}


def _smoothing_span(num_steps: int) -> int:
    """Steps behind a smoothed line: a twentieth of the run, at least 5."""
    return max(5, num_steps // 20)


def write_report(output_dir: str | Path) -> Path:
    """Write ``report.html`` into the run's folder and return its path. Raises FileNotFoundError and OSError."""
    run = _load_run(output_dir)
    sections = (
        Section("Learning", tuple(_panel(run, spec) for spec in _LEARNING)),
        Section("Policy and critic", tuple(_panel(run, spec) for spec in LOSSES)),
        *_methods(run),
        Section("Engine", tuple(_panel(run, spec) for spec in _ENGINE)),
        Section("Time", (_stage_panel(run), _timeline_panel(run))),
    )
    written = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    preset = run.setting("preset")
    page = Page(
        title=run.name,
        subtitle=f"megatron_rl{f' · {preset}' if preset else ''} · written {written}",
        headline=_headline(run),
        checks=_health_checks(run),
        sections=sections,
        summary=tuple(_flat(run.summary)),
        config_text=run.config_text,
    )
    return write_whole(Path(output_dir) / "report.html", render(page))


def _flat(summary: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows = []
    for key, value in summary.items():
        if isinstance(value, Mapping):
            rows += _flat(value, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", f"{value:.6g}" if isinstance(value, float) else str(value)))
    return rows


def _headline(run: _RunRecord) -> tuple[tuple[str, str, str], ...]:
    tiles = []
    evaluations = run.finite("eval/accuracy")
    if len(evaluations):
        remark = f"from {evaluations[0]:.1%}" if len(evaluations) > 1 else "one evaluation"
        tiles.append(("Evaluation accuracy", f"{evaluations[-1]:.1%}", remark))
    rewards = run.finite("reward/mean")
    if len(rewards):
        smoothed = smooth(rewards, _smoothing_span(len(rewards)))
        tiles.append(("Reward", f"{smoothed[-1]:.3f}", f"from {rewards[0]:.3f}, smoothed"))
    total = run.setting("run.num_steps")
    last_step = int(run.steps[-1]) if len(run.steps) else 0
    tiles.append(("Step", str(last_step), f"of {total}" if total else ""))
    if len(run.steps):
        seconds = run.finite("step/time_s")
        median = f"{np.median(seconds):.2g} s a step (median)" if len(seconds) else ""
        tiles.append(("Training time", duration(run.hours()[-1] * 3600), median))
    tokens = run.finite("step/tokens_generated")
    speed = run.finite("step/tokens_per_s")
    if len(tokens):
        remark = f"{compact(np.median(speed))} per second (median)" if len(speed) else ""
        tiles.append(("Tokens generated", compact(tokens.sum()), remark))
    hidden = _hidden_share(run.spans)
    if hidden is not None:
        tiles.append(("Critic update hidden", f"{hidden:.0%}", "behind generation"))
    return tuple(tiles)


def _hidden_share(spans: Sequence[Span]) -> float | None:
    """Part of the critic updates' time during which generation ran, 0 to 1; None without critic updates."""
    total_s = overlap_seconds(spans, _OVERLAP[1], _OVERLAP[1])
    return overlap_seconds(spans, *_OVERLAP) / total_s if total_s > 0 else None


def _health_checks(run: _RunRecord) -> tuple[Check, ...]:
    """What a practised eye looks at first. Each check judges only what was logged."""
    return (_reward_check(run), _mismatch_check(run), _critic_check(run), *_incident_checks(run), _number_check(run))


def _reward_check(run: _RunRecord) -> Check:
    # Dynamic sampling trains on mixed groups, whose reward says little: what counts is that of all responses.
    rewards = run.finite("dynamic_sampling/reward_mean")
    if not len(rewards):
        rewards = run.finite("reward/mean")
    if len(rewards) < 10:
        return Check("Reward", "none", "too few steps to judge")
    fifth = len(rewards) // 5
    before, after = float(rewards[:fifth].mean()), float(rewards[-fifth:].mean())
    noise = float(np.diff(rewards).std()) / math.sqrt(fifth)
    if after > before + noise:
        return Check("Reward rises", "good", f"{before:.3f} in the first fifth, {after:.3f} in the last")
    return Check("Reward does not rise", "look", f"{before:.3f} in the first fifth, {after:.3f} in the last")


def _mismatch_check(run: _RunRecord) -> Check:
    ratios = run.finite("mismatch/max_abs_log_ratio")
    limit = run.setting("rollout.max_logprob_difference")
    if not len(ratios):
        return Check("Engine and trainer", "none", "no mismatch was logged")
    largest = f"largest log-prob difference {ratios.max():.1e}"
    if not isinstance(limit, int | float) or limit <= 0:
        return Check("Engine and trainer", "none", f"{largest}; no limit is set")
    if ratios.max() <= limit:
        return Check("Engine and trainer agree", "good", f"{largest}, limit {limit:.1e}")
    return Check("Engine and trainer differ", "look", f"{largest}, over the limit {limit:.1e}")


def _critic_check(run: _RunRecord) -> Check:
    explained = run.finite("critic/explained_variance")
    if not len(explained):
        return Check("Critic", "none", "no critic update was logged")
    recent = float(smooth(explained, _smoothing_span(len(explained)))[-1])
    if recent > 0:
        return Check("Critic foresees returns", "good", f"explained variance {recent:.2f}")
    return Check("Critic is no help", "look", f"explained variance {recent:.2f}: pretrain it or warm it up longer")


def _incident_checks(run: _RunRecord) -> list[Check]:
    checks = []
    unscored = run.finite("reward/num_unscored")
    if len(unscored):
        count = int(unscored.sum())
        words = f"{count} responses in {int((unscored > 0).sum())} steps" if count else "in all steps"
        checks.append(Check("Responses without a score" if count else "Every response scored",
                            "look" if count else "good", words))
    restarts = run.finite("rollout/num_server_restarts")
    if len(restarts):
        count = int(restarts.max())
        checks.append(Check("Servers were restarted" if count else "No server restarts", "look" if count else "good",
                            f"up to {count} in a step's count" if count else ""))
    return checks


def _number_check(run: _RunRecord) -> Check:
    """NaN in a column also means "not logged": only infinities and NaN rows of the file can be told apart."""
    infinite = sorted(name for name, values in run.columns.items() if np.isinf(values).any())
    if not run.columns:
        return Check("Numbers", "none", "metrics.jsonl has no steps yet")
    if infinite:
        step = int(run.steps[np.isinf(run.columns[infinite[0]])][0])
        return Check("Infinite metrics", "look", f"{', '.join(infinite[:4])}, first at step {step}")
    return Check("All metrics finite", "good", "")


def _methods(run: _RunRecord) -> list[Section]:
    logged = [spec for spec in _METHODS if any(len(run.finite(line.metric)) for line in spec.lines)]
    return [Section("Methods", tuple(_panel(run, spec) for spec in logged))] if logged else []


def _panel(run: _RunRecord, spec: _PanelSpec) -> Panel:
    scale = 100.0 if spec.percent else 1.0
    series, legend = [], []
    newest = ""
    for line in spec.lines:
        values = run.values(line.metric) * scale
        logged = np.isfinite(values)
        if spec.log:
            values = np.where(values == 0, np.nan, np.abs(values))
        if not logged.any() or not np.isfinite(values).any():
            continue
        series += _series(run, line, np.maximum(values, spec.floor), scale)
        legend.append((line.label, line.color))
        if not newest:
            step = int(run.steps[logged][-1])
            last = run.values(line.metric)[logged][-1] * scale
            newest = f"{compact(float(last))}{' %' if spec.percent else ''} at step {step}"
    if not series:
        all_zero = spec.log and any(len(run.finite(line.metric)) for line in spec.lines)
        missing = "Every value is 0." if all_zero else spec.missing
        return Panel(spec.title, spec.says, "", missing=missing if len(run.steps) else "No step is done yet.")
    references = [(0.0, spec.zero_line)] if spec.zero_line else []
    limit = run.setting(spec.limit_setting) if spec.limit_setting else None
    if isinstance(limit, int | float) and limit > 0:
        references.append((float(limit), f"limit at start {limit:g}"))
    svg = charts.line_chart(series, spec.unit, log=spec.log, references=references)
    # One line that says what the title says needs no legend, unless it has a raw and a smoothed form.
    if len(legend) == 1:
        legend = [(f"{legend[0][0]}, smoothed over {_smoothing_span(len(run.steps))} steps", legend[0][1])]
        legend = legend if spec.lines[0].smoothed else []
    return Panel(spec.title, spec.says, svg, tuple(legend), newest)


def _series(run: _RunRecord, line: Line, values: np.ndarray, scale: float) -> list[Series]:
    if line.smoothed:
        present = np.isfinite(values)
        steps, values = run.steps[present], values[present]
        return [
            Series(line.label, line.color, steps, values, "faint"),
            Series(line.label, line.color, steps, smooth(values, _smoothing_span(len(run.steps)))),
        ]
    spread = run.values(line.spread) * scale if line.spread else None
    return [Series(line.label, line.color, run.steps, values, line.style, spread)]


def _stage_panel(run: _RunRecord) -> Panel:
    title, says = "Stage times", "Stages stacked, the step itself as a dark line: what rises above the line ran at the " \
        "same time as something else. Very slow steps are cut off."
    stages = {
        stage: run.values(f"time/{stage}_s")
        for stage in [*STAGE_STYLES, *sorted(_other_stages(run))]
        if len(run.finite(f"time/{stage}_s"))
    }
    if not stages:
        return Panel(title, says, "", missing="The steps have not logged time/<stage>_s.", wide=True)
    svg = charts.stage_chart(run.steps, stages, run.values("step/time_s"))
    legend = tuple((stage, charts.STAGE_COLORS.get(stage, "grey")) for stage in stages)
    totals = {stage: float(np.nansum(seconds)) for stage, seconds in stages.items()}
    longest = max(totals, key=lambda stage: totals[stage])
    share = totals[longest] / (sum(totals.values()) or 1.0)
    return Panel(title, says, svg, legend, f"{longest} takes {share:.0%} of stage time", wide=True)


def _other_stages(run: _RunRecord) -> set[str]:
    names = {name[5:-2] for name in run.columns if name.startswith("time/") and name.endswith("_s")}
    return names - set(STAGE_STYLES)


def _choose_window(spans: Sequence[Span], num_steps: int = _NUM_TIMELINE_STEPS) -> list[Span]:
    """Spans of the newest ``num_steps`` steps in a row that show overlap, or of the newest ones if none does.

    The very newest step may be under way and is left out if there are others enough.
    """
    steps = sorted({span.step for span in spans})
    candidates = steps[:-1] if len(steps) > num_steps else steps
    for end in range(len(candidates), max(num_steps, len(candidates) - 50) - 1, -1):
        chosen = set(candidates[end - num_steps : end])
        window = [span for span in spans if span.step in chosen]
        if overlap_seconds(window, *_OVERLAP) > 0:
            return window
    chosen = set(candidates[-num_steps:])
    return [span for span in spans if span.step in chosen]


def _timeline_panel(run: _RunRecord) -> Panel:
    title = "A few steps close up"
    says = "Each lane is a resource, each bar a stage and its step. Shaded: the critic updates while the next window " \
        "is generated. The whole trace opens in ui.perfetto.dev: timeline.json."
    window = _choose_window(run.spans)
    if not window:
        return Panel(title, says, "", missing="timeline.json is not there or holds no spans.", wide=True)
    present = {span.lane for span in window}
    lanes = [lane for lane in LANES if lane in present] + sorted(present - set(LANES))
    overlap_s = overlap_seconds(window, *_OVERLAP)
    critic_s = overlap_seconds(window, _OVERLAP[1], _OVERLAP[1])
    latest = f"{overlap_s:.2g} of {critic_s:.2g} s of critic updates hidden" if critic_s > 0 else "no critic update here"
    stages = sorted({span.name for span in window}, key=lambda name: ([*STAGE_STYLES, name].index(name), name))
    legend = tuple((stage, charts.STAGE_COLORS.get(stage, "grey")) for stage in stages)
    return Panel(title, says, charts.timeline_chart(window, lanes, _OVERLAP), legend, latest, wide=True)


def _write_curve_png(output_dir: str | Path, path: str | Path) -> Path:
    """A picture for a README: accuracy over steps and over training time. Raises FileNotFoundError, OSError.

    Raises ValueError if the run logged no accuracy.
    """
    run = _load_run(output_dir)
    training, evaluation = run.values("reward/accuracy") * 100, run.values("eval/accuracy") * 100
    if not np.isfinite(training).any() and not np.isfinite(evaluation).any():
        raise ValueError(f"{output_dir}: expected reward/accuracy or eval/accuracy in metrics.jsonl, found neither")
    hours = run.hours()
    unit, factor = ("hours", 1) if hours[-1] >= 2 else ("minutes", 60)
    figure = charts.new_figure(820, 300)
    for place, (x, x_label) in enumerate([(run.steps, "training step"), (hours * factor, f"training time ({unit})")]):
        axes = charts.new_axes(figure, (1, 2, place + 1))
        present = np.isfinite(training)
        smoothed = smooth(training[present], _smoothing_span(len(run.steps)))
        axes.plot(*reduce_points(x[present], training[present]), color=LIGHT["blue"], linewidth=0.8, alpha=0.3)
        axes.plot(*reduce_points(x[present], smoothed), color=LIGHT["blue"], linewidth=1.8, label="training, smoothed")
        axes.plot(*reduce_points(x, evaluation), color=LIGHT["orange"], marker="o", markersize=4.5, linewidth=1.0,
                  label="evaluation")
        axes.set_ylim(0, None)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=place == 0))
        charts.label_axes(axes, x_label, "% correct" if place == 0 else "")
        if place == 0:
            axes.legend(frameon=False, fontsize=10, labelcolor=LIGHT["ink"], loc="best")
    return write_whole(path, charts.to_png(figure))
