"""Checks of the settings of models: layouts, precision and multi-token-prediction layers."""

from pathlib import Path

import pytest

from megatron_rl.config.checks import check_config
from megatron_rl.config.schema import Dtype, Fp8, Init, Mtp
from megatron_rl.errors import ConfigError
from tests.unit.config.recipes import DENSE, load, problems


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
