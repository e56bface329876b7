"""What a practised eye looks at first: the report's health checks. Each judges only what was logged."""

import math
from dataclasses import dataclass

import numpy as np

from megatron_rl.desk.report.run_record import RunRecord
from megatron_rl.desk.report.smoothing import smooth, smoothing_span
from megatron_rl.step.watchdog import MAX_MISMATCH


@dataclass(frozen=True)
class HealthCheck:
    """One line of the health list."""

    title: str
    state: str
    """good, look (worth a look) or none (nothing to judge by)."""
    detail: str


def health_checks(run: RunRecord) -> tuple[HealthCheck, ...]:
    """In the order of the page."""
    return (_reward_check(run), _mismatch_check(run), _critic_check(run), *_incident_checks(run), _number_check(run))


def _reward_check(run: RunRecord) -> HealthCheck:
    # Dynamic sampling trains on mixed groups, whose reward says little: what counts is that of all responses.
    rewards = run.finite("dynamic_sampling/reward_mean")
    if not len(rewards):
        rewards = run.finite("reward/mean")
    if len(rewards) < 10:
        return HealthCheck("Reward", "none", "too few steps to judge")
    fifth = len(rewards) // 5
    before, after = float(rewards[:fifth].mean()), float(rewards[-fifth:].mean())
    noise = float(np.diff(rewards).std()) / math.sqrt(fifth)
    if after > before + noise:
        return HealthCheck("Reward rises", "good", f"{before:.3f} in the first fifth, {after:.3f} in the last")
    return HealthCheck("Reward does not rise", "look", f"{before:.3f} in the first fifth, {after:.3f} in the last")


def _mismatch_check(run: RunRecord) -> HealthCheck:
    divergences = run.finite("mismatch/k3")
    if not len(divergences):
        return HealthCheck("Engine and trainer", "none", "no mismatch was logged")
    largest = f"largest k3 of a step {divergences.max():.1e}"
    if divergences.max() <= MAX_MISMATCH:
        return HealthCheck("Engine and trainer agree", "good", f"{largest}, limit {MAX_MISMATCH:.1e}")
    return HealthCheck("Engine and trainer differ", "look", f"{largest}, over the limit {MAX_MISMATCH:.1e}")


def _critic_check(run: RunRecord) -> HealthCheck:
    explained = run.finite("critic/explained_variance")
    if not len(explained):
        return HealthCheck("Critic", "none", "no critic update was logged")
    recent = float(smooth(explained, smoothing_span(len(explained)))[-1])
    if recent > 0:
        return HealthCheck("Critic foresees returns", "good", f"explained variance {recent:.2f}")
    return HealthCheck("Critic is no help", "look", f"explained variance {recent:.2f}: pretrain it or warm it up longer")


def _incident_checks(run: RunRecord) -> list[HealthCheck]:
    checks = []
    unscored = run.finite("reward/num_unscored")
    if len(unscored):
        count = int(unscored.sum())
        words = f"{count} responses in {int((unscored > 0).sum())} steps" if count else "in all steps"
        checks.append(HealthCheck("Responses without a score" if count else "Every response scored",
                            "look" if count else "good", words))
    findings = run.finite("health/num_findings")
    if len(findings):
        count = int(findings.max())
        signs = run.finite("health/num_signs")
        words = f"{count} times; signs in {int((signs > 0).sum())} steps" if count else ""
        checks.append(HealthCheck("Signs that training has died" if count else "No sign that training has died",
                            "look" if count else "good", words))
    restarts = run.finite("rollout/num_server_restarts")
    if len(restarts):
        count = int(restarts.max())
        checks.append(HealthCheck("Servers were restarted" if count else "No server restarts", "look" if count else "good",
                            f"up to {count} in a step's count" if count else ""))
    return checks


def _number_check(run: RunRecord) -> HealthCheck:
    """NaN in a column also means "not logged": only infinities and NaN rows of the file can be told apart."""
    infinite = sorted(name for name, values in run.columns.items() if np.isinf(values).any())
    if not run.columns:
        return HealthCheck("Numbers", "none", "metrics.jsonl has no steps yet")
    if infinite:
        step = int(run.steps[np.isinf(run.columns[infinite[0]])][0])
        return HealthCheck("Infinite metrics", "look", f"{', '.join(infinite[:4])}, first at step {step}")
    return HealthCheck("All metrics finite", "good", "")
