"""Saves checkpoints of steps: collects the driver's state, and tracks writes that still run in the background."""

from collections.abc import Callable
from typing import Any

from megatron_rl.data.slots import SlotPool
from megatron_rl.rollout.service import RolloutService
from megatron_rl.run.checkpoints import Checkpointer
from megatron_rl.run.recorder import Recorder
from megatron_rl.step.kl_penalty import KlPenalty
from megatron_rl.step.state import StepState
from megatron_rl.step.updates import CriticWarmup
from megatron_rl.step.watchdog import Watchdog


def snapshot_slots(step: int, state: StepState, pool: SlotPool, kl_penalty: KlPenalty) -> Callable[[], dict[str, Any]]:
    """Return a function that returns the slots without the responses that ended in this step.

    The snapshot is taken once, before a later step changes the slots, and contains all tokens that exist by then. With windows
    ahead that includes the next window's tokens, because later weights would sample different ones.
    """
    if state.pool_state is None:
        pool.release_finished(step)
        state.pool_state, state.kl_state = pool.snapshot(), kl_penalty.state()
    return state.pool_state


class StepSaver:
    """Collects the driver's state of a step for its checkpoint, and restores it."""

    def __init__(
        self,
        checkpointer: Checkpointer,
        recorder: Recorder,
        rollout: RolloutService,
        pool: SlotPool,
        kl_penalty: KlPenalty,
        warmup: CriticWarmup,
        watchdog: Watchdog,
    ) -> None:
        self._checkpointer, self._recorder, self._rollout = checkpointer, recorder, rollout
        self._pool, self._kl_penalty, self._warmup, self._watchdog = pool, kl_penalty, warmup, watchdog

    def load_state(self, driver: dict[str, Any]) -> None:
        """Restore the driver's part of a checkpoint, except the pool."""
        self._kl_penalty.load_state(driver.get("kl"))
        if self._warmup.convergence and driver.get("settling"):
            self._warmup.convergence.load_state(driver["settling"])
        if driver.get("watchdog"):
            self._watchdog.load_state(driver["watchdog"])

    def save_if_due(self, step: int, state: StepState) -> None:
        if self._checkpointer.due(step):
            self._save(step, state)
        state.metrics["checkpoint/num_failed"] = float(self._checkpointer.num_failed)

    def save_last(self, step: int, state: StepState) -> None:
        """Save the newest step of a stopped run, unless a checkpoint contains it already."""
        self.finish_background_save(wait=True)
        if self._checkpointer.newest_step != step:
            self._save(step, state)
            self.finish_background_save(wait=True)

    def finish_background_save(self, *, wait: bool) -> None:
        """Register the checkpoint that is written in the background, if it is complete or ``wait`` is set."""
        self._warn(self._checkpointer.finish_background_save(wait=wait))

    def _save(self, step: int, state: StepState) -> None:
        slots, convergence = snapshot_slots(step, state, self._pool, self._kl_penalty), self._warmup.convergence
        driver = {
            "pool": slots(),
            "kl": state.kl_state,
            "settling": convergence.state() if convergence else None,
            "watchdog": self._watchdog.state(),
            "server_restarts": self._rollout.restart_counts(),
            # A killed run may not have written these metrics to its file yet.
            "metrics": state.metrics,
        }
        self._recorder.flush_records()
        version = self._rollout.trainer_version  # the servers may not have it yet
        self._warn(self._checkpointer.save(step, driver, weight_version=version, healthy=self._watchdog.healthy))

    def _warn(self, problem: str) -> None:
        if problem:
            self._recorder.console.warning(f"no checkpoint {problem}; the next step tries again")
