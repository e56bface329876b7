"""Evaluation: full responses (never windows) to held-out prompts, scored by the run's own reward."""

from collections.abc import Callable, Sequence

from megatron_rl.config.schema import Config
from megatron_rl.data.trajectory import Prompt, Trajectory
from megatron_rl.rollout.service import RolloutService
from megatron_rl.run.recorder import Recorder
from megatron_rl.step.grading import Grader


class Evaluator:
    """``start`` makes a fresh trajectory; ``stop_after`` is called once eval.stop_at_accuracy is reached."""

    def __init__(
        self,
        config: Config,
        prompts: Sequence[Prompt],
        *,
        rollout: RolloutService,
        grader: Grader,
        start: Callable[[Prompt, int], Trajectory],
        recorder: Recorder,
        stop_after: Callable[[int], None],
    ) -> None:
        self._config = config
        self._prompts = prompts[: config.eval.num_prompts or None]
        self._rollout = rollout
        self._grader = grader
        self._start = start
        self._recorder = recorder
        self._stop_after = stop_after

    def due(self, step: int) -> bool:
        """After every eval.every_steps steps and after the last one, when there is something to evaluate on."""
        every = self._config.eval.every_steps
        last = step + 1 == self._config.run.num_steps
        return bool(self._prompts) and (last or (every > 0 and (step + 1) % every == 0))

    async def evaluate_if_due(self, step: int) -> dict[str, float]:
        return await self.evaluate(step) if self.due(step) else {}

    async def evaluate(self, step: int) -> dict[str, float]:
        """Metrics; accuracy is the mean score of the responses that could be scored. Step -1: before training."""
        budget = self._config.batch.max_response_tokens
        trajectories = [self._start(prompt, index) for index, prompt in enumerate(self._prompts)]
        temperature = self._config.eval.temperature
        await self._rollout.generate(
            trajectories, step=step, window_tokens=budget, temperature=temperature, kind="eval"
        )
        await self._grader.grade(trajectories, step)
        values = [t.reward for t in trajectories if t.reward is not None]
        accuracy = sum(values) / len(values) if values else float("nan")
        self._recorder.evaluated(step + 1, accuracy)
        goal = self._config.eval.stop_at_accuracy
        # The evaluation before training ends nothing: there would be no step to stop after.
        if step >= 0 and goal and accuracy >= goal:
            self._stop_after(step)
        return {
            "eval/accuracy": accuracy,
            "eval/num_unscored": float(len(trajectories) - len(values)),
            "eval/response_tokens_mean": sum(t.num_response_tokens for t in trajectories) / len(trajectories),
            **{f"eval/{name}": value for name, value in self._grader.metrics(trajectories).items()},
        }
