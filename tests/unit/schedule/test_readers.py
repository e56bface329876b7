"""Modes and stages are data: no other file compares a mode, and a file that means a stage by name is listed here."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from rich.style import Style

import megatron_rl
from megatron_rl.desk.report.charts import COLORS
from megatron_rl.desk.report.run_report import write_report
from megatron_rl.errors import DataError
from megatron_rl.schedule.table import ROWS
from megatron_rl.tracking.console import stage_rows
from megatron_rl.tracking.metrics_file import MetricsWriter

PACKAGE = Path(megatron_rl.__file__).parent
NAMED_STAGES = {row.name for row in ROWS} - {"score", "values", "advantages", "old_logprobs", "reference_logprobs", "checkpoint", "record"}
"""Names that are of stages alone: the others are also fields of batches, commands or files."""
MEAN_A_STAGE = {
    "schedule/table.py": "the table",
    "step/metrics.py": "passes/<stage>: a stage's tokens are counted by its products",
    "step/stages/generate.py": "its own facts beside its span",
    "desk/doctor/check_installation.py": "where a first deviation comes from; the prompts and tokens of a recorded step",
    "desk/doctor/step_replay.py": "the stages that a replay runs, and the quantities of each",
}
OTHER_MEANINGS = {
    "commands/__init__.py": "the command evaluate",
    "commands/evaluate.py": "the command evaluate",
    "config/checks/data_settings.py": "the command evaluate",
    "config/checks/model_settings.py": "the command evaluate",
    "config/schema/commands.py": "the command evaluate",
    "desk/watch/watch_screen.py": "a heading",
}


@cache
def files():
    return {str(path.relative_to(PACKAGE)): ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}


def test_no_other_file_compares_a_mode():
    """``config.schedule_facts.overlap_of`` gives a mode its meaning; a comparison elsewhere would not know of a new one."""
    found = []
    for name, tree in files().items():
        for node in ast.walk(tree):
            parts = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
            parts += [node.subject, *node.cases] if isinstance(node, ast.Match) else []
            texts = [ast.unparse(part) for part in parts]
            if any("schedule.mode" in text or re.search(r"\bMode\.", text) for text in texts):
                found.append(name)
    assert set(found) == {"config/schedule_facts.py"}


def test_stages_are_named_only_in_the_listed_files():
    found = {
        name
        for name, tree in files().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in NAMED_STAGES
    }
    assert found == {*MEAN_A_STAGE, *OTHER_MEANINGS}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_stage_has_a_color_of_both_palettes_and_a_style(row):
    assert row.color in COLORS and Style.parse(row.style).color is not None


def test_colors_are_of_one_stage_each():
    own = [row.color for row in ROWS if row.name != "score"]
    assert len(set(own)) == len(own)


def test_display_and_report_refuse_a_stage_that_the_table_lacks(tmp_path):
    """The folder of a run of another version may name such a stage."""
    metrics = {"time/generate_s": 1.0, "time/rerank_s": 1.0, "step/time_s": 2.0}
    with pytest.raises(DataError, match="no stage is called 'rerank'"):
        stage_rows(metrics, 80)
    (tmp_path / "config.yaml").write_text("run: {num_steps: 8}\n")
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        writer.log(1, metrics)
    with pytest.raises(DataError, match="no stage is called 'rerank'"):
        write_report(tmp_path)
