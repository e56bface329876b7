"""Environments by name: a registry entry (``pag``) or an import path (``package.module:Class``).

Invariant: importing this module imports no environment; an unknown name or option is refused before a run starts.
"""

import inspect
from collections.abc import Mapping
from importlib import import_module
from typing import Any, get_type_hints

from megatron_rl.environments.base import Environment, EnvironmentFault

_BUILTIN = {
    "calculator": "megatron_rl.environments.calculator:Calculator",
    "pag": "megatron_rl.environments.pag:Pag",
}


def available() -> list[str]:
    return sorted(_BUILTIN)


def build(name: str, options: Mapping[str, Any]) -> Environment:
    """The environment, ready to use.

    Raises:
        EnvironmentFault: unknown name, a module that does not import, a class that is none, or options that its
            constructor does not take, misses, or takes with another type or value.
    """
    kind = resolve(name)
    _check_options(name, kind, options)
    try:
        environment = kind(**options)
    except (TypeError, ValueError) as error:
        raise EnvironmentFault(f"environment {name!r}: {error}; correct environment.options") from error
    if not environment.roles or environment.first_role() not in environment.roles:
        raise EnvironmentFault(
            f"environment {name!r}: expected first_role() to be one of its roles {environment.roles}, "
            f"got {environment.first_role()!r}"
        )
    return environment


def resolve(name: str) -> type[Environment]:
    """The class behind a name. Raises EnvironmentFault."""
    path = name if ":" in name else _BUILTIN.get(name)
    if path is None:
        raise EnvironmentFault(
            f"unknown environment {name!r}: expected one of {', '.join(available())}, "
            "or an import path package.module:Class"
        )
    module_name, _, class_name = path.partition(":")
    try:
        module = import_module(module_name)
    except Exception as error:  # importing runs foreign code, which may raise anything
        raise EnvironmentFault(
            f"environment {name!r}: module {module_name!r} does not import ({type(error).__name__}: {error}); "
            "expected package.module:Class with the module on PYTHONPATH"
        ) from error
    kind = vars(module).get(class_name)
    if not inspect.isclass(kind) or not issubclass(kind, Environment):
        found = sorted(
            key for key, value in vars(module).items() if inspect.isclass(value) and issubclass(value, Environment)
        )
        raise EnvironmentFault(
            f"environment {name!r}: {module_name} has no subclass of Environment named {class_name!r}; it has {found}"
        )
    if inspect.isabstract(kind):
        raise EnvironmentFault(
            f"environment {name!r}: {class_name} lacks the methods {sorted(kind.__abstractmethods__)}"
        )
    return kind


def _check_options(name: str, kind: type[Environment], options: Mapping[str, Any]) -> None:
    parameters = inspect.signature(kind).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = {n: p for n, p in parameters.items() if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    for option in options:
        if option not in named and not takes_any:
            raise EnvironmentFault(
                f"environment {name!r} has no option {option!r}; its options: {', '.join(named) or 'none'}"
            )
    missing = [n for n, p in named.items() if p.default is p.empty and n not in options]
    if missing:
        raise EnvironmentFault(f"environment {name!r} needs {', '.join(missing)}; set it under environment.options")
    hints = get_type_hints(kind.__init__)
    for option, value in options.items():
        _check_type(name, option, value, hints.get(option))


_EXPECTED = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}


def _check_type(name: str, option: str, value: Any, hint: Any) -> None:
    """The basic types, which a YAML file gets wrong most often."""
    if hint not in _EXPECTED:
        return
    accepted = (int, float) if hint is float else hint
    if not isinstance(value, accepted) or (hint is not bool and isinstance(value, bool)):
        raise EnvironmentFault(f"environment {name!r}: option {option} must be {_EXPECTED[hint]}, got {value!r}")
