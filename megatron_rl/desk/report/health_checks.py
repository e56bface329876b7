"""The report's health checks, as an experienced user would make them first. Each judges only logged metrics.

Charts and health checks filter the noise of single steps with the same exponential mean.
"""

import math
from dataclasses import dataclass

import numpy as np

from megatron_rl.desk.report.run_record import RunRecord
from megatron_rl.step.watchdog import MAX_MISMATCH


def smoothing_span(num_steps: int) -> int:
    """Steps that a smoothed line averages over: a twentieth of the run, at least 5."""
    return max(5, num_steps // 20)


def smooth(values: np.ndarray, span: int) -> np.ndarray:
    """Exponential mean over about ``span`` values, bias-corrected for the start. [N] -> [N]; NaN is skipped."""
    keep = 1.0 - 2.0 / (span + 1.0)
    total = weight = 0.0
    smoothed = np.full(len(values), np.nan)
    for index, value in enumerate(values):
        if math.isfinite(value):
            total = keep * total + (1.0 - keep) * float(value)
            weight = keep * weight + (1.0 - keep)
        if weight:
            smoothed[index] = total / weight
    return smoothed


def recent_mean(values: np.ndarray) -> float:
    """Last value of the line that charts draw through ``values`` [N >= 1], all finite: their exponential mean."""
    return float(smooth(values, smoothing_span(len(values)))[-1])


@dataclass(frozen=True)
class HealthCheck:
    """A line of the health list."""

    title: str
    state: str
    """good, look (should be checked) or none (no data)."""
    detail: str


def health_checks(run: RunRecord) -> tuple[HealthCheck, ...]:
    """All checks in the order of the page."""
    return (_reward_check(run), _mismatch_check(run), _critic_check(run), *_incident_checks(run), _number_check(run))


def _reward_check(run: RunRecord) -> HealthCheck:
    trains = np.isfinite(run.values("policy/grad_norm"))
    if not trains.any():
        return HealthCheck("Reward", "none", "the policy did not train")
    # Dynamic sampling trains on mixed groups, whose mean reward is uninformative: use the reward of all responses.
    name = "dynamic_sampling/reward_mean" if len(run.finite("dynamic_sampling/reward_mean")) else "reward/mean"
    rewards = run.values(name)[trains.argmax() :]
    rewards = rewards[np.isfinite(rewards)]
    if len(rewards) < 10:
        return HealthCheck("Reward", "none", "too few steps to judge")
    fifth = len(rewards) // 5
    before, after = float(rewards[:fifth].mean()), float(rewards[-fifth:].mean())
    # Noise of a mean over a fifth, from differences of consecutive steps, which a trend hardly affects.
    noise = float(np.diff(rewards).std()) / math.sqrt(fifth)
    if after > before + noise:
        return HealthCheck("Reward rises", "good", f"{before:.3f} in the first fifth, {after:.3f} in the last")
    return HealthCheck("Reward does not rise", "look", f"{before:.3f} in the first fifth, {after:.3f} in the last")


def _mismatch_check(run: RunRecord) -> HealthCheck:
    divergences = run.finite("mismatch/k3")
    if not len(divergences):
        return HealthCheck("Servers and trainer", "none", "no mismatch was logged")
    largest = f"largest k3 per step {divergences.max():.1e}"
    if divergences.max() <= MAX_MISMATCH:
        return HealthCheck("Servers and trainer agree", "good", f"{largest}, limit {MAX_MISMATCH:.1e}")
    return HealthCheck("Servers and trainer disagree", "look", f"{largest}, over the limit {MAX_MISMATCH:.1e}")


def _critic_check(run: RunRecord) -> HealthCheck:
    explained = run.finite("critic/explained_variance")
    if not len(explained):
        return HealthCheck("Critic", "none", "no critic update was logged")
    recent = recent_mean(explained)
    if recent > 0:
        return HealthCheck("Critic predicts returns", "good", f"explained variance {recent:.2f}")
    return HealthCheck("Critic explains no variance", "look", f"explained variance {recent:.2f}: pretrain it or warm it up longer")


def _incident_checks(run: RunRecord) -> list[HealthCheck]:
    checks = []
    unscored = run.finite("reward/num_unscored")
    if len(unscored):
        count = int(unscored.sum())
        detail = f"{count} responses in {int((unscored > 0).sum())} steps" if count else "in all steps"
        checks.append(HealthCheck("Unscored responses" if count else "Every response scored",
                            "look" if count else "good", detail))
    findings = run.finite("health/num_findings")
    if len(findings):
        count = int(findings.max())
        signs = run.finite("health/num_signs")
        detail = f"{count} times; signs in {int((signs > 0).sum())} steps" if count else ""
        checks.append(HealthCheck("Training shows signs of collapse" if count else "No sign of collapse",
                            "look" if count else "good", detail))
    restarts = run.finite("rollout/num_server_restarts")
    if len(restarts):
        count = int(restarts.max())
        checks.append(HealthCheck("Servers were restarted" if count else "No server restarts", "look" if count else "good",
                            f"up to {count} counted in a step" if count else ""))
    return checks


def _number_check(run: RunRecord) -> HealthCheck:
    """HealthCheck of non-finite metrics. NaN also means "not logged" in a column, so only infinite values are reported."""
    infinite = sorted(name for name, values in run.columns.items() if np.isinf(values).any())
    if not run.columns:
        return HealthCheck("Numbers", "none", "metrics.jsonl has no steps yet")
    if infinite:
        step = int(run.steps[np.isinf(run.columns[infinite[0]])][0])
        return HealthCheck("Infinite metrics", "look", f"{', '.join(infinite[:4])}, first at step {step}")
    return HealthCheck("All metrics finite", "good", "")
