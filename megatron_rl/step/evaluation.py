"""Evaluation: full responses (never windows) to held-out prompts, scored by the run's own reward.

Laws: every prompt of every set gets its own number of responses, each with a seed of its own that is the same in every
evaluation of a run, so that a resumed run measures what an uninterrupted one would have; a set's numbers do not depend
on the other sets. Prompts count alike, however many of their responses could be scored.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from megatron_rl.algorithms.pass_at_k import mean_and_error, pass_at_k, powers_up_to
from megatron_rl.config.derived import EvalSet, eval_sets, is_due
from megatron_rl.config.schema import Config
from megatron_rl.data.trajectory import Prompt, Trajectory
from megatron_rl.errors import UserError
from megatron_rl.rollout.sampling import SamplingOverrides
from megatron_rl.rollout.service import RolloutService
from megatron_rl.step.scoring import ResponseScorer

_LOOK_S = 1.0

Samples = list[list[Trajectory]]
"""By prompt."""


@dataclass
class EvaluationServers:
    """Servers for evaluation alone. Training goes on without them where they are lost."""

    rollout: RolloutService
    wait_for: Callable[[Coroutine[Any, Any, Any]], Any]
    """Runs a coroutine to its end from inside a trainer stage (``StageRunner.wait_for``)."""
    warn: Callable[[str], None]
    has: int = -1
    """The step whose weights it got last."""

    def take(self, step: int, evaluator: "Evaluator") -> None:
        """The present weights, for an evaluation of this step (main thread); what stands in the way is said."""
        self.wait_for(evaluator.idle(serves=lambda: self.rollout.num_live_servers > 0))  # it has the weights of its step
        problem: object = ""
        if not self.wait_for(self.rollout.check_servers()):
            problem = f"none of {', '.join(self.rollout.urls)} (eval.urls) answers"
        else:
            try:
                self.rollout.publish()
                self.has = step
            except UserError as error:
                problem = error
        if problem:
            self.warn(f"the evaluation after step {step + 1} is left out: {problem}")


class Evaluator:
    """``prompts`` by set; ``start`` makes a fresh trajectory; ``stop_after`` is called at eval.stop_at_accuracy.

    ``on_accuracy`` hears of every evaluation: steps done, accuracy over all sets, its standard error.
    """

    def __init__(
        self,
        config: Config,
        prompts: Mapping[str, Sequence[Prompt]],
        *,
        rollout: RolloutService,
        grader: ResponseScorer,
        start: Callable[[Prompt, int], Trajectory],
        on_accuracy: Callable[[int, float, float | None], None],
        stop_after: Callable[[int], None],
    ) -> None:
        self._config = config
        self._sets = eval_sets(config)
        self._prompts = {name: prompts[name][: one.num_prompts or None] for name, one in self._sets.items()}
        self._rollout = rollout
        self._grader = grader
        self._start = start
        self._on_accuracy = on_accuracy
        self._stop_after = stop_after
        self._beside: asyncio.Task[None] | None = None
        self._given_up = "the run ends"

    def move_to(self, rollout: RolloutService) -> None:
        """Other servers answer from now on."""
        self._rollout = rollout

    def due(self, step: int) -> bool:
        """After every eval.every_steps steps and after the last one, when there is something to evaluate on."""
        last = step + 1 == self._config.run.num_steps
        return bool(self._sets) and (last or is_due(step + 1, self._config.eval.every_steps))

    def begin(self, step: int, add: Callable[[int, dict[str, float], float], None], warn: Callable[[str], None]) -> None:
        """``evaluate`` beside training (on the event loop), on servers that ``idle`` has waited for.

        ``add(step done, metrics, Unix seconds at its begin)`` gets what it measures. What fails is said and left out: training goes on.
        """

        async def evaluate() -> None:
            began_s = time.time()
            try:
                add(step + 1, await self.evaluate(step), began_s)
            except (UserError, asyncio.CancelledError) as error:
                reason = self._given_up if isinstance(error, asyncio.CancelledError) else error
                warn(f"the evaluation after step {step + 1} is left out: {reason}")

        self._beside = asyncio.create_task(evaluate())

    async def idle(self, *, at_once: bool = False, serves: Callable[[], bool] = lambda: True) -> None:
        """Return once no evaluation is in progress that was begun; ``at_once``, or where nobody ``serves`` it: it is given up."""
        begun, self._beside = self._beside, None
        if begun is None:
            return
        while not begun.done():
            if at_once or not serves():
                self._given_up = "the run ends" if at_once else "its servers were lost"
                begun.cancel()
            await asyncio.wait((begun,), timeout=_LOOK_S)
        if not begun.cancelled():
            begun.result()

    async def evaluate(self, step: int) -> dict[str, float]:
        """Metrics over all sets, and over each that has a name. Step -1: before training."""
        samples = {name: self._fresh(name, one) for name, one in self._sets.items()}
        tasks = [asyncio.create_task(self._generate(name, samples[name], step)) for name in self._sets]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        everything = list(chain.from_iterable(samples.values()))
        await self._grader.grade(_flat(everything), step)
        metrics = self._metrics("eval", everything)
        for name in filter(None, samples):
            metrics |= self._metrics(f"eval/{name}", samples[name])
        accuracy = metrics["eval/accuracy"]
        self._on_accuracy(step + 1, accuracy, metrics.get("eval/accuracy_stderr"))
        goal = self._config.eval.stop_at_accuracy
        # The evaluation before training ends nothing: there would be no step to stop after.
        if step >= 0 and goal and accuracy >= goal:
            self._stop_after(step)
        return metrics

    def _fresh(self, name: str, one: EvalSet) -> Samples:
        prompts = self._prompts[name]
        # Sample 0 of a prompt has the same seed whatever the number of samples is.
        return [
            [self._start(prompt, sample * len(prompts) + index) for sample in range(one.num_samples)]
            for index, prompt in enumerate(prompts)
        ]

    async def _generate(self, name: str, samples: Samples, step: int) -> None:
        one = self._sets[name]
        await self._rollout.generate(
            _flat(samples),
            step=step,
            window_tokens=self._config.batch.max_response_tokens,
            draw=SamplingOverrides(one.temperature, one.top_p, one.top_k, name),
            kind=f"eval-{name}" if name else "eval",
        )

    def _metrics(self, prefix: str, samples: Samples) -> dict[str, float]:
        trajectories = _flat(samples)
        scores = [[t.reward for t in group if t.reward is not None] for group in samples]
        numbers = score_metrics(scores)
        numbers["num_unscored"] = float(len(trajectories) - sum(map(len, scores)))
        numbers["response_tokens_mean"] = sum(t.num_response_tokens for t in trajectories) / len(trajectories)
        return {f"{prefix}/{name}": value for name, value in (numbers | self._grader.metrics(trajectories)).items()}


def score_metrics(scores: Sequence[Sequence[float]]) -> dict[str, float]:
    """accuracy (avg@k), its standard error over prompts and pass@k, from the scores of each prompt's responses.

    A prompt without a score says nothing, one with fewer than k nothing about pass@k; a number that no prompt says
    anything about is left out, but for the accuracy, which is nan then.
    """
    known = [list(of_prompt) for of_prompt in scores if of_prompt]
    accuracy, error = mean_and_error([sum(of_prompt) / len(of_prompt) for of_prompt in known])
    metrics = {"accuracy": accuracy}
    if len(known) > 1:
        metrics["accuracy_stderr"] = error
    best: dict[int, list[float]] = defaultdict(list)
    most = max(map(len, scores), default=0)
    for of_prompt in known if most > 1 else ():
        for k in powers_up_to(most):
            if k <= len(of_prompt):
                best[k].append(pass_at_k(of_prompt, k))
    return metrics | {f"pass@{k}": mean_and_error(values)[0] for k, values in sorted(best.items())}


def _flat(samples: Samples) -> list[Trajectory]:
    return list(chain.from_iterable(samples))
