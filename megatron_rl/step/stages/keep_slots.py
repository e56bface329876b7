"""The slots for a checkpoint of this step, taken between two windows: a publish may come in the middle of one."""

from megatron_rl.data.slots import SlotPool
from megatron_rl.step.kl_penalty import KlPenalty
from megatron_rl.step.state import StepState
from megatron_rl.step.step_saver import snapshot_slots


def run(step: int, state: StepState, *, pool: SlotPool, kl_penalty: KlPenalty) -> None:
    snapshot_slots(step, state, pool, kl_penalty)
