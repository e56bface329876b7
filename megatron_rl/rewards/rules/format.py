"""Reward ``format``: tags must separate the thought of a response from its solution.

The required form is ``<think>{thought}</think>{solution}`` (Seed1.5-VL, arXiv 2505.07062, section on hybrid RL). Other
responses get 0 before any other reward is called. Compliant responses get 1 or, with ``then``, that reward's score of
the solution; the thought is never judged.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from megatron_rl.data.trajectory import Score
from megatron_rl.rewards.registry import Reward, RewardError, check_options, register, resolve

OPEN, CLOSE = "<think>", "</think>"

_resolve_once = cache(resolve)


def split_thought(response: str, *, opened_by_prompt: bool = False) -> tuple[str, str] | None:
    """(thought, solution) of a compliant response; None for any other response.

    Strict: the response starts with the opening tag, has each tag exactly once, and its solution is not blank.

    Args:
        opened_by_prompt: The prompt already ends with the opening tag, so the response must not have it.
    """
    if response.count(CLOSE) != 1 or response.count(OPEN) != int(not opened_by_prompt):
        return None
    if not opened_by_prompt:
        if not response.startswith(OPEN):
            return None
        response = response.removeprefix(OPEN)
    thought, _, solution = response.partition(CLOSE)
    return (thought.strip(), solution.strip()) if solution.strip() else None


def _inner(options: Mapping[str, Any]) -> Reward | None:
    return _resolve_once(options["then"]) if options.get("then") else None


def _prepare(options: Mapping[str, Any]) -> None:
    inner = _inner(options)
    if inner is not None and inner.prepare is not None:
        inner.prepare(options.get("then_options") or {})


def _check(options: Mapping[str, Any]) -> None:
    inner = _inner(options)
    if inner is None:
        return
    # The inner reward runs inside this reward's worker process, which has no event loop.
    if inner.is_async:
        raise RewardError(
            f"reward 'format': then={inner.name!r} queries a server, which worker processes cannot do; set "
            f"reward.name={inner.name} and reward.require_think=true instead"
        )
    check_options(inner, options.get("then_options") or {})


def _value_range(options: Mapping[str, Any]) -> tuple[float, float] | None:
    """Range including 0, the score of a response without the format; None if the inner reward declares no range."""
    inner = _inner(options)
    if inner is None:
        return (0.0, 1.0)
    inside = inner.value_range(options.get("then_options") or {})
    return None if inside is None else (min(0.0, inside[0]), max(0.0, inside[1]))


@register("format", prepare=_prepare, check=_check, range=_value_range, answer_required=False)
def score(
    response: str,
    answer: str,
    *,
    opened_by_prompt: bool = False,
    then: str = "",
    then_options: dict[str, Any] | None = None,
) -> float | Score:
    """Score 0 without the format; otherwise 1, or the score that the reward ``then`` gives the solution.

    Args:
        opened_by_prompt: The prompt already ends with ``<think>``.
        then: Name of another reward.
        then_options: Options of that reward.
    """
    parts = split_thought(response, opened_by_prompt=opened_by_prompt)
    if parts is None:
        return Score(0.0, f"not of the form {'' if opened_by_prompt else OPEN}thought{CLOSE}solution")
    if not then:
        return Score(1.0, "format holds")
    inner = _resolve_once(then)
    return inner.function(parts[1], answer, **inner.arguments(then_options or {}))
