"""Checks of the servers: GPUs of a node, colocated layouts, SGLang options."""

import itertools
import os
import re
from dataclasses import replace

import pytest

from megatron_rl.config.checks import check_config
from megatron_rl.config.checks.servers import (
    Node,
    flag_problems,
    gpu_problems,
    placement_problems,
    quantization_problems,
)
from megatron_rl.config.load import load_config
from megatron_rl.config.schema import Config, ParallelConfig, Placement, RolloutConfig, WeightSync
from tests.unit.config.recipes import problems


def config(tensor=1, **rollout):
    return Config(parallel=ParallelConfig(tensor_parallel_size=tensor), rollout=RolloutConfig(**rollout))


@pytest.mark.parametrize(
    ("num_gpus", "ranks", "servers", "size"), itertools.product([0, 1, 4, 8], [1, 2, 4, 8], [1, 2, 4], [1, 2])
)
def test_node_with_more_ranks_and_server_workers_than_gpus_is_rejected(num_gpus, ranks, servers, size):
    one = config(num_servers=servers, tensor_parallel_size=size)
    problems = list(gpu_problems(one, Node(num_gpus, ranks), ranks, "train"))
    assert bool(problems) == (0 < num_gpus < ranks + servers * size)
    assert not list(gpu_problems(one, Node(num_gpus, min(ranks, num_gpus or ranks)), ranks, "sft"))


def test_suggested_layouts_fit_the_node():
    """Also with a layout whose replica takes several ranks."""
    for num_gpus, tensor, size in itertools.product([2, 4, 8], [1, 2, 4], [1, 2]):
        one = config(tensor, tensor_parallel_size=size)
        problems = list(gpu_problems(one, Node(num_gpus, num_gpus), num_gpus, "train"))
        for found in re.findall(r"parallel.num_ranks=(\d+) rollout.num_servers=(\d+) .*RANKS_PER_NODE=(\d+)", problems[0]):
            ranks, servers, per_node = map(int, found)
            assert ranks == per_node and ranks % tensor == 0
            fewer = replace(one, rollout=replace(one.rollout, num_servers=servers))
            assert not list(gpu_problems(fewer, Node(num_gpus, ranks), ranks, "train"))
        (servers,) = re.findall(r"rollout.placement=colocated rollout.num_servers=(\d+)", problems[0])
        shared = replace(one, rollout=replace(one.rollout, placement=Placement.colocated, num_servers=int(servers)))
        assert not list(gpu_problems(shared, Node(num_gpus, num_gpus), num_gpus, "train"))
        assert not list(placement_problems(shared.rollout, num_gpus))


@pytest.mark.parametrize("rollout", [{"urls": ["http://node7:30000"]}, {"weight_sync": WeightSync.disk}])
def test_remote_servers_and_weights_by_files_need_no_gpu_of_the_node(rollout):
    assert not list(gpu_problems(config(**rollout), Node(8, 8), 8, "train"))


def test_driver_does_not_start_colocated_servers_of_other_nodes():
    one = config(placement=Placement.colocated, num_servers=16)
    (problem,) = gpu_problems(one, Node(8, 8), 16, "train")
    assert "8 of the 16 trainer ranks" in problem and "rollout.urls" in problem
    assert not list(gpu_problems(replace(one, rollout=replace(one.rollout, urls=["http://a:1"])), Node(8, 8), 16, "train"))


def test_more_ranks_than_gpus_are_rejected_for_every_command():
    for command in ("train", "sft", "reward-train"):
        (problem,) = gpu_problems(config(), Node(2, 4), 4, command)
        assert "RANKS_PER_NODE=2" in problem


@pytest.mark.parametrize(("gpus", "ranks", "here"), [(8, 8, 8), (8, 4, 4), (8, 16, 8), (8, 12, 6), (0, 16, 16), (8, 1, 1)])
def test_ranks_spread_over_as_few_nodes_as_they_need(gpus, ranks, here):
    assert Node.of(gpus, ranks) == Node(gpus, here)


@pytest.mark.parametrize(
    ("server_args", "names"),
    [
        ({"tensor-parallel-size": 2}, "tensor-parallel-size=2.*rollout.tensor_parallel_size"),
        ({"--tp_size": 2}, "tp_size=2"),
        ({"tp": 4}, "tp=4"),
        ({"tensor-parallel": 4}, "tensor-parallel=4"),
        ({"pp-size": 2}, "pp-size=2.*cannot receive weights"),
        ({"dp_size": 8}, "dp_size=8.*num_servers"),
        ({"data-parallel-size": 2}, "num_servers"),
        ({"nnodes": 2}, "nnodes=2.*serve --num-nodes"),
        ({"speculative-algorithm": "EAGLE"}, "random weights.*speculative-draft-load-format=auto"),
        ({"speculative_algorithm": "NEXTN", "speculative-num-steps": 3}, "neither multi-token-prediction layers"),
        ({"--speculative-algo": "EAGLE3"}, "speculative-algo=EAGLE3.*random weights"),
        ({"base-gpu-id": 4}, "base-gpu-id=4.*same GPUs"),
        ({"attention-backend": "fa3"}, "no float32 kernels; use triton"),
    ],
)
def test_options_that_change_server_workers_are_rejected_with_remedy(server_args, names):
    (problem,) = flag_problems(server_args, num_servers=2, dtype="float32")
    assert re.search(names, problem)


@pytest.mark.parametrize(
    "server_args",
    [
        {"tp-size": 1},
        {"dp": 1},
        {"mem-fraction-static": 0.8},
        {"tokenizer-worker-num": 2},
        {"attention-backend": "triton"},
        {"speculative-algorithm": "NGRAM"},
        {"speculative-algorithm": "NEXTN", "speculative-draft-load-format": "auto"},
    ],
)
def test_other_server_options_pass(server_args):
    assert not list(flag_problems(server_args, num_servers=1, dtype="float32"))
    assert not list(flag_problems({"base-gpu-id": 4, "attention-backend": "fa3"}, num_servers=1, dtype="bfloat16"))


def test_options_in_a_servers_config_file_are_checked(tmp_path):
    (tmp_path / "own.yaml").write_text("tp-size: 2\nmem-fraction-static: 0.5\n")
    (problem,) = flag_problems({"config": str(tmp_path / "own.yaml")}, num_servers=1, dtype="bfloat16")
    assert "config: tensor-parallel-size=2" in problem
    assert not list(flag_problems({"config": str(tmp_path / "absent")}, num_servers=1, dtype="bfloat16"))


@pytest.mark.parametrize(("flag", "ours", "refused"), [("enable-symm-mem", "0", True), ("enable-symm-mem", "1", False)])
def test_options_that_change_only_the_servers_nccl_are_rejected(monkeypatch, flag, ours, refused):
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", ours)
    monkeypatch.setenv("NCCL_NVLS_ENABLE", ours)
    problems = list(flag_problems({flag: True}, num_servers=1, dtype="bfloat16"))
    assert bool(problems) is refused
    if refused:
        assert "export NCCL_CUMEM_ENABLE=1 NCCL_NVLS_ENABLE=1" in problems[0]


def test_expandable_segments_are_rejected_only_with_colocated_servers(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    (problem,) = placement_problems(config(placement=Placement.colocated).rollout, 1)
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in problem and "Unset it" in problem
    assert not list(placement_problems(config().rollout, 1))
    monkeypatch.delitem(os.environ, "PYTORCH_CUDA_ALLOC_CONF")
    assert not list(placement_problems(config(placement=Placement.colocated).rollout, 1))


@pytest.mark.parametrize(
    ("server_args", "model_type", "refused"),
    [
        ({"quantization": "fp8"}, "qwen2", True),
        ({"--quantization": "fp8", "load_format": "flash_rl"}, "qwen3", False),
        ({"quantization": "fp8", "load-format": "flash_rl"}, "qwen3_moe", True),
        ({"quantization": "w8a8_fp8", "load-format": "flash_rl"}, "qwen2", True),
        ({"modelopt-quant": "fp8"}, "qwen2", True),
        ({"json-model-override-args": '{"quantization_config": {"quant_method": "fp8"}}'}, "qwen2", True),
        ({"quantization": "unquant", "kv-cache-dtype": "fp8_e5m2"}, "qwen2", False),
        ({"quantization": None}, "qwen2", False),
    ],
)
def test_quantizing_servers_are_rejected_unless_they_accept_new_weights(server_args, model_type, refused):
    problems = list(quantization_problems(server_args, model_type))
    assert len(problems) == refused
    if refused:
        assert re.search("rollout.server_args.*quant.*cannot take the trainer's.*flash_rl", problems[0])


COLOCATED = "rollout.placement=colocated"


@pytest.mark.parametrize(
    ("overrides", "world_size", "message"),
    [
        (
            ["rollout.num_servers=2"],
            4,
            r"2 x rollout.tensor_parallel_size 1 = 2 is not the 4 trainer ranks.*num_servers=4",
        ),
        (["rollout.tensor_parallel_size=3"], 4, "a rollout.tensor_parallel_size that divides 4"),
        (["rollout.urls=[http://a:1]"], 2, "the rollout.urls 1 x .*list 2 servers"),
        (["rollout.tensor_parallel_size=0"], 2, "rollout.tensor_parallel_size: expected at least 1"),
        (["rollout.weight_sync=disk"], 1, "rollout.weight_sync=disk"),
        (["rollout.host=0.0.0.0"], 1, "rollout.host"),
    ],
)
def test_colocated_servers_must_match_the_trainer_ranks(recipe, overrides, world_size, message):
    assert re.search(message, problems(recipe, COLOCATED, *overrides, world_size=world_size))


def test_matching_colocated_layouts_pass(recipe):
    for overrides, world_size in ((["rollout.num_servers=2", "rollout.tensor_parallel_size=2"], 4), ([], None)):
        check_config(load_config(recipe, [COLOCATED, *overrides]), command="train", world_size=world_size)
