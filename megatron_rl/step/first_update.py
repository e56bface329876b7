"""The old log-probs of a step's first update of the policy: those of its own forward pass, which starts from the old policy.

So no other pass gives them, and what compares with them waits for the update.
"""

from collections.abc import Sequence

from torch import Tensor

from megatron_rl.config.derived import reuses_first_logprobs
from megatron_rl.config.schema import Config, KlPlace
from megatron_rl.step.kl_penalty import KlPenalty
from megatron_rl.step.loss_batches import mismatch
from megatron_rl.step.state import StepState
from megatron_rl.step.updates import policy_minibatches


def uses_own_logprobs(
    config: Config, num_sequences: int, step: int, *, rests: bool, never_trains: bool
) -> Sequence[int]:
    """Sequences of the policy's first update, whose own log-probs are the old ones; none where another pass gives them.

    ``rests``: there is no update in this step. Of a policy that ``never_trains`` nobody reads them: all sequences.
    """
    if not reuses_first_logprobs(config):
        return ()
    if rests:
        return range(num_sequences) if never_trains and config.algorithm.kl.place is KlPlace.none else ()
    return next(iter(policy_minibatches(config, num_sequences, step)), ())


def finish_own_logprobs(config: Config, state: StepState, old_logprobs: Tensor, kl_penalty: KlPenalty) -> None:
    """The first update has given its ``old_logprobs`` [T]: metrics follow, and the divergence from a reference."""
    state.old_logprobs = state.old_logprobs + old_logprobs  # each 0 where the other is not
    found = mismatch(state.batch, state.old_logprobs, state.policy_batch.fields["mask"], config.algorithm)
    state.metrics |= {f"mismatch/{name}": value for name, value in found.items()}
    if config.algorithm.kl.place is not KlPlace.none:
        state.metrics |= kl_penalty.measure(state)
