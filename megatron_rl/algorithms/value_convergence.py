"""Decides when value pretraining has converged (VC-PPO, arXiv 2503.01491). Pure.

The curve has two phases: the fresh head finds the scale of the returns in a few steps, then the critic slowly learns
which states are good. Between the phases, and in noise, the loss can appear flat. Pretraining has therefore converged
only if

- value loss and explained variance both changed by less than the tolerance between two adjacent windows of steps,
- both did so for half a window of consecutive steps, because a single flat comparison can be chance,
- the critic explains some variance: a head that predicts only the mean return has not started its second phase.
"""

import math
from dataclasses import asdict, dataclass, field
from statistics import mean
from typing import Any

_MIN_EXPLAINED_VARIANCE = 0.05
_TOLERANCE = 0.02
"""Above the noise of window means, below the change of a critic that still learns."""


@dataclass
class ValueConvergence:
    """Convergence test over the metrics of the last two windows, updated once per step.

    Survives a restart through ``state`` and ``load_state``.
    """

    window: int
    """Steps in each of the two windows; 0 means never converged."""
    tolerance: float = _TOLERANCE
    """Largest relative change of the value loss, and largest change of the explained variance, that count as flat."""
    min_steps: int = 0
    min_explained_variance: float = _MIN_EXPLAINED_VARIANCE
    num_steps: int = 0
    num_calm_steps: int = 0
    losses: list[float] = field(default_factory=list)
    variances: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.window < 0 or self.tolerance < 0 or self.min_steps < 0:
            raise ValueError(
                "window, tolerance and min_steps must be 0 or more, got "
                f"{self.window}, {self.tolerance} and {self.min_steps}"
            )

    def update(self, value_loss: float, explained_variance: float) -> bool:
        """Add one step's metrics; returns True once pretraining may end."""
        self.num_steps += 1
        keep = 2 * self.window
        self.losses = [*self.losses, value_loss][-keep:] if keep else []
        self.variances = [*self.variances, explained_variance][-keep:] if keep else []
        self.num_calm_steps = self.num_calm_steps + 1 if self._is_calm() else 0
        return self.done

    @property
    def settled(self) -> bool:
        """True if the curves are flat, regardless of the step limits."""
        return self.window > 0 and self.num_calm_steps >= max(1, self.window // 2)

    @property
    def done(self) -> bool:
        return self.settled and self.num_steps >= self.min_steps

    def state(self) -> dict[str, Any]:
        """The state as JSON-serializable values."""
        names = ("num_steps", "num_calm_steps", "losses", "variances")
        return {name: value for name, value in asdict(self).items() if name in names}

    def load_state(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, list(value) if isinstance(value, list) else value)

    def _is_calm(self) -> bool:
        w = self.window
        if not w or len(self.losses) < 2 * w:
            return False
        if not all(map(math.isfinite, (*self.losses, *self.variances))):
            return False
        loss_before, loss_now = mean(self.losses[:w]), mean(self.losses[w:])
        variance_before, variance_now = mean(self.variances[:w]), mean(self.variances[w:])
        return (
            abs(loss_now - loss_before) <= self.tolerance * max(abs(loss_before), 1e-12)
            and abs(variance_now - variance_before) <= self.tolerance
            and variance_now >= self.min_explained_variance
        )
