"""Rewards of a run: one for all prompts, or one per prompt type (hybrid reward: verifiers and judges mixed).

Laws (Seed1.5-VL, arXiv 2505.07062, section on hybrid RL; arXiv 2503.22230):

- Every prompt has exactly one source of rewards. Its name is part of the score's detail.
- A response without the required ``<think>`` form scores exactly 0 before any reward is called; otherwise only the
  solution is scored.
- Rewards of one run have the same range, declared or rescaled, because one critic learns from all of them. A value
  outside its declared range counts as unscored.

A call waits for the slowest reward that it uses; the rewards run concurrently.
"""

import asyncio
import concurrent.futures
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from megatron_rl.config.schema import RewardConfig, RewardRouteConfig
from megatron_rl.data.trajectory import Prompt, Score
from megatron_rl.rewards.registry import (
    WHOLE_ROW,
    Range,
    Reward,
    RewardError,
    check_options,
    required_fields,
    resolve,
    row_arguments,
    wall_limit_s,
)
from megatron_rl.rewards.rules.format import split_thought
from megatron_rl.rewards.workers.calls import CallQueue, RewardItem, RunnerSettings
from megatron_rl.rewards.workers.event_loop import start_runner

_ANY_TYPE = ""
"""Key of the only route if reward.by_type is empty."""
_RANGE_TOLERANCE = 1e-6
"""Relative tolerance: a float that was rounded outwards is still in the range."""
_NOT_THOUGHT = "not of the form <think>thought</think>solution"
_MAX_REPORTED = 5


@dataclass(frozen=True)
class ScoreItem:
    response: str
    answer: str
    prompt: str = ""
    """Text of the prompt, for judges."""
    type: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Additional fields of the prompt's row."""

    @property
    def row(self) -> dict[str, Any]:
        return {"prompt": self.prompt, "type": self.type, "answer": self.answer, **self.fields}


@dataclass(frozen=True)
class Route:
    """The reward of one prompt type."""

    reward: Reward
    options: Mapping[str, Any]
    timeout_s: float
    declared: Range | None
    """Range of the reward's own values."""
    rescale_to: Range | None = None

    @property
    def range(self) -> Range | None:
        """Range of the values that the trainer sees."""
        return self.rescale_to or self.declared

    @property
    def required(self) -> list[str]:
        """Row fields without which the reward cannot be called."""
        return [name for name in required_fields(self.reward, self.options) if name != "prompt"]

    @property
    def row_fields(self) -> list[str]:
        """Keyword parameters that rows set."""
        return [*required_fields(self.reward, self.options), *self.reward.row_fields]

    @property
    def key(self) -> tuple[str, str, float]:
        """Key of the route's runner; routes with the same key share a runner."""
        # As text, because options may contain lists, which cannot be keys.
        return self.reward.name, json.dumps(self.options, sort_keys=True), self.timeout_s

    def finish(self, score: Score) -> Score:
        """Rescale a score to the common range; unscored if the reward left its own range."""
        if score.value is None or self.declared is None:
            return score
        low, high = self.declared
        # Values within the tolerance are clamped below, so that the trainer never sees a value outside the range.
        slack = _RANGE_TOLERANCE * max(1.0, abs(low), abs(high))
        if not low - slack <= score.value <= high + slack:
            error = f"reward {self.reward.name} gave {score.value:g}, outside its declared range [{low:g}, {high:g}]"
            return replace(score, value=None, error=error)
        value = min(max(score.value, low), high)
        if self.rescale_to is not None:
            new_low, new_high = self.rescale_to
            value = new_low + (value - low) / (high - low) * (new_high - new_low)
        return replace(score, value=value)


# ------------------------------------------------------------------------------------------------- before a run starts


def routes_of(config: RewardConfig) -> dict[str, Route]:
    """Validated routes, keyed by prompt type; starts no process.

    Raises:
        RewardError: unknown rewards, wrong options, or incompatible ranges.
    """
    if not config.by_type:
        only = RewardRouteConfig(config.name, config.options)
        routes = {_ANY_TYPE: _route(only, config.timeout_s, "reward")}
    else:
        routes = {type_: _route(route, config.timeout_s, f"reward.by_type.{type_}") for type_, route in config.by_type.items()}
        _check_commensurable(routes)
    if config.require_think:
        for type_, route in routes.items():
            if route.range is not None and route.range[0] != 0:
                raise RewardError(
                    f"{_place(type_)}: reward.require_think scores a missing thought 0, which must be the lowest value; "
                    f"{route.reward.name} has the range [{route.range[0]:g}, {route.range[1]:g}]: set rescale_to: [0, 1]"
                )
    return routes


def _route(config: RewardRouteConfig, timeout_s: float, place: str) -> Route:
    if not config.name:
        raise RewardError(f"{place}.name is empty; expected a registered reward, package.module:function or path/file.py:function")
    reward = resolve(config.name)
    check_options(reward, config.options, required_fields(reward, config.options))
    timeout_s = config.timeout_s or timeout_s
    # A reward that ends its own work scores a slow item; if the runner's timeout came first, the item would be unscored.
    own_limit_s = wall_limit_s(reward, config.options)
    if own_limit_s is not None and own_limit_s >= timeout_s:
        raise RewardError(
            f"{place}: {reward.name} ends its own work after wall_limit_s={own_limit_s:g} s, which must be less than the "
            f"{timeout_s:g} s of timeout_s, or a slow item counts as unscored; raise timeout_s or lower wall_limit_s"
        )
    declared = reward.value_range(config.options)
    rescale_to = _rescaling(config.rescale_to, declared, reward, place) if config.rescale_to else None
    return Route(reward, dict(config.options), timeout_s, declared, rescale_to)


def _rescaling(values: Sequence[float], declared: Range | None, reward: Reward, place: str) -> Range:
    if len(values) != 2 or not values[0] < values[1]:
        raise RewardError(f"{place}.rescale_to must be [low, high] with low < high, got {list(values)}")
    if declared is None or not declared[0] < declared[1]:
        raise RewardError(
            f"{place}.rescale_to needs to know the range of {reward.name}; declare it with "
            "@register(name, range=(low, high)) at the function"
        )
    return float(values[0]), float(values[1])


def _check_commensurable(routes: Mapping[str, Route]) -> None:
    # One reward for all types is comparable with itself, even if its range is not declared.
    if len({route.key for route in routes.values()}) == 1 and len({route.range for route in routes.values()}) == 1:
        return
    ranges = {type_: route.range for type_, route in routes.items() if route.range is not None}
    unknown = [type_ for type_ in routes if type_ not in ranges]
    if unknown:
        raise RewardError(
            f"reward.by_type mixes rewards, but the range of {', '.join(routes[t].reward.name for t in unknown)} "
            f"(type {', '.join(unknown)}) is not declared; add range=(low, high) to its @register"
        )
    if len(set(ranges.values())) > 1:
        listed = ", ".join(f"{t}: {routes[t].reward.name} [{low:g}, {high:g}]" for t, (low, high) in ranges.items())
        raise RewardError(
            f"reward.by_type mixes rewards of different ranges ({listed}), and one critic learns from all of them; "
            "set rescale_to: [0, 1] for the rewards whose range differs"
        )


def _place(type_: str) -> str:
    return f"reward.by_type.{type_}" if type_ else "reward"


def wanted_row_fields(config: RewardConfig) -> list[str]:
    """All row fields that some reward reads, required or optional."""
    names: dict[str, None] = {}
    for route in routes_of(config).values():
        aliases = [a for name, a in route.reward.row_fields.items() if name not in route.options]
        for name in [*route.required, *(alias for group in aliases for alias in group)]:
            if name not in ("prompt", "answer", WHOLE_ROW):
                names[name] = None
    return list(names)


def check_types(config: RewardConfig, types: Iterable[str]) -> None:
    """Raise RewardError for prompt types without a reward."""
    missing = sorted(set(types) - set(config.by_type)) if config.by_type else []
    if missing:
        raise RewardError(
            f"reward.by_type has no entry for the prompt types {', '.join(map(repr, missing))} of the data; it has "
            f"{', '.join(sorted(config.by_type))}. Add entries, or correct data.type_field"
        )


def check_prompts(config: RewardConfig, prompts: Iterable[Prompt]) -> None:
    """Raise RewardError, listing rows, for prompts that their reward cannot score."""
    prompts = list(prompts)
    check_types(config, {prompt.type for prompt in prompts})
    routes = routes_of(config)
    by_route: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        by_route[prompt.type if config.by_type else _ANY_TYPE].append(prompt)
    for type_, group in by_route.items():
        route = routes[type_]
        problems = [
            f"{p.source or p.id}: field {name!r} is missing"
            for p in group
            for name in route.required
            if p.fields.get(name) is None
        ]
        # A reward named by its path does not declare whether it needs an answer.
        if route.reward.answer_required and ":" not in route.reward.name:
            problems += [f"{p.source or p.id}: it has no answer" for p in group if not p.answer]
        if not problems and route.reward.check_prompts is not None:
            problems = route.reward.check_prompts(group, route.options)
        if problems:
            raise RewardError(
                f"reward {route.reward.name} cannot score the data: {len(problems)} problems. Fix the rows, or list the "
                "fields that it reads in data.reward_fields:\n" + "\n".join(problems[:_MAX_REPORTED])
            )


# ------------------------------------------------------------------------------------------------------------ the run


def runner_settings(config: RewardConfig, timeout_s: float | None = None) -> RunnerSettings:
    """Settings of one runner. ``timeout_s``: limit of the route; None uses the configuration's."""
    return RunnerSettings(
        num_workers=config.num_workers,
        timeout_s=timeout_s or config.timeout_s,
        memory_limit_mb=config.memory_limit_mb,
        max_concurrency=config.max_concurrency,
        max_retries=config.max_retries,
        start_timeout_s=config.start_timeout_s,
    )


def build_rewards(config: RewardConfig) -> "RewardRouter":
    """Start the runners of all rewards of a run.

    Raises:
        RewardError: as ``routes_of``, or if a reward does not start; nothing is left running then.
    """
    routes = routes_of(config)
    runners: dict[Any, CallQueue] = {}
    with ExitStack() as started:
        for route in routes.values():
            if route.key not in runners:
                runners[route.key] = started.enter_context(
                    start_runner(
                        route.reward.name,
                        runner_settings(config, timeout_s=route.timeout_s),
                        options=route.options,
                        row_fields=route.row_fields,
                    )
                )
        # pop_all: the runners outlive this function; if a later runner fails to start, the stack closes the earlier ones.
        return RewardRouter(config, routes, runners, started.pop_all())


class RewardRouter:
    """Scores items of any type. Usable from any thread and any event loop; close it when done."""

    def __init__(self, config: RewardConfig, routes: Mapping[str, Route], runners: Mapping[Any, CallQueue], started: ExitStack) -> None:
        self._config = config
        self._routes = dict(routes)
        self._runners = dict(runners)
        self._started = started

    async def score_many(self, items: Sequence[ScoreItem]) -> list[Score]:
        """Score ``items``; results are in their order. Cancelling the call drops waiting items."""
        return await asyncio.wrap_future(self.submit(items))

    def submit(self, items: Sequence[ScoreItem]) -> concurrent.futures.Future[list[Score]]:
        """Queue ``items`` and return immediately.

        Raises:
            RewardError: a prompt type without a reward, or a runner that is closed or has failed.
        """
        scores: dict[int, Score] = {}
        queued: dict[Any, list[tuple[int, RewardItem]]] = defaultdict(list)
        for index, item in enumerate(items):
            route = self._route_of(item)
            prepared = self._prepare(item, route)
            if isinstance(prepared, Score):
                scores[index] = self._label(prepared, item, route)
            else:
                queued[route.key].append((index, prepared))

        def store(key: Any, results: list[Score]) -> None:
            for (index, _), score in zip(queued[key], results, strict=True):
                item = items[index]
                route = self._route_of(item)
                if self._config.require_think:
                    score = replace(score, metrics={**score.metrics, "thought": 1.0})
                scores[index] = self._label(route.finish(score), item, route)

        # Submit to all runners before waiting for one, so that the rewards run concurrently.
        futures = {key: self._runners[key].submit([item for _, item in pairs]) for key, pairs in queued.items()}
        return _gather(futures, store, lambda: [scores[index] for index in range(len(items))])

    def close(self) -> None:
        """Stop all processes and loops started for the rewards."""
        self._started.close()

    def __enter__(self) -> "RewardRouter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _route_of(self, item: ScoreItem) -> Route:
        type_ = item.type if self._config.by_type else _ANY_TYPE
        if type_ not in self._routes:
            check_types(self._config, [type_])
        return self._routes[type_]

    def _prepare(self, item: ScoreItem, route: Route) -> RewardItem | Score:
        """Item for the route's runner, or the score if no call is needed."""
        response = item.response
        if self._config.require_think:
            parts = split_thought(response)
            if parts is None:
                return Score(0.0, _NOT_THOUGHT, metrics={"thought": 0.0})
            response = parts[1]
        try:
            return response, item.answer, row_arguments(route.reward, route.options, item.row)
        except KeyError as error:
            return Score(None, error=f"the row lacks the field {error} that reward {route.reward.name} needs")

    def _label(self, score: Score, item: ScoreItem, route: Route) -> Score:
        """With several rewards, add the reward's name to the detail and a metric per prompt type."""
        if not self._config.by_type:
            return score
        metrics = dict(score.metrics)
        if score.value is not None:
            metrics[f"mean_of_{re.sub(r'[^A-Za-z0-9_.-]', '_', item.type)}"] = score.value
        detail = f"{route.reward.name}: {score.detail}" if score.detail else route.reward.name
        return replace(score, detail=detail, metrics=metrics)


def _gather(
    futures: Mapping[Any, concurrent.futures.Future[list[Score]]],
    store: Callable[[Any, list[Score]], None],
    result: Callable[[], list[Score]],
) -> concurrent.futures.Future[list[Score]]:
    """Future of ``result()`` that is done once all ``futures`` have been stored, or with the first failure."""
    combined: concurrent.futures.Future[list[Score]] = concurrent.futures.Future()
    if not futures:
        combined.set_result(result())
        return combined
    threads_waiting = iter(range(len(futures) - 1, -1, -1))  # next() is atomic: the thread that draws 0 is the last

    def on_done(key: Any, future: concurrent.futures.Future[list[Score]]) -> None:
        # The combined future may already be done: cancelled by the caller, or failed with another reward.
        with suppress(concurrent.futures.InvalidStateError):
            try:
                store(key, future.result())
                if next(threads_waiting) > 0:
                    return
                scores = result()
            except Exception as error:
                combined.set_exception(error)
                return
            combined.set_result(scores)

    def on_cancel(future: concurrent.futures.Future[list[Score]]) -> None:
        if future.cancelled():
            for each in futures.values():
                each.cancel()

    combined.add_done_callback(on_cancel)
    for key, future in futures.items():
        future.add_done_callback(partial(on_done, key))
    return combined


def check_error_rate(scores: Sequence[Score], max_error_rate: float, *, what: str = "this step") -> float:
    """Return the share of responses that could not be scored, in [0, 1].

    Raises:
        RewardError: the share is above ``max_error_rate``; the message has the three most frequent errors.
    """
    errors = [score.error for score in scores if score.value is None]
    rate = len(errors) / len(scores) if scores else 0.0
    if rate <= max_error_rate:
        return rate
    # Replace digits, so that the same failure on different responses counts as one kind.
    kinds = Counter(re.sub(r"\d+", "N", error) for error in errors)
    examples = {re.sub(r"\d+", "N", error): error for error in errors}
    frequent = "; ".join(f"{count}x {examples[kind]}" for kind, count in kinds.most_common(3))
    raise RewardError(
        f"{len(errors)} of {len(scores)} responses of {what} could not be scored ({rate:.1%}, allowed "
        f"{max_error_rate:.1%}). Most frequent: {frequent}. Fix the reward, raise reward.timeout_s, "
        "or raise reward.max_error_rate if this is expected"
    )
