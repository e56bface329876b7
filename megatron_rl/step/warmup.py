"""The steps in which the critic trains alone: the first ones of a run, or all steps of a value pretraining."""

from collections.abc import Mapping

from megatron_rl.algorithms.value_convergence import ValueConvergence
from megatron_rl.config.schema import Config


class CriticWarmup:
    """Decides in which steps the policy is frozen, and when the critic of a value pretraining has converged."""

    def __init__(self, config: Config, convergence: ValueConvergence | None = None) -> None:
        """``convergence``: the test that ends a value pretraining, once the critic's metrics are flat; None otherwise."""
        self.convergence = convergence
        # In a pretraining the policy never trains.
        self._num_steps = config.run.num_steps if convergence else config.critic.warmup_steps

    @property
    def never_ends(self) -> bool:
        return self.convergence is not None

    def policy_rests(self, step: int) -> bool:
        return step < self._num_steps

    def critic_converged(self, metrics: Mapping[str, float]) -> bool:
        """Add a step's metrics; return True once the critic of a value pretraining has converged."""
        if self.convergence is None:
            return False
        return self.convergence.update(metrics["critic/loss"], metrics["critic/explained_variance"])
