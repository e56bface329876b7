"""Agreement of trainer and servers: four figures, their bounds, and the error beyond a bound."""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl.algorithms.mismatch import MismatchStats, mismatch_figures
from megatron_rl.config.checks import check_config
from megatron_rl.config.load import load_config
from megatron_rl.config.schema import Config, Dtype, Fp8, RoutingReplay
from megatron_rl.data.trajectory import Prompt, Segment, Trajectory
from megatron_rl.errors import ConfigError
from megatron_rl.step.parity import EngineMismatch, ParityCheck, compare_logprobs, numeric_format, parity_bounds
from tests.unit.config.recipes import DENSE, SPARSE, load

NUM_TOKENS = 200
BFLOAT16 = ["policy.dtype=bfloat16"]


def test_parity_figures_equal_a_loop_over_tokens() -> None:
    log_rho = torch.randn(501, generator=torch.Generator().manual_seed(1)) * 0.6
    values = log_rho.tolist()
    assert sum(abs(v) > math.log(2) for v in values) > 50
    expected = MismatchStats(
        mean=sum(map(abs, values)) / 501,
        k3=sum(math.exp(v) - 1 - v for v in values) / 501,
        outliers=sum(abs(v) > math.log(2) for v in values) / 501,
        max=max(map(abs, values)),
    )
    assert vars(mismatch_figures(log_rho)) == pytest.approx(vars(expected), rel=1e-6)


def test_nan_difference_exceeds_every_bound() -> None:
    for broken in (math.nan, math.inf, -math.inf):
        found = mismatch_figures(torch.tensor([0.0, broken, 0.0]))
        assert found.mean == found.max == math.inf and found.outliers == pytest.approx(1 / 3) and found.k3 > 1
    assert mismatch_figures(torch.zeros(0)) == MismatchStats(0.0, 0.0, 0.0, 0.0)


def config_of(tmp_path: Path, model: dict[str, Any] = DENSE, *, dtype: Dtype = Dtype.bfloat16) -> Config:
    config = load(tmp_path, model)
    config.policy.dtype = dtype
    return config


def test_bounds_grow_with_rounding_and_with_experts(tmp_path: Path) -> None:
    (tmp_path / "sparse").mkdir()
    dense, sparse = config_of(tmp_path), config_of(tmp_path / "sparse", SPARSE)

    def bounds(config: Config, kind: str) -> MismatchStats:
        config.policy.dtype = Dtype.float32 if kind in ("float32", "TF32") else Dtype.bfloat16
        config.policy.fp8 = Fp8.hybrid if kind == "fp8" else Fp8.none
        assert numeric_format(config, on_gpu=kind == "TF32") == kind
        return parity_bounds(config, on_gpu=kind == "TF32")

    assert bounds(dense, "float32").max == bounds(sparse, "float32").max == 1e-4
    for config in (dense, sparse):
        rising = [bounds(config, kind) for kind in ("TF32", "bfloat16", "fp8")]
        for name in ("mean", "k3", "outliers"):
            values = [getattr(one, name) for one in rising]
            assert values == sorted(values) and values[0] < values[-1] < 1
    for kind in ("TF32", "bfloat16", "fp8"):
        for name in ("mean", "k3", "outliers"):
            assert getattr(bounds(dense, kind), name) < getattr(bounds(sparse, kind), name)


def test_configured_bound_replaces_only_its_default(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    usual = parity_bounds(config, on_gpu=False)
    config.rollout.parity_bounds.outliers, config.rollout.max_logprob_difference = 0.5, 0.7
    found = parity_bounds(config, on_gpu=False)
    assert found == MismatchStats(usual.mean, usual.k3, outliers=0.5, max=0.7) and math.isinf(usual.max)


def test_the_former_key_still_means_the_largest_difference_and_zero_no_check(tmp_path: Path) -> None:
    config = config_of(tmp_path, dtype=Dtype.float32)
    config.rollout.max_logprob_difference = 0.01
    bounds = parity_bounds(config, on_gpu=False)
    assert bounds.max == 0.01 and math.isinf(bounds.mean)
    check = ParityCheck(config, [], group=None, rollout=None, vision=None, wait_for=None)
    assert check.wanted and check.due(99) and not check.due(98)
    config.rollout.max_logprob_difference = 0
    assert not check.wanted and not check.due(99)


def test_bounds_are_keys_with_bounds(tmp_path: Path) -> None:
    load(tmp_path, DENSE)
    for override, expected in (
        ("rollout.parity_bounds.mean=0", "rollout.parity_bounds.mean: expected more than 0"),
        ("rollout.parity_bounds.outliers=1.5", "rollout.parity_bounds.outliers: expected more than 0 and up to 1"),
        ("rollout.parity_bounds.max=1", "parity_bounds.max"),
    ):
        with pytest.raises(ConfigError, match=expected):
            check_config(load_config(tmp_path / "recipe.yaml", [override]), command="train")


def compare(config: Config, differences: Tensor, *, differing: list[str] | None = None) -> Any:
    """Of one response whose tokens' log-probs are so far apart."""
    trajectory = Trajectory(0, Prompt("p", (1, 2)), 0, 0, NUM_TOKENS)
    theirs = tuple([-1.0] * NUM_TOKENS)
    trajectory.segments.append(Segment(tuple([5] * NUM_TOKENS), theirs, 1, "length", 0))
    ours = torch.cat([torch.zeros(2), -1.0 + differences])
    group = SimpleNamespace(logprobs=lambda batch, temperature: ours)
    return compare_logprobs(config, group, [trajectory], lambda: differing or [])


def spread(size: float, share: float = 1.0) -> Tensor:
    """Differences of one size and both signs at this share of the tokens."""
    values = torch.zeros(NUM_TOKENS)
    number = round(share * NUM_TOKENS)
    values[:number] = size * torch.tensor([1.0, -1.0]).repeat(NUM_TOKENS)[:number]
    return values


def test_noise_of_bfloat16_passes_also_where_single_tokens_are_far_off(tmp_path: Path) -> None:
    parity = compare(config_of(tmp_path), spread(0.02) + torch.eye(1, NUM_TOKENS)[0] * 0.5)
    assert parity.too_large() == [] and parity.num_tokens == NUM_TOKENS
    assert re.fullmatch(r"mean difference 0\.02\d? \(at most 0\.05\), k3 .+, beyond ln 2 .+, largest 0\.52", str(parity))


@pytest.mark.parametrize(
    ("differences", "over"),
    [
        (spread(0.1), ["mean"]),  # all tokens a little: a norm of every layer
        (spread(0.8, 0.02), ["outliers"]),  # few tokens much: an expert that few go to
        (spread(5.0, 0.005), ["k3"]),  # next to none, but beyond belief
    ],
)
def test_each_kind_of_fault_exceeds_a_different_figure(
    differences: Tensor, over: list[str], tmp_path: Path
) -> None:
    with pytest.raises(EngineMismatch) as caught:
        compare(config_of(tmp_path), differences)
    message, parity = str(caught.value), caught.value.parity
    assert parity is not None and set(over) <= set(parity.too_large())
    for words in ("bfloat16 of a dense model", "mean difference", "k3", "beyond ln 2", "largest", "SGLang -1.00000"):
        assert words in message, message
    for name in parity.too_large():
        assert f"rollout.parity_bounds.{name}" in message
    assert "\n" not in message and "megatron-rl doctor" in message and "routing_replay" not in message


def test_experts_get_the_advice_that_helps_them(tmp_path: Path) -> None:
    config = config_of(tmp_path, SPARSE)
    with pytest.raises(EngineMismatch, match="bfloat16 of a mixture of experts.*routing_replay=R3 makes the trainer"):
        compare(config, spread(1.0))
    config.policy.moe.routing_replay = RoutingReplay.R3
    with pytest.raises(EngineMismatch) as caught:
        compare(config, spread(1.0))
    assert "routing_replay" not in str(caught.value)
    with pytest.raises(EngineMismatch, match="The servers have other weights than the trainer: model.norm.weight"):
        compare(config, spread(1.0), differing=["model.norm.weight"])


def test_float32_on_a_cpu_is_held_to_its_largest_difference(tmp_path: Path) -> None:
    config = config_of(tmp_path, dtype=Dtype.float32)
    assert str(compare(config, spread(5e-5))).endswith("beyond ln 2 0.00%, largest 5e-05 (at most 0.0001)")
    with pytest.raises(EngineMismatch, match="raise rollout.max_logprob_difference$"):
        compare(config, torch.eye(1, NUM_TOKENS)[0] * 2e-4)


def test_the_model_folder_says_whether_there_are_experts(tmp_path: Path) -> None:
    config = config_of(tmp_path, SPARSE)
    with_experts = parity_bounds(config, on_gpu=False)
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**SPARSE, "mlp_only_layers": [0, 1]}))
    assert parity_bounds(config, on_gpu=False).mean < with_experts.mean
    file.unlink()
    assert parity_bounds(config, on_gpu=False).mean < with_experts.mean
