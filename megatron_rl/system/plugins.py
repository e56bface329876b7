"""Plug-ins of a recipe: resolved by a registered name, an import path ``package.module:name`` or a file's ``path/file.py:name``.

A package that users may extend has a ``Registry``. Its decorator gives a function (or class) a name; an import path
also finds a function without a name. A plug-in gets those of the registry's ``inputs`` that it declares as parameters.
Its other parameters are options, which are checked here against its signature before a run starts. A parameter whose
default is a dataclass represents its fields: each field is an option (``arguments``).

Invariant: importing a registry imports no plug-in; looking up a name imports the modules of the registry's packages.
"""

import difflib
import inspect
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType, NoneType, UnionType
from typing import Any, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from megatron_rl.errors import UserError

Function = TypeVar("Function", bound=Callable[..., Any])


class PluginError(UserError, ValueError):
    """A plug-in cannot be found, or does not accept the given options."""


@dataclass(frozen=True)
class Plugin:
    """A registered plug-in; packages with more facts extend the class by fields with defaults."""

    name: str
    """Name in the recipe: the registered name, or the import path."""
    function: Callable[..., Any]


Entry = TypeVar("Entry", bound=Plugin)


class Registry(Generic[Entry]):
    """Plug-ins of one kind."""

    def __init__(
        self,
        kind: str,
        entry: type[Entry],
        *,
        packages: Sequence[str],
        options_key: str,
        inputs: Collection[str] = (),
        error: type[UserError] = PluginError,
    ):
        """Create an empty registry.

        Args:
            kind: Noun for messages, such as "reward".
            entry: Class of the entries, built from name, function and the decorator's facts.
            packages: Packages whose modules (not those of sub-packages) register plug-ins.
            options_key: Configuration key of the options, for messages.
            inputs: Parameters that any plug-in may declare and the caller provides.
            error: Class of the exceptions raised.
        """
        self.kind = kind
        self.inputs = tuple(inputs)
        self._entry = entry
        self._packages = list(packages)
        self._options_key = options_key
        self._error = error
        self._by_name: dict[str, Entry] = {}
        self._by_function: dict[Callable[..., Any], Entry] = {}

    def register(self, name: str = "", **facts: Any) -> Callable[[Function], Function]:
        """Decorator that makes a function available as ``name``; ``facts`` are additional fields of the entry.

        Without a name the function is still only found by its import path, but with its facts.
        """

        def add(function: Function) -> Function:
            path = path_of(function)
            known = self._by_name.get(name)
            if known is not None and path_of(known.function) != path:
                raise self._error(f"{self.kind} {name!r} is {path_of(known.function)} already; give {path} another name")
            self._by_function[function] = self._entry(name or path, function, **facts)
            if name:
                self._by_name[name] = self._by_function[function]
            return function

        return add

    def names(self) -> list[str]:
        """Names of all registered plug-ins, by module and registration order, independent of the order of imports."""
        while self._packages:
            package = self._packages.pop()
            for module in iter_modules(import_module(package).__path__):
                import_module(f"{package}.{module.name}")
        return sorted(self._by_name, key=lambda name: self._by_name[name].function.__module__)

    def summaries(self) -> dict[str, str]:
        """First line of each plug-in's docstring, for documentation."""
        return {n: (inspect.getdoc(self._by_name[n].function) or "").partition("\n")[0] for n in self.names()}

    def find(self, name: str) -> Entry:
        """Find a plug-in by a registered name or an import path.

        Raises:
            PluginError: (or the registry's own error) unknown name, or a module that cannot be imported or lacks the
            name.
        """
        if ":" in name:
            function = self._import(name)
            return self._by_function.get(function) or self._entry(name, function)
        names = self.names()
        if name not in names:
            raise self._error(
                f"unknown {self.kind} {name!r}: expected one of {', '.join(names)}, "
                f"or an import path package.module:name (or path/file.py:name){_suggestion(name, names)}"
            )
        return self._by_name[name]

    def bind(self, name: str, options: Mapping[str, Any] | None = None) -> Callable[..., Any]:
        """Return the plug-in with fixed options. Call it with all inputs by keyword; it gets the inputs that it declares."""
        plugin, options = self.find(name), dict(options or {})
        self.check_options(plugin, options)
        wanted = set(self.inputs).intersection(parameters(plugin.function))
        bound = arguments(plugin.function, options)

        def call(**inputs: Any) -> Any:
            return plugin.function(**{key: value for key, value in inputs.items() if key in wanted}, **bound)

        return call

    def check_options(self, plugin: Entry, options: Mapping[str, Any], *, given: Collection[str] = ()) -> None:
        """Reject options that are unknown, missing or of the wrong type.

        Args:
            given: Parameters that the caller sets in addition to ``inputs``.

        Raises:
            PluginError: (or the registry's own error) with the option, the expected type and the value.
        """
        what, given = f"{self.kind} {plugin.name!r}", {*self.inputs, *given}
        named = [name for name in parameters(plugin.function) if name not in given]
        for name in options:
            if name in given:
                raise self._error(f"{what}: {name} is set by the caller, it is not an option of {self._options_key}")
            if name not in named and not takes_any(plugin.function):
                raise self._error(
                    f"{what} has no option {name!r}; its options: {', '.join(named) or 'none'}{_suggestion(name, named)}"
                )
        missing = [name for name in required(plugin.function) if name not in given and name not in options]
        if missing:
            raise self._error(f"{what} needs {', '.join(missing)}; set it under {self._options_key}")
        for name, value in options.items():
            expected = _expected_instead(value, _hints(plugin.function).get(name, Any))
            if expected:
                raise self._error(f"{what}: option {name} must be {expected}, got {value!r}")

    def _import(self, path: str) -> Callable[..., Any]:
        module_name, _, qualified_name = path.partition(":")
        try:
            module = _load_file(module_name) if module_name.endswith(".py") else import_module(module_name)
        except Exception as error:  # importing runs foreign code, which may raise anything
            raise self._error(
                f"{self.kind} {path!r}: module {module_name!r} does not import ({type(error).__name__}: {error}); "
                "expected package.module:name with the module on PYTHONPATH, or path/file.py:name"
            ) from error
        value: Any = module
        for part in qualified_name.split("."):
            if not hasattr(value, part):
                own = [k for k, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__]
                raise self._error(
                    f"{self.kind} {path!r}: {module_name} has no {qualified_name!r}; it has {sorted(own)}"
                    f"{_suggestion(qualified_name, own)}"
                )
            value = getattr(value, part)
        if not callable(value):
            raise self._error(f"{self.kind} {path!r}: expected a plain function or a class, got {value!r}")
        return value


def _load_file(path: str) -> ModuleType:
    """Import a Python file. Its absolute path is the module's name, by which worker processes find the file again."""
    name = str(Path(path).resolve())
    if name not in sys.modules:
        spec = spec_from_file_location(name, name)
        assert spec is not None and spec.loader is not None, "Python loads every .py file"
        sys.modules[name] = module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def path_of(function: Callable[..., Any]) -> str:
    """Import path of a function."""
    return f"{function.__module__}:{function.__qualname__}"


@cache
def _signature(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    # Cached, because every update resolves its losses, and reading a signature is the most expensive part.
    return inspect.signature(function).parameters


@cache
def parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Parameters that can be passed by keyword, with the fields of dataclass defaults in place of their parameter."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    keywords = {}
    for name, parameter in _signature(function).items():
        group = parameter.default
        if is_dataclass(group):
            for own in fields(group):
                default = getattr(group, own.name)
                keywords[own.name] = inspect.Parameter(own.name, inspect.Parameter.KEYWORD_ONLY, default=default)
        elif parameter.kind in named:
            keywords[name] = parameter
    return keywords


def arguments(function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """``options`` as keyword arguments of ``function``, with fields of a dataclass parameter combined into one value."""
    keywords = dict(options)
    for name, parameter in _signature(function).items():
        group = parameter.default
        if is_dataclass(group) and not isinstance(group, type):
            own = {f.name: keywords.pop(f.name) for f in fields(group) if f.name in keywords}
            keywords[name] = replace(group, **own)
    return keywords


def required(function: Callable[..., Any]) -> list[str]:
    """Names of the ``parameters`` without a default."""
    return [name for name, p in parameters(function).items() if p.default is p.empty]


def takes_any(function: Callable[..., Any]) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in _signature(function).values())


@cache
def _hints(function: Callable[..., Any]) -> Mapping[str, Any]:
    groups = [type(p.default) for p in _signature(function).values() if is_dataclass(p.default)]
    try:
        hints = get_type_hints(function.__init__ if inspect.isclass(function) else function)
        for group in groups:
            hints.update(get_type_hints(group))
        return hints
    except NameError:  # annotations imported only for type checkers cannot be checked
        return {}


_TYPE_NAMES = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "a mapping",
    NoneType: "null",
}


def _expected_instead(value: Any, hint: Any) -> str:
    """Type that an annotation expects instead of ``value``; "" if the value fits or the type cannot occur in YAML."""
    if get_origin(hint) in (Union, UnionType):
        expected = [_expected_instead(value, part) for part in get_args(hint)]
        return "" if "" in expected else " or ".join(expected)
    if get_origin(hint) is Literal:
        return "" if value in get_args(hint) else f"one of {', '.join(map(repr, get_args(hint)))}"
    kind = get_origin(hint) or hint
    if kind not in _TYPE_NAMES:
        return ""
    fits = isinstance(value, (int, float) if kind is float else kind)
    # True is an int in Python, but a user who writes true does not mean 1.
    return "" if fits and (kind is bool or not isinstance(value, bool)) else _TYPE_NAMES[kind]


def _suggestion(name: str, names: Collection[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
