"""Laws of the objectives: megatron_rl/training/losses.py."""

import math
from dataclasses import replace

import pytest
import torch

from megatron_rl import algorithms
from megatron_rl.config.schema import AlgorithmConfig, CorrectionConfig, KlConfig, KlPlace
from megatron_rl.data.batch import PackedBatch, cu_seqlens_of
from megatron_rl.training import losses

LENGTHS = torch.tensor([5, 9, 3, 7])
ALGORITHM = AlgorithmConfig(entropy_coef=0.02, positive_lm_coef=0.3, dual_clip=3.0)
OUTPUTS = {"policy": ("logprobs", "entropy"), "sft": ("logprobs", "entropy"), "critic": ("values", "final_values")}


def make_batch() -> PackedBatch:
    generator = torch.Generator().manual_seed(0)
    total = int(LENGTHS.sum())
    fields = {name: torch.randn(total, generator=generator) for name in ("advantages", "returns", "old_values")}
    fields["old_logprobs"] = -1.0 + 0.3 * torch.randn(total, generator=generator)
    fields["mask"] = torch.rand(total, generator=generator) < 0.6
    fields["lm_mask"] = torch.rand(total, generator=generator) < 0.3
    fields["reference_logprobs"] = -1.0 + 0.3 * torch.randn(total, generator=generator)
    fields["kl_coefs"] = torch.tensor([0.1, 0.0, 0.3, 0.2]).repeat_interleave(LENGTHS)
    fields["weights"] = torch.rand(total, generator=generator)
    return PackedBatch(torch.zeros(total, dtype=torch.int64), cu_seqlens_of(LENGTHS), fields)


def make_outputs(objective: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    total = int(LENGTHS.sum())
    return {name: (torch.randn(total, generator=generator) - 1.0).requires_grad_() for name in OUTPUTS[objective]}


def counts(batch: PackedBatch, algorithm: AlgorithmConfig = ALGORITHM) -> dict[str, float]:
    return losses.policy_denominators(batch, algorithm) | losses.critic_denominators(batch, algorithm)


KL_IN_LOSS = KlConfig(place=KlPlace.loss, estimator="k3", coef=0.1)
VARIANTS = {
    "critic": ALGORITHM,
    "critic-sequence-mean": AlgorithmConfig(critic_aggregation="sequence_mean"),
    "sft": ALGORITHM,
    "policy": ALGORITHM,
    "policy-sequence-mean": AlgorithmConfig(aggregation="sequence_mean", kl=KL_IN_LOSS),
    "policy-gspo": AlgorithmConfig(policy_loss="gspo", kl=KL_IN_LOSS),
    "policy-cispo": AlgorithmConfig(policy_loss="cispo", clip_low=1.0, clip_high=4.0),
    "policy-sapo": AlgorithmConfig(policy_loss="sapo", aggregation="sequence_mean"),
    "policy-gmpo": AlgorithmConfig(policy_loss="gmpo", clip_low=0.4, clip_high=0.4),
    "policy-dppo-tv": AlgorithmConfig(policy_loss="dppo_tv", clip_low=0.05, clip_high=0.05),
    "policy-dppo-kl": AlgorithmConfig(policy_loss="dppo_kl", clip_low=0.01, clip_high=0.01),
    "policy-dis": AlgorithmConfig(policy_loss="dis", clip_low=0.3, clip_high=0.5),
    "policy-m2po": AlgorithmConfig(policy_loss="m2po", policy_loss_options={"max_second_moment": 0.5}),
    "policy-opsm": AlgorithmConfig(correction=CorrectionConfig(opsm_delta=0.01)),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_microbatch_losses_and_gradients_add_up_to_the_whole(name):
    objective, algorithm = name.partition("-")[0], VARIANTS[name]
    batch, whole, split = make_batch(), make_outputs(objective), make_outputs(objective)
    if algorithm.policy_loss == "m2po":
        batch = batch.with_fields(kept=losses.kept_tokens(algorithm, whole["logprobs"].detach(), batch, range(4)))
    loss = losses.build(objective, algorithm, counts(batch, algorithm))
    total, metrics = loss(whole, batch)
    total.backward()
    first, second = slice(0, 14), slice(14, None)
    parts = []
    for rows, indices in ((first, [0, 1]), (second, [2, 3])):
        part, part_metrics = loss({name: value[rows] for name, value in split.items()}, batch.select(indices))
        part.backward()
        parts.append((part, part_metrics))
    torch.testing.assert_close(sum(part for part, _ in parts), total)
    for name, value in whole.items():
        torch.testing.assert_close(split[name].grad, value.grad, msg=name)
    for name, (numerator, denominator) in metrics.items():
        torch.testing.assert_close(sum(part[name][0] for _, part in parts), numerator)
        torch.testing.assert_close(sum(part[name][1] for _, part in parts), denominator)


def test_the_policy_objective_is_the_sum_of_its_three_terms():
    """Brute force in float64, token by token."""
    batch, outputs = make_batch(), make_outputs("policy")
    total, metrics = losses.policy_objective(ALGORITHM, counts(batch))(outputs, batch)
    clipped = entropy = likelihood = 0.0
    for token in range(int(LENGTHS.sum())):
        logprob, old, advantage = (
            float(value[token].detach())
            for value in (outputs["logprobs"], batch.fields["old_logprobs"], batch.fields["advantages"])
        )
        if batch.fields["mask"][token]:
            ratio = torch.tensor(logprob - old, dtype=torch.float64).exp().item()
            bounded = min(max(ratio, 1 - ALGORITHM.clip_low), 1 + ALGORITHM.clip_high)
            loss = min(max(-advantage * ratio, -advantage * bounded), ALGORITHM.dual_clip * abs(advantage))
            clipped += float(batch.fields["weights"][token]) * loss
            entropy += float(outputs["entropy"][token].detach())
        if batch.fields["lm_mask"][token]:
            likelihood -= logprob
    count, lm_count = counts(batch)["mask"], counts(batch)["lm_mask"]
    expected = (clipped - ALGORITHM.entropy_coef * entropy) / count + ALGORITHM.positive_lm_coef * likelihood / lm_count
    assert total.item() == pytest.approx(expected, rel=1e-5)
    assert metrics["policy_loss"][0].item() == pytest.approx(clipped, rel=1e-5)
    assert metrics["entropy"][0].item() == pytest.approx(entropy, rel=1e-5)
    assert metrics["lm_loss"][0].item() == pytest.approx(likelihood, rel=1e-5)


def test_kl_is_weighted_by_prompt_type_and_prompts_without_kl_ignore_the_reference():
    """The loss on verifiable samples is independent of the reference model (arXiv 2505.07062)."""
    algorithm = VARIANTS["policy-sequence-mean"]
    batch, outputs = make_batch(), make_outputs("policy")
    total, metrics = losses.policy_objective(algorithm, counts(batch, algorithm))(outputs, batch)
    moved = batch.with_fields(reference_logprobs=batch.fields["reference_logprobs"] + (batch.fields["kl_coefs"] == 0))
    assert torch.equal(losses.policy_objective(algorithm, counts(batch, algorithm))(outputs, moved)[0], total)
    expected = 0.0
    for start, end in zip(batch.cu_seqlens.tolist(), batch.cu_seqlens[1:].tolist()):
        tokens = [t for t in range(start, end) if batch.fields["mask"][t]]
        for t in tokens:
            difference = float(batch.fields["reference_logprobs"][t] - outputs["logprobs"][t].detach())
            k3 = math.exp(difference) - 1 - difference
            expected += float(batch.fields["kl_coefs"][t]) * k3 / len(tokens)
    assert metrics["kl_loss"][0].item() == pytest.approx(expected, rel=1e-5)


def test_with_the_teachers_tokens_the_kl_term_is_their_divergence_and_the_sampled_tokens_do_not_count():
    algorithm = VARIANTS["policy-sequence-mean"]
    batch, outputs = make_batch(), make_outputs("policy")
    generator, num = torch.Generator().manual_seed(8), int(LENGTHS.sum())
    own = torch.randn(num, 3, generator=generator).log_softmax(1).sub(0.5).requires_grad_()
    reference = torch.randn(num, 3, generator=generator).log_softmax(1) - 0.3
    told = batch.with_fields(teacher_ids=torch.zeros(num, 3, dtype=torch.int32), teacher_logprobs=reference)
    told = told.with_fields(reference_logprobs=torch.full((num,), math.nan))
    objective = losses.policy_objective(algorithm, counts(batch, algorithm))
    metrics = objective(outputs | {"teacher_ids": own}, told)[1]
    expected, divergence = 0.0, algorithms.top_k_kl(own, reference).detach()
    for start, end in zip(batch.cu_seqlens.tolist(), batch.cu_seqlens[1:].tolist()):
        tokens = [t for t in range(start, end) if batch.fields["mask"][t]]
        expected += sum(float(batch.fields["kl_coefs"][t] * divergence[t]) / len(tokens) for t in tokens)
    assert metrics["kl_loss"][0].item() == pytest.approx(expected, rel=1e-5)


def test_without_positive_examples_the_lm_term_is_absent():
    batch, outputs = make_batch(), make_outputs("policy")
    without, metrics = losses.policy_objective(ALGORITHM, {"mask": 3.0, "policy": 3.0, "lm_mask": 0.0})(outputs, batch)
    plain, _ = losses.policy_objective(AlgorithmConfig(entropy_coef=0.02, dual_clip=3.0), {"mask": 3.0, "policy": 3.0})(
        outputs, batch
    )
    assert torch.equal(without, plain)
    assert "lm_loss" not in metrics


def test_the_entropy_gets_a_gradient_only_with_a_bonus():
    batch, outputs = make_batch(), make_outputs("policy")
    losses.policy_objective(AlgorithmConfig(), counts(batch))(outputs, batch)[0].backward()
    assert outputs["entropy"].grad is None
    losses.policy_objective(ALGORITHM, counts(batch))(outputs, batch)[0].backward()
    assert (outputs["entropy"].grad[batch.fields["mask"]] < 0).all()


def test_value_clips_of_zero_mean_no_clipping():
    batch, outputs = make_batch(), make_outputs("critic")
    algorithm = AlgorithmConfig(value_clip_low=0.0, value_clip_high=0.0)
    loss, metrics = losses.critic_objective(algorithm, counts(batch))(outputs, batch)
    errors = (outputs["values"] - batch.fields["returns"])[batch.fields["mask"]]
    torch.testing.assert_close(loss, 0.5 * errors.square().mean())
    torch.testing.assert_close(metrics["value_loss"][0], 0.5 * errors.square().sum().detach())


def test_responses_count_equally_in_a_critic_loss_averaged_over_responses():
    """Mean per response, then over the responses with counted tokens; a long one weighs no more than a short one."""
    batch, outputs = make_batch(), make_outputs("critic")
    algorithm = AlgorithmConfig(value_clip_low=0.0, value_clip_high=0.0, critic_aggregation="sequence_mean")
    batch.fields["mask"][:5] = False
    loss, metrics = losses.critic_objective(algorithm, counts(batch, algorithm))(outputs, batch)
    means = []
    for start, end in zip(batch.cu_seqlens.tolist(), batch.cu_seqlens[1:].tolist()):
        errors = (outputs["values"] - batch.fields["returns"])[start:end][batch.fields["mask"][start:end]]
        means += [float(0.5 * errors.detach().square().mean())] if len(errors) else []
    assert len(means) == 3
    assert loss.item() == pytest.approx(sum(means) / 3, rel=1e-5)
    assert metrics["value_loss"][1].item() == pytest.approx(3)
    with pytest.raises(ValueError, match="denominators\\['value'\\]"):
        losses.critic_objective(algorithm, {"mask": 3.0})


@pytest.mark.parametrize("name", [name for name in VARIANTS if name.startswith("policy")])
def test_own_logprobs_replace_missing_old_logprobs_bit_for_bit(name):
    """A step's first update: nothing has moved the policy since."""
    algorithm, batch = VARIANTS[name], make_batch()
    found = []
    for old in (True, False):
        outputs, fields = make_outputs("policy"), {n: v for n, v in batch.fields.items() if n != "old_logprobs"}
        fields |= {"old_logprobs": outputs["logprobs"].detach().clone()} if old else {}
        build = losses.build("policy", algorithm, counts(batch, algorithm), is_own_old=not old)
        loss, metrics = build(outputs, replace(batch, fields=fields))
        loss.backward()
        found.append((loss.detach(), outputs["logprobs"].grad, *(number for pair in metrics.values() for number in pair)))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert found[0][1].abs().sum() > 0


@pytest.mark.parametrize("weight", ["token", "sequence", "icepop"])
def test_weights_computed_in_the_loss_equal_the_corrections_per_microbatch(weight):
    batch = make_batch()
    old, mask = batch.fields["old_logprobs"], batch.fields["mask"]
    rollout = old + 0.5 * torch.randn(len(old), generator=torch.Generator().manual_seed(5))
    settings = CorrectionConfig(weight=weight, max_weight=1.3, icepop_low=0.7, icepop_high=1.2)
    bounds = {name: getattr(settings, name) for name in ("max_weight", "icepop_low", "icepop_high")}
    weights = algorithms.mismatch_correction(rollout, old, mask, batch.cu_seqlens, weight=weight, **bounds).weights
    algorithm = AlgorithmConfig(correction=settings)
    outputs = make_outputs("policy")
    build = losses.build("policy", algorithm, counts(batch, algorithm))
    given, _ = build(outputs, batch.with_fields(weights=weights))
    here = batch.with_fields(rollout_logprobs=rollout)
    parts = [(slice(0, 14), [0, 1]), (slice(14, None), [2, 3])]
    split = sum(build({n: v[rows] for n, v in outputs.items()}, here.select(indices))[0] for rows, indices in parts)
    assert (weights != 1).sum() > 0 and weights[mask].std() > 0
    torch.testing.assert_close(split, given)


@pytest.mark.parametrize("objective", ["policy", "critic", "sft"])
def test_an_empty_minibatch_and_an_unknown_objective_are_refused(objective):
    with pytest.raises(ValueError, match="at least 1"):
        losses.build(objective, ALGORITHM, {"mask": 0.0})
    with pytest.raises(ValueError, match="policy"):
        losses.build("reward", ALGORITHM, {"mask": 1.0})
