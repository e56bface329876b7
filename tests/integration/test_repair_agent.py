"""The recipe of examples/agents/repair, some steps long: transcripts, then reinforcement learning by OpenAI's client at the endpoint."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time

import pytest

from megatron_rl.tracking.metrics_file import read_metrics
from tests.integration.preloaded import preloading
from tests.unit.examples.test_examples import ROOT

FOLDER = ROOT / "examples" / "agents" / "repair"
TIMEOUT_S = 500


def run(*words):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with preloading():
        done = subprocess.run(
            [sys.executable, *map(str, words)], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """A task, and a policy that has seen some transcripts."""
    folder = tmp_path_factory.mktemp("repair")
    run(FOLDER / "make_task.py", "--output", folder / "task", "--num-train", 200, "--num-sft", 4000, "--num-held-out", 20)
    settings = [f"policy.path={folder}/task/model", "policy.init=random", f"sft.train_files=[{folder}/task/sft.jsonl]"]
    steps = [f"sft.output_path={folder}/sft", "sft.num_steps=60", "sft.optimizer.decay_steps=60"]
    run("-m", "megatron_rl.cli", "sft", "--config", FOLDER / "repair.yaml", *settings, *steps)
    return folder


@contextlib.contextmanager
def agent_service():
    """The port of a service."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, str(FOLDER / "agent_service.py"), str(port)], env=environment)
    try:
        deadline = time.monotonic() + 60
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert process.poll() is None and time.monotonic() < deadline, "the service does not listen"
            time.sleep(0.2)
        yield port
    finally:
        process.terminate()
        process.wait(timeout=30)


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_an_agent_from_random_weights_is_trained_through_the_endpoint_and_no_episode_fails(warm):
    with agent_service() as port:
        command = [sys.executable, "-I", "-S", str(FOLDER / "episode.py"), str(port), "{result_file}"]
        run(
            *("-m", "megatron_rl.cli", "train", "--config", FOLDER / "repair.yaml"),
            *(f"policy.path={warm}/sft", f"run.output_dir={warm}/run", "run.overwrite=true", "run.num_steps=3", "critic.warmup_steps=1"),
            *("batch.num_prompts_per_step=8", "batch.policy_minibatch_size=8", "batch.critic_minibatch_size=8", "eval.every_steps=0"),
            *(f"data.train_files=[{warm}/task/train.jsonl]", f"data.eval_files=[{warm}/task/eval.jsonl]"),
            *(f"environment.options.command={json.dumps(command)}", f"environment.options.ports=[{port}]", "parallel.num_ranks=1"),
        )
    metrics = [row.metrics for row in read_metrics(warm / "run" / "metrics.jsonl")]
    ended = [step for step in metrics if step.get("rollout/num_finished")]
    assert ended and {step["dialogue/num_rows"] for step in ended} == {1.0}
    assert max(step["dialogue/num_requests"] for step in ended) > 1  # tool calls were read and answered
    assert not any(step.get("reward/error_rate", 0.0) for step in metrics)
    assert all("eval/accuracy" in metrics[i] for i in (0, -1))
