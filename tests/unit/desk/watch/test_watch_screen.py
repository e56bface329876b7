"""A run's view comes from its files only: running, finished, failed, stopped or killed, at any terminal width."""

import io
import json
import os
import socket
import time

import numpy as np
import pytest
from rich.console import Console

from megatron_rl.desk.watch.run_view import RunFolder
from megatron_rl.desk.watch.watch_screen import ClippedToHeight, screen
from megatron_rl.tracking.metrics_file import MetricsTail, MetricsWriter
from megatron_rl.tracking.status import SILENT_S, StatusFile, read_status


def write_run(folder, num_rows=12, num_steps=40):
    (folder / "config.yaml").write_text(f"preset: tppo\nrun: {{num_steps: {num_steps}, stop_after_s: 0.0}}\n")
    with MetricsWriter(folder / "metrics.jsonl") as writer:
        for step in range(1, num_rows + 1):
            writer.log(step, {
                "reward/mean": step / 20, "reward/num_unscored": 0.0, "policy/entropy": 1.0 / step, "mismatch/k3": 1e-6,
                "step/time_s": 2.0, "step/tokens_per_s": 100.0 * step, "time/generate_s": 1.5, "time/update_policy_s": 0.25,
                "time/rollout_idle_share": 0.25, "memory/update_policy_host_gib": 3.5, "sync/version": float(step),
            })  # fmt: skip
    return folder


def write_status(folder, state="running", *, silent_s=0.0, host="elsewhere", pid=1, **more):
    record = {"state": state, "host": host, "pid": pid, "started_s": 0.0, "written_s": time.time() - silent_s, **more}
    (folder / "status.json").write_text(json.dumps(record))


def drawn(folder, width=100):
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(screen(RunFolder(folder).poll(), width))
    return out.getvalue()


def test_status_reports_running_stages_and_the_outcome(tmp_path):
    stages = [("generate", 3.0)]
    status = StatusFile(tmp_path, lambda: {"step": 7, "stages": stages, "warnings": ["w"], "num_warnings": 1})
    status.training()
    deadline_s = time.monotonic() + 20
    while read_status(tmp_path).state != "running":
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    seen = read_status(tmp_path, now_s=time.time() + 2.0)
    assert seen.step == 7 and seen.warnings == ["w"] and seen.place.endswith(f":{os.getpid()}")
    assert seen.stages[0][0] == "generate" and 4.9 < seen.stages[0][1] < 6.0
    status.end("failed", "ValueError: no")
    status.end("finished")
    assert (read_status(tmp_path).state, read_status(tmp_path).words) == ("failed", "ValueError: no")
    assert os.listdir(tmp_path) == ["status.json"]


def test_status_that_cannot_be_written_raises_nothing(tmp_path):
    status = StatusFile(tmp_path / "gone", dict)
    status.end("finished")
    assert read_status(tmp_path / "gone").state == "unknown"


def test_silent_run_or_missing_local_process_counts_as_dead(tmp_path):
    write_status(tmp_path, silent_s=SILENT_S + 1)
    assert read_status(tmp_path).state == "dead"
    write_status(tmp_path, silent_s=SILENT_S / 2)
    assert read_status(tmp_path).state == "running"
    write_status(tmp_path, silent_s=SILENT_S / 2, host=socket.gethostname(), pid=2**22 + 1)
    assert read_status(tmp_path).state == "dead"
    write_status(tmp_path, silent_s=SILENT_S / 2, host=socket.gethostname(), pid=os.getpid())
    assert read_status(tmp_path).state == "running"
    write_status(tmp_path, "stopped", silent_s=10 * SILENT_S, reason="SIGTERM")
    assert (read_status(tmp_path).state, read_status(tmp_path).words) == ("stopped", "SIGTERM")
    for damaged in ("", "[]", "{}", '{"state": 1'):
        (tmp_path / "status.json").write_text(damaged)
        assert read_status(tmp_path).state == "unknown"


def test_metrics_tail_reads_new_rows_and_rereads_a_replaced_file(tmp_path):
    file = tmp_path / "metrics.jsonl"
    tail = MetricsTail(file)
    assert not tail.look() and tail.rows == []
    writer = MetricsWriter(file)
    writer.log(1, {"a": 1.0})
    assert tail.look() and not tail.look()
    with open(file, "ab") as torn:
        torn.write(b'{"step": 2, "time_s": 3.0, "metr')
    tail.look()
    assert [row.step for row in tail.rows] == [1]
    with open(file, "ab") as torn:
        torn.write(b'ics": {"a": 2.0}}\n')
    assert tail.look() and [row.metrics["a"] for row in tail.rows] == [1.0, 2.0]
    writer.close()
    with MetricsWriter(file, resume_step=2) as again:  # drops step 2: a new file replaces the old one
        again.log(2, {"a": 5.0})
    assert tail.look() and [row.metrics["a"] for row in tail.rows] == [1.0, 5.0]


@pytest.mark.parametrize("width", [20, 50, 80, 120, 200])
def test_screen_fits_every_width_and_shows_the_progress(tmp_path, width):
    write_status(write_run(tmp_path), stages=[["generate", 3.0]], warnings=["10:00:00 grader slow"], num_warnings=1)
    text = drawn(tmp_path, width)
    assert max(map(len, text.splitlines())) <= width
    assert "step 12/40" in text
    if width >= 50:
        for words in ("running", "generate 3 s", "56 s to go", "reward", "0.505", "mismatch k3", "weights", "servers idle",
                      "25.0%", "3.5 GiB", "grader slow", "every response scored"):  # fmt: skip
            assert words in " ".join(text.split()), words
    assert "nan" not in text


def test_values_are_means_of_the_newest_steps_except_for_counts(tmp_path):
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        for step in range(1, 41):
            writer.log(step, {"step/tokens_per_s": 100.0 if step == 40 else 1000.0, "sync/version": float(step)})
    lines = {line.split()[0]: line.split() for line in drawn(tmp_path, 60).splitlines() if line.strip()}
    assert 600 < float(lines["tokens/s"][1]) < 800 and lines["weights"][1] == "40"


def test_control_characters_of_warnings_reasons_and_logs_do_not_reach_the_terminal(tmp_path):
    write_status(write_run(tmp_path), "failed", reason="\x1b[2Jcleared", warnings=["\x1b]0;title\x07"], num_warnings=1)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "sglang-0.log").write_text("\x1b[31mred\u202e line\n")
    text = drawn(tmp_path)
    assert not set(text) & set("\x1b\x07\u202e")
    assert "␛[2Jcleared" in text and "␛]0;title␇" in text and "␛[31mred· line" in text


def test_run_without_status_file_is_judged_by_summary_and_silence(tmp_path):
    write_run(tmp_path)
    assert "no status.json" in drawn(tmp_path)
    (tmp_path / "summary.json").write_text(json.dumps({"num_steps": 12, "wall_s": 24.0}))
    assert RunFolder(tmp_path).poll().status.state == "stopped"
    (tmp_path / "config.yaml").write_text("run: {num_steps: 12}\n")
    assert RunFolder(tmp_path).poll().status.state == "finished" and "to go" not in drawn(tmp_path)


def test_failed_run_shows_its_reason_and_the_end_of_the_newest_log(tmp_path):
    write_status(write_run(tmp_path), "failed", reason="RuntimeError: out of [bold]memory[/bold]")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "sglang-0.log").write_text("a\nb\n\nlast [red] words\n")
    text = drawn(tmp_path)
    assert "out of [bold]memory[/bold]" in text and "logs/sglang-0.log" in text and "last [red] words" in text


def test_screen_handles_empty_folders_and_low_terminals(tmp_path):
    assert "No step has finished yet" in drawn(tmp_path)
    write_status(write_run(tmp_path))
    out = io.StringIO()
    console = Console(file=out, width=80, height=10, force_terminal=True)
    console.print(ClippedToHeight(screen(RunFolder(tmp_path).poll(), 80)), end="")
    lines = out.getvalue().splitlines()
    assert len(lines) == 10 and "more lines" in lines[-1]


def test_clock_difference_is_detected_at_the_second_status(tmp_path):
    folder = RunFolder(write_run(tmp_path))
    write_status(tmp_path, silent_s=500.0)
    assert folder.poll().status.state == "dead"
    write_status(tmp_path, silent_s=498.0)
    assert folder.poll().status.state == "running"


def test_status_that_is_briefly_unreadable_changes_nothing(tmp_path):
    folder = RunFolder(write_run(tmp_path))
    write_status(tmp_path)
    assert folder.poll().status.state == "running"
    (tmp_path / "status.json").unlink()
    assert folder.poll().status.state == "running"


def test_incremental_reads_equal_a_full_read(tmp_path):
    folder = RunFolder(write_run(tmp_path, num_rows=3))
    folder.poll()
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        writer.log(4, {"reward/mean": 0.5, "new": 7.0})
        folder.poll()
        writer.log(5, {"reward/mean": 0.25})
        folder.poll()
        writer.log(5, {"late": 3.0})  # a second line of the same step
        grown = folder.poll().run
    whole = RunFolder(tmp_path).poll().run
    assert grown.steps.tolist() == whole.steps.tolist() == [1, 2, 3, 4, 5]
    assert list(grown.columns) == list(whole.columns) and whole.columns["late"][-1] == 3.0 and whole.columns["reward/mean"][-1] == 0.25
    for name in whole.columns:
        assert np.array_equal(grown.values(name), whole.values(name), equal_nan=True), name
