"""The record of a run: its name."""

from megatron_rl.desk.report.run_record import load_run
from tests.unit.desk.report.written_runs import write_run


def test_general_folder_name_is_shown_with_its_parent(tmp_path):
    assert load_run(write_run(tmp_path / "tppo" / "run")).name == "tppo/run"
    assert load_run(write_run(tmp_path / "ppo")).name == "ppo"
