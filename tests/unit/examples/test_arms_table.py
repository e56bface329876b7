"""Laws of examples/arms_table.py and examples/line_rewards/check_labels.py: what the examples' READMEs quote."""

import importlib.util
import json
import sys

import pytest

from tests.unit.examples.test_examples import ROOT


def load(name, path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    for module in ("make_task", "characters", "tiny_model", "words"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("make_task", "characters", "tiny_model", "words"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return module


def write_run(folder, accuracies):
    folder.mkdir(parents=True)
    rows = [{"step": step, "time_s": 0.0, "metrics": {"eval/accuracy": number}} for step, number in accuracies.items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_cell_is_the_mean_and_the_standard_error_over_seeds(monkeypatch, tmp_path, capsys):
    table = load("arms_table", "arms_table.py", monkeypatch)
    assert table.cell([0.5, 0.7, 0.9], percent=True) == "70.0 ± 11.5 %"  # 0.2 / sqrt(3)
    assert table.cell([0.25], percent=True) == "25.0 %"
    assert table.cell([1.0, 3.0], percent=False) == "2.00 ± 1.00"
    assert table.cell([], percent=True) == ""


def test_arms_are_told_from_seeds_and_steps_stand_in_columns(monkeypatch, tmp_path, capsys):
    table = load("arms_table", "arms_table.py", monkeypatch)
    write_run(tmp_path / "plain-1", {0: 0.1, 5: 0.2})
    write_run(tmp_path / "plain-2", {0: 0.1, 5: 0.4})
    write_run(tmp_path / "fire_mask-1", {0: 0.1})
    assert table.main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "| steps | 0 | 5 |"
    assert lines[4] == "| `fire_mask` (1 seed) | 10.0 % |  |"
    assert lines[5] == "| `plain` (2 seeds) | 10.0 ± 0.0 % | 30.0 ± 10.0 % |"


def test_the_gain_of_a_seed_is_its_last_number_less_its_first(monkeypatch, tmp_path, capsys):
    table = load("arms_table", "arms_table.py", monkeypatch)
    curve = {"steps": [0, 5], "tokens": [0.0, 9.0]}
    seeds = {"1": {**curve, "metric": [0.2, 0.5]}, "2": {**curve, "metric": [0.2, 0.9]}}
    (tmp_path / "results.json").write_text(json.dumps({"agents": {"whole": seeds}}))
    assert table.main([str(tmp_path / "results.json"), "--study", "agents", "--ends"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "| `whole` | 2 | 20.0 ± 0.0 % | 70.0 ± 20.0 % | 50.0 ± 20.0 % | 30.0 % |"


def test_a_folder_without_runs_is_reported(monkeypatch, tmp_path, capsys):
    table = load("arms_table", "arms_table.py", monkeypatch)
    assert table.main([str(tmp_path)]) == 2
    assert "no run under" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("written", "labels"),
    [
        (" b=a+3\n c=b*2\n return c\n", [1, 1, 1]),
        (" b=a+3\n c=a*2\n return c\n", [1, -1, -1]),
        (" b=c+3\n c=b*2\n return c\n", [-1, -1, -1]),
        (" b=a+3\n c=b*2\n return c\n return c\n", [1, 1, 1, -1]),
        (" b=a+3\n", [1]),
    ],
)
def test_a_line_is_bad_from_the_first_that_differs_from_the_right_program(written, labels, monkeypatch):
    check = load("check_labels", "line_rewards/check_labels.py", monkeypatch)
    assert check.true_labels("+3 *2:", written) == labels
