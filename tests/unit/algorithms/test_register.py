"""Algorithm plugins by import path (custom_pieces.py), called through the code of a run, and rejected plugins."""

import re
import subprocess
import sys

import pytest
import torch

from megatron_rl import algorithms
from megatron_rl.algorithms import register
from megatron_rl.algorithms.advantages import Episodes, estimate_advantages
from megatron_rl.config.checks.combinations import problems, unknown_plugins
from megatron_rl.config.derived import needs_critic
from megatron_rl.config.load import load_config
from megatron_rl.config.schedule_facts import facts_of
from megatron_rl.config.schema import (
    AlgorithmConfig,
    Config,
    CorrectionConfig,
    KlConfig,
    KlPlace,
    LambdaKind,
    Normalization,
)
from megatron_rl.data.batch import PackedBatch, cu_seqlens_of
from megatron_rl.data.trajectory import Prompt, Score, Segment, Trajectory
from megatron_rl.step.loss_batches import policy_batch
from megatron_rl.step.packing import window_batch
from megatron_rl.step.window_advantages import Advantages, ModelOutputs, window_advantages
from megatron_rl.training import losses
from tests.unit.algorithms import custom_pieces

SIZES = (2, 1, 3)
REWARDS = (1.0, 0.0, 0.5)
RAW = {"lambda_policy": LambdaKind.constant, "normalization": Normalization.none, "advantage_clamp": 0.0}


def custom(name: str) -> str:
    return f"{custom_pieces.__name__}:{name}"


def advantages_of(algorithm: AlgorithmConfig, values: tuple[float, ...] | None = None) -> list[float]:
    """Token advantages of three finished responses to one prompt, computed by ``window_advantages``."""
    trajectories = [
        Trajectory(
            i, Prompt("p", (1,)), 0, 0, 9, [Segment((7,) * n, (-0.5,) * n, 0, "stop", 0)], score=Score(REWARDS[i])
        )
        for i, n in enumerate(SIZES)
    ]
    batch = window_batch(trajectories, 0)
    signals = ModelOutputs()
    if values is not None:
        window_values = torch.zeros(len(batch.tokens))
        window_values[batch.fields["mask"]] = torch.tensor(values)
        signals = ModelOutputs(window_values, torch.zeros(3))
    found = window_advantages(trajectories, batch, signals, step=0, window_tokens=9, algorithm=algorithm)
    return found.advantages[batch.fields["mask"]].tolist()


def minibatch() -> PackedBatch:
    generator = torch.Generator().manual_seed(0)
    fields = {
        name: -torch.rand(6, generator=generator)
        for name in ("advantages", "old_logprobs", "rollout_logprobs", "reference_logprobs")
    }
    fields |= {"mask": torch.tensor([0, 1, 1, 1, 0, 1]).bool(), "kl_coefs": torch.full((6,), 0.5)}
    return PackedBatch(torch.zeros(6, dtype=torch.int64), cu_seqlens_of(torch.tensor(SIZES)), fields)


def policy_loss_of(algorithm: AlgorithmConfig, batch: PackedBatch) -> tuple[float, torch.Tensor]:
    """Loss and gradient of a mini-batch without micro-batches, computed by ``policy_objective``."""
    logprobs = (batch.fields["old_logprobs"] + 0.1).requires_grad_()
    objective = losses.policy_objective(algorithm, losses.policy_denominators(batch, algorithm))
    batch = batch.only(*(name for name in batch.fields if name != "rollout_logprobs"))  # with these, the loss would need correction weights
    loss, _ = objective({"logprobs": logprobs, "entropy": torch.zeros(6)}, batch)
    loss.backward()
    return float(loss.detach()), logprobs.grad


def test_advantage_by_import_path_can_compare_responses():
    algorithm = AlgorithmConfig(advantage=custom("above_best_other"), advantage_options={"margin": 0.25}, **RAW)
    assert advantages_of(algorithm) == pytest.approx([0.25, 0.25, -1.25, -0.75, -0.75, -0.75])
    assert not needs_critic(Config(algorithm=algorithm)) and register.needs_groups(algorithm.advantage)


def test_advantage_by_import_path_that_reads_values_needs_a_critic():
    algorithm = AlgorithmConfig(advantage=custom("td_errors"), gamma=0.5, **RAW)
    found = advantages_of(algorithm, values=(0.2, 0.4, 0.6, 0.1, 0.2, 0.3))
    assert found == pytest.approx([0.0, 0.6, -0.6, 0.0, -0.05, 0.2])
    assert needs_critic(Config(algorithm=algorithm)) and not register.needs_groups(algorithm.advantage)


def test_policy_loss_by_import_path_gets_the_inputs_it_names():
    batch = minibatch()
    algorithm = AlgorithmConfig(policy_loss=custom("unclipped"), policy_loss_options={"power": 2.0})
    ratio = torch.full((6,), 0.2).exp()
    token_loss = (-batch.fields["advantages"] * ratio)[batch.fields["mask"]]
    loss, gradient = policy_loss_of(algorithm, batch)
    assert loss == pytest.approx(float(token_loss.mean()), rel=1e-5)
    assert gradient[batch.fields["mask"]].tolist() == pytest.approx((2 * token_loss / 4).tolist(), rel=1e-5)


def test_sequence_averaging_policy_loss_divides_by_sequences():
    algorithm = AlgorithmConfig(policy_loss=custom("first_tokens"))
    batch = minibatch()
    assert losses.policy_denominators(batch, algorithm)["policy"] == 3.0
    first = batch.cu_seqlens[:-1]
    expected = -(batch.fields["advantages"] * (batch.fields["old_logprobs"] + 0.1))[first].mean()
    assert policy_loss_of(algorithm, batch)[0] == pytest.approx(float(expected), rel=1e-5)


def test_aggregation_by_import_path_sets_coefficients_and_denominator():
    batch = minibatch()
    algorithm = AlgorithmConfig(
        policy_loss=custom("unclipped"), aggregation=custom("fixed_length"), aggregation_options={"length": 10}
    )
    token_loss = (-batch.fields["advantages"] * torch.tensor(0.1).exp())[batch.fields["mask"]]
    assert policy_loss_of(algorithm, batch)[0] == pytest.approx(float(token_loss.sum() / 10 / 3), rel=1e-5)


def test_default_denominator_is_the_sum_of_the_coefficients():
    mask, cu_seqlens = torch.tensor([0, 1, 1, 1, 0, 1]), torch.tensor([0, 2, 3, 6])
    half = custom("half")
    assert algorithms.loss_denominator(mask, cu_seqlens, half) == 2.0
    assert algorithms.token_coefficients(mask, cu_seqlens, half).tolist() == [0, 0.5, 0.5, 0.5, 0, 0.5]


def test_kl_estimator_by_import_path_enters_the_loss():
    batch = minibatch()
    kl = KlConfig(place=KlPlace.loss, estimator=custom("absolute"), estimator_options={"scale": 3.0}, coef=0.5)
    without, with_kl = AlgorithmConfig(), AlgorithmConfig(kl=kl)
    distance = (batch.fields["old_logprobs"] + 0.1 - batch.fields["reference_logprobs"]).abs()[batch.fields["mask"]]
    added = policy_loss_of(with_kl, batch)[0] - policy_loss_of(without, batch)[0]
    assert added == pytest.approx(0.5 * 3.0 * float(distance.mean()), rel=1e-4)


def test_correction_by_import_path_changes_the_policy_batch():
    batch = minibatch()
    correction = CorrectionConfig(
        weight=custom("square_root"),
        weight_options={"floor": 0.9},
        rejection=custom("no_surprises"),
        rejection_high=1.2,
    )
    mask = batch.fields["mask"]
    rho = (batch.fields["old_logprobs"] - batch.fields["rollout_logprobs"]).exp()
    stays = torch.cat([(part[inside] <= 1.2).all().expand(len(part)) for part, inside in _by_sequence(rho, mask)])
    given = Advantages(batch.fields["advantages"], mask, raw=batch.fields["advantages"], ended=mask)
    made, metrics = policy_batch([], batch, batch.fields["old_logprobs"], given, AlgorithmConfig(correction=correction))
    assert made.fields["mask"].tolist() == (mask & stays).tolist()
    assert 0 < int(made.fields["mask"].sum()) < int(mask.sum())
    expected = torch.where(mask & stays, rho.sqrt().clamp(min=0.9), 0.0)
    torch.testing.assert_close(made.fields["weights"], expected)
    assert metrics["rejected_share"] == 1 - int((mask & stays).sum()) / int(mask.sum())


def _by_sequence(*tensors: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    return list(zip(*(tensor.split(SIZES) for tensor in tensors)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"advantage": "grop"},
            "algorithm.advantage: unknown advantage 'grop': expected one of egae, group, .* or an import path "
            ".*; did you mean 'group'",
        ),
        ({"policy_loss": "no_such_package:loss"}, "algorithm.policy_loss: .*'no_such_package' does not import"),
        ({"advantage": custom("above_best")}, "has no 'above_best'; it has .*did you mean 'above_best_other'"),
        ({"advantage": custom("not_a_function")}, "expected a plain function or a class, got 3"),
        (
            {"advantage": custom("above_best_other"), "advantage_options": {"margn": 1.0}},
            "has no option 'margn'; its options: margin; did you mean 'margin'",
        ),
        (
            {"advantage": custom("above_best_other"), "advantage_options": {"margin": "much"}},
            "option margin must be a number, got 'much'",
        ),
        (
            {"aggregation": custom("fixed_length")},
            "algorithm.aggregation: .* needs length; set it under algorithm.aggregation_options",
        ),
        ({"policy_loss_options": {"clip_low": 0.1}}, "clip_low is set by the caller, it is not an option of"),
        (
            {"kl": KlConfig(estimator="k4")},
            "algorithm.kl.estimator: unknown KL estimator 'k4': expected one of k1, k2, k3",
        ),
        (
            {"correction": CorrectionConfig(weight="tis")},
            "algorithm.correction.weight: unknown correction weight 'tis'",
        ),
    ],
)
def test_unknown_or_unfit_plugins_are_rejected_with_key_and_remedy(settings: dict, message: str):
    (problem,) = unknown_plugins(AlgorithmConfig(**settings))
    assert re.search(message, problem), problem


def test_losses_that_ignore_correction_or_aggregation_are_rejected():
    algorithm = AlgorithmConfig(
        policy_loss=custom("bare"), aggregation="sequence_mean", correction=CorrectionConfig(weight="token")
    )
    found = "\n".join(problems(Config(algorithm=algorithm)))
    assert "algorithm.correction: algorithm.policy_loss=" in found and "no parameter `weights`" in found
    assert "algorithm.aggregation: algorithm.policy_loss=" in found and "no parameter `coefficients`" in found


@pytest.mark.parametrize(("name", "in_groups"), [("above_best_other", True), ("td_errors", False)])
def test_windowed_advantage_without_values_trains_whole_groups(name, in_groups):
    config = Config(algorithm=AlgorithmConfig(advantage=custom(name)))
    assert facts_of(config).whole_groups is in_groups
    assert "schedule.mode" not in "\n".join(problems(config))


def test_advantage_results_of_other_shapes_are_rejected_by_name():
    bounds, flags = torch.tensor([0, 2, 3]), torch.ones(2, dtype=torch.bool)
    episodes = Episodes(torch.ones(3), bounds, flags, flags, torch.zeros(2, dtype=torch.int64), gamma=1.0, lam=1.0)
    with pytest.raises(ValueError, match=r"mistaken'.*per token, \[3\], or per sequence, \[2\], got"):
        estimate_advantages(custom("mistaken"), {}, episodes)


def test_recipe_sets_plugins_and_their_options(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"algorithm: {{advantage: '{custom('above_best_other')}', advantage_options: {{margin: 0.5}}}}\n")
    algorithm = load_config(recipe, ["algorithm.policy_loss=gspo", "schedule.mode=sync"]).algorithm
    assert algorithm.advantage_options == {"margin": 0.5} and algorithm.policy_loss == "gspo"
    assert list(unknown_plugins(algorithm)) == []


def test_plugin_names_are_unique():
    with pytest.raises(ValueError, match="advantage 'rloo' is .*_rloo already; give .* another name"):
        register.advantage("rloo")(lambda outcomes: outcomes)


@pytest.mark.parametrize("key", register.SEAMS)
def test_every_registered_plugin_has_a_summary(key: str):
    assert all(register.SEAMS[key].summaries().values())


def test_configuration_is_loaded_without_torch():
    code = "import sys, megatron_rl.config.load, megatron_rl.config.derived; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
