"""Scores the responses that ended in a step, whole or by the turns of a dialogue.

Laws: every ended response is scored once, in the step in which it ended; an unscored one keeps a score without a value.
A dialogue's environment selects the texts that the reward scores, and determines each turn's reward.
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from megatron_rl.config.schema import RewardConfig
from megatron_rl.data.trajectory import Score, TokenParts, Trajectory
from megatron_rl.environments.base import Environment, turn_views, turns_to_score
from megatron_rl.rewards.router import RewardRouter, ScoreItem, check_error_rate


class ResponseScorer:
    """Calls the run's reward and the environment, if there is one, and stores the scores in the trajectories."""

    def __init__(
        self,
        config: RewardConfig,
        rewards: RewardRouter,
        decode: Callable[[Sequence[int]], str],
        environment: Environment | None = None,
        *,
        stop_on_errors: bool = True,
        texts: Callable[[Sequence[TokenParts]], Awaitable[list[str]]] | None = None,
    ) -> None:
        """``stop_on_errors`` False leaves too many errors to the watchdog. ``texts`` decodes many sequences in other processes."""
        self._rewards = rewards
        self._decode = decode
        self._texts = texts or self._texts_here
        self._environment = environment
        self._max_error_rate = config.max_error_rate if stop_on_errors else 1.0

    async def grade(self, trajectories: Sequence[Trajectory], step: int) -> None:
        """Score the responses that ended in ``step`` and have no score yet. Raises RewardError if too many cannot be scored."""
        if self._environment is not None:
            await self._grade_turns(self._environment, trajectories, step)
            return
        ended = [t for t in trajectories if t.finished and t.score is None]
        texts = await self._texts([TokenParts(t.token_parts()[1:]) for t in ended])
        scores = await self._ask(list(zip(ended, texts, strict=True)))
        for trajectory, score in zip(ended, scores, strict=True):
            trajectory.score = score

    async def _texts_here(self, sequences: Sequence[TokenParts]) -> list[str]:
        # Decoding a step's responses takes seconds, which would block the event loop.
        return await asyncio.to_thread(lambda: [self._decode(np.asarray(one).tolist()) for one in sequences])

    async def _grade_ended(self, trajectories: Sequence[Trajectory], step: int) -> None:
        """Score the dialogues to which the environment gave a text or a score at their end; an episode's rows share its score."""
        ended = [t for t in trajectories if t.finished and t.segments[-1].step == step]
        named: dict[int, list[Trajectory]] = defaultdict(list)
        for t in ended:
            if t.graded_text is not None and t.score is None:
                named[t.id if t.parent < 0 else t.parent].append(t)
        scores = await self._ask([(rows[0], rows[0].graded_text or "") for rows in named.values()])
        for rows, score in zip(named.values(), scores, strict=True):
            for row in rows:
                row.score = score
        given = [t.score for t in ended if t.score is not None and t.graded_text is None and t.parent < 0]
        check_error_rate(given, max_error_rate=self._max_error_rate)

    async def _grade_turns(self, environment: Environment, trajectories: Sequence[Trajectory], step: int) -> None:
        await self._grade_ended(trajectories, step)
        views = {t.id: turn_views(t, self._decode) for t in trajectories if t.turn_ended(step) or t.finished}
        open_ = [t for t in trajectories if t.id in views and t.score is None]
        asked = []
        for t in open_:
            for index in range(len(views[t.id])):
                text = environment.graded_text(t.prompt, views[t.id], index)
                # A turn that was graded in an earlier step keeps its grade.
                if text is not None and index not in t.turn_grades:
                    asked.append((t, index, text))
        grades = await self._ask([(t, text) for t, _, text in asked])
        for (t, index, _), grade in zip(asked, grades, strict=True):
            t.turn_grades[index] = grade
        for t in open_:
            turns = views[t.id]
            for index in turns_to_score(environment, t, step):
                reward = environment.turn_reward(t.prompt, turns, index, t.turn_grades)
                if reward is not None:
                    t.turn_scores[index] = reward
            if t.finished:
                t.score = environment.outcome(t.prompt, turns, t.turn_grades)

    async def _ask(self, texts: Sequence[tuple[Trajectory, str]]) -> list[Score]:
        items = [
            ScoreItem(response=text, answer=p.answer, prompt=p.text, type=p.type, fields=p.fields)
            for p, text in ((t.prompt, text) for t, text in texts)
        ]
        scores = await self._rewards.score_many(items)
        check_error_rate(scores, max_error_rate=self._max_error_rate)
        return scores

    def metrics(self, finished: Sequence[Trajectory]) -> dict[str, float]:
        """Return means over the finished responses of the extra metrics of rewards and environment."""
        values: dict[str, list[float]] = defaultdict(list)
        for trajectory in finished:
            scores = [trajectory.score, *trajectory.turn_grades.values()]
            for name, value in (pair for score in scores if score for pair in score.metrics.items()):
                values[f"reward/{name}"].append(value)
            if self._environment is not None:
                turns = turn_views(trajectory, self._decode)
                found = self._environment.metrics(trajectory.prompt, turns, trajectory.turn_grades)
                for name, value in found.items():
                    values[f"dialogue/{name}"].append(value)
        return {name: sum(numbers) / len(numbers) for name, numbers in values.items()}
