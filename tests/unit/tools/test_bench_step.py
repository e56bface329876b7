"""The account of a step, and of a comparison with TRL: tools/bench_step.py, tools/bench_trl.py."""

import json
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[3] / "tools"


@pytest.fixture(autouse=True)
def tools_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(TOOLS)


def step(number: int, seconds: float, own: float) -> dict:
    """One whose only stage took ``seconds``, a tenth of them messages; the driver has used a CPU second per step."""
    stage = {"seconds": seconds, "passes": 0.5, "ranks": 0.0, "messages": seconds / 10, "servers": 0.0, "own": own}
    ended = {"driver": float(number), "ranks": 2.0 * number, "servers": 0.0}
    cpu = {"driver": 0.25, "ranks": 0.5, "servers": 0.0}
    return {"stages": {"values": stage | {"cpu": cpu, "ended": ended}}, "seconds": 2 * seconds, "tokens": 10.0 * number}


def test_a_step_is_the_median_of_those_after_the_warm_up():
    from bench_step import summary

    found = summary([step(0, 99.0, 9.0), step(1, 99.0, 9.0), *(step(n, 1.0 + n, 0.1 * n) for n in (2, 3, 4))])
    assert found["seconds"] == 8.0 and found["tokens"] == 30.0
    assert found["stages"]["values"]["own"] == pytest.approx(0.3) and found["stages"]["values"]["cpu"] == 0.75
    assert found["own_seconds"] == pytest.approx(0.3 + 0.4) and found["own_share"] == pytest.approx(0.7 / 8.0)
    assert found["cpu"] == {"driver": 1.0, "ranks": 2.0, "servers": 0.0}


def test_clocks_count_nested_waits_once(monkeypatch):
    import bench_step

    now = [0.0]
    monkeypatch.setattr(bench_step.time, "perf_counter", lambda: now[0])
    probes = bench_step.Probes()

    def message() -> None:
        now[0] += 3.0

    def work() -> None:
        now[0] += 1.0
        probes._clocked(message, "messages")()
        now[0] += 1.0

    probes._clocked(work, "passes")()
    assert dict(probes._spent) == {"messages": 3.0, "passes": 2.0}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--slots", "6"], "--slots is a multiple of 4"),
        (["--steps", "2"], "--steps is at least 3"),
        (["--window", "81"], "--window is 1 to --response-tokens"),
    ],
)
def test_bench_step_rejects_impossible_sizes(monkeypatch, capsys, words, said):
    import bench_step

    monkeypatch.setattr(sys, "argv", ["bench_step.py", *words])
    with pytest.raises(SystemExit):
        bench_step.parse()
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("text", "reward"), [(" b:3=12 c:6=18", 1.0), ("18 then 19", 0.0), ("none", 0.0), ("018", 1.0)])
def test_both_sides_get_the_same_reward(text, reward):
    from bench_trl import last_number, score

    assert last_number(text, "18") == score(text, "18") == reward


def test_without_trl_or_a_start_the_command_for_one_is_reported(monkeypatch, capsys, tmp_path):
    import bench_trl

    words = ["bench_trl.py", "--start", str(tmp_path), "--trl-python", ""]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit):
        bench_trl.parse()
    assert "warm_start.sh" in capsys.readouterr().err
    for name in ("sft/config.json", "task/train.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    for python in ("", str(tmp_path / "nowhere"), "/bin/false"):
        monkeypatch.setattr(sys, "argv", [*words[:-1], python])
        with pytest.raises(SystemExit):
            bench_trl.parse()
        assert "pip install torch==" in capsys.readouterr().err


def test_the_ratio_is_of_tokens_and_seconds_of_the_steps_in_between():
    from bench_trl import summary

    steps = [{"seconds": s, "tokens": t, "cpu": 1.0} for s, t in [(9, 1), (9, 1), (9, 1), (1.0, 10), (3.0, 10), (99, 1)]]
    assert summary(steps) == {"seconds": 2.0, "tokens": 10.0, "cpu": 1.0, "tokens_per_s": 5.0}
    assert json.dumps(summary(steps))
