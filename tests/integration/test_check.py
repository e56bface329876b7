"""``megatron-rl check``: the release's record holds on this machine; a change is reported where it first deviates."""

import json

import pytest

from megatron_rl.cli import main
from megatron_rl.desk.doctor.check_task import RECORD


@pytest.mark.parametrize(
    ("overrides", "departs"),
    [
        ([], ""),
        (["run.seed=2"], "step 1, prompts and servers: prompts differ ("),
        (["algorithm.gamma=0.9"], "step 1, the advantages: advantages "),
        (["policy.optimizer.lr=2.0e-3"], "step 2, the policy's loss and gradient: policy lr 0.002 instead of 0.001; it must be equal"),
    ],
)
def test_check_reports_the_first_deviation_of_a_change(overrides, departs, capsys):
    status = main(["check", "--trainer-only", *overrides])
    said = capsys.readouterr().out
    if departs:
        assert status == 1 and f"first deviation: {departs}" in said
    else:
        assert status == 0 and "this installation computes what the release computed" in said


def test_check_refuses_invalid_records_with_a_reason(tmp_path, capsys):
    for content in ("{", "[]", json.dumps(json.loads(RECORD.read_text()) | {"steps": []})):
        (tmp_path / "record.json").write_text(content)
        assert main(["check", "--against", str(tmp_path / "record.json")]) == 2
        assert "check --against: " in capsys.readouterr().err
    assert main(["check", "--record", "x", "--trainer-only"]) == 2
    assert "--record needs servers" in capsys.readouterr().err
    assert main(["check", "parallel.num_ranks=2"]) == 2
    assert "expected 1; `megatron-rl doctor" in capsys.readouterr().err
