"""Registry of rewards.

A reward is a function ``score(response: str, answer: str, **options) -> float | Score``, named by its registry entry
(``math``), its import path (``package.module:function``) or its file (``path/file.py:function``). A plain function runs
in a worker process, so it must be importable there: a module-level function of a module other than ``__main__``. An
``async def`` function waits for a server and runs in an event loop of this process.

Options are the function's keyword parameters, checked against its signature before a run starts. A keyword parameter
without a default that the options omit is a row field: every item must provide it. A reward may declare additional row
fields, which are passed if a row has them (``row_arguments``).

Rewards are searched in the modules of ``rules`` and ``judges``. Invariant: importing this module imports no reward. An
import path imports only its own module; a registered name imports the modules of ``rules`` and ``judges``, which import
large libraries only on use.
"""

import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from megatron_rl.data.trajectory import Prompt, Score
from megatron_rl.errors import UserError
from megatron_rl.system import plugins

__all__ = ["Reward", "RewardError", "Score", "available", "check_options", "register", "required_fields", "resolve"]

OptionsHook = Callable[[Mapping[str, Any]], Awaitable[None] | None]
Range = tuple[float, float]
_PromptsHook = Callable[[Sequence[Prompt], Mapping[str, Any]], list[str]]
_RangeOfOptions = Callable[[Mapping[str, Any]], Range | None]

WHOLE_ROW = "*"


class RewardError(UserError, RuntimeError):
    """A reward cannot be found, loaded or run."""


@dataclass(frozen=True)
class Reward(plugins.Plugin):
    """A named reward; ``function`` is ``score(response, answer, **options) -> float | Score``, plain or async."""

    prepare: OptionsHook | None = None
    """Hook that is called once before the workers start, for imports that would otherwise count towards the first
    deadline."""
    check: OptionsHook | None = None
    """Hook that is called with the options before a run starts, for checks beyond the signature; raises RewardError."""
    range: Range | _RangeOfOptions | None = None
    """Smallest and largest value, or None if not declared. Rewards of one run must agree on it (router.py)."""
    row_fields: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Parameters that a row may set, each with its field names in rows; the first field present is used."""
    answer_required: bool = True
    """False if a row may lack ``answer``; the reward then gets ""."""
    check_prompts: _PromptsHook | None = None
    """Hook that is called with all prompts of this reward and its options before a run starts; returns problems with
    file and line."""
    owns_processes: bool = False
    """The reward keeps helper processes between items and ends its other child processes within an item; workers do not
    kill them."""

    @property
    def is_async(self) -> bool:
        """True if the reward runs in an event loop (event_loop.py) instead of worker processes."""
        return inspect.iscoroutinefunction(self.function)

    def value_range(self, options: Mapping[str, Any]) -> Range | None:
        return self.range(options) if callable(self.range) else self.range

    def arguments(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Validated options as keyword arguments of ``function``."""
        return plugins.arguments(self.function, options)

    @property
    def path(self) -> str:
        """Import path from which a worker loads the function."""
        return plugins.path_of(self.function)


_registry = plugins.Registry(
    "reward",
    Reward,
    packages=["megatron_rl.rewards.rules", "megatron_rl.rewards.judges"],
    options_key="reward.options",
    error=RewardError,
)
register = _registry.register
"""Decorator ``register(name, **facts)`` that registers a score function; ``facts`` are fields of Reward."""


def available() -> list[str]:
    """Names of the registered rewards."""
    return sorted(_registry.names())


def resolve(name: str) -> Reward:
    """Find a reward by registry name, import path ``package.module:function`` or file ``path/file.py:function``.

    Raises:
        RewardError: unknown name, a module that cannot be imported, or an object that is not a score function.
    """
    reward = _registry.find(name)
    check_function(reward)
    return reward


def check_function(reward: Reward) -> None:
    function = reward.function
    if not inspect.isfunction(function) or inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise RewardError(f"reward {reward.name!r}: expected a plain function or an async one, got {function!r}")
    # "<" marks lambdas and functions defined inside others, which a worker cannot import either.
    if function.__module__ == "__main__" or "<" in function.__qualname__:
        raise RewardError(
            f"reward {reward.name!r}: a worker process cannot import {reward.path}; "
            "define it at the top level of an importable module"
        )
    try:
        inspect.signature(function).bind_partial("", "")
    except TypeError as error:
        raise RewardError(
            f"reward {reward.name!r}: expected score(response, answer, **options), "
            f"got {function.__name__}{inspect.signature(function)}"
        ) from error


@cache
def _option_parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Keyword parameters after response and answer."""
    fixed = _response_and_answer(function)
    return {name: p for name, p in plugins.parameters(function).items() if name not in fixed}


def _response_and_answer(function: Callable[..., Any]) -> list[str]:
    """Names of the function's first two parameters, response and answer."""
    return list(inspect.signature(function).parameters)[:2]


def wall_limit_s(reward: Reward, options: Mapping[str, Any]) -> float | None:
    """Seconds after which the reward itself ends an item; None for a reward without the option."""
    keywords = _option_parameters(reward.function)
    if "wall_limit_s" not in keywords:
        return None
    return float(options.get("wall_limit_s", keywords["wall_limit_s"].default))


def check_options(reward: Reward, options: Mapping[str, Any], row_fields: Sequence[str] = ()) -> None:
    """Reject options that are unknown, missing or of the wrong type.

    Args:
        options: Keyword arguments of every call; plain JSON values, because they are sent to worker processes.
        row_fields: Keyword arguments that every item provides.

    Raises:
        RewardError: names the option, the expected type and the value.
    """
    keywords = _option_parameters(reward.function)
    for name in row_fields:
        if name not in keywords and not plugins.takes_any(reward.function):
            raise RewardError(f"reward {reward.name!r} has no option {name!r}; its options: {', '.join(keywords) or 'none'}")
    # A row field that the options set is an option like any other.
    from_rows = [name for name in row_fields if name not in options]
    _registry.check_options(reward, options, given=[*_response_and_answer(reward.function), *from_rows])
    # Options are sent to workers as JSON: reject others here, before a worker process starts.
    try:
        json.dumps(dict(options))
    except TypeError as error:
        raise RewardError(f"reward {reward.name!r}: options must be plain JSON values ({error})") from error
    if reward.check is not None:
        reward.check(options)


def required_fields(reward: Reward, options: Mapping[str, Any]) -> list[str]:
    """Keyword parameters without a default that ``options`` leave to the rows."""
    keywords = _option_parameters(reward.function)
    return [name for name, p in keywords.items() if p.default is p.empty and name not in options]


def row_arguments(reward: Reward, options: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments that ``row`` provides for one call: required fields, and ``row_fields`` that are present.

    Parameters set by the options are skipped. The alias ``*`` means the row itself.

    Raises:
        KeyError: a required field is missing in the row.
    """
    arguments = {name: row[name] for name in required_fields(reward, options)}
    for name, aliases in reward.row_fields.items():
        present = [alias for alias in aliases if row.get(alias) is not None]
        if name in options:
            continue
        if WHOLE_ROW in aliases:
            arguments[name] = dict(row)
        elif present:
            arguments[name] = row[present[0]]
    return arguments
