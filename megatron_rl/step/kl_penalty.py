"""Penalizes the policy's divergence from the reference: a KL penalty in the rewards, or a KL term in the loss."""

from typing import Any

import torch
from torch import Tensor

from megatron_rl import algorithms
from megatron_rl.algorithms.sequences import exact_sums, repeat_per_sequence
from megatron_rl.config.schema import KlConfig, KlPlace
from megatron_rl.data.trajectory import Trajectory
from megatron_rl.step.packing import Stretches
from megatron_rl.step.state import StepState


class KlPenalty:
    """Owns the KL coefficient, which adapts to ``algorithm.kl.target``."""

    def __init__(self, settings: KlConfig) -> None:
        self._settings = settings
        self._controller = (
            algorithms.AdaptiveKlController(settings.coef, settings.target, settings.horizon)
            if settings.target
            else None
        )

    def state(self) -> dict[str, Any] | None:
        """Return the state for a checkpoint; None for a constant coefficient."""
        return self._controller.state() if self._controller else None

    def load_state(self, state: dict[str, Any] | None) -> None:
        if self._controller and state:
            self._controller.load_state(state)

    def measure(self, state: StepState) -> dict[str, float]:
        """Return the step's divergence on the window's tokens as metrics, and adapt the coefficient for the next step."""
        kl, window = self._settings, Stretches(state.batch.fields["mask"])
        logprobs, reference = window.within(state.old_logprobs), window.within(state.reference_logprobs)
        divergence = algorithms.kl_estimate(logprobs, reference, kl.estimator, kl.estimator_options)
        by_row = exact_sums(divergence, window.borders(state.batch.cu_seqlens))
        mean = float(by_row.sum()) / max(len(divergence), 1)
        return {"kl/reference_per_token": mean, "kl/coef": self._coef} | self._measure(state, by_row)

    @property
    def _coef(self) -> float:
        return self._controller.coef if self._controller else self._settings.coef

    def _measure(self, state: StepState, by_row: Tensor) -> dict[str, float]:
        """Return the KL of finished responses, each summed over its windows. ``by_row``: [N] the KL of this step's window.

        An adaptive coefficient follows only the responses that it applies to, because a prompt type may have its own coefficient.
        """
        for trajectory, of_row in zip(state.trajectories, by_row.tolist(), strict=True):
            trajectory.reference_kl.append(of_row)
        own, coef = self._settings.coef_by_type, self._settings.coef

        def counts(trajectory: Trajectory) -> bool:
            type_ = trajectory.prompt.type
            charged = type_ not in own if self._controller else own.get(type_, coef) > 0
            return trajectory.finished and charged

        measured = [sum(t.reference_kl) for t in state.trajectories if counts(t)]
        if not measured:
            return {}
        per_response = sum(measured) / len(measured)
        if self._controller:
            self._controller.update(per_response, len(measured))
        return {"kl/reference_per_response": per_response}

    def charge(self, state: StepState) -> tuple[Tensor | None, dict[str, Tensor], dict[str, float]]:
        """Charge the step's divergence on the window's tokens, and measure it if all old log-probs are known.

        Returns the token rewards [T] float32 (the line rewards minus the penalty; None if there are neither), the fields of the loss
        (with the term in the loss ``reference_logprobs`` and ``kl_coefs``, both [T] float32, and the teacher's tokens) and the metrics.
        """
        kl = self._settings
        if kl.place is KlPlace.none:
            return state.line_rewards, {}, {}
        by_sequence = [kl.coef_by_type.get(t.prompt.type, self._coef) for t in state.trajectories]
        coefs = repeat_per_sequence(torch.tensor(by_sequence, dtype=torch.float32), state.batch.lengths)
        mask = state.batch.fields["mask"]
        # Old log-probs that the first update computes are measured after that update.
        metrics = {} if state.first_update else self.measure(state)
        if kl.place is KlPlace.loss:
            fields = {"reference_logprobs": state.reference_logprobs, "kl_coefs": coefs, **state.teacher_tokens}
            return state.line_rewards, fields, metrics
        rewards = algorithms.kl_penalized_rewards(
            torch.zeros(len(mask)) if state.line_rewards is None else state.line_rewards,
            state.old_logprobs,
            state.reference_logprobs,
            mask,
            coefs,
            kl.estimator,
            kl.estimator_options,
        )
        return rewards, {}, metrics
