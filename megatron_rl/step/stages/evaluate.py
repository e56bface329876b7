"""Evaluates on held-out prompts if due: within the stage, or in the background on evaluation servers."""

from megatron_rl.run.recorder import Recorder
from megatron_rl.step.evaluation import EvaluationServers, Evaluator
from megatron_rl.step.state import StepState


async def run(step: int, state: StepState, *, evaluator: Evaluator, fleet: EvaluationServers | None, recorder: Recorder) -> None:
    is_due = evaluator.due(step)
    if is_due and fleet is None:
        state.metrics |= await evaluator.evaluate(step)
    elif is_due and fleet is not None and fleet.has == step:
        evaluator.begin(step, recorder.add_to, recorder.console.warning)
