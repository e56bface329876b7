"""The table at the end of a run."""

from megatron_rl.config.schema import Config
from megatron_rl.run.summary import RunSummary, print_summary


def test_no_path_of_the_final_table_is_wrapped_in_a_file_or_pipe(capsys, tmp_path):
    config = Config()
    config.run.output_dir = str(tmp_path / ("long" * 40))
    print_summary(config, RunSummary("tppo", 1, 10.0, 100, (), {"generate": 5.0}, 0.0))
    lines = capsys.readouterr().out.splitlines()
    for name in ("report.html", "mlflow.db", "policy"):
        assert any(f"{config.run.output_dir}/{name}" in line for line in lines)
    assert max(map(len, lines)) < 400
