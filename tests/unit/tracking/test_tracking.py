"""A run's records survive kills and full disks, are consistent, and never raise into training."""

import io
import json
import math

import pytest

from megatron_rl.desk.report.run_report import write_report
from megatron_rl.tracking.metrics_file import MetricsWriter, read_metrics
from megatron_rl.tracking.terminal.console import TrainingConsole, compact, duration, plain_line, sparkline
from megatron_rl.tracking.timeline import Span, Timeline, assign_tracks, overlap_seconds, read_timeline

SPANS = [
    Span("generate", "rollout", 100.0, 104.0, 1),
    Span("update_critic", "trainer", 103.0, 106.0, 1),
    Span("generate", "rollout", 105.0, 108.0, 2),
]


def test_metrics_round_trip_with_steps_and_non_finite_values(tmp_path):
    file = tmp_path / "metrics.jsonl"
    with MetricsWriter(file) as writer:
        writer.log(1, {"a": 1.5, "b": math.inf}, time_s=10.0)
        writer.log(2, {"a": math.nan}, time_s=11.0)
    one, two = read_metrics(file)
    assert (one.step, one.time_s, one.metrics) == (1, 10.0, {"a": 1.5, "b": math.inf})
    assert two.step == 2 and math.isnan(two.metrics["a"])


def test_torn_last_line_is_skipped_and_overwritten(tmp_path):
    file = tmp_path / "metrics.jsonl"
    with MetricsWriter(file) as writer:
        writer.log(1, {"a": 1.0})
    with open(file, "ab") as torn:
        torn.write(b'{"step": 2, "time_s": 3')
    assert [row.step for row in read_metrics(file)] == [1]
    with MetricsWriter(file) as writer:
        writer.log(2, {"a": 2.0})
    assert [row.step for row in read_metrics(file)] == [1, 2]


def test_resume_drops_the_lines_that_will_be_rewritten(tmp_path):
    file = tmp_path / "metrics.jsonl"
    with MetricsWriter(file) as writer:
        for step in range(6):
            writer.log(step, {"a": float(step)})
    with MetricsWriter(file, resume_step=4) as writer:
        writer.log(4, {"a": -1.0})
    assert [row.metrics["a"] for row in read_metrics(file)] == [0, 1, 2, 3, -1]


def test_overlap_counts_only_time_in_which_both_stages_run():
    assert overlap_seconds(SPANS, "generate", "update_critic") == pytest.approx(2.0)
    duplicated = [*SPANS, Span("generate", "rollout", 100.0, 104.0, 1)]
    assert overlap_seconds(duplicated, "generate", "update_critic") == pytest.approx(2.0)
    assert overlap_seconds(SPANS, "generate", "publish") == 0.0


def test_timeline_round_trips_and_names_its_lanes(tmp_path):
    timeline = Timeline(spans=SPANS)
    timeline.write(tmp_path / "timeline.json")
    back = read_timeline(tmp_path / "timeline.json")
    assert sorted((s.name, s.lane, s.step) for s in back) == sorted((s.name, s.lane, s.step) for s in SPANS)
    assert overlap_seconds(back, "generate", "update_critic") == pytest.approx(2.0, abs=1e-3)
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == {"rollout", "trainer"}


def test_idle_shares_count_finished_and_running_spans():
    timeline = Timeline(spans=[
        Span("generate", "rollout", 0.0, 4.0, 1),
        Span("old_logprobs", "trainer", 4.0, 5.0, 1),
        Span("update_policy", "trainer", 5.0, 7.0, 1),
    ])  # fmt: skip
    assert timeline.idle_shares(2.0, 10.0) == {"rollout": 0.75, "trainer": 0.625}
    assert timeline.idle_shares(2.0, 10.0, [("generate", 5.0), ("unknown", 1.0)]) == {"rollout": 0.125, "trainer": 0.625}
    assert timeline.idle_shares(4.0, 4.0) == {"rollout": 0.0, "trainer": 0.0}


def test_crossing_spans_get_separate_tracks():
    crossing = [Span("a", "host", 0.0, 2.0, 1), Span("b", "host", 1.0, 3.0, 1), Span("c", "host", 4.0, 5.0, 1)]
    assert assign_tracks(crossing) == [0, 1, 0]


def test_timeline_keeps_the_newest_spans_and_sums_a_step():
    timeline = Timeline(max_spans=2, spans=SPANS)
    assert timeline.spans() == SPANS[1:]
    alongside =  [Span("evaluation", "evaluation", 0.0, 90.0, step) for step in (-9, 1)]
    assert Timeline(spans=[SPANS[0], SPANS[0], *alongside]).stage_seconds(1) == {"generate": 8.0}


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [(duration, 42, "42 s"), (duration, 200, "3 min 20 s"), (duration, 18_720, "5 h 12 min"),
     (compact, 12.5, "12.5"), (compact, 1_234_567, "1.23M"), (compact, 12_345, "12.3k"), (compact, 0.00012, "1.2e-04")],
)  # fmt: skip
def test_durations_and_values_format_as_short_text(function, value, text):
    assert function(value) == text


def test_sparkline_scales_from_lowest_to_highest():
    assert sparkline([0, 1, 2]) == "▁▅█" and sparkline([math.nan]) == "" and len(sparkline(list(range(99)), 40)) == 40


def test_step_is_one_plain_line_without_a_terminal():
    out = io.StringIO()
    with TrainingConsole(2, stream=out, plain_interval_s=0.0) as console:
        console.update(1, {"reward/mean": 0.25, "step/time_s": 1.0})
        console.warning("grader slow")
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("step 1/2  reward 0.250") and lines[1] == "warning: grader slow"
    assert "\x1b" not in out.getvalue()
    assert plain_line(1, 2, {}, None) == "step 1/2"


def test_remaining_time_respects_the_time_limit_of_the_run():
    out = io.StringIO()
    with TrainingConsole(1_000_000, left_s=lambda: 30.0, stream=out, plain_interval_s=0.0) as console:
        console.update(1, {"step/time_s": 2.0})
    assert "31 s to go" in out.getvalue()


def test_evaluation_text_has_standard_error_and_sets():
    numbers = {
        "eval/accuracy": 0.5, "eval/accuracy_stderr": 0.021, "eval/aime/accuracy": 0.25, "eval/math.500/accuracy": 0.75,
        "eval/math.500/accuracy_stderr": 0.03, "eval/reward/accuracy": 0.1, "eval/aime/reward/accuracy": 0.1,
    }  # fmt: skip
    assert "eval 50.0% ± 2.1% (aime 25.0%, math.500 75.0% ± 3.0%)" in plain_line(1, 2, numbers, None)


def test_closed_pipe_does_not_end_a_run():
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    with TrainingConsole(2, stream=Closed(), plain_interval_s=0.0) as console:
        console.update(1, {"reward/mean": 0.25})
        console.note("still here")


def test_report_is_self_contained_and_omits_missing_panels(tmp_path):
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        for step in range(1, 9):
            writer.log(step, {"reward/mean": step / 10, "eval/accuracy": step / 10, "step/time_s": 1.0})
    page = write_report(tmp_path).read_text()
    assert "<script src" not in page and "http://" not in page.replace("http://www.w3.org", "")
    assert "80.0" in page and "svg" in page
    assert "Evaluation by set" not in page and "Best of k" not in page


def test_report_draws_evaluation_sets_and_best_of_k_with_standard_errors(tmp_path):
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        for step in range(1, 4):
            numbers = {f"eval/{name}accuracy{what}": 0.3 for name in ("", "aime/", "math/") for what in ("", "_stderr")}
            writer.log(step, numbers | {f"eval/pass@{k}": k / 10 for k in (1, 2, 4)})
    page = write_report(tmp_path).read_text()
    assert "Evaluation by set" in page and "Best of k" in page and "aime" in page and "pass@4" in page
    assert "30.0% ± 30.0%" in page
