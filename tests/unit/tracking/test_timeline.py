"""Spans add up, and a timeline reads back."""

import json

import pytest

from megatron_rl.tracking.timeline import Span, Timeline, assign_tracks, overlap_seconds, read_timeline

SPANS = [
    Span("generate", "rollout", 100.0, 104.0, 1),
    Span("update_critic", "trainer", 103.0, 106.0, 1),
    Span("generate", "rollout", 105.0, 108.0, 2),
]


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
