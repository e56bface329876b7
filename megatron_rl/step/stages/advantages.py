"""The inputs of both losses: advantages and their masks, and the values to train on."""

from megatron_rl.config.derived import effective_window_tokens, needs_greedy
from megatron_rl.config.schema import Config, TrainsOn
from megatron_rl.data.vision import ImageProcessor
from megatron_rl.rollout.service import RolloutService
from megatron_rl.step import metrics
from megatron_rl.step.kl_penalty import KlPenalty
from megatron_rl.step.loss_batches import (
    policy_batch,
    response_batch,
    store_model_outputs,
    store_untrained,
    window_critic_batch,
)
from megatron_rl.step.scoring import ResponseScorer
from megatron_rl.step.state import StepState
from megatron_rl.step.window_advantages import (
    Advantages,
    ModelOutputs,
    ResponseRules,
    greedy_rewards,
    window_advantages,
)


def run(
    step: int,
    state: StepState,
    *,
    config: Config,
    grader: ResponseScorer,
    kl_penalty: KlPenalty,
    rollout: RolloutService,
    rules: ResponseRules,
    vision: ImageProcessor | None,
) -> None:
    algorithm, batch = config.algorithm, state.batch
    state.token_rewards, kl_fields, kl_metrics = kl_penalty.charge(state)
    greedy = greedy_rewards(state.slots, algorithm) if needs_greedy(config) else None
    signals = ModelOutputs(state.values, state.final_values, state.token_rewards, greedy)
    advantages = advantages_of(step, state, signals, config, rules)
    store_model_outputs(state.trajectories, batch, signals, step)
    state.policy_batch, found = policy_batch(
        state.trajectories,
        batch,
        state.old_logprobs,
        advantages,
        algorithm,
        kl_fields,
        rules,
        is_partial=bool(state.first_update),
    )
    if algorithm.positive_lm_coef:
        store_untrained(state.trajectories, batch, state.policy_batch.fields["mask"])
    if state.values is not None and config.schedule.critic_trains_on is TrainsOn.responses:
        state.critic_batch = response_batch(state.finished, algorithm, rules, vision)
    elif state.values is not None:
        state.critic_batch = window_critic_batch(state.trajectories, batch, signals, step=step, algorithm=algorithm, rules=rules)
    state.metrics |= (
        kl_metrics
        | metrics.rollout_metrics(state.slots, step=step)
        | metrics.staleness_metrics(state.trajectories, state.policy_batch.fields["mask"], rollout.weight_version)
        | metrics.reward_metrics(state.finished)
        | ({"reward/greedy_mean": sum(greedy.values()) / len(greedy)} if greedy else {})
        | grader.metrics(state.finished)
        | metrics.advantage_metrics(batch, advantages)
        | {f"mismatch/{name}": value for name, value in found.items()}
    )


def advantages_of(step: int, state: StepState, signals: ModelOutputs, config: Config, rules: ResponseRules) -> Advantages:
    window = effective_window_tokens(config)
    return window_advantages(
        state.trajectories, state.batch, signals, step=step, window_tokens=window, algorithm=config.algorithm, rules=rules
    )
