"""Checks before a run starts: data, GPUs, network interface."""

import argparse
import json
import os
from pathlib import Path

import pytest
import torch

from megatron_rl import cli
from megatron_rl.commands import add_rank_recipe_arguments
from megatron_rl.config.checks.servers import Node
from megatron_rl.config.load import config_to_yaml, load_config
from megatron_rl.config.schema import Config, EvalSetConfig, RewardRouteConfig
from megatron_rl.errors import ConfigError, DataError, UserError
from megatron_rl.run import launch as recipes
from megatron_rl.run.output import check_machine
from megatron_rl.step.input_checks import check_rl_inputs
from tests.unit.examples.test_examples import ROOT


def recipe(tmp_path, by_type):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "p", "answer": "1", "type": name}) + "\n" for name in "ab"))
    config = Config()
    config.data.train_files, config.batch.num_samples_by_type = [str(path)], by_type
    return config


def test_num_samples_by_type_rejects_unknown_types(tmp_path):
    check_rl_inputs(recipe(tmp_path, {"a": 1, "b": 2}))
    with pytest.raises(DataError, match=r"batch.num_samples_by_type: no prompt has the type 'c'; .*'a', 'b'"):
        check_rl_inputs(recipe(tmp_path, {"a": 1, "c": 1}))


def test_rewards_for_types_absent_from_the_data_are_allowed(tmp_path):
    config = recipe(tmp_path, {"general": 1})
    config.reward.by_type = {name: RewardRouteConfig(name="math") for name in ("a", "b", "general")}
    check_rl_inputs(config)


def test_rows_of_every_evaluation_set_are_checked(tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "p"}\n')
    config = recipe(tmp_path, {})
    config.eval.sets = {"good": EvalSetConfig(files=config.data.train_files), "bad": EvalSetConfig(files=[str(bad)])}
    with pytest.raises(DataError, match=r"bad.jsonl:1: field 'answer'"):
        check_rl_inputs(config)


@pytest.fixture
def model_with_long_context(tmp_path):
    """A model and data that the recipes of examples/gpu need, in the folder that they run in."""
    from tests.tiny_models import make_tiny_model

    model = make_tiny_model(tmp_path / "model", num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=32768)
    (model / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    (tmp_path / "data").mkdir()
    for name in ("train", "eval"):
        (tmp_path / "data" / f"{name}.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    return model


@pytest.mark.parametrize("name", ["one_node_disaggregated", "one_node_colocated"])
def test_recipes_for_one_node_need_only_a_model_and_data(name, model_with_long_context, monkeypatch, capsys):
    monkeypatch.chdir(model_with_long_context.parent)
    words = ["train", "--config", str(ROOT / "examples" / "gpu" / f"{name}.yaml"), "--dry-run", f"policy.path={model_with_long_context}"]
    assert cli.main([*words, "--gpus-per-node", "8"]) == 0
    assert "nothing was started" in capsys.readouterr().out
    assert cli.main([*words, "--gpus-per-node", "4"]) == 2
    assert "GPUs" in capsys.readouterr().err or name == "one_node_colocated"


def test_without_a_number_of_ranks_a_dry_run_plans_the_fewest_and_a_run_is_refused_with_it(model_with_long_context, monkeypatch, capsys):
    monkeypatch.chdir(model_with_long_context.parent)
    words = ["train", "--config", str(ROOT / "examples" / "gpu" / "tppo.yaml"), f"policy.path={model_with_long_context}"]
    assert cli.main([*words, "--dry-run"]) == 0
    assert "nothing was started" in capsys.readouterr().out
    assert cli.main(words) == 2
    said = capsys.readouterr().err.strip()
    assert "parallel.num_ranks=4 or a multiple" in said and len(said.splitlines()) == 1


def test_gpus_per_node_is_given_to_a_dry_run_and_counted_by_a_run(model_with_long_context, monkeypatch, capsys):
    monkeypatch.chdir(model_with_long_context.parent)
    recipe = str(ROOT / "examples" / "gpu" / "one_node_disaggregated.yaml")
    words = ["train", "--config", recipe, f"policy.path={model_with_long_context}"]
    assert cli.main([*words, "--gpus-per-node", "8"]) == 2
    assert "--gpus-per-node is for --dry-run" in capsys.readouterr().err
    monkeypatch.setattr("megatron_rl.run.launch.count_gpus", lambda: 6)
    assert cli.main(words) == 2
    said = capsys.readouterr().err
    assert "need 8 GPUs, and it has 6" in said and "rollout.placement=colocated rollout.num_servers=4" in said


def test_run_that_requires_a_gpu_does_not_start_on_cpus(model_with_long_context, monkeypatch, capsys):
    monkeypatch.chdir(model_with_long_context.parent)
    monkeypatch.setenv("MEGATRON_RL_REQUIRE_GPU", "1")
    recipe = str(ROOT / "examples" / "gpu" / "one_node_disaggregated.yaml")
    assert cli.main(["train", "--config", recipe, f"policy.path={model_with_long_context}"]) == 2
    assert "torch finds no GPU" in capsys.readouterr().err
    assert cli.main(["serve", "--model-path", str(model_with_long_context)]) == 2
    assert "torch finds no GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("environment", "urls", "asked", "interface"),
    [
        ({}, [], None, "lo"),
        ({}, ["http://127.0.0.1:1"], None, "lo"),
        ({}, ["http://127.0.0.1:1", "http://node7:1"], "node7", "eth7"),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "node0"}, [], "node0", "eth7"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "node0"}, [], "node0", "eth7"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, [], None, "lo"),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, [], None, "lo"),
        ({"GLOO_SOCKET_IFNAME": "ib0"}, ["http://node7:1"], None, "ib0"),
    ],
)
def test_gloo_uses_loopback_on_one_node_and_a_common_interface_otherwise(
    monkeypatch, environment, urls, asked, interface
):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", {**os.environ, **environment})
    seen = []
    monkeypatch.setattr(recipes, "local_interface_for", lambda host: seen.append(host) or "eth7")
    config = Config()
    config.rollout.urls = urls
    recipes.choose_interface(config)
    assert os.environ["GLOO_SOCKET_IFNAME"] == interface and seen == ([asked] if asked else [])


@pytest.mark.parametrize(
    ("environment", "world_size", "words", "node"),
    [
        ({}, None, [], Node(8, 16)),  # all of them would start here
        ({}, None, ["--dry-run"], Node(8, 8)),
        ({}, None, ["--dry-run", "--gpus-per-node", "4"], Node(4, 4)),
        ({"LOCAL_WORLD_SIZE": "4"}, 16, [], Node(8, 4)),
        ({"LOCAL_WORLD_SIZE": "8", "GROUP_RANK": "1"}, 16, [], Node(0, 0)),  # the driver's node may have fewer ranks
        ({}, 16, [], Node(8, 8)),  # srun says nothing of the node
    ],
)
def test_ranks_of_the_driver_node_come_from_the_launcher(monkeypatch, environment, world_size, words, node):
    monkeypatch.setattr("megatron_rl.run.launch.count_gpus", lambda: 8)
    kept = {name: value for name, value in os.environ.items() if name not in ("LOCAL_WORLD_SIZE", "GROUP_RANK")}
    monkeypatch.setattr(os, "environ", {**kept, **environment})
    parser = argparse.ArgumentParser()
    add_rank_recipe_arguments(parser)
    config = Config()
    config.parallel.num_ranks = 16
    assert recipes.driver_node(config, parser.parse_args(["--config", "x", *words]), world_size) == node


def test_torch_built_for_cuda_without_a_gpu_prints_a_note(monkeypatch, capsys):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    recipes.prepare_gpus(is_rank=False)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    recipes.prepare_gpus(is_rank=False)
    assert "finds no GPU: this computes on CPUs" in capsys.readouterr().err
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the quickstart sets this on purpose
    recipes.prepare_gpus(is_rank=False)
    assert capsys.readouterr().err == ""


def test_a_value_pretraining_and_the_training_after_it_share_a_recipe_but_no_folder(tmp_path, monkeypatch):
    for name in ("check_config", "check_models", "prepare_gpus", "choose_interface"):
        monkeypatch.setattr(recipes, name, lambda *arguments, **keywords: None)
    (tmp_path / "recipe.yaml").write_text(f"run: {{output_dir: {tmp_path}/one}}")

    def folder_of(command, path):
        folders = []

        def work(config):
            folders.append(Path(config.run.output_dir))
            folders[0].mkdir(parents=True, exist_ok=True)
            (folders[0] / "metrics.jsonl").write_text("")
            (folders[0] / "config.yaml").write_text(config_to_yaml(config))

        words = argparse.Namespace(config=[str(path)], overrides=[], dry_run=False, all_rows=False, gpus_per_node=None)
        keywords = {"check_inputs": lambda *_, **rows: None, "print_plan": lambda *plan: None, "writes_output_dir": True}
        assert recipes.run_on_ranks(command, words, work=work, **keywords) == 0
        return folders[0]

    pretraining = folder_of("critic-pretrain", tmp_path / "recipe.yaml")
    assert folder_of("train", tmp_path / "recipe.yaml") == tmp_path / "one" != pretraining
    with pytest.raises(UserError, match="one/critic_pretrain_run already contains a run"):
        folder_of("critic-pretrain", pretraining / "config.yaml")


@pytest.mark.parametrize("key", ["parallel.num_ranks", "rollout.num_servers"])
def test_more_ranks_or_servers_than_a_cpu_can_run_are_refused_by_a_run_and_not_by_its_dry_run(key, tmp_path):
    config = load_config(None, [f"{key}={64 + 8 * len(os.sched_getaffinity(0))}"])
    with pytest.raises(ConfigError, match=f"{key}: expected at most"):
        check_machine(config, "train", starts_ranks=True)
    check_machine(config, "train")


def test_a_dry_run_for_another_machine_does_not_count_this_ones_cores(tmp_path):
    config = load_config(None, ["reward.num_workers=1000", "rollout.num_workers=500"])
    with pytest.raises(ConfigError, match=r"(?s)reward.num_workers: .*, got 1000; .*--gpus-per-node\).*rollout.num_workers: .*, got 500"):
        check_machine(config, "train")
    check_machine(config, "train", is_elsewhere=True)
    check_machine(config, "sft")
