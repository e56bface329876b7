"""Actions of a run when training has collapsed, one per warning sign."""

from dataclasses import dataclass
from enum import Enum

from megatron_rl.config.schema.bounds import at_least


class HealthAction(Enum):
    """Action once a warning sign has been present for ``patience_steps`` consecutive steps."""

    ignore = "ignore"
    """No action; the steps are still counted."""
    warn = "warn"
    """A warning on the terminal, repeated after every further ``patience_steps`` steps."""
    stop = "stop"
    """The run ends with an error that names the last healthy checkpoint."""
    roll_back = "roll_back"
    """Weights and optimizers return to the last healthy checkpoint; the prompts continue at their current position."""


@dataclass
class HealthConfig:
    """Warning signs of collapsed training, with an action for each. A checkpoint is healthy if no sign was present at its step."""

    patience_steps: int = at_least(1, default=5)
    """Consecutive steps with a sign before its action is taken. Signs of reward errors and parity act immediately."""
    entropy: HealthAction = HealthAction.warn
    """The policy's entropy is below 0.001 nats per token."""
    reward_drop: HealthAction = HealthAction.warn
    """The mean reward of the last patience_steps steps has fallen by half of its best, beyond the noise of the steps."""
    gradient: HealthAction = HealthAction.warn
    """The gradient of the policy or the critic is zero, the policy had no token to train on, or an update was skipped
    because its gradient was not finite."""
    mismatch: HealthAction = HealthAction.warn
    """Trainer and servers disagree about the sampled tokens by more than 0.1 nats per token (mismatch/k3)."""
    reward_errors: HealthAction = HealthAction.stop
    """More than reward.max_error_rate of a step's responses could not be scored. Acts immediately."""
    parity: HealthAction = HealthAction.stop
    """The parity check of rollout.parity_every_steps exceeded a bound (rollout.parity_bounds). Acts immediately."""
