"""`megatron-rl watch` in a real terminal (a pty): it redraws, restores the screen, and only reads."""

import json
import os
import pty
import signal
import subprocess
import sys
import time

import pytest

from megatron_rl.cli import main
from megatron_rl.tracking.metrics_file import MetricsWriter


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.yaml").write_text("run: {num_steps: 4}\n")
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        writer.log(1, {"reward/mean": 0.5, "step/time_s": 1.0})
    say(tmp_path, "running")
    return tmp_path


def say(folder, state):
    record = {"state": state, "host": "elsewhere", "pid": 1, "started_s": 0.0, "written_s": time.time()}
    (folder / "status.json").write_text(json.dumps(record))


def test_watch_prints_one_plain_snapshot_without_a_terminal(folder, capsys):
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    os.chmod(folder, 0o555)
    try:
        assert main(["watch", str(folder)]) == 0
    finally:
        os.chmod(folder, 0o755)
    out = capsys.readouterr().out
    assert "step 1/4" in out and "running" in out and "\x1b" not in out
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_a_snapshot_without_a_terminal_is_as_wide_as_columns_says(folder, capsys, monkeypatch):
    shown = set()
    for columns, width in (("60", 60), ("80", 80), ("", 100)):
        monkeypatch.setenv("COLUMNS", columns)
        assert main(["watch", str(folder)]) == main(["watch", str(folder), "--width", str(width)]) == 0
        lines = capsys.readouterr().out.splitlines()
        # Without the first line, in which a clock advances.
        assert lines[1 : len(lines) // 2] == lines[len(lines) // 2 + 1 :]
        shown.add(tuple(lines[1 : len(lines) // 2]))
    assert len(shown) == 3


def test_watch_rejects_a_missing_folder(tmp_path, capsys):
    assert main(["watch", str(tmp_path / "nowhere")]) == 2
    assert "run.output_dir" in capsys.readouterr().err


class Terminal:
    """Runs the command on a pty and collects its output."""

    def __init__(self, folder):
        self.master, slave = pty.openpty()
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
        command = [sys.executable, "-m", "megatron_rl.cli", "watch", str(folder), "--every", "0.05"]
        self.process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment)
        os.close(slave)
        self.drawn = ""

    def wait_for(self, words):
        """Wait until the output contains ``words``; empty: until the command exits."""
        deadline_s = time.monotonic() + 120
        while not words or words not in self.drawn:
            assert time.monotonic() < deadline_s, self.drawn
            try:
                self.drawn += os.read(self.master, 65536).decode(errors="replace")
            except OSError:  # the other end is closed
                assert not words, self.drawn
                return self.process.wait(60)
        return None


def test_watch_follows_on_a_terminal_and_ctrl_c_restores_the_screen(folder):
    terminal = Terminal(folder)
    try:
        terminal.wait_for("step 1/4")
        with MetricsWriter(folder / "metrics.jsonl") as writer:
            writer.log(2, {"reward/mean": 0.75, "step/time_s": 1.0})
        terminal.wait_for("step 2/4")
        assert "\x1b[?1049h" in terminal.drawn and "\x1b[2J" not in terminal.drawn.split("step 1/4")[1]  # redrawn without clearing
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.wait_for("") == 0
    finally:
        terminal.process.kill()
    assert terminal.drawn.rstrip().endswith("\x1b[?25h") or "\x1b[?1049l" in terminal.drawn[-40:]
    assert "\x1b[?25h" in terminal.drawn and "\x1b[?1049l" in terminal.drawn and "Traceback" not in terminal.drawn


def test_watch_exits_with_the_last_view_when_the_run_finishes(folder):
    terminal = Terminal(folder)
    try:
        terminal.wait_for("step 1/4")
        say(folder, "finished")
        assert terminal.wait_for("") == 0
    finally:
        terminal.process.kill()
    assert "finished" in terminal.drawn.split("\x1b[?1049l")[1]
