"""Log-probs of the window's tokens under the old policy.

The step's first update starts from the old policy. If no stage reads them earlier, the update's own forward pass computes the old
log-probs of its sequences, and this stage skips them.
"""

from collections.abc import Sequence

from megatron_rl.config.schedule_facts import reuses_first_logprobs
from megatron_rl.config.schema import Config, KlPlace, OldPolicy, RoutingReplay
from megatron_rl.step.state import StepState
from megatron_rl.step.updates import CriticWarmup, policy_minibatches
from megatron_rl.training.trainer_group import TrainerGroup


def run(step: int, state: StepState, *, config: Config, group: TrainerGroup, warmup: CriticWarmup) -> None:
    temperature, num_sequences = config.rollout.temperature, state.batch.num_sequences
    state.first_update = uses_own_logprobs(config, warmup, num_sequences, step)
    if state.first_update:
        others = sorted(set(range(num_sequences)) - set(state.first_update))
        state.old_logprobs = group.logprobs(state.batch, others, temperature=temperature)
    elif config.algorithm.correction.old_policy is OldPolicy.rollout:
        state.old_logprobs = state.batch.fields["rollout_logprobs"]
    elif config.policy.moe.routing_replay is RoutingReplay.R2:
        # The update replays the experts that this pass chooses, so the routes stay on the ranks.
        state.old_logprobs = group.logprobs(state.batch, temperature=temperature, keeps_routes=True)
    else:
        state.old_logprobs = group.logprobs(state.batch, temperature=temperature)


def uses_own_logprobs(config: Config, warmup: CriticWarmup, num_sequences: int, step: int) -> Sequence[int]:
    """Return the sequences whose own update computes their old log-probs; empty if another pass must.

    If the policy never trains, no stage reads old log-probs: returns all sequences.
    """
    if not reuses_first_logprobs(config):
        return ()
    if warmup.policy_rests(step):
        return range(num_sequences) if warmup.never_ends and config.algorithm.kl.place is KlPlace.none else ()
    return next(iter(policy_minibatches(config, num_sequences, step)), ())
