"""Scores of the responses that ended in this step."""

from megatron_rl.step.scoring import ResponseScorer
from megatron_rl.step.state import StepState


async def run(step: int, state: StepState, *, grader: ResponseScorer) -> None:
    await grader.grade(state.slots, step)
    state.finished = state.ended
