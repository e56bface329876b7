"""Writes ``report.html``: the course of a run in one self-contained file.

Reads ``metrics.jsonl``, ``timeline.json``, ``config.yaml`` and ``summary.json`` from the run's folder. Each may be
missing: a panel without data shows the reason. The run may still be running. Safe to call from a thread or another
process: figures are plain objects, and the file appears atomically. Takes one to two seconds, mostly to import
matplotlib and to draw.

The page's samples can be filtered and read token by token, without a network. The page has a bounded part of what is stored: some
steps from the first to the newest, some responses of each step, and the start and the end of long responses. A token's color
shows its advantage, weight version or mismatch.
"""

import json
import time
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.config.load import flat_params
from megatron_rl.desk.report.health_checks import health_checks, recent_mean
from megatron_rl.desk.report.html_page import ReportPage, render
from megatron_rl.desk.report.run_record import RunRecord, load_run
from megatron_rl.desk.report.training_panels import report_sections
from megatron_rl.errors import UserError
from megatron_rl.system.files.atomic_files import write_atomic
from megatron_rl.tracking.console import accuracy_text, compact, duration
from megatron_rl.tracking.samples_file import METRICS, ROW_COLUMNS, read_samples, sample_files
from megatron_rl.tracking.timeline import OVERLAP, Span, overlap_seconds

TokenColor = tuple[int, int, int]
"""Red, green and blue, 0 to 255, light enough for black text."""
GOOD, BAD, APART = (88, 196, 110), (240, 110, 100), (245, 170, 60)
VERSIONS = ((140, 190, 245), (245, 205, 120), (205, 175, 245), (130, 215, 210), (245, 175, 205), (200, 200, 150))
"""Colors of weight versions, used cyclically."""
PAPER = (236, 236, 232)


Legend = tuple[tuple[str, TokenColor], ...]


def token_colors(row: Mapping[str, Any], by: str) -> tuple[list[TokenColor | None], Legend]:
    """Colors for the tokens of ``row``, which comes from ``whole_rows``. ``by``: advantage, version, mismatch or none.

    Returns ([tokens] colors, legend). A token without a value or one that did not train has the color None.
    """
    legend: Legend
    if by == "advantage":
        advantages = advantages_of(row)
        scale = _scale(np.abs(advantages))
        legend = ((f"+{scale:.2g}", GOOD), (f"-{scale:.2g}", BAD), ("0", PAPER))
        return [_shade(one / scale, GOOD, BAD) for one in advantages.tolist()], legend if np.isfinite(advantages).any() else ()
    if by == "mismatch":
        gaps = np.abs(mismatch_of(row))
        scale = _scale(gaps)
        legend = ((f"{scale:.2g} difference", APART), ("0", PAPER))
        return [_shade(one / scale, APART, APART) for one in gaps.tolist()], legend if np.isfinite(gaps).any() else ()
    if by == "version":
        colors: list[TokenColor | None] = []
        versions = sorted({s["weight_version"] for s in row["segments"] if s["role"] != "environment" and s["num_tokens"]})
        for segment in row["segments"]:
            color = None if segment["role"] == "environment" else VERSIONS[segment["weight_version"] % len(VERSIONS)]
            colors += [color] * segment["num_tokens"]
        return colors, tuple((f"weights {version}", VERSIONS[version % len(VERSIONS)]) for version in versions)
    return [None] * row["length"], ()


def advantages_of(row: Mapping[str, Any]) -> np.ndarray:
    """Advantages [tokens]; NaN for a token that did not train."""
    return np.where(np.array(row["mask"], bool), np.array(row["advantages"], np.float64), np.nan)


def mismatch_of(row: Mapping[str, Any]) -> np.ndarray:
    """The trainer's log-probs minus the server's [tokens]."""
    return np.array(row["trainer_logprobs"], np.float64) - np.array(row["rollout_logprobs"], np.float64)


def turn_titles(row: Mapping[str, Any]) -> list[tuple[int, str]]:
    """(first token, title) of each turn and message of a dialogue, in order; empty for a single text."""
    parts: list[list[Mapping[str, Any]]] = []
    for segment in row["segments"]:
        if segment["num_tokens"] and parts and all(parts[-1][0][name] == segment[name] for name in ("turn", "role")):
            parts[-1].append(segment)
        elif segment["num_tokens"]:
            parts.append([segment])
    rewards = {turn["turn"]: turn["reward"] for turn in row["turns"]}
    titles, start = [], 0
    for part in parts if len(parts) > 1 else []:
        end = start + sum(segment["num_tokens"] for segment in part)
        titles.append((start, _turn_title(row, part, start, end, rewards.get(part[0]["turn"]))))
        start = end
    return titles


def _turn_title(row: Mapping[str, Any], part: Sequence[Mapping[str, Any]], start: int, end: int, reward: float | None) -> str:
    first, last = part[0], part[-1]
    if first["role"] == "environment":
        waited_s = first.get("waited_s")
        return " · ".join(["message", f"{end - start} tokens", *([] if waited_s is None else [f"after {waited_s:.2g} s"])])
    steps = str(first["step"]) if first["step"] == last["step"] else f"{first['step']} to {last['step']}"
    said = [f"turn {first['turn'] + 1}", first["role"], f"{end - start} tokens", f"step {steps}"]
    said += ["cut"] if last["finish_reason"] != "stop" and end < row["length"] else []
    values = np.array(row["values"][start:end] if row["values"] is not None else [], np.float64)
    values = values[np.isfinite(values)]
    said += [f"value {values[0]:.2g} to {values[-1]:.2g}"] if len(values) else []
    return " · ".join([*said, *([] if reward is None else [f"reward {reward:.3g}"])])


def _scale(sizes: np.ndarray) -> float:
    """Value drawn in full color: nearly the largest, because a single outlier would make all others pale."""
    finite = sizes[np.isfinite(sizes)]
    return float(np.quantile(finite, 0.98)) or float(finite.max()) or 1.0 if len(finite) else 1.0


def _shade(share: float, positive: TokenColor, negative: TokenColor) -> TokenColor | None:
    """RGB color of ``share``: paper at 0, ``positive`` from 1, ``negative`` from -1, mixed between them; None for NaN."""
    if share != share:
        return None
    full, part = (positive if share > 0 else negative), min(abs(share), 1.0)
    red, green, blue = (round(empty + (color - empty) * part) for empty, color in zip(PAPER, full, strict=True))
    return red, green, blue


_MAX_STEPS, _MAX_PER_STEP = 8, 16
_MAX_TOKENS_PER_STEP = 12_000
"""Limit that keeps a page at a few MB."""
_HEAD, _TAIL = 500, 1000
"""Tokens shown from the start and from the end of a long response."""
_MAX_PROMPT_CHARACTERS = 6000
_MISSING = (
    "This run has stored no responses yet: each policy update writes some, unless tracking.samples_per_step is 0."
)


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
        tiles.append(("Reward", f"{recent_mean(rewards):.3f}", f"from {rewards[0]:.3f}, smoothed"))
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


def samples_html(run: str | Path) -> str:
    """The samples section as HTML; one sentence if nothing is stored."""
    files = sample_files(run)
    try:
        rows = _chosen_rows(files) if files else []
    except UserError as error:
        return _section(f'<p class="missing">{escape(str(error))}</p>')
    if not rows:
        return _section(f'<p class="missing">{escape(_MISSING)}</p>')
    kinds = {name: {"bool_": "bool", "string": "text"}.get(kind, "number") for name, kind in ROW_COLUMNS.items()}
    metrics = sorted({name for row in rows for name in row["metrics"]} - set(kinds))
    # Escape every "<": a response may contain "</script>".
    data = json.dumps({"rows": rows, "kinds": kinds, "metrics": metrics}, separators=(",", ":")).replace("<", "\\u003c")
    says = (
        f"{len(rows)} of the stored responses, from {len({row['step'] for row in rows})} of {len(files)} stored steps. All of them: "
        f"megatron-rl samples {escape(str(run))}"
    )
    here = package_files("megatron_rl.desk.report")
    style, script = (here.joinpath(f"samples.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    return _section(
        f"<style>{style}</style>\n{_TOOLS}<noscript><p class=\"missing\">Samples need JavaScript.</p></noscript>\n"
        f'<script type="application/json" id="samples-data">{data}</script>\n<script>{script}</script>',
        says,
    )


_TOOLS = """<div class="samples" id="samples">
<div class="tools">
<label class="filter"><span>Filter</span><input data-is="where" type="text" spellcheck="false" autocomplete="off"
 placeholder="reward &lt; 0.5 and length &gt; 200"></label>
<label><span>Step</span><select data-is="step"><option value="">all</option></select></label>
<label><span>Order</span><select data-is="sort"><option value="step:desc">newest step</option>
<option value="reward:asc">lowest reward</option>
<option value="reward:desc">highest reward</option><option value="length:desc">longest</option><option value="length:asc">shortest</option>
<option value="advantage:asc">lowest advantage</option><option value="advantage:desc">highest advantage</option>
<option value="mismatch:desc">highest mismatch</option></select></label>
<label><span>Color</span><select data-is="by"><option value="advantage">advantage</option><option value="version">weight version</option>
<option value="mismatch">mismatch</option></select></label>
<span class="count" data-is="count"></span><div class="problem" data-is="problem" role="status"></div>
</div>
<div class="both"><div class="list" data-is="list"></div><div class="one" data-is="one"></div></div>
</div>
"""


def _section(body: str, says: str = "") -> str:
    return f'<h2>Samples</h2>\n<p class="says" style="margin-bottom: 10px">{says}</p>\n{body}\n'


def _chosen_rows(files: Mapping[int, Path]) -> list[dict[str, Any]]:
    steps = list(files)
    indices = np.unique(np.linspace(0, len(steps) - 1, min(_MAX_STEPS, len(steps))).round().astype(int))
    chosen = []
    for index in indices.tolist():
        table = read_samples([files[steps[index]]]).slice(0, _MAX_PER_STEP)
        so_far = np.cumsum([min(length, _HEAD + _TAIL) for length in table["length"].to_pylist()])
        # Keep at least one response per step, even if it exceeds the limit.
        chosen += [_embedded(row) for row in table.slice(0, max(1, int((so_far <= _MAX_TOKENS_PER_STEP).sum()))).to_pylist()]
    return chosen


def _embedded(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row in the format of the page's script: token values as text, and only the tokens that are shown."""
    length = row["length"]
    left_out = max(0, length - _HEAD - _TAIL)
    head = _HEAD if left_out else length
    kept = np.r_[0:head, head + left_out : length]
    ends = np.array(row["token_ends"], np.int64)
    sizes = np.diff(ends, prepend=0)
    text: str = row["response"]
    cut_from, cut_to = (int(ends[head - 1]), int(ends[head + left_out - 1])) if left_out else (len(text), len(text))
    scalars = {name: row[name] for name in ROW_COLUMNS}
    return scalars | {
        "prompt": _shortened(row["prompt"]),
        "response": text[:cut_from] + text[cut_to:],
        "metrics": dict(row[METRICS]),
        "head": head,
        "left_out": left_out,
        # A character outside the basic plane counts as two units in JavaScript.
        "ends": ",".join(map(str, _utf16_sizes(text, sizes)[kept].tolist())),
        "adv": _digits(advantages_of(row)[kept]),
        "lp": _digits(np.array(row["rollout_logprobs"], np.float64)[kept]),
        "diff": _digits(mismatch_of(row)[kept]),
        "parts": turn_titles(row),
        "ver": [
            [s["num_tokens"], None if s["role"] == "environment" else s["weight_version"], s["step"]] for s in row["segments"]
        ],
    }


def _utf16_sizes(text: str, sizes: np.ndarray) -> np.ndarray:
    """Number of UTF-16 units of each token [tokens]."""
    if text.isascii():
        return sizes
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    so_far = np.concatenate([[0], np.cumsum(1 + (points > 0xFFFF))])
    return np.diff(so_far[np.cumsum(sizes)], prepend=0)


def _digits(values: np.ndarray) -> str:
    return ",".join("" if value != value else f"{value:.3g}" for value in values.tolist())


def _shortened(text: str) -> str:
    half = _MAX_PROMPT_CHARACTERS // 2
    return text if len(text) <= 2 * half else f"{text[:half]}\n… {len(text) - 2 * half} characters …\n{text[-half:]}"
