"""What a run does when training has died: a limit and an action per sign."""

from dataclasses import dataclass
from enum import Enum

from megatron_rl.config.schema.bounds import at_least, share


class HealthAction(Enum):
    """What happens once a sign has held for ``patience_steps`` steps in a row."""

    ignore = "ignore"
    """Nothing; the steps are counted all the same."""
    warn = "warn"
    """A warning on the display, again after each further ``patience_steps`` steps."""
    stop = "stop"
    """The run ends with an error that names the last good checkpoint."""
    roll_back = "roll_back"
    """Weights and optimizers return to the last good checkpoint; the prompts go on where they are."""


@dataclass
class HealthConfig:
    """Signs that training has died, and what to do about each. A checkpoint is good if no sign held when it was saved."""

    patience_steps: int = at_least(1, default=5)
    """Steps in a row that show a sign before its action is taken. Errors of rewards and parity act at once."""
    entropy: HealthAction = HealthAction.warn
    """The policy's entropy is below min_entropy."""
    min_entropy: float = at_least(0, default=1.0e-3)
    """Nats per token; 0 never counts."""
    reward_drop: HealthAction = HealthAction.warn
    """The mean reward of the last patience_steps steps has fallen by max_reward_drop from its best."""
    max_reward_drop: float = share(default=0.5)
    """Share of the best mean reward; falls that the steps' noise explains never count."""
    gradient: HealthAction = HealthAction.warn
    """The gradient of the policy or the critic is zero, the policy had nothing to train on, or an update was skipped
    because its gradient was not finite."""
    mismatch: HealthAction = HealthAction.warn
    """Trainer and servers disagree about the sampled tokens by more than max_mismatch."""
    max_mismatch: float = at_least(0, default=0.1)
    """Nats per token of mismatch/k3 (k3 estimate of the KL divergence); 0 never counts."""
    reward_errors: HealthAction = HealthAction.stop
    """More than reward.max_error_rate of a step's responses could not be scored. Acts at once."""
    parity: HealthAction = HealthAction.stop
    """The comparison of rollout.parity_every_steps went beyond a bound (rollout.parity_bounds). Acts at once."""
    max_rollbacks: int = at_least(0, default=2)
    """Times that a run returns to an earlier checkpoint; then a sign that asks for it stops the run."""
