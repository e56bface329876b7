"""The report's panels of lengths, ranks and memory."""

from megatron_rl.desk.report.resource_panels import finished_lengths, memory_panel, rank_panel
from megatron_rl.desk.report.run_record import load_run
from megatron_rl.tracking.timeline import Span
from tests.unit.desk.report.written_runs import record, write_run


def test_lengths_are_of_finished_responses_only(tmp_path):
    spans = load_run(write_run(tmp_path / "run")).spans
    assert sorted(finished_lengths(spans, {1, 8})) == [1, 8, 25, 25]
    old = Span("generate", "rollout", 0.0, 1.0, 1, {"rounds": [{"rows": 3, "held": "1 2", "new": "1"}]})
    assert len(finished_lengths([old, Span("score", "host", 0.0, 1.0, 1)], {1})) == 0


def test_rank_panel_names_the_most_uneven_stage():
    rows = [("update_policy", "0:5.0 1:5.2"), ("values", "0:0.1 1:1.0"), ("score", "0:0.0001 1:0.01")]
    spans = [Span(name, "trainer", 0.0, 1.0, 1, {"rank_s": seconds}) for name, seconds in rows]
    panel = rank_panel(record({"step/time_s": 1.0}, spans=spans))
    assert panel.latest == "values: rank 1 takes 82% more than the mean"


def test_memory_panel_draws_one_line_if_all_stages_are_alike():
    steps = [{"memory/values_host_gib": size, "memory/update_policy_host_gib": size + 0.001} for size in (1.0, 2.0, 3.0, 4.0, 5.0)]
    alike = memory_panel(record(*steps))
    assert not alike.legend and "All 2 stages have the same" in alike.says and alike.latest == "at most 5 GiB"
    apart = memory_panel(record(*({"memory/values_host_gib": 1.0, "memory/update_policy_host_gib": 2.0} for _ in range(5))))
    assert [name for name, _ in apart.legend] == ["values", "update_policy"] and apart.latest == "at most 2 GiB, update_policy"
