"""The critic's values of the window's tokens after its updates, and the policy's advantages from them (SAO, arXiv 2607.07508).

The critic's targets, and the values that its clip and metrics refer to, remain those from before its updates.
"""

from megatron_rl.config.schema import Config
from megatron_rl.step import metrics
from megatron_rl.step.stages.advantages import advantages_of
from megatron_rl.step.state import StepState
from megatron_rl.step.updates import CriticWarmup
from megatron_rl.step.window_advantages import ModelOutputs, ResponseRules
from megatron_rl.training.trainer_group import TrainerGroup


def run(step: int, state: StepState, *, config: Config, group: TrainerGroup, rules: ResponseRules, warmup: CriticWarmup) -> None:
    if state.critic_batch is None or warmup.policy_rests(step):
        return
    state.updated_values, final_values = group.values(state.batch)
    signals = ModelOutputs(state.updated_values, final_values, state.token_rewards)
    advantages = advantages_of(step, state, signals, config, rules)
    # The mask does not depend on values.
    state.policy_batch = state.policy_batch.with_fields(advantages=advantages.advantages)
    state.metrics |= metrics.advantage_metrics(state.batch, advantages)
