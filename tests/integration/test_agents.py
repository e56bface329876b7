"""Programs that are trained by their base URL, with Megatron, a real SGLang server and the official client of OpenAI."""

import json
import os
import random
import subprocess
import sys

import pytest

from megatron_rl.tracking.metrics_file import read_metrics
from tests.chat_models import make_chat_model
from tests.integration.preloaded import preloading

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
            command, env={**environment, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S, check=False
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
