"""Runs the functions and classes of the tests as unittest and pytest do.

Of pytest: marks ``parametrize``, ``skip`` and ``xfail``, fixtures of one test, ``capsys``, ``tmp_path``, ``setup_module`` and
``setup_method``. Anything else of it is refused, because a test that nobody runs cannot fail.
"""

import inspect
import itertools
import unittest
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import GeneratorType, SimpleNamespace
from typing import Any

from megatron_rl.graders.sandbox.channel import taken, text_stream
from megatron_rl.graders.sandbox.program_objects import is_object

_MARKS = {"parametrize", "skip", "xfail"}
_REFUSED = {"setup_function", "setup_class", "setup"}


class NeedsPytest(Exception):
    """The tests need more of pytest than is here."""


class TestRun:
    """Runs tests one by one; ``has_skipped`` if unittest has skipped one, or one had to fail: the program may have decided that.

    Args:
        namespace: Namespace of the tests, in which they are defined.
        called: Names that the tests use themselves: functions that need arguments may be their helpers.
    """

    def __init__(self, namespace: Mapping[str, Any], called: frozenset[str]) -> None:
        self.has_skipped, self._num_folders = False, 0
        self._namespace, self._called = namespace, called
        self._fixtures: dict[str, Callable[..., Any]] = {"capsys": _capsys, "tmp_path": self._new_folder}
        self._used_by_all: list[str] = []
        for name, value in ((name, value) for name, value in namespace.items() if not is_object(value)):
            # Attributes of pytest from 8.4 on, and before.
            marker = getattr(value, "_fixture_function_marker", getattr(value, "_pytestfixturefunction", None))
            if callable(value) and marker is not None:
                if marker.params or marker.scope != "function":
                    raise NeedsPytest(f"fixture {name}")
                self._fixtures[marker.name or name] = getattr(value, "_fixture_function", getattr(value, "__wrapped__", value))
                self._used_by_all += [marker.name or name] * marker.autouse
        if refused := _REFUSED & namespace.keys():
            raise NeedsPytest(min(refused))
        namespace.get("setup_module", lambda: None)()

    def _new_folder(self) -> Path:
        """A new folder, with the same name in each run of the tests."""
        self._num_folders += 1
        folder = Path(f"folder{self._num_folders}").absolute()
        folder.mkdir()
        return folder

    def run(self, name: str) -> None:
        """Run a test function or all tests of a class."""
        tested = self._namespace.get(name)
        if tested is None:  # its definition was not reached
            self.has_skipped = True
        elif not isinstance(tested, type):
            self._run(tested, None, name)
        elif issubclass(tested, unittest.TestCase):
            result = unittest.TestResult()
            unittest.defaultTestLoader.loadTestsFromTestCase(tested).run(result)
            broken = [*result.failures, *result.errors]
            skipped = [test for test, _ in result.skipped if self._called & {"skipIf", "skipUnless"} or not _is_to_skip(test)]
            self.has_skipped |= bool(skipped or result.expectedFailures)
            if broken or result.unexpectedSuccesses:
                raise AssertionError(broken[0][1].strip().splitlines()[-1] if broken else "a test that should fail succeeded")
        else:
            if tested.__init__ is not object.__init__ or _REFUSED & {*dir(tested)} or hasattr(tested, "pytestmark"):
                raise NeedsPytest(name)
            for each in dir(tested):
                if each.startswith("test"):
                    self._run(getattr(tested, each), tested, name)

    def _run(self, test: Any, owner: type | None, name: str) -> None:
        marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name in _MARKS]
        if len(marks) != len(getattr(test, "pytestmark", [])):
            raise NeedsPytest(name)
        if any(mark.name != "parametrize" for mark in marks):
            return
        for values in _parameters([mark.args[:2] for mark in marks]):
            given, ends = dict(values), list[Iterator[Any]]()
            function = test if owner is None else getattr(owner(), test.__name__)
            if hasattr(owner, "setup_method"):
                self._call(function.__self__.setup_method, {"method": function}, ends)
            for each in self._used_by_all:
                self._call(self._fixtures[each], given, ends)
            if (missing := _required(function) - given.keys() - self._fixtures.keys()) or inspect.isgeneratorfunction(function):
                if name not in self._called:
                    raise NeedsPytest(f"{min(missing, default='yield')} of {name}")
            elif self._call(function, given, ends) is False:
                raise AssertionError("a test returned False")
            for end in reversed(ends):
                next(end, None)

    def _call(self, function: Callable[..., Any], given: dict[str, Any], ends: list[Iterator[Any]]) -> Any:
        """The result of a function with the values of its parameters; fixtures that yield are added to ``ends``."""
        names = [name for name in inspect.signature(function).parameters if name in given or name in self._fixtures]
        for name in names:
            if name not in given:
                given[name] = self._call(self._fixtures[name], given, ends)
        result = function(**{name: given[name] for name in names})
        if type(result) is GeneratorType and function in self._fixtures.values():
            ends.append(result)
            return next(result)
        return result


def _is_to_skip(test: unittest.TestCase) -> bool:
    """True for a test that is marked with unittest.skip, or whose class is."""
    method = getattr(test, test._testMethodName, None)
    return any(getattr(each, "__unittest_skip__", False) for each in (test, method))


def _required(function: Callable[..., Any]) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    return {each.name for each in parameters if each.default is each.empty and each.kind <= each.POSITIONAL_OR_KEYWORD}


def _parameters(marks: list[Any]) -> Iterator[dict[str, Any]]:
    """Arguments of each run of a test."""
    for rows in itertools.product(*(rows for _, rows in marks)):
        values: dict[str, Any] = {}
        for (names, _), row in zip(marks, rows, strict=True):
            words = names.replace(",", " ").split() if isinstance(names, str) else names
            parts = row.values if hasattr(row, "marks") else row if len(words) > 1 else [row]  # pytest.param(...)
            values |= dict(zip(words, parts, strict=True))
        yield values


_Captured = namedtuple("_Captured", "out err")


def _capsys() -> Iterator[SimpleNamespace]:
    """Fixture of pytest with what is printed."""
    streams = text_stream(), text_stream()
    with redirect_stdout(streams[0]), redirect_stderr(streams[1]):
        yield SimpleNamespace(readouterr=lambda: _Captured(*taken(streams)))
