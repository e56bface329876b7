"""Programs that are trained by their base URL, with Megatron, a real SGLang server and the official client of OpenAI."""

import json
import os
import random
import signal
import subprocess
import sys

import psutil
import pytest

from megatron_rl.rollout.sglang.process.options import ServerOptions
from megatron_rl.rollout.sglang.process.server import SglangServer
from megatron_rl.tracking.metrics_file import read_metrics
from megatron_rl.tracking.samples_file import read_samples, sample_files
from tests.chat_models import make_chat_model
from tests.integration.preloaded import preloading, serving
from tests.integration.test_async import kill_and_resume
from tests.integration.test_train import descendants, run, start, stop_tree, wait_until
from tests.same_runs import differences

TIMEOUT_S = 580
AGENT = """
import json, random, sys, openai
client = openai.OpenAI()
messages = [{"role": "user", "content": open("prompt.txt").read()}]
tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
for turn in range(3):
    stream = turn == 1
    answer = client.chat.completions.create(model="policy", messages=messages, tools=tools, stream=stream)
    if stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices)
        messages.append({"role": "assistant", "content": text})
    else:
        messages.append(answer.choices[0].message)
        text = answer.choices[0].message.content
    messages.append({"role": "user", "content": f"more {turn}"})
open("result.txt", "w").write(text or "")
if "fail" in sys.argv and random.random() < 0.3:
    raise SystemExit(1)
"""
RECIPE = """
preset: {preset}
run: {{num_steps: 3, seed: 3, output_dir: "{folder}/run"}}
policy: {{path: {folder}/model, init: random, optimizer: {{lr: 1.0e-3}}}}
parallel: {{num_ranks: 1}}
batch:
  num_prompts_per_step: 4
  num_samples_per_prompt: 2
  max_prompt_tokens: 400
  max_response_tokens: 200
  policy_minibatch_size: 4
  max_tokens_per_microbatch: 1024
environment:
  name: harness
  max_turn_tokens: 16
  options:
    command: ["{python}", "{folder}/agent.py", "{argument}"]
    tool_parser: qwen25
    score_command: ["{python}", "-c", "import sys; print(len(open(sys.argv[1]).read()) % 3 / 2)", "{{result_file}}"]
data: {{train_files: ["{folder}/train.jsonl"], use_chat_template: true}}
reward: {{name: math, max_error_rate: 1.0}}
"""
WINDOWS = """
critic: {warmup_steps: 1, optimizer: {lr: 1.0e-3}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agents")
    make_chat_model(folder / "model")
    rng = random.Random(0)
    rows = [{"id": str(i), "prompt": f"{rng.randint(0, 99)}+{rng.randint(0, 99)}", "answer": "1"} for i in range(24)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "agent.py").write_text(AGENT)
    return folder


def train(folder, *, preset, argument="", extra="", overrides=()):
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(folder=folder, preset=preset, python=sys.executable, argument=argument) + extra)
    command = [sys.executable, "-m", "megatron_rl.cli", "train", "--config", str(recipe), *overrides]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    with preloading():
        done = subprocess.run(
            command,
            env={**environment, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout, [row.metrics for row in read_metrics(folder / "run" / "metrics.jsonl")]


@pytest.mark.timeout(TIMEOUT_S + 20)
def test_an_unmodified_client_loop_is_trained_in_windows_and_its_failures_are_masked(folder):
    windows = ["batch.window_tokens=20", "run.num_steps=4", "schedule.mode=tppo"]
    _, metrics = train(folder, preset="tppo", argument="fail", extra=WINDOWS, overrides=windows)
    assert len(metrics) == 4 and all(step["step/tokens_generated"] > 0 for step in metrics)
    ended = [step for step in metrics if step["rollout/num_finished"] > 0]
    scored = [step for step in ended if "dialogue/num_rows" in step]
    assert scored and {step["dialogue/num_rows"] for step in scored} == {1.0}
    assert {step["dialogue/num_requests"] for step in scored} == {3.0}
    outputs = {path.parent.name: path.read_text() for path in (folder / "run" / "agents").glob("*/output.txt")}
    assert len(outputs) >= 8 and not any("Traceback" in text for text in outputs.values())
    assert not list((folder / "run" / "agents").glob("*/workspace"))


SLOW_AGENT = AGENT.replace("for turn in range(3):", "import time\nfor turn in range(3):\n    time.sleep(0.4)")
KILLED = (
    "batch.window_tokens=12",
    "run.num_steps=9",
    "run.save_every_steps=2",
    "run.resume=auto",
    "schedule.mode=tppo",
    "rollout.num_workers=1",
)


def wait_for_rows(path, number, process):
    wait_until(lambda: path.exists() and len(read_metrics(path)) >= number, process, f"row {number}")


@pytest.mark.timeout(2 * TIMEOUT_S)
def test_programs_survive_the_kill_of_server_and_worker_and_end_unscored_with_a_killed_run(folder):
    own, output_dir = folder / "kills", folder / "kills" / "run"
    own.mkdir()
    (own / "agent.py").write_text(SLOW_AGENT)
    recipe = RECIPE.format(folder=folder, preset="tppo", python=sys.executable, argument="") + WINDOWS
    recipe = recipe.replace(str(folder / "agent.py"), str(own / "agent.py")).replace(str(folder / "run"), str(output_dir))
    (own / "recipe.yaml").write_text(recipe)
    process = start(own, "train", *KILLED, servers=False)
    try:
        wait_for_rows(output_dir / "metrics.jsonl", 1, process)
        names = {child: " ".join(child.cmdline()) for child in descendants(process.pid)}
        victims = [child for child, name in names.items() if "sglang.launch_server" in name or "rollout.workers" in name]
        assert len(victims) >= 2, names
        for victim in victims:
            victim.kill()
        wait_until((output_dir / "checkpoints" / "step-2" / "manifest.json").exists, process, "the checkpoint")
        wait_for_rows(output_dir / "metrics.jsonl", 3, process)
        outputs = {path.parent.name: path.read_text() for path in (output_dir / "agents").glob("*/output.txt")}
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=60)
    finally:
        stop_tree(process)
    gone = [p for p in psutil.process_iter(["cmdline"]) if str(own / "agent.py") in " ".join(p.info["cmdline"] or ())]
    psutil.wait_procs(gone, timeout=20)
    assert outputs and not any(one.is_running() for one in gone)  # programs end with their run
    # Of these a program may still have written that its connection has ended.
    with_the_run = {path.parent.name for path in (output_dir / "agents").glob("*/output.txt")}
    status, output = run(own, "train", *KILLED)
    assert status == 0 and "resumes after step" in output, output
    metrics = {row.step: row.metrics for row in read_metrics(output_dir / "metrics.jsonl")}
    assert sorted(metrics) == [*range(1, 10)] and metrics[3]["rollout/num_server_restarts"] >= 1
    assert {row["rollout/num_slots"] for row in metrics.values()} == {8.0}
    later = {path.parent.name: path.read_text() for path in (output_dir / "agents").glob("*/output.txt")}
    outputs |= {name: text for name, text in later.items() if name not in with_the_run}
    assert not any("Traceback" in text for text in outputs.values()), outputs
    rows = read_samples(sample_files(output_dir).values()).to_pylist()
    ended = [row for row in rows if "ended with its run" in row["error"]]
    assert ended and {row["reward"] for row in ended} == {None} and {row["trained_tokens"] for row in ended} == {0}
    last = max(row["step"] for row in ended)
    assert any(row["reward"] is not None and row["id"] > max(one["id"] for one in ended) for row in rows if row["step"] >= last)


WAITS = """
import asyncio
from megatron_rl.environments.base import Environment, Message
class Waits(Environment):
    async def respond(self, prompt, turns, episode):
        process = await asyncio.create_subprocess_exec("sleep", "0.1")
        await process.wait()
        return None if len(turns) == 3 else Message(f"{len(turns[-1].text)} letters", max_turn_tokens=5 + len(turns), stop_strings=("e",))
    def graded_text(self, prompt, turns, index):
        return None
    def turn_reward(self, prompt, turns, index, grades):
        return None
    def outcome(self, prompt, turns, grades):
        from megatron_rl.data.trajectory import Score
        return Score(len(turns[-1].text) % 3 / 2)
"""


@pytest.mark.timeout(3 * TIMEOUT_S)
def test_a_killed_run_whose_environment_waits_for_a_tool_resumes_bit_for_bit(folder, monkeypatch):
    own = folder / "waits"
    own.mkdir()
    (own / "waiting_environment.py").write_text(WAITS)
    before, _, after = RECIPE.partition("environment:")
    recipe = (
        before + "environment: {{name: waiting_environment:Waits, max_turn_tokens: 12, step_wait_s: 30}}\n" + after[after.index("data:") :]
    )
    (own / "recipe.yaml").write_text(recipe.format(folder=folder, preset="tppo", python=sys.executable, argument="") + WINDOWS)
    monkeypatch.setenv("PYTHONPATH", f"{own}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    options = ServerOptions(str(folder / "model"), deterministic=True, load_weights=False)
    with serving(SglangServer(options, own / "sglang.log", start_timeout_s=400.0)) as server:
        words = ("schedule.mode=tppo", "batch.window_tokens=8", "run.num_steps=4", "run.save_every_steps=2", f"rollout.urls=[{server.url}]")
        words += ("algorithm.ignore_boundary_tokens=1",)
        status, output = run(own, "train", f"run.output_dir={own}/whole", *words)
        assert status == 0, output
        kill_and_resume(own, own / "killed", *words)
    assert differences(own / "killed", own / "whole") == []
    metrics = [row.metrics for row in read_metrics(own / "whole" / "metrics.jsonl")]
    assert all(row["rollout/message_share"] > 0 for row in metrics) and any(row["rollout/num_finished"] for row in metrics)
