"""Checks of the settings of models: layouts, precision and multi-token-prediction layers."""

from pathlib import Path

import pytest

from megatron_rl.config.checks import check_config
from megatron_rl.config.schema import Dtype, Fp8, Init, Mtp
from megatron_rl.errors import ConfigError
from tests.unit.config.recipes import DENSE, SPARSE, load, problems, write_recipe

HIDDEN = {"hidden_size": 64}


def test_fp8_with_float32_is_rejected_before_anything_starts(tmp_path: Path) -> None:
    config = load(tmp_path, DENSE)
    config.policy.fp8 = Fp8.hybrid
    with pytest.raises(ConfigError, match="policy.fp8=hybrid: needs parameters in bfloat16, got policy.dtype=float32"):
        check_config(config, command="train")
    config.policy.dtype = Dtype.bfloat16
    check_config(config, command="train")


def test_mtp_layers_can_be_kept_only_from_a_checkpoint(tmp_path: Path) -> None:
    config = load(tmp_path, DENSE)
    config.policy.mtp, config.policy.init = Mtp.keep, Init.random
    with pytest.raises(ConfigError, match="policy.mtp=keep: random weights .* have no layers to keep; set it to drop"):
        check_config(config, command="train")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["policy.lora.rank=0", "policy.lora.path=x"], "policy.lora.path: adapters have a rank; set policy.lora.rank"),
        (["policy.lora.path=x"], "policy.lora.path: x has no adapter_config.json; give a folder that peft"),
        (["policy.lora.targets=[]"], "policy.lora.targets: adapters need at least one target"),
        (["policy.dtype=bfloat16", "policy.fp8=hybrid"], "policy.fp8=hybrid: not supported with policy.lora"),
        (["critic.lora.rank=4", "critic.freeze=['*.mlp.*']"], "critic.freeze: with critic.lora.rank"),
        (["policy.lora.sync=adapters", "rollout.placement=colocated"], "policy.lora.sync=adapters: not supported for servers on"),
        (["policy.lora.targets=[query]"], "policy.lora.targets: 'query' matches no linear layer"),
        (["critic.lora.rank=4", "critic.lora.targets=[value]"], "critic.lora.targets: 'value' matches no linear layer"),
    ],
)
def test_combinations_that_adapters_exclude_name_key_and_remedy(tmp_path, overrides, expected):
    assert expected in problems(write_recipe(tmp_path, DENSE | HIDDEN), "policy.lora.rank=4", *overrides)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["policy.moe.load_balancing=aux_loss", "policy.moe.aux_loss_coef=0.1"], "routers are frozen with policy.lora"),
        (["policy.lora.sync=adapters"], "policy.lora.sync=adapters: only adapters of llama, qwen2, qwen3 are served"),
        (
            [
                "policy.lora.targets=[experts.*]",
                *("parallel.num_ranks=2", "parallel.tensor_parallel_size=2", "parallel.sequence_parallel=true"),
            ],
            "adapters of routed experts need parallel.expert_tensor_parallel_size=1, got 2; set it to 1",
        ),
    ],
)
def test_adapters_that_a_mixture_of_experts_excludes_name_key_and_remedy(tmp_path, overrides, expected):
    assert expected in problems(write_recipe(tmp_path, SPARSE | HIDDEN), "policy.lora.rank=4", *overrides)


def test_commands_that_read_the_model_alone_refuse_adapters(recipe):
    assert "evaluate reads policy.path alone" in problems(recipe, "policy.lora.rank=4", "policy.lora.path=x", command="evaluate")
    assert "reward models train all weights" in problems(recipe, "policy.lora.rank=4", command="reward-train")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["critic.parallel.tensor_parallel_size=3"],
            ["4 ranks do not divide by critic.parallel.tensor_parallel_size 3"],
        ),
        (
            ["critic.parallel.virtual_pipeline_size=2"],
            ["critic.parallel.virtual_pipeline_size", "critic.parallel.pipeline"],
        ),
        (
            ["critic.parallel.tensor_parallel_size=4"],
            ["critic.parallel.tensor_parallel_size: 4 does not divide num_key"],
        ),
        (["critic.parallel.pipeline_layers=[3]"], ["critic.parallel.pipeline_parallel_size: num_hidden_layers 2"]),
        (
            ["critic.parallel.expert_parallel_size=2"],
            ["critic.parallel: the layers have no experts", "critic.parallel.exp"],
        ),
        (["critic.parallel.num_ranks=2"], ["critic.parallel.num_ranks", "parallel.num_ranks=4"]),
        (["critic.parallel.collective_timeout_s=0"], ["critic.parallel.collective_timeout_s"]),
        (["preset=grpo", "critic.parallel.sequence_parallel=false"], ["critic.parallel: ", "no critic"]),
    ],
)
def test_problems_of_the_critics_layout_name_its_keys(recipe, overrides, expected):
    message = problems(recipe, "parallel.num_ranks=4", *overrides)
    for part in expected:
        assert part in message
    assert "\nparallel." not in f"\n{message}"


def test_number_of_ranks_must_equal_the_launchers(recipe):
    assert "parallel.num_ranks" in problems(recipe, "parallel.num_ranks=2", world_size=4)
