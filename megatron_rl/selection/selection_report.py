"""Reports a selection: dropped prompts by type and reason, as Markdown, as JSON and on the terminal.

The files next to ``kept.jsonl`` are ``kept.report.md``, ``kept.report.json`` (settings and tables) and
``kept.verdicts.jsonl`` (one row per prompt).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from megatron_rl.selection.selection_rules import PromptDecision, TypeSummary, summarize
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
    """Maps the endings of the report's file names to their paths."""
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
