"""The reward runner against rewards that hang, crash, hoard, fork and print: each costs its own response only."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_rl.data.trajectory import Score
from megatron_rl.rewards.registry import RewardError
from megatron_rl.rewards.router import check_error_rate
from megatron_rl.rewards.score_file import score_file
from megatron_rl.rewards.workers.calls import RunnerSettings
from megatron_rl.rewards.workers.processes import RewardRunner
from megatron_rl.system.processes.child_process import pack_frame

HOSTILE = "tests.integration.hostile_rewards"
ROOT = Path(__file__).parents[2]
MARK_NAME = "MEGATRON_RL_TEST_MARK"

pytestmark = pytest.mark.timeout(120)


def marked_processes(mark: str) -> set[int]:
    """Living processes that inherited the mark; zombies show no environment."""
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes():
                found.add(int(entry.name))
        except OSError:
            continue
    return found


def wait_until_gone(mark: str, timeout_s: float = 10.0) -> set[int]:
    """Marked processes that are left after at most ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while (left := marked_processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Marks every process that the test starts; remaining processes are killed at the end."""
    value = uuid.uuid4().hex
    monkeypatch.setenv(MARK_NAME, value)
    yield value
    for pid in marked_processes(value):
        os.kill(pid, signal.SIGKILL)


def hostile_runner(**settings) -> RewardRunner:
    return RewardRunner(f"{HOSTILE}:score", RunnerSettings(**{"timeout_s": 1.0, **settings}))


# ---------------------------------------------------------------------------------------------------------- hostility

EXPECTED_ERRORS = {
    "loop": "timed out after 3 s",
    "stop": "timed out after 3 s",
    "print": "timed out after 3 s",
    "memory": "MemoryError",
    "exit": "exited with code 3",
    "orphan_and_crash": "exited with code 4",
    "segfault": "SIGSEGV",
    "raise": "ValueError: the reward's own mistake",
    "leave": "SystemExit: 5",
    "fork": "left processes running",
    "daemon": "left processes running",
    "nan": "finite",
    "nothing": "TypeError",
}


def test_hostile_items_go_unscored_and_all_others_are_scored(mark: str) -> None:
    items = [("good", "good" if index % 2 else "other") for index in range(700)]
    for index, kind in enumerate(EXPECTED_ERRORS):
        items.insert(index * 40, (f"{kind} now", "1"))
    started_at = time.monotonic()
    with hostile_runner(timeout_s=3.0, memory_limit_mb=64) as runner:
        scores = runner.submit(items).result()
    # Three items hang for 3 s each, on two workers; the rest is starting and replacing processes.
    assert time.monotonic() - started_at < 40
    for (response, answer), score in zip(items, scores, strict=True):
        expected = EXPECTED_ERRORS.get(response.partition(" ")[0])
        if expected is None:
            assert score.value == float(response == answer)
        else:
            assert score.value is None and expected in score.error, (response, score)
    assert wait_until_gone(mark) == set()


def test_items_queued_behind_a_hanging_item_go_to_other_workers() -> None:
    with hostile_runner(timeout_s=8.0) as runner:
        # Both workers are busy while the queue fills, so that the hanging item shares its chunk with good ones.
        busy = [runner.submit([("sleep 0.5", "")]) for _ in range(2)]
        time.sleep(0.2)
        hanging = runner.submit([("loop", "")])
        good = runner.submit([("good", "good")] * 200)
        assert all(score.value == 1.0 for score in good.result(timeout=6.0))
        assert not hanging.done()
        assert hanging.result(timeout=20)[0].value is None
        assert all(future.done() for future in busy)


def test_a_fork_inside_a_reward_cannot_reply_for_the_worker() -> None:
    with hostile_runner(num_workers=1) as runner:
        scores = runner.submit([("good", "good"), ("twin", ""), ("good", "good")]).result()
    assert [score.value for score in scores] == [1.0, 1.0, 1.0]


def test_a_crash_is_retried_until_the_retries_are_exhausted(tmp_path: Path) -> None:
    options = {"mark": str(tmp_path / "tried")}
    with RewardRunner(f"{HOSTILE}:crash_once", RunnerSettings(num_workers=1), options=options) as runner:
        assert [score.value for score in runner.submit([("ok", ""), ("crash", "")]).result()] == [1.0, 1.0]
    with hostile_runner(max_retries=2, num_workers=1) as runner:
        (score,) = runner.submit([("exit", "")]).result()
        assert score.error == "the worker exited with code 3 at this response, 3 times"


def test_pathological_answers_do_not_break_the_math_reward() -> None:
    hostile = ["\\boxed{9**9**9**9}", "\\boxed{9^{9^{9^{9}}}}", "\\boxed{" * 100_000, "\x00\ud800" * 1000]
    with RewardRunner("math", RunnerSettings(timeout_s=4.0)) as runner:
        items = [(text, "\\sqrt{2}") for text in hostile] + [("\\boxed{2^{1/2}}", "\\sqrt{2}"), ("so 4", "4")] * 20
        scores = runner.submit(items).result()
    assert all(score.value in (0.0, None) for score in scores[: len(hostile)])
    assert all(score.value == 1.0 for score in scores[len(hostile) :])


# ---------------------------------------------------------------------------------------------------------- processes


def test_workers_use_little_memory_and_lead_their_own_process_group() -> None:
    with RewardRunner(f"{HOSTILE}:process_facts", RunnerSettings(num_workers=1)) as runner:
        (score,) = runner.submit([("", "")]).result()
    pid, parent, group = map(int, score.detail.split())
    assert score.value == 0.0, "a worker imported torch"
    assert group == pid and parent != os.getpid()


def test_close_leaves_no_process_and_ends_running_calls(mark: str) -> None:
    runner = hostile_runner(timeout_s=60.0)
    future = runner.submit([("loop", ""), ("stop", "")])
    time.sleep(0.5)
    assert len(marked_processes(mark)) == 3
    runner.close()
    runner.close()
    assert wait_until_gone(mark) == set()
    with pytest.raises(RewardError, match="closed"):
        future.result(timeout=1)
    with pytest.raises(RewardError, match="closed"):
        runner.submit([("good", "good")]).result()


def test_all_workers_end_with_a_killed_trainer_even_if_its_fork_survives(mark: str) -> None:
    script = (
        "import os, time\n"
        "from megatron_rl.rewards.workers.calls import RunnerSettings\n"
        "from megatron_rl.rewards.workers.processes import RewardRunner\n"
        f"runner = RewardRunner({HOSTILE + ':score'!r}, RunnerSettings(timeout_s=60))\n"
        "runner.submit([('loop', ''), ('stop', '')])\n"
        "time.sleep(0.5)\n"
        "fork = os.fork()  # holds the runner's sockets open\n"
        "if fork: print(fork, flush=True)\n"
        "time.sleep(60)\n"
    )
    trainer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=ROOT)
    try:
        assert trainer.stdout is not None
        fork = int(trainer.stdout.readline())
        assert len(marked_processes(mark)) == 5  # trainer, its fork, fork server, two workers
    finally:
        trainer.kill()
        trainer.wait(timeout=10)
    deadline = time.monotonic() + 10
    while (left := marked_processes(mark)) != {fork} and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == {fork}
    trainer.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_fork_server_is_restarted_and_reported_and_no_item_is_lost(
    number: signal.Signals, mark: str, caplog: pytest.LogCaptureFixture
) -> None:
    # Four workers end with it, and each task asks for its worker while one of them restarts the server.
    with hostile_runner(timeout_s=10.0, num_workers=4) as runner:
        future = runner.submit([("sleep 0.05", "")] * 40)
        time.sleep(0.3)
        (fork_server,) = [pid for pid in marked_processes(mark) if parent_of(pid) == os.getpid()]
        os.kill(fork_server, number)
        assert [score.value for score in future.result(timeout=60)] == [1.0] * 40
    (warning,) = [text for text in caplog.messages if "a worker died" not in text]
    assert "fork server of the reward" in warning and "is restarted" in warning


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("num_kills", [3, 4])
def test_a_fork_server_that_is_killed_at_its_start_or_restart_is_started_three_times_more(
    number: signal.Signals, num_kills: int, mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, kills = f"reward_{uuid.uuid4().hex}", tmp_path / "kills"
    (tmp_path / f"{module}.py").write_text(
        f"import os, pathlib, time\nkills = pathlib.Path({str(kills)!r})\n"
        f"if os.getpid() != {os.getpid()}:\n"
        f"    kills.open('a').write('x')\n    if len(kills.read_text()) not in {{1, {num_kills + 1}}}:\n"
        f"        os.kill(os.getpid(), {int(number)})\n        time.sleep(60)\n"
        "def score(response, answer):\n    time.sleep(0.1)\n    return 1.0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with RewardRunner(f"{module}:score", RunnerSettings(num_workers=2)) as runner:
        future = runner.submit([("a", "")] * 20)
        time.sleep(0.3)
        (fork_server,) = [pid for pid in marked_processes(mark) if parent_of(pid) == os.getpid()]
        os.kill(fork_server, number)  # the first; the others follow during the imports
        if num_kills == 3:
            assert [score.value for score in future.result(timeout=60)] == [1.0] * 20
        else:
            with pytest.raises(RewardError, match=f"died of {number.name} while it imported.*for the 4th time; check"):
                future.result(timeout=60)
    assert wait_until_gone(mark) == set()


def test_a_killed_worker_is_reported_once_and_its_item_is_retried(mark: str, caplog: pytest.LogCaptureFixture) -> None:
    with hostile_runner(timeout_s=10.0, num_workers=1) as runner:
        for _ in range(2):
            future = runner.submit([("sleep 0.5", "")] * 2)
            time.sleep(0.3)
            (worker,) = [pid for pid in marked_processes(mark) if parent_of(pid) != os.getpid()]
            os.kill(worker, signal.SIGKILL)
            assert [score.value for score in future.result(timeout=60)] == [1.0] * 2
    (warning,) = caplog.messages
    assert "a worker died of SIGKILL" in warning


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


# -------------------------------------------------------------------------------------------------------------- calls


def test_scores_are_in_item_order_from_any_loop_and_thread() -> None:
    items = [(str(index), str(index // 3 * 3)) for index in range(1000)]
    expected = [float(response == answer) for response, answer in items]

    async def two_at_once(runner: RewardRunner) -> list[list[Score]]:
        return await asyncio.gather(runner.score_many(items), runner.score_many(items[:10]))

    with hostile_runner() as runner:
        for _ in range(2):  # a new event loop each time
            first, second = asyncio.run(two_at_once(runner))
            assert [score.value for score in first] == expected
            assert [score.value for score in second] == expected[:10]
        assert [score.value for score in runner.submit(items).result()] == expected
        assert runner.submit([]).result() == []


def test_a_cancelled_call_frees_the_workers() -> None:
    async def give_up(runner: RewardRunner) -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(runner.score_many([("sleep 0.5", "")] * 100), timeout=0.2)

    with hostile_runner(num_workers=1) as runner:
        asyncio.run(give_up(runner))
        started_at = time.monotonic()
        assert runner.submit([("good", "good")]).result()[0].value == 1.0
        assert time.monotonic() - started_at < 10  # the cancelled items would take 50 s


def test_items_are_sent_in_chunks_and_thousands_are_scored_per_second(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk_sizes = []

    def count(payloads: list) -> bytes:
        chunk_sizes.append(len(payloads))
        return pack_frame(payloads)

    monkeypatch.setattr("megatron_rl.rewards.workers.processes.pack_frame", count)
    items = [("4,12,122,134", "134")] * 5000
    with RewardRunner("math", options={"separator": ","}) as runner:
        started_at = time.monotonic()
        scores = runner.submit(items).result()
        seconds = time.monotonic() - started_at
    assert all(score.value == 1.0 for score in scores)
    assert sum(chunk_sizes) >= len(items) and len(chunk_sizes) < len(items) / 20
    assert len(items) / seconds > 1000  # several times that on two idle cores


def test_row_fields_reach_the_reward_and_options_are_checked() -> None:
    with RewardRunner(
        f"{HOSTILE}:with_fields", RunnerSettings(num_workers=1), options={"scale": 2.0}, row_fields=["bonus"]
    ) as runner:
        scores = runner.submit([("ab", "", {"bonus": 1.0}), ("ab", "", {"bonus": 2.0})]).result()
    assert [score.value for score in scores] == [6.0, 8.0]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("maths", {}, "unknown reward 'maths'.*math"),
        ("no_such_package:score", {}, "does not import"),
        (f"{HOSTILE}:missing", {}, "has no 'missing'"),
        (f"{HOSTILE}:MISDEEDS", {}, "expected a plain function"),
        (f"{HOSTILE}:_loop", {}, r"expected score\(response, answer"),
        (f"{HOSTILE}:with_fields", {}, "needs bonus"),
        ("math", {"extrct": "auto"}, "no option 'extrct'; its options: extract, separator"),
        ("math", {"extract": "first"}, "one of 'auto'.*got 'first'"),
        ("math", {"separator": 3}, "separator must be a str"),
        ("format", {"then": "maths"}, "unknown reward 'maths'"),
        ("format", {"then": "math", "then_options": {"extract": "first"}}, "got 'first'"),
    ],
)
def test_invalid_rewards_are_refused_before_a_process_starts(mark: str, name: str, options: dict, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        RewardRunner(name, options=options)
    assert marked_processes(mark) == set()


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("raise ValueError('no licence')", "does not load in its worker process.*no licence"),
        ("time.sleep(60)", "did not start within 2 s"),
        ("os._exit(1)", "did not start"),
    ],
)
def test_a_reward_that_imports_only_in_the_trainer_is_refused(
    mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str, message: str
) -> None:
    module = f"reward_{uuid.uuid4().hex}"
    (tmp_path / f"{module}.py").write_text(
        f"import os, time\nif os.getpid() != {os.getpid()}:\n    {action}\n"
        "def score(response, answer):\n    return 1.0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RewardError, match=message):
        RewardRunner(f"{module}:score", RunnerSettings(start_timeout_s=2.0 if "sleep" in action else 30.0))
    assert wait_until_gone(mark) == set()


def test_an_item_without_text_is_refused_with_its_index() -> None:
    with hostile_runner(num_workers=1) as runner, pytest.raises(RewardError, match="item 1: .*NoneType"):
        runner.submit([("a", "b"), (None, "b")])


def test_too_many_errors_are_reported_with_the_three_most_frequent() -> None:
    errors = ["timed out after 5 s"] * 4 + ["row 17 is bad", "row 3 is bad", "crash", "crash", "rare"]
    scores = [Score(1.0)] * 91 + [Score(None, error=error) for error in errors]
    assert check_error_rate(scores, 0.09) == 0.09
    assert check_error_rate([], 0.0) == 0.0
    with pytest.raises(RewardError, match="9 of 100 responses of step 3") as raised:
        check_error_rate(scores, 0.08, what="step 3")
    message = str(raised.value)
    assert "4x timed out after 5 s" in message and "2x row" in message and "2x crash" in message
    assert "rare" not in message


# -------------------------------------------------------------------------------------------------------------- files


def write_rows(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_score_file_keeps_rows_and_order(tmp_path: Path) -> None:
    rows = [{"id": index, "response": f"so {index}", "answer": index if index % 2 else "x+1"} for index in range(3000)]
    source = write_rows(tmp_path / "in.jsonl", rows)
    summary = score_file("math", source, tmp_path / "out.jsonl", options={"extract": "last_number"})
    scored = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [{key: row[key] for key in ("id", "response", "answer")} for row in scored] == rows
    assert all(row["score"] == (1.0 if row["id"] % 2 else None) for row in scored)
    assert all(bool(row["error"]) == (row["score"] is None) for row in scored)
    assert (summary.num_rows, summary.num_unscored, summary.mean_score) == (3000, 1500, 1.0)
    assert summary.table().row_count == 5  # four totals and one kind of error
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl"}


def test_score_file_takes_required_options_from_the_rows_and_may_replace_its_input(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"response": "ab", "answer": "", "bonus": 3}])
    score_file(f"{HOSTILE}:with_fields", path, path, num_workers=1)
    assert json.loads(path.read_text())["score"] == 5.0


def test_bad_rows_are_refused_with_file_and_line(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    good = json.dumps({"response": "4", "answer": "4"})
    bad = ['{"response": "4"}', "{broken", '{"response": 4, "answer": "4"}', "", "[]"]
    source.write_text("\n".join([good, *bad, good]))
    with pytest.raises(RewardError, match="4 of 6 rows are bad") as raised:
        score_file("math", source, output)
    for place in ("in.jsonl:2: field 'answer' is missing", ":3: not valid JSON", ":4: field 'response'", ":6: expected"):
        assert place in str(raised.value)
    assert not output.exists()


def test_failed_scoring_keeps_the_previous_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"response": "4", "answer": "4"}])
    output = tmp_path / "out.jsonl"
    output.write_text("old")

    def fail(*_: object) -> None:
        raise RewardError("no workers")

    monkeypatch.setattr(RewardRunner, "submit", fail)
    with pytest.raises(RewardError, match="no workers"):
        score_file("math", source, output, num_workers=1)
    assert output.read_text() == "old"
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl"}


def test_close_returns_while_the_first_workers_are_being_forked() -> None:
    for pause_s in (0.0, 0.005, 0.02, 0.05):
        runner = RewardRunner("math")
        time.sleep(pause_s)
        runner.close()
