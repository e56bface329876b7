"""Environments by name: a registered one (``pag``) or an import path (``package.module:Class``).

Modules of this package are searched for environments. Invariants: importing this module imports no environment; an
unknown name or option is refused before a run starts.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from megatron_rl.environments.base import Environment, EnvironmentFault
from megatron_rl.system import plugins

_registry = plugins.Registry(
    "environment",
    plugins.Plugin,
    packages=["megatron_rl.environments"],
    options_key="environment.options",
    error=EnvironmentFault,
)
register = _registry.register
"""Decorator ``register(name)`` of a subclass of Environment."""


def available() -> list[str]:
    """Names of the registered environments."""
    return sorted(_registry.names())


def build(name: str, options: Mapping[str, Any]) -> Environment:
    """The environment, ready to use.

    Raises:
        EnvironmentFault: unknown name, a module that does not import, a class that is not an Environment, or options
            that are unknown to its constructor, missing, or of the wrong type or value.
    """
    kind = resolve(name)
    _registry.check_options(plugins.Plugin(name, kind), options)
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
    """The environment class with this name or import path.

    Raises:
        EnvironmentFault: unknown name, or a class that is not a complete subclass of Environment.
    """
    kind = _registry.find(name).function
    if not inspect.isclass(kind) or not issubclass(kind, Environment):
        raise EnvironmentFault(f"environment {name!r}: expected a subclass of Environment, got {kind!r}")
    if inspect.isabstract(kind):
        raise EnvironmentFault(
            f"environment {name!r}: {kind.__name__} lacks the methods {sorted(kind.__abstractmethods__)}"
        )
    return kind
