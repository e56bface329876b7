"""Rewards by name.

A reward is a function ``score(response: str, answer: str, **options) -> float | Score``. It is named either by its
registry entry (``math``) or by its import path (``package.module:function``). A plain one runs in a worker process, so
it must be importable there: a module-level function of a module other than ``__main__``. An ``async def`` one waits for
somebody else (a server) and runs in an event loop of this process.

Options are the function's keyword parameters. They are checked against its signature here, before a run starts. A
keyword parameter without a default that the options leave out is a row field: every item must bring it along. A reward
may name further row fields, which are passed on where a row has them (``row_arguments``).

Invariant: importing this module imports no reward; looking a name up imports only the small built-in ones.
"""

import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any, Literal, get_args, get_origin, get_type_hints

from megatron_rl.data.trajectory import Prompt, Score
from megatron_rl.errors import UserError

ScoreFunction = Callable[..., "float | Score | Awaitable[float | Score]"]
OptionsHook = Callable[[Mapping[str, Any]], "Awaitable[None] | None"]
Range = tuple[float, float]
PromptsHook = Callable[[Sequence[Prompt], Mapping[str, Any]], list[str]]
RangeOfOptions = Callable[[Mapping[str, Any]], "Range | None"]

WHOLE_ROW = "*"

_BUILTIN_MODULES = (
    "rules.math",
    "rules.format",
    "rules.choice",
    "rules.grounding",
    "rules.regex",
    "rules.code",
    "judges.reward_server",
    "judges.genrm",
    "judges.pairwise",
)
"""Modules of this package that register rewards."""


class RewardError(UserError, RuntimeError):
    """A reward that cannot be found, loaded or run."""


@dataclass(frozen=True)
class Reward:
    name: str
    function: ScoreFunction
    prepare: OptionsHook | None = None
    """Called once before the workers start: imports that would otherwise count towards the first item's deadline."""
    check: OptionsHook | None = None
    """Called with the options before a run starts, for what the signature cannot say; raises RewardError."""
    range: "Range | RangeOfOptions | None" = None
    """Smallest and largest value; None if nobody declared it. Rewards of one run must agree on it (hybrid.py)."""
    row_fields: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Parameters that a row may set: for each, the row's field names that mean it, the first one present counts."""
    answer_required: bool = True
    """False: a row may lack ``answer``; the reward gets ""."""
    check_prompts: "PromptsHook | None" = None
    """Called with all prompts of this reward and its options before a run starts; returns what is wrong, with places."""
    owns_processes: bool = False
    """It keeps helper processes between items and ends, within an item, what they start; workers leave them alone."""

    @property
    def is_async(self) -> bool:
        """Runs in an event loop (async_runner.py) instead of worker processes."""
        return inspect.iscoroutinefunction(self.function)

    def value_range(self, options: Mapping[str, Any]) -> "Range | None":
        return self.range(options) if callable(self.range) else self.range

    @property
    def path(self) -> str:
        """Where a worker finds the function."""
        return f"{self.function.__module__}:{self.function.__qualname__}"


_rewards: dict[str, Reward] = {}


def register(
    name: str,
    *,
    prepare: OptionsHook | None = None,
    check: OptionsHook | None = None,
    range: "Range | RangeOfOptions | None" = None,
    row_fields: Mapping[str, Sequence[str]] | None = None,
    answer_required: bool = True,
    check_prompts: "PromptsHook | None" = None,
    owns_processes: bool = False,
) -> Callable[[ScoreFunction], ScoreFunction]:
    """Decorator: make a score function available as ``name``."""

    def add(function: ScoreFunction) -> ScoreFunction:
        reward = Reward(
            name=name,
            function=function,
            prepare=prepare,
            check=check,
            range=range,
            row_fields=dict(row_fields or {}),
            answer_required=answer_required,
            check_prompts=check_prompts,
            owns_processes=owns_processes,
        )
        if name in _rewards and _rewards[name].path != reward.path:
            raise RewardError(f"reward {name!r} is {_rewards[name].path} already; give {reward.path} another name")
        _rewards[name] = reward
        return function

    return add


def available() -> list[str]:
    """Names of the registered rewards."""
    for module in _BUILTIN_MODULES:
        import_module(f"megatron_rl.rewards.{module}")
    return sorted(_rewards)


def resolve(name: str) -> Reward:
    """Find a reward by registry name or by import path ``package.module:function``.

    Raises:
        RewardError: unknown name, a module that does not import, or something that is not a score function.
    """
    reward = _resolve_path(name) if ":" in name else _resolve_name(name)
    _check_function(reward)
    return reward


def _resolve_name(name: str) -> Reward:
    names = available()
    if name not in names:
        raise RewardError(
            f"unknown reward {name!r}: expected one of {', '.join(names)}, or an import path package.module:function"
        )
    return _rewards[name]


def _resolve_path(path: str) -> Reward:
    module_name, _, function_name = path.partition(":")
    try:
        module = import_module(module_name)
    except Exception as error:  # importing runs foreign code, which may raise anything
        raise RewardError(
            f"reward {path!r}: module {module_name!r} does not import ({type(error).__name__}: {error}); "
            "expected package.module:function with the module on PYTHONPATH"
        ) from error
    function = module
    for part in function_name.split("."):
        if not hasattr(function, part):
            found = sorted(key for key, value in vars(module).items() if inspect.isfunction(value))
            raise RewardError(f"reward {path!r}: {module_name} has no {function_name!r}; its functions: {found}")
        function = getattr(function, part)
    for reward in _rewards.values():
        if reward.function is function:
            return reward
    return Reward(path, function)


def _check_function(reward: Reward) -> None:
    function = reward.function
    if (
        not inspect.isfunction(function)
        or inspect.isgeneratorfunction(function)
        or inspect.isasyncgenfunction(function)
    ):
        raise RewardError(f"reward {reward.name!r}: expected a plain function or an async one, got {function!r}")
    if function.__module__ == "__main__" or "<" in function.__qualname__:
        raise RewardError(
            f"reward {reward.name!r}: a worker process cannot import {reward.path}; "
            "define it at the top level of a module of its own"
        )
    try:
        inspect.signature(function).bind_partial("", "")
    except TypeError as error:
        raise RewardError(
            f"reward {reward.name!r}: expected score(response, answer, **options), "
            f"got {function.__name__}{inspect.signature(function)}"
        ) from error


@cache  # asked for once an item
def _option_parameters(function: ScoreFunction) -> tuple[dict[str, inspect.Parameter], bool]:
    """The keyword parameters after response and answer, and whether any other keyword is taken too."""
    parameters = list(inspect.signature(function).parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    fixed = {p.name for p in positional[:2]}
    keywords = {
        p.name: p for p in parameters if p.name not in fixed and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    return keywords, any(p.kind is p.VAR_KEYWORD for p in parameters)


def wall_limit_s(reward: Reward, options: Mapping[str, Any]) -> float | None:
    """After how many seconds the reward itself gives an item up; None for a reward without the option."""
    keywords, _ = _option_parameters(reward.function)
    if "wall_limit_s" not in keywords:
        return None
    return float(options.get("wall_limit_s", keywords["wall_limit_s"].default))


def check_options(reward: Reward, options: Mapping[str, Any], row_fields: Sequence[str] = ()) -> None:
    """Refuse options that the reward does not take, misses, or takes with another type.

    Args:
        options: Keyword arguments of every call; plain JSON values, since they travel to worker processes.
        row_fields: Keyword arguments that every item brings along.

    Raises:
        RewardError: naming the option, what was expected and what came.
    """
    keywords, takes_any = _option_parameters(reward.function)
    for name in [*options, *row_fields]:
        if name not in keywords and not takes_any:
            raise RewardError(
                f"reward {reward.name!r} has no option {name!r}; its options: {', '.join(keywords) or 'none'}"
            )
    missing = [name for name in required_fields(reward, options) if name not in row_fields]
    if missing:
        raise RewardError(f"reward {reward.name!r} needs {', '.join(missing)}; set it under reward.options")
    hints = get_type_hints(reward.function)
    for name, value in options.items():
        _check_type(reward, name, value, hints.get(name, Any))
    try:
        json.dumps(dict(options))
    except TypeError as error:
        raise RewardError(f"reward {reward.name!r}: options must be plain JSON values ({error})") from error
    if reward.check is not None:
        reward.check(options)


def required_fields(reward: Reward, options: Mapping[str, Any]) -> list[str]:
    """Keyword parameters without a default that ``options`` leave to the rows."""
    keywords, _ = _option_parameters(reward.function)
    return [name for name, p in keywords.items() if p.default is p.empty and name not in options]


def row_arguments(reward: Reward, options: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments that ``row`` brings for one call: the required ones, and those it has of ``row_fields``.

    What the options set is left alone. The alias ``*`` means the row itself.

    Raises:
        KeyError: a required field that the row lacks.
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


def _check_type(reward: Reward, name: str, value: Any, hint: Any) -> None:
    """Check what is cheap to check and often wrong: literals and the basic types."""
    if get_origin(hint) is Literal:
        valid, expected = value in get_args(hint), f"one of {', '.join(map(repr, get_args(hint)))}"
    elif hint is float:
        valid, expected = isinstance(value, (int, float)) and not isinstance(value, bool), "a number"
    elif hint is int:
        valid, expected = isinstance(value, int) and not isinstance(value, bool), "an integer"
    elif hint in (str, bool):
        valid, expected = isinstance(value, hint), f"a {hint.__name__}"
    else:
        return
    if not valid:
        raise RewardError(f"reward {reward.name!r}: option {name} must be {expected}, got {value!r}")
