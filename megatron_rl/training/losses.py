"""From the algorithms' loss pieces to what one optimizer step minimises. Pure: no torch.distributed.

An objective divides each piece by the piece's own *global* denominator, a number of tokens of the whole mini-batch
over all ranks and micro-batches: the micro-batches' losses add up to the mini-batch's loss, whichever way it is split.

    policy: sum(L_clip) / n(mask) - entropy_coef * sum(H) / n(mask) + positive_lm_coef * sum(-log pi) / n(lm_mask)
    critic: sum(L_value) / n(mask)
    sft:    sum(-log pi) / n(mask)

with n(field) = ``denominators[field]``. Metrics keep their sums and denominators apart; the engine adds them up.
"""

from collections.abc import Callable, Mapping

from torch import Tensor

from megatron_rl.algorithms.loss import Loss, mask_total, masked_sum
from megatron_rl.algorithms.policy_loss import lm_loss, policy_loss
from megatron_rl.algorithms.value_loss import value_loss
from megatron_rl.config.schema import AlgorithmConfig
from megatron_rl.data.batch import PackedBatch

Metrics = Mapping[str, tuple[Tensor, Tensor]]
"""Name -> (sum, denominator), scalars over one micro-batch."""
LossFunction = Callable[[Mapping[str, Tensor], PackedBatch], tuple[Tensor, Metrics]]
"""(outputs, micro-batch) -> (loss divided by its global denominators, metrics).

``outputs`` of a policy: logprobs [T], entropy [T]; of a critic: values [T], final_values [N]; float32.
"""


def build(objective: str, algorithm: AlgorithmConfig, denominators: Mapping[str, float]) -> LossFunction:
    """The objective called "policy", "critic" or "sft"."""
    if objective == "policy":
        return policy_objective(algorithm, denominators)
    if objective == "critic":
        return critic_objective(algorithm, denominators)
    if objective == "sft":
        return sft_objective(denominators)
    raise ValueError(f"objective is 'policy', 'critic' or 'sft', got {objective!r}")


def policy_objective(algorithm: AlgorithmConfig, denominators: Mapping[str, float]) -> LossFunction:
    """Reads the fields mask, old_logprobs, advantages and, with positive_lm_coef, lm_mask (may overlap mask or not).

    A mini-batch without positive examples (``denominators["lm_mask"]`` 0 or absent) has no LM term.
    """
    num_tokens = _positive(denominators, "mask")
    num_lm_tokens = denominators.get("lm_mask", 0.0)
    with_lm = algorithm.positive_lm_coef != 0.0 and num_lm_tokens > 0

    def objective(outputs: Mapping[str, Tensor], batch: PackedBatch) -> tuple[Tensor, Metrics]:
        mask = batch.fields["mask"]
        clipped = policy_loss(
            outputs["logprobs"],
            batch.fields["old_logprobs"],
            batch.fields["advantages"],
            mask,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            dual_clip=algorithm.dual_clip or None,
        )
        entropy = Loss(masked_sum(outputs["entropy"], mask), mask_total(mask, outputs["entropy"].dtype))
        total = clipped.sum / num_tokens
        metrics = {**clipped.metrics, **_metric("policy_loss", clipped), **_metric("entropy", entropy)}
        if algorithm.entropy_coef != 0.0:
            total = total - algorithm.entropy_coef * entropy.sum / num_tokens
        if with_lm:
            positive = lm_loss(outputs["logprobs"], batch.fields["lm_mask"])
            total = total + algorithm.positive_lm_coef * positive.sum / num_lm_tokens
            metrics |= _metric("lm_loss", positive)
        return total, metrics

    return objective


def critic_objective(algorithm: AlgorithmConfig, denominators: Mapping[str, float]) -> LossFunction:
    """Reads the fields mask, returns and old_values."""
    num_tokens = _positive(denominators, "mask")
    clipped = algorithm.value_clip_low != 0.0 or algorithm.value_clip_high != 0.0
    clip_low, clip_high = (algorithm.value_clip_low, algorithm.value_clip_high) if clipped else (None, None)

    def objective(outputs: Mapping[str, Tensor], batch: PackedBatch) -> tuple[Tensor, Metrics]:
        loss = value_loss(
            outputs["values"],
            batch.fields["old_values"],
            batch.fields["returns"],
            batch.fields["mask"],
            clip_low=clip_low,
            clip_high=clip_high,
        )
        return loss.sum / num_tokens, {**loss.metrics, **_metric("value_loss", loss)}

    return objective


def sft_objective(denominators: Mapping[str, float]) -> LossFunction:
    """Reads the field mask."""
    num_tokens = _positive(denominators, "mask")

    def objective(outputs: Mapping[str, Tensor], batch: PackedBatch) -> tuple[Tensor, Metrics]:
        loss = lm_loss(outputs["logprobs"], batch.fields["mask"])
        return loss.sum / num_tokens, _metric("lm_loss", loss)

    return objective


def _metric(name: str, loss: Loss) -> dict[str, tuple[Tensor, Tensor]]:
    return {name: (loss.sum.detach(), loss.denominator)}


def _positive(denominators: Mapping[str, float], name: str) -> float:
    count = denominators.get(name, 0.0)
    if count <= 0:
        raise ValueError(
            f"denominators[{name!r}] must be the number of tokens with {name} in the whole mini-batch, at least 1; "
            f"got {count}. Take no optimizer step on a mini-batch without such tokens"
        )
    return count
