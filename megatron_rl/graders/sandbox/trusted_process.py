"""Test process: runs the tests, and requests from the program process whatever the program defines.

Invariants:

- No code of the program runs here. The program sends plain values, or indices of objects that stay in its process.
- Objects of the program support only calls and attribute access. Any other use (comparing, counting, converting,
  testing for truth, ...) sends no request: it raises a Fault, which the tests cannot catch, and the program has failed.
- The program starts at the first request. Earlier failures are caused by the tests, later failures by the program, so
  no program can make itself unscored.
"""

import builtins
import random
import sys
import types
import unittest
from collections.abc import Callable
from types import FunctionType
from typing import Any

from megatron_rl.graders.sandbox.channel import FrameChannel, PeerGone
from megatron_rl.graders.sandbox.source import (
    InvalidTests,
    Tests,
    infer_entry_point,
    prelude,
    read_tests,
    record_classes,
)
from megatron_rl.graders.sandbox.values import NotSerializable, decode, encode

_MAX_DETAIL = 300
_TESTS_MODULE = "tests"
"""``__name__`` in the namespace of the tests."""


class ProtocolViolation(BaseException):
    """The program violated the protocol. Not an Exception, so that tests cannot catch it."""


class TrustedProcess:
    def __init__(self, wire: FrameChannel, on_start: Callable[[], object]) -> None:
        self._wire, self._on_start = wire, on_start
        self._functions: list[Any] = []
        self.records: dict[str, type] = {}
        self.started = False
        self.fault = ""
        """First fault; tests cannot pass after it."""

    def failed(self, text: str) -> ProtocolViolation:
        self.fault = self.fault or text
        return ProtocolViolation(text)

    def ask(self, what: str, *values: Any) -> Any:
        """Send a request; returns a plain value or a Handle. An exception of the program is raised as a built-in
        exception."""
        if self.fault:
            raise ProtocolViolation(self.fault)
        try:
            message, containers = encode(values, self._export, self.records)
            first = not self.started
            self.started = True
            if first:
                self._on_start()
            if first and what != "main":
                self._load()
            self._wire.send({**message, "do": what})
        except NotSerializable as error:
            # Before the first reply only the tests can be the cause.
            raise self.failed(f"the tests give the program {error}") from None
        except PeerGone as gone:
            raise self.failed(str(gone)) from None
        return self._answer(containers)

    def _load(self) -> None:
        try:
            self.ask("load")
        except BaseException as error:  # a test must not mistake a load error for an expected exception
            raise self.failed(_describe(error)) from None

    def _answer(self, containers: list[Any]) -> Any:
        while True:
            try:
                reply = self._wire.receive()
            except PeerGone as gone:
                raise self.failed(str(gone)) from None
            if "fault" in reply:
                raise self.failed(str(reply["fault"])[:_MAX_DETAIL])
            if "raise" in reply:
                raise self._rebuilt(reply["raise"])
            if "end" in reply:
                raise StopIteration
            try:
                if "callback" not in reply:
                    known = containers if len(reply["nodes"]) >= len(containers) and reply["values"] == [None] else ()
                    return decode(reply, self._import, self.records, known)[0][0]
                (arguments, keywords), _ = decode(reply, self._import, self.records)
                if type(reply["callback"]) is not int or type(arguments) is not tuple or type(keywords) is not dict:
                    raise ValueError("not a call")
                function = self._functions[reply["callback"]]
            except (ValueError, TypeError, KeyError, IndexError):
                raise self.failed("the program sent an invalid reply") from None
            self._call_back(function, arguments, keywords)

    def _call_back(self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Run a function of the tests that the program calls."""
        try:
            answer = encode([function(*arguments, **keywords)], self._export, self.records)[0]
        except AssertionError as error:
            raise self.failed(f"AssertionError: {error}") from None
        except NotSerializable as error:
            raise self.failed(f"the tests give the program {error}") from None
        except Exception as error:
            answer = {
                "raise": [type(error).__name__, [kind.__name__ for kind in type(error).__mro__], str(error)[:1000]]
            }
        try:
            self._wire.send(answer)
        except (PeerGone, NotSerializable) as error:
            raise self.failed(str(error)) from None

    def _rebuilt(self, description: Any) -> BaseException:
        """Closest built-in exception. Excludes exceptions that steer loops and generators, which could end tests early."""
        try:
            name, bases, text = description
            kinds = [getattr(builtins, base, None) for base in (name, *bases)]
        except (TypeError, ValueError):
            return self.failed("the program sent an invalid reply")
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseException):
                if issubclass(kind, Exception | SystemExit) and not issubclass(
                    kind, StopIteration | StopAsyncIteration
                ):
                    try:
                        return kind(str(text)[:1000])
                    except TypeError:  # UnicodeError and similar classes need more arguments
                        continue
                break
        return self.failed(f"{name}: {text}"[:_MAX_DETAIL])

    def _export(self, value: Any) -> list[Any]:
        if isinstance(value, _Object):
            return object.__getattribute__(value, "_reference")
        if type(value) is FunctionType and value.__module__ == _TESTS_MODULE:
            self._functions.append(value)
            return ["callback", len(self._functions) - 1]
        module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
        home = sys.modules.get(module) if isinstance(module, str) and module != _TESTS_MODULE else None
        if home is not None and getattr(home, name, None) is value:
            return ["import", f"{module}:{name}"]
        raise NotSerializable(f"an object of class {type(value).__name__}")

    def _import(self, reference: list[Any]) -> Any:
        kind, number = reference
        if type(number) is not int or number < 0:
            raise ValueError("not a reference")
        if kind == "callback":
            return self._functions[number]
        if kind not in ("object", "iterator"):
            raise ValueError("not a reference")
        return (Iterator if kind == "iterator" else Handle)(self, ["object", number])


class _Object:
    """An object of the program, as seen by the tests: supports calls and attribute access."""

    __slots__ = ("_referee", "_reference")

    def __init__(self, referee: TrustedProcess, reference: list[Any]) -> None:
        object.__setattr__(self, "_referee", referee)  # bypasses __setattr__ below, which would send a request
        object.__setattr__(self, "_reference", reference)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return object.__getattribute__(self, "_referee").ask("call", self, arguments, keywords)

    def __getattr__(self, name: str) -> Any:
        if (name.startswith("__") and name not in ("__name__", "__doc__")) or name in _COMPARISONS:
            raise _fault(self, name)
        return object.__getattribute__(self, "_referee").ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__getattribute__(self, "_referee").ask("set", self, name, value)


class Handle(_Object):
    __slots__ = ()


class Iterator(_Object):
    """An iterator of the program; items are requested one at a time."""

    __slots__ = ()

    def __iter__(self) -> "Iterator":
        return self

    def __next__(self) -> Any:
        return object.__getattribute__(self, "_referee").ask("next", self)


def _fault(handle: _Object, name: str) -> ProtocolViolation:
    return object.__getattribute__(handle, "_referee").failed(
        f"the program gave an object where the tests need a plain value ({name.strip('_')})"
    )


def _refuse(name: str) -> Any:
    def refuse(handle: _Object, *_: Any, **__: Any) -> Any:
        raise _fault(handle, name)

    return refuse


_COMPARISONS = frozenset(
    "equals equal eq isequal is_equal almost_equal almost_equals allclose isclose identical compare issubset issuperset "
    "isdisjoint".split()
)
"""Methods that compare an object with an expected value: the program would judge itself."""
_BINARY = "add sub mul truediv floordiv mod divmod pow matmul and or xor lshift rshift".split()
_REFUSED = (
    "eq ne lt le gt ge hash bool reversed contains getitem setitem delitem neg pos abs invert round trunc floor ceil index int "
    "float complex str repr bytes format dir enter exit aenter aexit await aiter anext instancecheck subclasscheck reduce_ex "
    "copy deepcopy fspath delattr array array_ufunc array_function"
).split() + [prefix + name for prefix in ("", "r", "i") for name in _BINARY]
for _name in _REFUSED:
    setattr(_Object, f"__{_name}__", _refuse(_name))
for _name in ("len", "iter", "next"):
    setattr(Handle, f"__{_name}__", _refuse(_name))


# -------------------------------------------------------------------------------------------------------------- tests


class _Namespace(dict[str, Any]):
    """Namespace of the tests. Constants of the program are requested when the tests read them."""

    def __init__(self, referee: TrustedProcess, constants: frozenset[str]) -> None:
        super().__init__(__name__=_TESTS_MODULE)
        self._referee, self._constants = referee, constants

    def __missing__(self, name: str) -> Any:
        if name in self._constants:
            return self._referee.ask("value", Handle(self._referee, ["name", name]))
        raise KeyError(name)


class _Cases:
    """Context around each assert: counts asserts that held; with partial credit it counts and suppresses failures."""

    def __init__(self, referee: TrustedProcess, partial: bool) -> None:
        self.num_passed = 0
        self.failures: list[str] = []
        self._referee, self._partial = referee, partial

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> bool:
        if error is None:
            self.num_passed += not self._referee.fault
            return False
        if self._partial and self._referee.started and isinstance(error, Exception):
            self.failures.append(_describe(error))
            return True
        return False


def judge(task: dict[str, Any], wire: FrameChannel, on_start: Callable[[], object]) -> dict[str, Any]:
    """Run the tests; ``on_start`` is called before the program starts.

    The verdict is {"bad_tests": text} or {"num_passed", "num_failed", "detail"}.
    """
    random.seed(0)
    referee = TrustedProcess(wire, on_start)
    try:
        entry_point = task["entry_point"] or infer_entry_point(task["prompt_code"])
        tests = read_tests(task["tests"], setup=task["setup"], prompt_code=task["prompt_code"], entry_point=entry_point)
    except InvalidTests as bad:
        return {"bad_tests": str(bad)}
    cases = _Cases(referee, task["partial"])
    error: BaseException | None = None
    try:
        namespace = _namespace(task, tests, entry_point, referee)
        namespace["__case__"] = cases
        exec(tests.code, namespace)
        for name in tests.functions:
            _run_function(namespace[name])
    except BaseException as raised:
        error = raised
    if not referee.started:
        detail = referee.fault or (_describe(error) if error else "the tests use nothing of the program")
        return {"bad_tests": detail[:_MAX_DETAIL]}
    failures = list(cases.failures)
    if error is not None or referee.fault:
        failures.append(referee.fault or _located(error, tests))
    elif not failures and tests.num_asserts and not cases.num_passed:
        failures.append("no assert was reached")
    if not failures:
        return {"num_passed": max(cases.num_passed, tests.num_asserts, 1), "num_failed": 0, "detail": ""}
    num_passed = cases.num_passed if task["partial"] else 0
    num_failed = max(len(failures), tests.num_asserts - num_passed)
    return {"num_passed": num_passed, "num_failed": num_failed, "detail": failures[0][:_MAX_DETAIL]}


def _namespace(task: dict[str, Any], tests: Tests, entry_point: str, referee: TrustedProcess) -> dict[str, Any]:
    namespace = _Namespace(referee, tests.constants)
    for code in prelude(task["prompt_code"], entry_point):
        exec(code, namespace)
    exec(compile(task["setup"], "<setup>", "exec"), namespace)
    referee.records = record_classes(namespace)
    namespace.update({name: Handle(referee, ["name", name]) for name in tests.names - tests.constants})
    if "candidate" in tests.names and entry_point:
        namespace["candidate"] = Handle(referee, ["name", entry_point])
        if not entry_point.isidentifier():  # Solution().method
            exec(f"def candidate(*a, **k): return {entry_point}(*a, **k)", namespace)
    namespace["run_program"] = lambda text: referee.ask("main", text)
    solution = sys.modules["solution"] = types.ModuleType("solution")
    vars(solution)["__getattr__"] = lambda name: Handle(referee, ["name", name])  # for ``from solution import ...``
    return namespace


def _run_function(function: Any) -> None:
    if not isinstance(function, type):
        function()
        return
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(function).run(result)
    broken = [*result.failures, *result.errors]
    if broken or result.unexpectedSuccesses or not result.testsRun:
        raise AssertionError(broken[0][1].strip().splitlines()[-1] if broken else "no test succeeded")


def _located(error: BaseException | None, tests: Tests) -> str:
    """Description of the exception, with the line of the tests that raised it."""
    line, traceback = 0, error.__traceback__ if error else None
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == "<tests>":
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    source = tests.lines[line - 1].strip() if 0 < line <= len(tests.lines) else ""
    return _describe(error) + (f" at {source!r}" if source else "")


def _describe(error: BaseException | None) -> str:
    try:
        return f"{type(error).__name__}: {error}".rstrip(": ")
    except BaseException:
        return type(error).__name__
