"""`megatron-rl score` with a reward that calls a service: fields of the row, metrics and errors in the summary."""

import concurrent.futures
import json
import os
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.cli import main
from megatron_rl.rewards.registry import RewardError
from megatron_rl.rewards.score_file import score_file
from tests.unit.local_service import local_service

PATH = "tests.unit.rewards.async_rewards"


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def grade(path: str, body: Any) -> Any:
    return {"score": 1.0} if body["response"] == body.get("hidden") else {"score": None, "error": f"row {body['n']}"}


def test_score_command_scores_rows_with_a_service(tmp_path: Path, capsys: pytest.CaptureFixture):
    rows = [{"response": "a", "hidden": "a" if n % 2 else "b", "n": n} for n in range(10)]
    source = write(tmp_path / "in.jsonl", rows)
    with local_service(grade) as service:
        arguments = ["--reward", "http", "--input", str(source), "--output", str(tmp_path / "out.jsonl")]
        assert main(["score", *arguments, "--max-concurrency", "3", f"url={service.url}"]) == 0
        assert service.most_in_progress <= 3
    found = read(tmp_path / "out.jsonl")
    assert [row["score"] for row in found] == [1.0 if n % 2 else None for n in range(10)]
    assert [row["error"] for row in found] == ["" if n % 2 else f"row {n}" for n in range(10)]
    assert [{k: row[k] for k in rows[0]} for row in found] == rows
    shown = capsys.readouterr().out
    assert "unscored: row N" in shown and "5" in shown


def test_score_summary_has_the_means_of_metrics(tmp_path: Path):
    source = write(tmp_path / "in.jsonl", [{"response": r, "answer": ""} for r in ("detail", "detail", "good", "raise")])
    summary = score_file(f"{PATH}:misbehave", source, tmp_path / "out.jsonl")
    assert summary.metrics == {"mass": 0.25}
    assert summary.num_unscored == 1 and summary.mean_score == pytest.approx((0.5 + 0.5 + 4) / 3)
    assert summary.errors == {"ValueError: the reward's own mistake": 1}


def test_score_rejects_rows_without_a_field_that_the_reward_needs(tmp_path: Path, capsys: pytest.CaptureFixture):
    source = write(tmp_path / "in.jsonl", [{"response": "a", "answer": "b"}])
    arguments = ["--reward", "genrm", "--input", str(source), "--output", str(tmp_path / "out.jsonl")]
    assert main(["score", *arguments, "url=http://127.0.0.1:1"]) == 2
    assert "'prompt' is missing" in capsys.readouterr().err


@pytest.mark.parametrize("reward", ["genrm", "pairwise", "http"])
def test_reward_without_its_server_is_a_one_line_error(tmp_path: Path, reward: str, capsys: pytest.CaptureFixture):
    source = write(tmp_path / "in.jsonl", [{"response": "a", "answer": "b", "prompt": "p"}])
    arguments = ["--reward", reward, "--input", str(source), "--output", str(tmp_path / "out.jsonl")]
    assert main(["score", *arguments]) == 2
    assert "set option url" in capsys.readouterr().err


def test_score_reads_a_pipe_once_and_scores_all_rows(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    rows = [{"response": "a", "hidden": "a", "n": n} for n in range(3)]
    content = b"\xef\xbb\xbf" + "".join(json.dumps(row) + "\n" for row in rows).encode()
    with local_service(grade) as service, concurrent.futures.ThreadPoolExecutor() as threads:
        written = threads.submit((tmp_path / "pipe").write_bytes, content)
        summary = score_file("http", tmp_path / "pipe", tmp_path / "out.jsonl", options={"url": service.url})
        assert written.result() == len(content)
    assert (summary.num_rows, summary.mean_score) == (3, 1.0)
    assert [row["score"] for row in read(tmp_path / "out.jsonl")] == [1.0] * 3


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"response": "\\ud800", "answer": "1"}', "field 'response': a text contains half of a surrogate pair"),
        (b'{"response": "1", "answer": NaN}', "field 'answer': expected text or a number, got nan"),
        (b'{"response": "1", "answer": "1", "answer": "2"}', "field 'answer' occurs twice in an object"),
        (b"\xff\xfe{\0}\0", "UTF-16"),
        (b"[" * 100_000, "not valid JSON"),
    ],
)
def test_score_rejects_bad_rows_with_their_line(tmp_path: Path, line: bytes, words: str) -> None:
    (tmp_path / "in.jsonl").write_bytes(b'{"response": "1", "answer": "1"}\n' + line + b"\n")
    with pytest.raises(RewardError, match="in.jsonl:2: ") as error:
        score_file("math", tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert words in str(error.value) and not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("arguments", [["--num-workers", "0"], ["--timeout-s", "nan"], ["--max-concurrency", "-3"]])
def test_score_rejects_flags_that_are_not_positive_by_name(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit):
        main(["score", "--reward", "math", "--input", "a", "--output", "b", *arguments])
    assert f"argument {arguments[0]}: expected" in capsys.readouterr().err
