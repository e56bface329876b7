"""Chooses the responses of a step: one window per slot, over-sampling with abort, or groups with a mixed outcome.

Laws: windows (``schedule.mode=tppo`` or ``async``) keep every token: an aborted response has a shorter window and continues
in the next step. Without a critic a group trains in the step in which its last response ends; with dynamic sampling a group
with equal rewards does not train. Full responses (``sync``) train in whole groups: responses that over-sampling aborted or
dynamic sampling discarded leave the pool and are counted.

``timeline.json`` stores the amount of generated work, from which `megatron-rl simulate` calibrates. For every round of
requests it has ``rows`` and ``tokens`` (responses and new tokens in all), and for each row ``prompt`` (tokens), ``held``
(response tokens from earlier steps), ``new``, ``ended`` (0 or 1) and ``ms`` (from arrival at the server to the last token,
as the server reports; 0 if unknown). Values are space-separated text in the order in which the requests were sent. At most
``MAX_ROWS`` rows are kept, spaced evenly over the rows sorted by length, longest first.
"""

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np
import psutil

from megatron_rl.config.derived import block_size, effective_window_tokens, needs_greedy, num_responses_per_step
from megatron_rl.config.schedule_facts import Overlap, overlap_of
from megatron_rl.config.schema import Config
from megatron_rl.data.slots import SlotPool, full_blocks
from megatron_rl.data.trajectory import Trajectory
from megatron_rl.errors import UserError
from megatron_rl.rollout.service import RolloutService
from megatron_rl.step.scoring import ResponseScorer

Group = list[Trajectory]


class Collector:
    """Fills the pool's slots and has them generated; the only component that chooses a step's responses."""

    def __init__(self, config: Config, pool: SlotPool, rollout: RolloutService, grader: ResponseScorer) -> None:
        self._config = config
        self._pool = pool
        self._rollout = rollout
        self._grader = grader
        self._window_tokens = effective_window_tokens(config)
        self._in_windows = overlap_of(config.schedule) > Overlap.nothing
        self._num_greedy = int(needs_greedy(config))
        # If all prompts have the same number of samples, a block is a group.
        self._block_size = block_size(config.batch) + self._num_greedy
        self._num_blocks = num_responses_per_step(config) // block_size(config.batch)
        self.rounds: list[dict[str, int | str]] = []
        """The newest step's rounds of requests, including discarded responses (``generated_rows``)."""

    async def collect(self, step: int) -> tuple[list[Trajectory], dict[str, float]]:
        """Generate the step's responses, and return them with metrics; with dynamic sampling they are also scored.

        The metrics count the responses continued from an earlier step, and the discarded ones.
        """
        self.rounds = []
        sorts_out = self._config.algorithm.dynamic_sampling.enabled
        if sorts_out and not self._in_windows:
            return await self._mixed_groups(step)
        trajectories = self._pool.fill(step)
        num_carried = sum(any(segment.step < step for segment in t.segments) for t in trajectories)
        metrics = {"rollout/num_carried": float(num_carried)}
        if step > self._pool.newest_generated:
            await self._generate(trajectories, step)
        else:  # the window's tokens were restored from a checkpoint
            self.rounds.append(generated_rows([t.as_of(step) for t in trajectories], step, {}))
        if sorts_out:
            await self._grader.grade([t.as_of(step) for t in trajectories], step)
            metrics |= self._kinds(self._pool.ended_groups(step))
        if self._in_windows or self._config.rollout.over_sampling == 1.0:
            return trajectories, metrics
        kept = list(chain(*self._blocks(self._complete_groups(trajectories))[: self._num_blocks]))
        num_discarded = self._discard_all_but(trajectories, kept)
        return kept, metrics | {"rollout/num_discarded": float(num_discarded)}

    def ended_groups(self, step: int) -> list[Trajectory]:
        """Return the responses that train if groups train whole: the groups whose last response ended in ``step``.

        With dynamic sampling, only groups with differing rewards train. The others are not replaced by other prompts in this step.
        """
        settings, groups = self._config.algorithm.dynamic_sampling, self._pool.ended_groups(step)
        if settings.enabled:
            groups = [group for group in groups if classify_group(group, settings.correct_from) == "mixed"]
        return list(chain(*groups))

    def _kinds(self, groups: Sequence[Group]) -> dict[str, float]:
        """Return the share of each kind of group (``classify_group``) among the groups that ended in a step."""
        if not groups:
            return {}
        kinds = [classify_group(group, self._config.algorithm.dynamic_sampling.correct_from) for group in groups]
        names = {"mixed": "useful", "all_right": "all_right", "all_wrong": "all_wrong"}
        shares = {f"dynamic_sampling/{name}_share": kinds.count(kind) / len(kinds) for kind, name in names.items()}
        rewards = [t.reward for group in groups for t in group if t.reward is not None]
        return shares | ({"dynamic_sampling/reward_mean": sum(rewards) / len(rewards)} if rewards else {})

    async def _mixed_groups(self, step: int) -> tuple[list[Trajectory], dict[str, float]]:
        """Dynamic sampling (DAPO, arXiv 2503.14476, eq. 11): generate until enough groups have differing rewards."""
        settings = self._config.algorithm.dynamic_sampling
        useful: list[Group] = []
        counts = {"all_right": 0, "all_wrong": 0, "unscored": 0}
        rewards: list[float] = []
        num_rounds = 0
        blocks = f"blocks of {self._block_size} responses" if self._config.batch.num_samples_by_type else "groups"
        while len(self._blocks(useful)) < self._num_blocks:
            if num_rounds == settings.max_rounds:
                raise UserError(
                    f"algorithm.dynamic_sampling: after {num_rounds} rounds of generation step {step + 1} has "
                    f"{len(self._blocks(useful))} of {self._num_blocks} {blocks} whose responses got different "
                    f"rewards ({counts['all_right']} "
                    f"entirely right, {counts['all_wrong']} entirely wrong, {counts['unscored']} without "
                    "scores); use prompts of suitable difficulty (megatron-rl select-prompts), more samples per "
                    "prompt, or raise algorithm.dynamic_sampling.max_rounds"
                )
            num_rounds += 1
            trajectories = self._pool.fill(step)
            await self._generate(trajectories, step)
            groups = self._complete_groups(trajectories)
            await self._grader.grade([t for group in groups for t in group], step)
            self._discard_all_but(trajectories, [])
            rewards += [t.reward for group in groups for t in group if t.reward is not None]
            for group in groups:
                kind = classify_group(group, settings.correct_from)
                if kind == "mixed":
                    useful.append(group)
                else:
                    counts[kind] += 1
        num_groups = len(useful) + sum(counts.values())
        kept = list(chain(*self._blocks(useful)[: self._num_blocks]))
        metrics = {
            "rollout/num_carried": 0.0,
            "dynamic_sampling/reward_mean": sum(rewards) / len(rewards),
            "dynamic_sampling/num_rounds": float(num_rounds),
            "dynamic_sampling/useful_share": len(useful) / num_groups,
            "dynamic_sampling/all_right_share": counts["all_right"] / num_groups,
            "dynamic_sampling/all_wrong_share": counts["all_wrong"] / num_groups,
            "dynamic_sampling/num_left_over": float(len(useful) - len({t.group_id for t in kept})),
        }
        return kept, metrics

    async def _generate(self, trajectories: list[Trajectory], step: int) -> None:
        def is_enough() -> bool:
            """True if as many windows (or groups of full responses) are complete as the step needs."""
            if not self._in_windows:
                return len(self._blocks(self._complete_groups(trajectories))) >= self._num_blocks
            num_complete = sum(t.finished or t.remaining_window(step, self._window_tokens) <= 0 for t in trajectories)
            return num_complete >= num_responses_per_step(self._config)

        def open_row(first: Trajectory, token_ids: Sequence[int]) -> Trajectory:
            trajectories.append(self._pool.open_row(first, token_ids))
            return trajectories[-1]

        over_samples = self._config.rollout.over_sampling > 1.0
        engine_s = await self._rollout.generate(
            trajectories,
            step=step,
            window_tokens=self._window_tokens,
            is_enough=is_enough if over_samples else None,
            open_row=open_row,
        )
        # Saved with the pool, so that a resumed run does not generate this window again.
        self._pool.newest_generated = step
        self.rounds.append(generated_rows(trajectories, step, engine_s))

    def _blocks(self, groups: Sequence[Group]) -> list[Group]:
        return full_blocks(groups, self._block_size)

    def _complete_groups(self, trajectories: Sequence[Trajectory]) -> list[Group]:
        """Return the groups whose members are all present and finished, in the order in which they were started."""
        groups: dict[int, Group] = {}
        for trajectory in trajectories:
            groups.setdefault(trajectory.group_id, []).append(trajectory)
        batch = self._config.batch

        def is_complete(group: Group) -> bool:
            size = batch.num_samples_by_type.get(group[0].prompt.type, batch.num_samples_per_prompt)
            return sum(t.parent < 0 for t in group) == size + self._num_greedy and all(t.finished for t in group)

        return [group for group in groups.values() if is_complete(group)]

    def _discard_all_but(self, trajectories: Sequence[Trajectory], kept: Sequence[Trajectory]) -> int:
        kept_ids = {t.id for t in kept}
        discarded = [t for t in trajectories if t.id not in kept_ids]
        self._pool.discard(discarded)
        self._rollout.stop_dialogues(discarded)
        return len(discarded)


def classify_group(group: Sequence[Trajectory], correct_from: float) -> str:
    """Return mixed if the rewards differ, all_right or all_wrong if they are equal, unscored if a member has no score.

    The comparison uses scores before any shaping. With rewards of 0 and 1 this is DAPO's rule; partial credit and judgments
    may differ without being right or wrong, and still give a gradient.
    """
    sampled = [t for t in group if not t.greedy]
    rewards = [t.reward for t in sampled if t.reward is not None]
    if len(rewards) < len(sampled):
        return "unscored"
    if min(rewards) < max(rewards):
        return "mixed"
    return "all_right" if rewards[0] >= correct_from else "all_wrong"


# ---------------------------------------------------------------------------------------------------- facts of the timeline

MAX_ROWS = 512


def generated_rows(
    trajectories: Sequence[Trajectory], step: int, engine_s: Mapping[int, float]
) -> dict[str, int | str]:
    """Return the facts of one round of requests of ``step``; O(responses). ``engine_s``: server seconds by trajectory id."""
    prompt = np.array([len(t.prompt.token_ids) for t in trajectories], dtype=np.int64)
    new = np.array([t.window_tokens(step) for t in trajectories], dtype=np.int64)
    held = np.array([t.num_response_tokens for t in trajectories], dtype=np.int64) - new
    ended = np.array([t.finished for t in trajectories], dtype=np.int64)
    kept = _kept_rows(new, held)
    ms = np.array([round(1000 * engine_s.get(t.id, 0.0)) for t in trajectories], dtype=np.int64)
    words = {"prompt": prompt, "held": held, "new": new, "ended": ended, "ms": ms}
    rows = {name: " ".join(map(str, values[kept].tolist())) for name, values in words.items()}
    return {"rows": len(trajectories), "tokens": int(new.sum()), **rows}


def _kept_rows(new: np.ndarray, held: np.ndarray) -> np.ndarray:
    """Return the indices of the rows to store."""
    num_rows = len(new)
    if num_rows <= MAX_ROWS:
        return np.arange(num_rows)
    by_length = np.lexsort((held, new))[::-1]
    even = ((np.arange(MAX_ROWS) + 0.5) * num_rows / MAX_ROWS).astype(np.int64)
    even[0] = 0  # the longest row determines the duration of the round
    return by_length[even]


class ChildCpuClock:
    """Sums the CPU seconds of this process's descendants: servers, reward workers and their children."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def cpu_s(self) -> float:
        """Return the CPU seconds since the processes started; an exited process counts up to the last call."""
        for process in psutil.Process().children(recursive=True):
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            self._seconds[process.pid] = times.user + times.system
        return sum(self._seconds.values())
