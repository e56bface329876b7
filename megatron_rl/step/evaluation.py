"""Evaluation: full responses (never windows) to held-out prompts, scored by the run's own reward.

Laws: every response has its own seed, which is the same in every evaluation of a run, so that a resumed run measures the
same values as an uninterrupted one. A set's metrics do not depend on the other sets. All prompts have equal weight,
regardless of how many of their responses could be scored.
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
from megatron_rl.rollout.generation import SamplingOverrides
from megatron_rl.rollout.service import RolloutService
from megatron_rl.step.scoring import ResponseScorer

_LOOK_S = 1.0

Samples = list[list[Trajectory]]
"""The responses to each prompt."""


@dataclass
class EvaluationServers:
    """Servers for evaluation alone. If they are lost, training continues without them."""

    rollout: RolloutService
    wait_for: Callable[[Coroutine[Any, Any, Any]], Any]
    """Runs a coroutine to completion from inside a trainer stage (``StageRunner.wait_for``)."""
    warn: Callable[[str], None]
    has: int = -1
    """The step whose weights the servers received last, or -1."""

    def take(self, step: int, evaluator: "Evaluator") -> None:
        """Publish the current weights for an evaluation of ``step`` (main thread); warns if that fails."""
        # An evaluation in progress must finish first, because it needs the weights of its own step.
        self.wait_for(evaluator.idle(serves=lambda: self.rollout.num_live_servers > 0))
        problem: object = ""
        # Idle clients do not notice that a server has gone.
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
    """Evaluates the served policy. ``prompts`` by set; ``start`` creates an empty trajectory.

    ``stop_after`` is called at eval.stop_at_accuracy, and ``on_accuracy`` after every evaluation with the steps done, the
    accuracy over all sets and its standard error.
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
        self._background: asyncio.Task[None] | None = None
        self._cancel_reason = "the run ends"

    def move_to(self, rollout: RolloutService) -> None:
        """Send all later requests to other servers."""
        self._rollout = rollout

    def due(self, step: int) -> bool:
        """True after every eval.every_steps steps and after the last one, if there are sets to evaluate on."""
        last = step + 1 == self._config.run.num_steps
        return bool(self._sets) and (last or is_due(step + 1, self._config.eval.every_steps))

    def begin(self, step: int, add: Callable[[int, dict[str, float], float], None], warn: Callable[[str], None]) -> None:
        """Start ``evaluate`` in the background (on the event loop), after ``idle`` has waited for the servers.

        ``add(steps done, metrics, Unix seconds at the start)`` receives the metrics. A failure is a warning: training continues.
        """

        async def evaluate() -> None:
            began_s = time.time()
            try:
                add(step + 1, await self.evaluate(step), began_s)
            except (UserError, asyncio.CancelledError) as error:
                reason = self._cancel_reason if isinstance(error, asyncio.CancelledError) else error
                warn(f"the evaluation after step {step + 1} is left out: {reason}")

        self._background = asyncio.create_task(evaluate())

    async def idle(self, *, at_once: bool = False, serves: Callable[[], bool] = lambda: True) -> None:
        """Wait for the background evaluation, if there is one. Cancels it if ``at_once`` is set or ``serves`` returns False."""
        begun, self._background = self._background, None
        if begun is None:
            return
        while not begun.done():
            if at_once or not serves():
                self._cancel_reason = "the run ends" if at_once else "its servers were lost"
                begun.cancel()
            await asyncio.wait((begun,), timeout=_LOOK_S)
        # Raises any failure that ``evaluate`` does not turn into a warning.
        if not begun.cancelled():
            begun.result()

    async def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate, and return metrics over all sets and over each named one. Step -1 is before training."""
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
        # The evaluation before training cannot end the run, because there is no step to stop after.
        if step >= 0 and goal and accuracy >= goal:
            self._stop_after(step)
        return metrics

    def _fresh(self, name: str, one: EvalSet) -> Samples:
        prompts = self._prompts[name]
        # Sample 0 of a prompt has the same seed for any number of samples.
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
    """Return accuracy (avg@k), its standard error over prompts, and pass@k, from the scores of each prompt's responses.

    Prompts without a score are skipped; pass@k also skips prompts with fewer than k scores. Metrics without any prompt are
    omitted, except the accuracy, which is then nan.
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
