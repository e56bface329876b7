"""Acts on a step's warning signs: warns, rolls the run back, or ends it."""

from collections.abc import Sequence

from megatron_rl.config.schema import HealthAction
from megatron_rl.data.slots import SlotPool
from megatron_rl.errors import UserError
from megatron_rl.run.checkpoints import Checkpointer
from megatron_rl.run.recorder import Recorder
from megatron_rl.step import metrics as step_metrics
from megatron_rl.step.parity import EngineMismatch, ParityCheck
from megatron_rl.step.state import StepState
from megatron_rl.step.updates import CriticWarmup
from megatron_rl.step.watchdog import MAX_ROLLBACKS, Finding, Rollback, Watchdog


class HealthGuard:
    """Examines each step once and acts on its findings: the only component that ends a run over its health."""

    def __init__(
        self,
        watchdog: Watchdog,
        parity: ParityCheck,
        checkpointer: Checkpointer,
        recorder: Recorder,
        pool: SlotPool,
        warmup: CriticWarmup,
    ) -> None:
        self.watchdog, self.parity = watchdog, parity
        self._checkpointer, self._recorder, self._pool, self._warmup = checkpointer, recorder, pool, warmup
        self._examined = -1

    def examine(self, step: int, state: StepState) -> None:
        """Examine a step's metrics, once per step. Raises UserError or Rollback."""
        if step <= self._examined:
            return
        self._examined = step
        state.metrics |= step_metrics.passes_metrics(state)
        findings = self.watchdog.observe(step, state.metrics, policy_trains=not self._warmup.policy_rests(step))
        state.metrics |= self.watchdog.metrics()
        self._handle_findings(findings)

    def check_parity(self, step: int, state: StepState) -> None:
        """Compare the trainer's log-probs with the servers', if a parity check is due."""
        if not self.parity.due(step):
            return
        try:
            parity = self.parity.compare()
        except EngineMismatch as error:
            state.metrics |= error.parity.metrics() if error.parity else {}
            self._handle_findings(self.watchdog.found("parity", str(error)))
        else:
            state.metrics |= parity.metrics()

    def _handle_findings(self, findings: Sequence[Finding]) -> None:
        """Warn about the findings, or end the run; the most severe action wins."""
        messages = {action: [f.message for f in findings if f.action is action] for action in HealthAction}
        for message in messages[HealthAction.warn]:
            self._recorder.console.warning(message)
        if messages[HealthAction.stop]:
            raise UserError(f"{'; '.join(messages[HealthAction.stop])}. {self._rollback_hint()}")
        if messages[HealthAction.roll_back]:
            self._roll_back("; ".join(messages[HealthAction.roll_back]))

    def _roll_back(self, why: str) -> None:
        number = self.watchdog.num_rollbacks + 1
        if number > MAX_ROLLBACKS:
            raise UserError(f"{why}. Already rolled back {MAX_ROLLBACKS} times. {self._rollback_hint()}")
        if self._checkpointer.newest_healthy is None:
            raise UserError(f"{why}. {self._rollback_hint()}")
        # The next prompts follow, because those of the failed steps may be the cause.
        raise Rollback(why, self._pool.position(), number)

    def _rollback_hint(self) -> str:
        healthy = self._checkpointer.newest_healthy
        if healthy is None:
            return "No healthy checkpoint to return to: start again with other settings, and save earlier (run.save_every_steps)"
        return f"The last healthy checkpoint is {healthy}: remove the later ones and resume with run.resume=true and other settings"
