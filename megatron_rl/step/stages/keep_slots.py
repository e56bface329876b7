"""Takes the slots for this step's checkpoint between two windows, because an in-flight publish may split a window."""

from megatron_rl.data.slots import SlotPool
from megatron_rl.step.kl_penalty import KlPenalty
from megatron_rl.step.state import StepState
from megatron_rl.step.step_saver import snapshot_slots


def run(step: int, state: StepState, *, pool: SlotPool, kl_penalty: KlPenalty) -> None:
    snapshot_slots(step, state, pool, kl_penalty)
