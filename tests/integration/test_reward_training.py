"""reward-train and label-lines as a user runs them: two torchrun ranks, a real SGLang server, models that load again."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.cli import main
from megatron_rl.rewards.registry import RewardError, check_options, resolve
from tests.integration.preloaded import preloading
from tests.word_models import make_word_model

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 400


def refused(arguments, capsys):
    """(exit status, standard error) of a command that starts no process, and therefore runs in this one."""
    status = main(list(map(str, arguments)))
    return status, capsys.readouterr().err


def run(*arguments):
    """(exit status, output) of a command of megatron-rl."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    with preloading():
        process = subprocess.run(
            [sys.executable, "-m", "megatron_rl.cli", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            env=environment | {"OMP_NUM_THREADS": "1"},
            cwd=ROOT,
        )
    return process.returncode, process.stdout


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """The example's task, small, and its untrained model."""
    spec = importlib.util.spec_from_file_location("make_task", ROOT / "examples" / "reward_models" / "make_task.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = tmp_path_factory.mktemp("reward_models")
    module.write_task(folder / "task", num_train=600, num_held_out=60, seed=1)
    return folder


def overrides(task, kind, **settings):
    files = "programs" if kind == "process" else "preferences"
    values = {
        "policy.path": task / "task" / "model",
        "reward_train.output_path": task / kind,
        "reward_train.train_files": f"[{task}/task/{files}.train.jsonl]",
        "reward_train.eval_files": f"[{task}/task/{files}.held_out.jsonl]",
        **settings,
    }
    return [f"{key}={value}" for key, value in values.items()]


def train(task, kind, num_steps, **settings):
    steps = {"reward_train.num_steps": num_steps, "reward_train.optimizer.decay_steps": 300}
    recipe = ROOT / "examples" / "reward_models" / f"{kind}.yaml"
    return run("reward-train", "--config", recipe, *overrides(task, kind, **steps, **settings))


def record(task, kind):
    return json.loads((task / kind / "reward_training.json").read_text())


@pytest.fixture(scope="module")
def scalar_model(task):
    status, output = train(task, "bradley_terry", 40)
    assert status == 0, output
    return output


def test_a_scalar_reward_model_learns_held_out_preferences(task, scalar_model):
    history = record(task, "bradley_terry")["history"]
    assert history[0]["step"] == 0 and history[0]["eval/loss"] == pytest.approx(0.69, abs=0.2)
    assert history[-1]["eval/accuracy"] > 0.9 and history[-1]["eval/margin"] > 1.0
    assert "reward-train step 40 held out: loss" in scalar_model
    options = {"url": "http://127.0.0.1:1", "tokenizer_path": str(task / "bradley_terry")}
    check_options(resolve("reward_model"), options, ("prompt",))
    with pytest.raises(RewardError, match="system_prompt is 'be brief', was ''"):
        check_options(resolve("reward_model"), {**options, "chat": True, "system_prompt": "be brief"}, ("prompt",))


def test_a_reward_model_starts_the_critic(task, scalar_model):
    """The value head of the checkpoint is what an engine loads; train accepts the folder as critic.path."""
    from megatron_rl.config.schema import ParallelConfig
    from megatron_rl.data.batch import PackedBatch
    from megatron_rl.parallel import topology as topologies
    from megatron_rl.training.engine import Engine

    head = load_file(task / "bradley_terry" / "model-00001-of-00001.safetensors")["value_head.weight"]
    assert torch.equal(load_file(task / "bradley_terry" / "score.safetensors")["score.weight"], head)
    topology = topologies.initialize(ParallelConfig(), seed=0)
    try:
        engine = Engine(
            "critic", task / "bradley_terry", parallel=ParallelConfig(), topology=topology, optimizer=None, seed=5
        )
        loaded = dict(engine.export_weights())["value_head.weight"]
        assert torch.equal(loaded, head) and head.abs().sum() > 0
        batch = PackedBatch(torch.tensor([5, 6, 7]), torch.tensor([0, 3]))
        ((values, final),) = engine.values([batch])
        assert torch.isfinite(values).all() and torch.isfinite(final).all()
    finally:
        topologies.destroy()
    sizes = ["batch.max_prompt_tokens=32", "batch.max_response_tokens=16", "policy.init=random"]
    paths = [
        f"policy.path={task}/task/model",
        f"critic.path={task}/bradley_terry",
        f"data.train_files=[{task}/task/prompts.train.jsonl]",
    ]
    (task / "ppo.yaml").write_text("preset: ppo\n")
    assert main(["train", "--config", str(task / "ppo.yaml"), "--dry-run", *sizes, *paths]) == 0


def test_reward_training_does_not_depend_on_layout_or_packing(task, scalar_model):
    """One rank, a few sequences a micro-batch, against two ranks with large ones: the same losses."""
    settings = {"parallel.num_ranks": 1, "batch.max_tokens_per_microbatch": 64}
    other = task / "other"
    output_path = {"reward_train.output_path": other / "bradley_terry"}
    status, output = train(task, "bradley_terry", 5, **settings, **output_path)
    assert status == 0, output
    one, two = record(task, "bradley_terry")["history"][1:6], record(other, "bradley_terry")["history"][1:6]
    for first, second in zip(one, two):
        assert second["train/loss"] == pytest.approx(first["train/loss"], rel=1e-3, abs=1e-4)
        assert second["grad_norm"] == pytest.approx(first["grad_norm"], rel=1e-2)


def test_a_judge_trains_and_stores_its_prompt_template(task):
    status, output = train(task, "pairwise", 12)
    assert status == 0, output
    found = record(task, "pairwise")
    last = found["history"][-1]
    assert {"eval/accuracy_chosen_first", "eval/swap_consistency", "eval/position_gap"} <= set(last)
    # The words come first: from one in 192 tokens towards all of the probability.
    assert last["eval/judgement_mass"] > 10 * found["history"][0]["eval/judgement_mass"]
    assert last["train/loss"] < 0.5 * found["history"][1]["train/loss"]
    assert "{first}" in found["judge"]["template"] and found["judge"]["yes_word"] == "YES"
    (weights_file,) = (task / "pairwise").glob("*.safetensors")
    assert "lm_head.weight" in load_file(weights_file)


def test_a_process_reward_model_learns_labels_of_held_out_programs(task):
    status, output = train(task, "process", 60)
    assert status == 0, output
    history = record(task, "process")["history"]
    assert history[-1]["eval/accuracy"] > 0.7 > history[0]["eval/accuracy"]
    assert history[-1]["eval/margin"] > 0.5
    (weights_file,) = (task / "process").glob("*.safetensors")
    assert "value_head.weight" in load_file(weights_file)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"reward_train.train_files": "[nowhere.jsonl]"}, "nowhere.jsonl"),
        ({"reward_train.optimizer.lr": 0}, "reward_train.optimizer.lr"),
        ({"reward_train.output_path": ""}, "reward_train.output_path"),
        ({"reward_train.kind": "process"}, "field 'response'"),
    ],
)
def test_mistakes_are_one_line_errors_before_anything_starts(task, settings, reason, capsys):
    recipe = ROOT / "examples" / "reward_models" / "bradley_terry.yaml"
    status, said = refused(["reward-train", "--config", recipe, *overrides(task, "bradley_terry", **settings)], capsys)
    assert status == 2 and reason in said


def test_judgment_words_of_several_tokens_are_reported(task):
    status, output = train(task, "pairwise", 2, **{"parallel.num_ranks": 1, "reward_train.yes_word": "'YES YES'"})
    assert status == 2 and "expected one token" in output and "Traceback" not in output, output


def test_label_lines_uses_a_real_server_and_a_second_run_resumes(tmp_path, capsys):
    make_word_model(tmp_path / "model", extra="bad note")
    programs = ["a = 1\n# note\nbad = 2\nc = 3\n", "a = 1\nb = 2\n", "bad\n", "x\n" * 5 + "bad"]
    rows = [{"id": f"{i}", "prompt": f"{i}:", "response": text, "answer": ""} for i, text in enumerate(programs)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "recipe.yaml").write_text(
        f"""
policy: {{path: {tmp_path}/model}}
reward: {{name: "tests.integration.line_oracle:score", options: {{}}}}
batch: {{max_prompt_tokens: 64, max_response_tokens: 128}}
label_lines:
  input_path: {tmp_path}/in.jsonl
  output_path: {tmp_path}/out.jsonl
  num_completions: 4
  max_new_tokens: 8
"""
    )
    status, output = run("label-lines", "--config", tmp_path / "recipe.yaml")
    assert status == 0 and "4 of 4 rows labeled" in output, output
    lines = (tmp_path / "out.jsonl").read_text().splitlines(keepends=True)
    labels = {row["id"]: row["line_labels"] for row in map(json.loads, lines)}
    assert labels == {"0": [1, 0, -1, -1], "1": [1, 1], "2": [-1], "3": [1] * 5 + [-1]}
    # A kill in the middle of a row: it alone is done again, and comes out the same.
    (tmp_path / "out.jsonl").write_text("".join(lines[:3]) + lines[3][:10])
    status, output = run("label-lines", "--config", tmp_path / "recipe.yaml")
    assert status == 0 and "1 of 4 rows labeled (3 by earlier runs)" in output, output
    assert (tmp_path / "out.jsonl").read_text().splitlines(keepends=True) == lines
    status, said = refused(["label-lines", "--config", tmp_path / "recipe.yaml", "label_lines.num_completions=5"], capsys)
    assert status == 2 and "another input, model or setting" in said
