"""select-prompts with a real server: the policy's own responses, a kill in the middle, the same result."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from megatron_rl.cli import main
from tests.integration.preloaded import preloading
from tests.tiny_models import make_tiny_model

TIMEOUT_S = 400
NUM_PROMPTS = 60
NUM_SAMPLES = 4
SLOWLY = "rollout.max_inflight_requests=2"
"""Seconds pass between the first response and the last: time to strike in the middle."""
RECIPE = """
policy: {{path: {folder}/model}}
batch: {{max_prompt_tokens: 8, max_response_tokens: 6}}
data: {{train_files: ["{folder}/prompts.jsonl"]}}
reward: {{name: "tests.integration.test_selection:has_digit"}}
algorithm: {{ignore_boundary_tokens: 0}}
rollout: {{max_inflight_requests: 8}}
select_prompts: {{rule: pass_rate, num_samples: 4, max_pass_rate: 0.75, output_path: "{folder}/kept.jsonl"}}
"""


def has_digit(response: str, answer: str) -> float:
    """Random text holds one now and then."""
    return float(any(character.isdigit() for character in response))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("selection")
    # Short responses from random weights: the end-of-text token is one of few.
    make_tiny_model(folder / "model", vocab_size=80)
    rows = [
        {"id": f"p{i}", "prompt": f"{i:02d}+{i:02d}=" + "0" * 9 * (i == 7), "answer": str(2 * i), "type": "ab"[i % 2]}
        for i in range(NUM_PROMPTS)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.yaml").write_text(RECIPE.format(folder=folder))
    return folder


def start(folder, *overrides, forks=True, servers=True):
    command = [sys.executable, "-m", "megatron_rl.cli", "select-prompts", "--config", str(folder / "recipe.yaml")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with preloading(servers=servers) if forks else contextlib.nullcontext():
        return subprocess.Popen(
            [*command, *overrides],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
        )


def finish(process):
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    finally:
        end(process)
    return process.returncode, output


def end(process):
    """Kill processes that a failed test left running."""
    for child in children(process.pid):
        child.kill()
    if process.poll() is None:
        process.kill()
    process.wait()


def children(pid):
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def scores_of(folder, name):
    path = folder / name / "select_scores.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {(row["id"], row["sample"]): row for row in rows}


@pytest.fixture(scope="module")
def whole_run(folder):
    status, output = finish(start(folder, f"run.output_dir={folder}/whole"))
    assert status == 0, output
    return output


def test_selection_keeps_prompts_that_are_sometimes_solved(folder, whole_run):
    scores = scores_of(folder, "whole")
    assert len(scores) == (NUM_PROMPTS - 1) * NUM_SAMPLES
    by_prompt = {}
    for (prompt_id, _), row in scores.items():
        by_prompt.setdefault(prompt_id, []).append(row["score"])
    expected = [f"p{i}" for i in range(NUM_PROMPTS) if 0 < sum(by_prompt.get(f"p{i}", [])) <= 3]
    assert [json.loads(line)["id"] for line in (folder / "kept.jsonl").read_text().splitlines()] == expected
    assert 0 < len(expected) < NUM_PROMPTS
    report = json.loads((folder / "kept.report.json").read_text())
    assert sum(t["dropped"].get("longer than batch.max_prompt_tokens", 0) for t in report["types"]) == 1
    assert report["settings"]["reward.name"].endswith("has_digit")


def test_a_killed_selection_resumes_and_a_restarted_server_gives_the_same_responses(folder, whole_run):
    process = start(folder, f"run.output_dir={folder}/killed", SLOWLY, servers=False)
    deadline = time.monotonic() + TIMEOUT_S
    while not scores_of(folder, "killed"):
        assert process.poll() is None and time.monotonic() < deadline, process.stdout.read()
        time.sleep(0.05)
    servers = children(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = scores_of(folder, "killed")
    assert 0 < len(before) < (NUM_PROMPTS - 1) * NUM_SAMPLES
    _, alive = psutil.wait_procs(servers, timeout=30)
    assert not alive, "servers and graders die with the command"

    process = start(folder, f"run.output_dir={folder}/killed", servers=False)
    while len(scores_of(folder, "killed")) == len(before):
        assert process.poll() is None and time.monotonic() < deadline, process.stdout.read()
        time.sleep(0.05)
    server = next(c for c in children(process.pid) if "sglang.launch_server" in " ".join(c.cmdline()))
    server.kill()
    status, output = finish(process)
    assert status == 0, output
    assert "responses are already in" in output
    after, whole = scores_of(folder, "killed"), scores_of(folder, "whole")
    assert after.keys() == whole.keys() and before.items() <= after.items()
    assert [after[key]["response"] for key in after] == [whole[key]["response"] for key in after]


def test_selection_from_finished_scores_needs_no_server(folder, whole_run, capsys):
    recipe = str(folder / "recipe.yaml")
    assert main(["select-prompts", "--config", recipe, f"run.output_dir={folder}/whole", "select_prompts.rule=spread"]) == 0
    said = "".join(capsys.readouterr())
    assert "236 of 236 responses are already in" in said and "SGLang" not in said


def test_ctrl_c_stops_everything(folder, whole_run):
    process = start(folder, f"run.output_dir={folder}/interrupted", SLOWLY, forks=False)
    deadline = time.monotonic() + TIMEOUT_S
    while not scores_of(folder, "interrupted"):
        assert process.poll() is None and time.monotonic() < deadline, process.stdout.read()
        time.sleep(0.05)
    servers = children(process.pid)
    process.send_signal(signal.SIGINT)
    status, output = finish(process)
    assert status == 130 and "interrupted" in output and "Traceback" not in output, output
    assert not [child for child in servers if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
