"""Detects collapsed training: low entropy, a reward drop, zero or non-finite gradients, a growing mismatch.

The watchdog is pure: it reads each step's metrics once, in order. Its ``state`` is part of a checkpoint, so that a resumed run
warns in the same steps. The configuration chooses the action for each sign (``health.*``).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rl.config.schema import HealthAction, HealthConfig

MIN_ENTROPY = 1.0e-3
"""Lowest healthy entropy in nats per token; below it the policy samples the same token nearly everywhere."""
MAX_MISMATCH = 0.1
"""Largest healthy mismatch/k3 in nats per token; trainer and servers that agree stay far below."""
MAX_ROLLBACKS = 2
"""Rollbacks per run; a sign that returns after them has a cause that a rollback does not remove."""
_MAX_REWARD_DROP = 0.5
"""Fraction of the best mean reward; a drop that the noise of the steps explains never counts."""
_IMMEDIATE_SIGNS = ("reward_errors",)
_NO_GRADIENT = 1e-10
"""Gradient norms of models that learn are larger by many orders; float32 rounding of a dead one need not be exactly 0."""
_NUM_STANDARD_ERRORS = 6.0
"""Twice three: the best of many noisy means is about three standard errors too high, and the worst is as far too low."""


class Rollback(Exception):
    """Raised to return to the last healthy checkpoint, because of a warning sign whose configured action is a rollback."""

    def __init__(self, message: str, position: dict[str, Any], number: int) -> None:
        """
        Args:
            position: the position at which the prompts continue (``SlotPool.position``).
            number: rollbacks of the run, including this one.
        """
        super().__init__(message)
        self.position = position
        self.number = number


@dataclass(frozen=True)
class Finding:
    """A warning sign that has lasted long enough to act on."""

    sign: str
    """The key of ``HealthConfig`` that sets the action."""
    action: HealthAction
    message: str
    """The steps, the observed values and the usual remedy."""


class Watchdog:
    """Counts warning signs. Call ``observe`` once per step; ``healthy`` is True if the last step showed no sign."""

    def __init__(self, config: HealthConfig, *, max_error_rate: float = 1.0) -> None:
        self._config = config
        self._max_error_rate = max_error_rate
        self._num_steps: dict[str, int] = {}
        """Maps each sign to the number of consecutive steps that have shown it."""
        self._rewards = _Rewards(config.patience_steps)
        self._num_findings = 0
        self.num_rollbacks = 0

    @property
    def healthy(self) -> bool:
        """True if the last step showed no sign, so that a checkpoint saved now is a healthy one."""
        return not self._num_steps

    def observe(self, step: int, metrics: Mapping[str, float], *, policy_trains: bool = True) -> list[Finding]:
        """Return the findings to act on after ``step`` (from 0). ``policy_trains``: False in a step that freezes the policy."""
        seen = dict(self._signs(metrics, policy_trains))
        self._num_steps = {sign: self._num_steps.get(sign, 0) + 1 for sign in seen}
        findings = []
        for sign, symptom in seen.items():
            patience = 1 if sign in _IMMEDIATE_SIGNS else self._config.patience_steps
            held = self._num_steps[sign]
            if held % patience == 0:
                since = f"step {step + 1}" if held == 1 else f"steps {step + 2 - held} to {step + 1}"
                findings += self.found(sign, f"{since}: {symptom}")
        return findings

    def found(self, sign: str, message: str) -> list[Finding]:
        """Count a sign that another component detected, and return its finding; empty if the configuration ignores the sign."""
        self._num_findings += 1
        action: HealthAction = getattr(self._config, sign)
        return [] if action is HealthAction.ignore else [Finding(sign, action, message)]

    def metrics(self) -> dict[str, float]:
        """Return the number of signs of the last step, and of findings and rollbacks of the whole run."""
        return {
            "health/num_signs": float(len(self._num_steps)),
            "health/num_findings": float(self._num_findings),
            "health/num_rollbacks": float(self.num_rollbacks),
        }

    def state(self) -> dict[str, Any]:
        """Return the state as JSON-serializable values."""
        return {
            "num_steps": self._num_steps,
            "num_findings": self._num_findings,
            "num_rollbacks": self.num_rollbacks,
            "rewards": self._rewards.state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._num_steps = dict(state["num_steps"])
        self._num_findings, self.num_rollbacks = state["num_findings"], state["num_rollbacks"]
        self._rewards.load_state(state["rewards"])

    def _signs(self, metrics: Mapping[str, float], policy_trains: bool) -> Iterator[tuple[str, str]]:
        entropy = metrics.get("policy/entropy", math.inf)
        if entropy < MIN_ENTROPY:
            yield "entropy", (
                f"the policy's entropy is {entropy:.1e} nats per token, below {MIN_ENTROPY:g}: "
                "it samples almost deterministically. Lower policy.optimizer.lr, raise algorithm.entropy_coef or clip_high"
            )
        reward = _first(metrics, ("dynamic_sampling/reward_mean", "reward/accuracy", "reward/mean"))
        if reward is not None and (fall := self._rewards.fall(reward, _MAX_REWARD_DROP)):
            yield "reward_drop", (
                f"the mean reward fell from {fall[0]:.3g} to {fall[1]:.3g}. Lower policy.optimizer.lr, or return to an "
                "earlier checkpoint"
            )
        gradient = next(_gradient_problems(metrics, policy_trains), None)
        if gradient:
            yield "gradient", gradient
        mismatch = metrics.get("mismatch/k3", 0.0)
        if not mismatch <= MAX_MISMATCH:
            yield "mismatch", (
                f"trainer and servers disagree: mismatch/k3 is {mismatch:.2g} nats per token, more than "
                f"{MAX_MISMATCH:g}. Compare their dtypes and kernels, use "
                "algorithm.correction, or policy.moe.routing_replay with experts"
            )
        sizes = [metrics[name] for name in ("policy/ess", "mismatch/ess") if name in metrics]
        if low := [size for size in sizes if not size >= self._config.min_ess]:
            yield "ess", (
                f"the effective sample size is {low[0]:.2g} of the tokens, below health.min_ess={self._config.min_ess:g}: few tokens, "
                "on which the policy differs most from the one that sampled them, make up the update. Lower "
                "policy.optimizer.lr, make fewer updates per step, or train fresher tokens (schedule.max_staleness)"
            )
        if metrics.get("reward/error_rate", 0.0) > self._max_error_rate:
            yield "reward_errors", (
                f"{metrics['reward/error_rate']:.1%} of the responses could not be scored, more than "
                f"reward.max_error_rate={self._max_error_rate:g}. See the reward's log for the cause"
            )


def _gradient_problems(metrics: Mapping[str, float], policy_trains: bool) -> Iterator[str]:
    for model in ("policy", "critic"):
        num_updates, num_skipped = metrics.get(f"{model}/num_updates"), metrics.get(f"{model}/num_skipped", 0.0)
        if num_skipped:
            yield (
                f"{num_skipped:.0f} of {num_skipped + (num_updates or 0):.0f} updates of the {model} were skipped, their "
                f"gradients were not finite. Lower {model}.optimizer.lr, or look for an overflow in {model}.dtype"
            )
        elif num_updates and metrics.get(f"{model}/grad_norm", math.inf) < _NO_GRADIENT:
            yield (
                f"the gradient of the {model} is zero, so it does not learn. All rewards or advantages are equal, or the "
                f"{model} has collapsed; return to an earlier checkpoint with a lower {model}.optimizer.lr"
            )
    if policy_trains and not metrics.get("policy/num_updates") and not metrics.get("policy/num_skipped"):
        yield (
            "the policy had no token to train on: every response is masked, unscored or rejected. Check the rewards' "
            "errors, algorithm.correction and algorithm.overlong"
        )


class _Rewards:
    """Compares the mean reward over the last ``span`` steps with the best such mean so far."""

    def __init__(self, span: int) -> None:
        self._span = span
        self._recent: list[float] = []
        self._best = -math.inf
        self._num_changes = 0
        self._squared_changes = 0.0

    def fall(self, reward: float, max_drop: float) -> tuple[float, float] | None:
        """Add a step's ``reward``. Return (best, current) mean over ``span`` steps if the current mean has fallen, else None.

        A fall is at least ``max_drop`` of the best mean's absolute value, and beyond the noise between steps. It does not change the best.
        """
        if not math.isfinite(reward):
            return None
        change = reward - self._recent[-1] if self._recent else 0.0
        self._recent = [*self._recent, reward][-self._span :]
        now, best = sum(self._recent) / len(self._recent), self._best
        # A change between two steps has twice the variance of a step, a mean of ``span`` steps one span-th of it.
        noise = math.sqrt(self._squared_changes / max(self._num_changes, 1) / 2 / self._span)
        enough = best > -math.inf and self._num_changes >= 2 * self._span
        drop = max(max_drop * abs(best), _NUM_STANDARD_ERRORS * noise) if enough else math.inf
        if 0 < best - now >= drop:
            return best, now
        # Update noise and best only while the reward has not fallen, so that a fall does not hide itself.
        self._num_changes += 1
        self._squared_changes += change * change
        if len(self._recent) == self._span:
            self._best = max(best, now)
        return None

    def state(self) -> dict[str, Any]:
        best = self._best if self._best > -math.inf else None
        return {"recent": self._recent, "best": best, "changes": [self._num_changes, self._squared_changes]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._recent = list(state["recent"])
        self._best = -math.inf if state["best"] is None else state["best"]
        self._num_changes, self._squared_changes = state["changes"]


def _first(metrics: Mapping[str, float], names: tuple[str, ...]) -> float | None:
    return next((metrics[name] for name in names if name in metrics), None)
