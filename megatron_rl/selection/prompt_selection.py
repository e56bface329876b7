"""Prompt selection, from a checked configuration to the kept rows and their report.

Prompts are read once to check them. Scores come from select_prompts.scores_path or from the policy's own
responses. The prompts are read again to write the kept rows unchanged. The same prompts and scores give the same
bytes. Nothing is written before all inputs have been read; each file appears atomically.

The report lists dropped prompts by type and reason, as Markdown, as JSON and on the terminal. The files next to
``kept.jsonl`` are ``kept.report.md``, ``kept.report.json`` (settings and tables) and ``kept.verdicts.jsonl`` (one row per
prompt).
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from megatron_rl.config.derived import model_has_vision
from megatron_rl.config.schema import Config, Init, SelectionRule
from megatron_rl.data.chat_content import moved_row
from megatron_rl.data.prompts import PromptSet, check_files, load_prompts, read_content, with_reward_fields
from megatron_rl.data.row_files import is_missing, lookup, not_json, read_rows
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.selection.scores import (
    SamplingPlan,
    ScoreFile,
    generate_scores,
    missing_samples,
    open_score_file,
    read_candidates,
    read_scores,
    score_settings,
)
from megatron_rl.selection.selection_rules import TOO_LONG, PromptDecision, PromptScores, TypeSummary, select, summarize
from megatron_rl.system.command_line.terminal import progress_bar
from megatron_rl.system.files.atomic_files import atomic_text_file


@dataclass(frozen=True)
class SelectionReport:
    settings: Mapping[str, Any]
    verdicts: Sequence[PromptDecision]
    notes: Sequence[str]
    """Remarks for the reader, in addition to the tables."""

    @property
    def types(self) -> list[TypeSummary]:
        return summarize(self.verdicts)

    @property
    def num_kept(self) -> int:
        return sum(verdict.kept for verdict in self.verdicts)

    def tables(self) -> list[Table]:
        """Tables for the terminal: an overview by type, and the reasons for dropped prompts."""
        overview = Table(title=f"kept {self.num_kept:,} of {len(self.verdicts):,} prompts", title_justify="left")
        for i, name in enumerate(_HEADER):
            overview.add_column(name, justify="right" if i else "left")
        reasons = Table(title="dropped", title_justify="left")
        reasons.add_column("type")
        reasons.add_column("reason")
        reasons.add_column("prompts", justify="right")
        for summary in self.types:
            overview.add_row(*_row(summary))
            for reason, number in summary.dropped.items():
                reasons.add_row(_name(summary.type), reason, f"{number:,}")
        return [overview, reasons]


def report_paths(output_path: str | Path) -> dict[str, Path]:
    """Paths of the report next to ``output_path``, by ending: report.md, report.json and verdicts.jsonl."""
    path = Path(output_path)
    stem = path.name.removesuffix(".jsonl")
    return {name: path.with_name(f"{stem}.{name}") for name in ("report.md", "report.json", "verdicts.jsonl")}


def write_report(report: SelectionReport, output_path: str | Path) -> None:
    paths = report_paths(output_path)
    with atomic_text_file(paths["verdicts.jsonl"]) as file:
        for verdict in report.verdicts:
            file.write(json.dumps({"kept": verdict.kept, **asdict(verdict)}) + "\n")
    with atomic_text_file(paths["report.json"]) as file:
        json.dump(_as_json(report), file, indent=2)
    with atomic_text_file(paths["report.md"]) as file:
        file.write(_as_markdown(report))


def _as_json(report: SelectionReport) -> dict[str, Any]:
    return {
        "settings": dict(report.settings),
        "num_prompts": len(report.verdicts),
        "num_kept": report.num_kept,
        "types": [asdict(summary) for summary in report.types],
        "notes": list(report.notes),
    }


def _as_markdown(report: SelectionReport) -> str:
    lines = ["# Prompt selection", "", f"Kept {report.num_kept:,} of {len(report.verdicts):,} prompts.", ""]
    lines += _markdown_table(_HEADER, [_row(summary) for summary in report.types])
    reasons = [
        (_name(summary.type), reason, f"{number:,}")
        for summary in report.types
        for reason, number in summary.dropped.items()
    ]
    lines += ["", "## Why prompts were dropped", "", *_markdown_table(("type", "reason", "prompts"), reasons)]
    if report.notes:
        lines += ["", "## Notes", "", *(f"- {note}" for note in report.notes)]
    lines += ["", "## Settings", ""]
    lines += _markdown_table(("key", "value"), [(key, f"`{value}`") for key, value in report.settings.items()])
    return "\n".join(lines) + "\n"


_HEADER = (
    "type", "prompts", "kept", "mean score", "mean score of kept", "highest kept", "responses", "unscored", "kept, all 0",
)  # fmt: skip


def _row(summary: TypeSummary) -> tuple[str, ...]:
    return (
        _name(summary.type),
        f"{summary.num_prompts:,}",
        f"{summary.num_kept:,}",
        _number(summary.mean_score),
        _number(summary.mean_score_kept),
        _number(summary.highest_kept),
        f"{summary.num_responses:,}",
        f"{summary.num_unscored:,}",
        f"{summary.num_kept_all_zero:,}",
    )


def _name(prompt_type: str) -> str:
    return prompt_type or "(no type)"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return [line(header), line(["---"] * len(header)), *(line(row) for row in rows)]


_SCORES_NAME = "select_scores.jsonl"
"""File in run.output_dir with the scored responses, if select_prompts.scores_path is empty."""

Note = Callable[[str], None]


def check_selection(config: Config) -> None:
    """Raise ConfigError with every problem that the general checks do not cover."""
    rule = config.select_prompts
    problems = []
    if Path(rule.output_path).resolve() in {Path(name).resolve() for name in config.data.train_files}:
        problems.append(f"select_prompts.output_path: {rule.output_path} is one of data.train_files; give another file")
    elif Path(rule.output_path).is_dir():
        problems.append(f"select_prompts.output_path: {rule.output_path} is a folder; give a file")
    if rule.scores_path and not Path(rule.scores_path).exists():
        problems.append(f"select_prompts.scores_path: {rule.scores_path} does not exist; leave it empty to generate")
    if not rule.scores_path and rule.rule is not SelectionRule.lowest and rule.num_samples < 2:
        problems.append(
            f"select_prompts.num_samples: rule={rule.rule.value} compares responses to a prompt; expected at least 2 "
            f"(16 is in use), got {rule.num_samples}"
        )
    if not rule.scores_path and config.policy.init is Init.random:
        problems.append("policy.init: random weights give no information about prompts; set checkpoint, or give scores_path")
    if problems:
        raise ConfigError("\n".join(problems))


def check_inputs(config: Config) -> tuple[dict[str, str], int]:
    """Check everything outside the configuration that would fail later. Returns the types by prompt id, and the number of duplicate ids."""
    takes_images = None if config.select_prompts.scores_path else model_has_vision(config)
    check_files(config.data.train_files, config.data, takes_images=takes_images)
    types, num_duplicates = read_candidates(config.data.train_files, config.data)
    if not config.select_prompts.scores_path:
        from megatron_rl.rewards.router import check_types, routes_of

        routes_of(config.reward)
        check_types(config.reward, types.values())
    return types, num_duplicates


def select_prompts(config: Config, types: Mapping[str, str], num_duplicates: int, note: Note) -> SelectionReport:
    """Write the kept rows and the report. ``types``: by prompt id. Raises DataError if no prompt is kept."""
    rule = config.select_prompts
    notes = []
    if num_duplicates:
        notes.append(f"{num_duplicates:,} rows with the id of an earlier row were skipped.")
    too_long: set[str] = set()
    if rule.scores_path:
        scores_path = rule.scores_path
    else:
        scores_path, prompt_set = _score_prompts(config, note)
        too_long = types.keys() - {prompt.id for prompt in prompt_set.prompts}
    prompts, num_foreign = read_scores(scores_path, types, id_field=config.data.id_field)
    if num_foreign:
        notes.append(f"{num_foreign:,} scores have no matching prompt.")
    verdicts = _verdicts(config, prompts, too_long)
    settings = {"data.train_files": ", ".join(config.data.train_files), "scores": scores_path, **_rule_settings(config)}
    report = SelectionReport(settings, verdicts, notes)
    if report.num_kept:
        _write_kept(config, {verdict.id for verdict in verdicts if verdict.kept})
    write_report(report, rule.output_path)
    if not report.num_kept:
        raise DataError(
            f"select_prompts: no prompt is left; {report_paths(rule.output_path)['report.md']} lists the reasons"
        )
    return report


def plan_table(config: Config, types: Mapping[str, str], num_duplicates: int) -> Table:
    """Plan of the command as a table, for --dry-run."""
    rule = config.select_prompts
    table = Table(title="select-prompts", title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("prompts", f"{len(types):,} ({num_duplicates:,} duplicate ids dropped)")
    for name, number in sorted(Counter(types.values()).items()):
        table.add_row(f"  type {name!r}", f"{number:,}")
    if rule.scores_path:
        table.add_row("scores", rule.scores_path)
    else:
        responses = f"up to {len(types) * rule.num_samples:,} responses"
        origin = f"{config.policy.path}, saved in {Path(config.run.output_dir) / _SCORES_NAME}"
        table.add_row("scores", f"{responses} of {origin}")
        rewards = {name: route.name for name, route in config.reward.by_type.items()} or config.reward.name
        table.add_row("reward", str(rewards))
    for key, value in _rule_settings(config).items():
        if key.startswith(("select_prompts.", "algorithm.")):
            table.add_row(key, str(value))
    for path in (rule.output_path, *report_paths(rule.output_path).values()):
        table.add_row("writes", str(path))
    return table


def _verdicts(config: Config, prompts: list[PromptScores], too_long: set[str]) -> list[PromptDecision]:
    rule = config.select_prompts
    # Prompts that never reach the policy do not count in the mean and share of their type.
    judged = [prompt for prompt in prompts if prompt.id not in too_long]
    most = max((len(prompt.scores) + prompt.num_unscored for prompt in judged), default=0)
    if rule.rule is not SelectionRule.lowest and most < 2:
        raise DataError(
            f"{rule.scores_path or 'scores'}: rule={rule.rule.value} compares responses to a prompt, but no prompt has "
            "more than one score; give several rows the same id"
        )
    verdicts = {v.id: v for v in select(judged, rule, correct_from=config.algorithm.dynamic_sampling.correct_from)}
    return [verdicts.get(p.id) or PromptDecision(p.id, p.type, TOO_LONG, 0, 0, None, None, None) for p in prompts]


def _rule_settings(config: Config) -> dict[str, Any]:
    rule = config.select_prompts
    settings: dict[str, Any] = {"select_prompts.rule": rule.rule.value}
    if rule.rule is SelectionRule.lowest:
        settings["select_prompts.keep_share"] = rule.keep_share
    elif rule.rule is SelectionRule.pass_rate:
        settings["select_prompts.max_pass_rate"] = rule.max_pass_rate
        settings["algorithm.dynamic_sampling.correct_from"] = config.algorithm.dynamic_sampling.correct_from
    else:
        settings["select_prompts.min_spread"] = rule.min_spread
    if not rule.scores_path:
        settings["select_prompts.num_samples"] = rule.num_samples
        settings |= {key: value for key, value in score_settings(config).items() if not key.startswith("policy weights")}
    return settings


def _write_kept(config: Config, kept: set[str]) -> None:
    """Write the rows of the prompt ids ``kept`` to select_prompts.output_path.

    A missing id is added, and image paths are made relative to the output's folder; all else is unchanged.
    """
    data = config.data
    left = set(kept)
    with atomic_text_file(config.select_prompts.output_path) as file:
        for row, place in read_rows(data.train_files, split=data.split):
            prompt_id = read_content(row, place, data).id
            if prompt_id not in left:
                continue
            # Later rows with this id are duplicates, which the selection has not judged.
            left.remove(prompt_id)
            row = moved_row(row, place, data, Path(config.select_prompts.output_path).parent)
            if is_missing(lookup(row, data.id_field)):
                # Write the id as the first field, where readers expect it.
                row = {data.id_field: prompt_id, **{key: value for key, value in row.items() if key != data.id_field}}
            file.write(_json_line(row, place))


def _json_line(row: Mapping[str, Any], place: str) -> str:
    problems = {name: not_json(value) for name, value in row.items()}
    wrong = next((name for name, problem in problems.items() if problem), None)
    if wrong is not None:
        raise DataError(f"{place}: field {wrong!r}: {problems[wrong]}, so the row cannot be written; drop the column")
    return json.dumps(row) + "\n"


# ------------------------------------------------------------------------------------------------ the policy's responses


def _score_prompts(config: Config, note: Note) -> tuple[str, PromptSet]:
    """Generate and score the responses that run.output_dir lacks. Returns (path of the scores, prompts of valid length)."""
    from megatron_rl.data.tokenizer import Tokenizer
    from megatron_rl.rewards.router import check_prompts, wanted_row_fields
    from megatron_rl.rollout.generation import Sampling

    data = with_reward_fields(config.data, wanted_row_fields(config.reward))
    tokenizer = Tokenizer(config.policy.path)
    prompt_set = load_prompts(data.train_files, data, tokenizer, max_prompt_tokens=config.batch.max_prompt_tokens)
    check_prompts(config.reward, prompt_set.prompts)
    folder = Path(config.run.output_dir)
    plan = SamplingPlan(
        Sampling.of(config.rollout, tokenizer, seed=config.run.seed),
        tokenizer.decode,
        num_samples=config.select_prompts.num_samples,
        max_new_tokens=config.batch.max_response_tokens,
    )
    with open_score_file(folder / _SCORES_NAME, score_settings(config)) as scores:
        missing = missing_samples(prompt_set.prompts, plan.num_samples, scores.done)
        num_missing = sum(map(len, missing.values()))
        num_all = len(prompt_set.prompts) * plan.num_samples
        if num_missing < num_all:
            note(f"{num_all - num_missing:,} of {num_all:,} responses are already in {scores.path}")
        if num_missing:
            with progress_bar("responses", num_all, completed=num_all - num_missing) as advance:
                _generate(config, prompt_set, plan, scores, note, advance)
    return str(folder / _SCORES_NAME), prompt_set


def _generate(
    config: Config,
    prompt_set: PromptSet,
    plan: SamplingPlan,
    scores: ScoreFile,
    note: Note,
    advance: Callable[[int], None],
) -> None:
    """Run servers and reward workers until no response is missing."""
    from megatron_rl.rewards.router import build_rewards
    from megatron_rl.rollout.recovering_client import RecoveringClient
    from megatron_rl.rollout.server_pool import open_servers
    from megatron_rl.system.processes.signals import clean_stop, run_until_stopped

    async def run() -> None:
        async with RecoveringClient.without_trainer(config, servers, note) as rollout:
            await generate_scores(
                prompt_set.prompts,
                plan,
                scores,
                generate=lambda request, prompt_id: rollout.generate(request, sticky_key=prompt_id),
                grade=rewards.score_many,
                # Twice as many prompts as fit, so that servers stay busy while a prompt's last response is scored.
                num_prompts_in_progress=max(
                    1, 2 * config.rollout.max_inflight_requests * num_servers // plan.num_samples
                ),
                max_error_rate=config.reward.max_error_rate,
                on_scored=advance,
            )

    with (
        clean_stop(),
        build_rewards(config.reward) as rewards,
        open_servers(config, Path(config.run.output_dir) / "logs", note, load_weights=True) as servers,
    ):
        num_servers = len(servers.urls)
        run_until_stopped(run())
