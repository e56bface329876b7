"""Evaluation: full responses (never windows) to held-out prompts, scored by the run's own reward."""

import time
from collections.abc import Callable, Sequence

from megatron_rl.config.schema import Config
from megatron_rl.data.trajectory import Prompt, Trajectory
from megatron_rl.rollout.service import RolloutService
from megatron_rl.run.summary import Evaluation
from megatron_rl.step.grading import Grader


class Evaluator:
    """``start`` makes a fresh trajectory; ``on_result(step, accuracy)`` hears of every evaluation and may end the run."""

    def __init__(
        self,
        config: Config,
        prompts: Sequence[Prompt],
        *,
        rollout: RolloutService,
        grader: Grader,
        start: Callable[[Prompt, int], Trajectory],
        on_result: Callable[[int, float], None],
    ) -> None:
        self._config = config
        self._prompts = prompts[: config.eval.num_prompts or None]
        self._rollout = rollout
        self._grader = grader
        self._start = start
        self._on_result = on_result

    def due(self, step: int) -> bool:
        """After every eval.every_steps steps and after the last one, when there is something to evaluate on."""
        every = self._config.eval.every_steps
        last = step + 1 == self._config.run.num_steps
        return bool(self._prompts) and (last or (every > 0 and (step + 1) % every == 0))

    async def evaluate_if_due(self, step: int) -> dict[str, float]:
        return await self.evaluate(step) if self.due(step) else {}

    async def evaluate(self, step: int) -> dict[str, float]:
        """Accuracy: the mean score of the responses that could be scored."""
        budget = self._config.batch.max_response_tokens
        trajectories = [self._start(prompt, index) for index, prompt in enumerate(self._prompts)]
        temperature = self._config.eval.temperature
        await self._rollout.generate(
            trajectories, step=step, window_tokens=budget, temperature=temperature, kind="eval"
        )
        await self._grader.grade(trajectories, step)
        values = [t.score.value for t in trajectories if t.score.value is not None]
        accuracy = sum(values) / len(values) if values else float("nan")
        self._on_result(step, accuracy)
        return {
            "eval/accuracy": accuracy,
            "eval/num_unscored": float(len(trajectories) - len(values)),
            "eval/response_tokens_mean": sum(t.num_response_tokens for t in trajectories) / len(trajectories),
            **{f"eval/{name}": value for name, value in self._grader.metrics(trajectories).items()},
        }


class EvaluationLog:
    """Remembers evaluations and ends the run once eval.stop_at_accuracy is reached."""

    def __init__(self, config: Config, stop_after: Callable[[int], None]) -> None:
        self._goal = config.eval.stop_at_accuracy
        self._stop_after = stop_after
        self._started_s = time.time()
        self.evaluations: list[Evaluation] = []

    def start_clock(self) -> None:
        self._started_s = time.time()

    @property
    def elapsed_s(self) -> float:
        return time.time() - self._started_s

    def __call__(self, step: int, accuracy: float) -> None:
        training = step >= 0
        self.evaluations.append(Evaluation(step + 1, accuracy, self.elapsed_s if training else 0.0))
        if training and self._goal and accuracy >= self._goal:
            self._stop_after(step)
