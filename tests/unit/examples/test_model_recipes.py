"""examples/models: each recipe is what its plan says, passes the dry run, and Megatron builds its layout."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_rl.cli import main
from megatron_rl.config.derived import shares_devices
from megatron_rl.config.load import load_config
from megatron_rl.desk.costs.gpus import gpu
from megatron_rl.desk.costs.parameter_counts import num_parameters
from megatron_rl.desk.costs.rank_memory import PassSettings, memory_by_rank
from megatron_rl.desk.costs.run_memory import model_folders
from megatron_rl.desk.plan.memory_fit import check_fit
from megatron_rl.desk.simulate import slot_simulation
from megatron_rl.families.flops import flops_cost
from megatron_rl.families.model_facts import as_config, read_model_json
from megatron_rl.models import policy
from megatron_rl.models.hf.model_config import load_hf_config
from megatron_rl.system.gpu.torchvision_ops import declare_torchvision_ops
from megatron_rl.system.megatron_core import linear_attention_problem
from tests.fake_world import fake_rank

declare_torchvision_ops()
ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools"))
import plan_models  # noqa: E402

sys.path.remove(str(ROOT / "tools"))
NAMES = plan_models.names()
LINEAR = pytest.mark.skipif(bool(linear_attention_problem()), reason=linear_attention_problem())
RECIPES = [
    pytest.param(f"{name}/{recipe}", marks=LINEAR if name == "qwen3-next-80b-a3b" else ())
    for name in NAMES
    for recipe in plan_models.recipes(name)
]
SIZES = {
    # billions of parameters: all, and those of a token (its embedding's row not counted)
    "qwen2.5-7b": (7.62, 7.07),
    "qwen2.5-32b": (32.76, 31.98),
    "qwen3-30b-a3b": (30.53, 3.04),
    "qwen3-235b-a22b": (235.09, 21.57),
    "deepseek-v3": (671.03, 36.6),
    "qwen3-next-80b-a3b": (79.67, 3.67),
    "kimi-k2": (1026.4, 31.7),
    "gpt-oss-20b": (20.91, 3.61),
    "gpt-oss-120b": (116.83, 5.13),
    "qwen3-vl-moe-20b-active": (210.9, 19.3),
}


def test_every_model_has_its_sizes():
    assert set(NAMES) == set(SIZES)


@pytest.mark.parametrize("name", SIZES)
def test_a_config_counts_what_is_published(name):
    facts = as_config(read_model_json(plan_models.MODELS / name))
    total, active = SIZES[name]
    assert num_parameters(facts) / 1e9 == pytest.approx(total, rel=0.002)
    assert flops_cost(facts).per_token / 2e9 == pytest.approx(active, rel=0.01)


@pytest.fixture
def simulated_once(monkeypatch):
    """A server of the same requests, times and limits is simulated once for all commands of a README."""
    real, traces = slot_simulation.serve, {}

    def serve(requests, timing, limits):
        same = (*(array.tobytes() for array in vars(requests).values()), timing.decode, timing.prefill, limits)
        if same not in traces:
            traces[same] = real(requests, timing, limits)
        return traces[same]

    monkeypatch.setattr(slot_simulation, "serve", serve)


@pytest.mark.parametrize("name", SIZES)
def test_recipe_and_readme_are_what_the_plan_gives(name, simulated_once):
    for file, text in plan_models.planned(name).items():
        assert (plan_models.MODELS / name / file).read_text() == text, f"python tools/plan_models.py --write {name}"


@pytest.mark.parametrize("path", RECIPES)
def test_a_recipe_passes_the_dry_run(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "model").mkdir()
    name = path.split("/")[0]
    vision = "vl" in name
    row = '{"prompt": "1+1=", "answer": "2", "type": "verifiable"}\n{"prompt": "Hi", "answer": "Hello", "type": "general"}\n'
    for file in ("train", "eval"):
        (tmp_path / "data" / f"{file}.jsonl").write_text(row if vision else '{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "data" / "dapo-math-17k.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "data" / "aime24.jsonl").write_text('{"id": 60, "problem": "1+1=", "answer": 2}\n')
    from tests.tiny_models import make_tokenizer
    from tests.tiny_vision import write_vision_files

    make_tokenizer(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_bytes((plan_models.MODELS / name / "config.json").read_bytes())
    if vision:
        write_vision_files(tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    recipe = plan_models.MODELS / path
    starts_with_critic = recipe.stem in ("vapo", "vc_ppo")
    command = ["critic-pretrain", "critic_pretrain.output_path=critic"] if starts_with_critic else ["train"]
    words = [*command, "--config", str(recipe), f"policy.path={tmp_path / 'model'}", "policy.init=random", "--dry-run"]
    if "aime24" in load_config(recipe).eval.sets:
        words.append("eval.sets.aime24.instruction='1+{prompt}'")  # the tiny tokenizer knows no letters
    assert main(words) == 0, capsys.readouterr().err
    assert "nothing was started" in capsys.readouterr().out


@pytest.mark.parametrize("path", RECIPES)
def test_megatron_builds_the_ranks_that_are_planned(path):
    """The last rank of the pipeline, on fake process groups and without memory."""
    name = path.split("/")[0]
    config = load_config(plan_models.MODELS / path)
    facts, parallel = as_config(read_model_json(plan_models.MODELS / name)), config.parallel
    planned_for = gpu("B300" if name in ("deepseek-v3", "kimi-k2") else "H100-80G")
    assert not check_fit(config, {role: facts for role in model_folders(config)}, planned_for).problem
    ranks = memory_by_rank(facts, parallel, PassSettings(0), num_ranks=parallel.num_ranks)
    with fake_rank(parallel.num_ranks - 1, parallel.num_ranks, parallel), torch.device("meta"):
        chunks = policy.build_policy(load_hf_config(plan_models.MODELS / name), parallel, dtype=torch.bfloat16, seed=None)
        held = sum(parameter.numel() for parameter in itertools.chain(*(chunk.parameters() for chunk in chunks)))
    assert ranks[-1].weights == 2 * held


def test_a_recipe_is_submitted_with_the_nodes_of_its_plan(tmp_path):
    (tmp_path / "sbatch").write_text('#!/bin/bash\necho "ROLLOUT_NODES=$ROLLOUT_NODES" "$@"\n')
    (tmp_path / "sbatch").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def submit(*words: str) -> subprocess.CompletedProcess[str]:
        script = ["bash", str(plan_models.MODELS / "submit.sh"), *words]
        return subprocess.run(script, capture_output=True, text=True, env=environment, check=False)

    done = submit("qwen2.5-7b", "run.output_dir=/a b", "policy.path=/m")
    config = load_config(plan_models.MODELS / "qwen2.5-7b" / "recipe.yaml")
    nodes = "all" if shares_devices(config.rollout) else (32 - config.parallel.num_ranks) // 8
    assert done.stdout.split("\n")[0] == (
        f"ROLLOUT_NODES={nodes} --nodes 4 launch/slurm.sbatch train --config examples/models/qwen2.5-7b/recipe.yaml "
        "run.output_dir=/a b policy.path=/m"
    )
    assert "qwen2.5-7b/ppo.yaml" in submit("qwen2.5-7b/ppo").stdout
    assert submit("nothing").returncode == 2 and "expected one of" in submit("nothing").stderr
