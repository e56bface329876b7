"""Test process: runs the tests, and requests from the program process whatever the program defines.

Invariants:

- No code of the program runs here. The program sends plain values, or indices of objects that stay in its process.
- The request decides which replies are valid; any other reply fails the program.
- Nothing that the tests use is taken from the program: a module or a name of the library is the real one.
- The program's objects never decide a test (program_objects.py); what would ask them to is a ProtocolViolation, which the
  tests cannot catch.
- The response is unscored if only the program could decide a test, and if the tests fail before their first request.
"""

import ast
import random
import re
import sys
import threading
import traceback
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from importlib.machinery import PathFinder
from typing import Any

from megatron_rl.graders.analysis.blind_spots import DOUBTS, shape_of
from megatron_rl.graders.analysis.library import library_value
from megatron_rl.graders.analysis.source import InvalidTests, Tests, infer_entry_point, prelude, read_tests
from megatron_rl.graders.sandbox.channel import FrameChannel
from megatron_rl.graders.sandbox.file_changes import FileChanges
from megatron_rl.graders.sandbox.program_objects import Handle, is_object
from megatron_rl.graders.sandbox.program_requests import (
    MAX_DETAIL,
    RUNS,
    TESTS_MODULE,
    ErrorType,
    ProgramRequests,
    describe_error,
)
from megatron_rl.graders.sandbox.side_record import SideRecord
from megatron_rl.graders.sandbox.test_functions import NeedsPytest, TestRun
from megatron_rl.graders.sandbox.values import record_classes

_HELD = {"num_passed": 1, "num_failed": 0, "detail": ""}
_CUT = "the program gave too few or too many for the zip that compares them"
_SPARE_REQUESTS = 100
"""Requests of a run without changes beyond twice those with them."""


class _Namespace(dict[str, Any]):
    """Namespace of the tests. Constants of the program are requested when the tests read them."""

    def __init__(self, requests: ProgramRequests, constants: frozenset[str]) -> None:
        super().__init__(__name__=TESTS_MODULE)
        self._requests, self._constants = requests, constants

    def __missing__(self, name: str) -> Any:
        if name in self._constants:
            return self._requests.ask("value", Handle(self._requests, ["name", name]))
        raise KeyError(name)


class _Imports(PathFinder):
    """Finds modules where they lay before the tests ran: the folders that tests add to ``sys.path`` may hold a program's modules."""

    places: list[str]

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> Any:
        return super().find_spec(fullname, cls.places if path is None else path, target)


class _Cases:
    """Context around each assert: counts asserts that held; with partial credit it counts and suppresses failures. An
    assert over an ``all`` or ``any`` of nothing has shown nothing."""

    def __init__(self, requests: ProgramRequests, partial: bool) -> None:
        self.num_passed = 0
        self.num_empty = 0
        self.failures: list[str] = []
        self.has_skipped = False
        """True if a test was not run, or had to fail."""
        self.is_over_nothing = self.was_over_nothing = False
        """True if one has gone over nothing since the last assert, and if the program gave nothing at that time."""
        self.gave_nothing = False
        self.doubt = ""
        """The reason why a comparison was not of everything."""
        self.reached: set[tuple[int, int]] = set()
        """Positions of the marked statements that were run."""
        self.reach = self.reached.add
        self.caught = ""
        """A failed assert: the tests have caught it if they go on."""
        self.record = SideRecord({})
        self.go_on = False
        """True if tests go on after a statement that fails."""
        self._has_failed, self._reached = False, set[str]()
        self._shapes: dict[tuple[int, ...], dict[bool, tuple[bool, list[int]]]] = defaultdict(dict)
        self._requests, self._partial, self._is_empty = requests, partial, False

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> bool:
        self.record.end_statement()
        is_empty, self._is_empty = self._is_empty, False
        if "nothing" in self._requests.given:
            self._requests.given.remove("nothing")
            self.gave_nothing = True
            self.was_over_nothing |= self.is_over_nothing
        self.is_over_nothing = False
        if error is None:
            self.num_empty += is_empty
            self.num_passed += not self._requests.fault and not is_empty
            return False
        if self._partial and self._requests.started and isinstance(error, Exception):
            self.failures.append(describe_error(error))
            return True
        self.caught = self.caught or describe_error(error)
        self._has_failed = True
        return self.go_on and isinstance(error, Exception)

    @contextmanager
    def statement(self, parts: dict[str, Callable[[], Any]]) -> Iterator[None]:
        """Context around a statement of the tests. If it fails, and tests go on, its ``parts`` are recorded that it has not reached."""
        self._has_failed, self._reached = False, set()
        try:
            yield
        except Exception:
            self._has_failed = self.go_on
            if not self.go_on:
                raise
        for place in parts.keys() - self._reached if self._has_failed else ():
            with suppress(Exception):
                parts[place]()
        self.record.end_statement()

    def side(self, place: str, value: Any) -> Any:
        """The value of a part of a comparison."""
        self._reached.add(place)
        self.record.add(place, value)
        return value

    def shape(self, site: tuple[int, int, bool], is_given: bool, value: Any) -> Any:
        """The value of a side of a comparison: what is given must have the shape of what is not, if that has several numbers."""
        shapes = self._shapes[site]
        shapes[is_given] = shape_of(value)
        if len(shapes) == 2:
            (is_array, given), (other, wanted) = shapes.pop(True), shapes.pop(False)
            if (is_array or other or site[2]) and wanted and given != wanted:
                self.doubt = "the program gave an array of another shape, which numpy spreads in comparisons"
        return value

    def type_of(self, value: Any) -> Any:
        """The built-in ``type`` of the tests, which have no class of an object of the program."""
        return value.__class__ if is_object(value) else type(value)

    def all(self, items: Iterable[Any]) -> bool:
        """The built-in ``all`` of the tests."""
        return not self.any(not item for item in items)

    def any(self, items: Iterable[Any]) -> bool:
        """The built-in ``any`` of the tests."""
        self._is_empty = True
        for item in items:
            self._is_empty = False
            if item:
                return True
        self.is_over_nothing |= self._is_empty
        return False

    def each(self, items: Iterable[Any], position: tuple[int, int], *expected: Any) -> Iterator[Any]:
        """The items of a loop with checks against the items of ``expected``."""
        size = 0
        for item in items:
            size += 1
            self.reach(position)
            yield item
        if self._requests.asks_for_nothing:
            self.reach(position)
        self.is_over_nothing |= not size
        if any(len(each) > size for each in expected if type(each) in (list, tuple, dict)):
            self.doubt = _CUT

    def next(self, items: Iterator[Any], *default: Any) -> Any:
        """The built-in ``next`` of the tests."""
        try:
            return next(items)
        except StopIteration:
            if not default:
                raise
        is_end = is_object(items) and type(default[0]) in (str, type(None)) and "nothing" not in self._requests.given
        self.is_over_nothing |= not is_end  # next(own, "end") asks whether the program's iterator has ended
        return default[0]

    def map(self, function: Callable[..., Any], *iterables: Iterable[Any]) -> Iterator[Any]:
        return (function(*values) for values in self.zip(*iterables))

    def zip(self, *iterables: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
        """The built-in ``zip`` of the tests, for iterables that should have one length; a range may be shorter."""
        sizes = [len(each) for each in iterables if hasattr(type(each), "__len__") and not is_object(each)]  # type: ignore[arg-type]
        ranges = [len(each) for each in iterables if type(each) is range]
        size = 0
        for values in zip(*iterables):  # noqa: B905 (as the tests do)
            size += 1
            yield values
        if max(sizes, default=0) > size and size not in ranges:
            self.doubt = _CUT


def _map(function: Callable[..., Any], *iterables: Iterable[Any]) -> Any:
    """The built-in ``map`` of the tests, as a generator: a StopIteration of ``function`` becomes a RuntimeError."""
    for values in zip(*iterables):  # noqa: B905 (as map does)
        yield function(*values)


def _filter(function: Callable[[Any], Any] | None, items: Iterable[Any]) -> Any:
    """The built-in ``filter`` of the tests, as a generator for the same reason as ``_map``."""
    return (item for item in items if (item if function is None else function(item)))


def judge(task: dict[str, Any], wire: FrameChannel, tell: Callable[[bytes], object]) -> dict[str, Any]:
    """Run the tests. The verdict is {"bad_tests": text} or {"num_passed", "num_failed", "detail"}, with a "record" if the tests have
    to run again: with the "record" of the first run in the task the sides of comparisons are recorded, and then compared (sides.py).

    Args:
        tell: See ProgramRequests.
    """
    random.seed(0)
    _Imports.places = list(sys.path)
    sys.meta_path[:] = [_Imports if finder is PathFinder else finder for finder in sys.meta_path]
    record: dict[str, Any] = task.get("record", {})
    is_first, earlier = not record, record.get("sides", [])
    requests = ProgramRequests(wire, tell, shares=RUNS[len(earlier) + bool(record)])
    requests.watch, requests.secret = FileChanges(requests.given, undoes=bool(earlier)), task["tests"]
    try:
        entry_point = task["entry_point"] or infer_entry_point(task["prompt_code"])
        source = {"setup": task["setup"], "prompt_code": task["prompt_code"], "entry_point": entry_point}
        tests = read_tests(task["tests"], **source, defined=task["defined"], records_sides=not is_first)
        tests.check(task["defined"])
    except InvalidTests as bad:
        return {"bad_tests": str(bad)}
    if tests.sides and tests.sides.are_fixed and not record["has_changed_results"]:
        return _HELD
    cases = _Cases(requests, task["partial"] and is_first)
    threading.excepthook = lambda failure: cases.failures.append(describe_error(failure.exc_value))
    error: BaseException | None = None
    try:
        namespace = _namespace(task, tests, entry_point, requests, cases)
        if not is_first:
            cases.record, cases.go_on = SideRecord(namespace), bool(earlier)
            requests.max_requests = record.get("max_requests", sys.maxsize)
        _run(tests, namespace, cases)
    except NeedsPytest as raised:
        error = requests.unscored(f"the tests need pytest, for {raised}")
    except BaseException as raised:
        error = raised
    if earlier and tests.sides:
        runs = [*earlier, cases.record.found]
        if len(runs) < len(RUNS) - 1:
            return _HELD | {"record": record | {"sides": runs}}
        doubt = tests.sides.doubt(*runs)
        return {"bad_tests": doubt} if doubt else _HELD
    return _verdict(task, tests, requests, cases, error)


def _run(tests: Tests, namespace: dict[str, Any], cases: _Cases) -> None:
    exec(tests.code, namespace)
    run = TestRun(namespace, tests.words)
    for name in tests.functions:
        with suppress(BaseException) if cases.go_on else nullcontext():
            run.run(name)
    cases.has_skipped = run.has_skipped


def _verdict(task: dict[str, Any], tests: Tests, requests: ProgramRequests, cases: _Cases, error: Any) -> dict[str, Any]:
    if not requests.started or requests.is_unscored:
        detail = requests.fault or (describe_error(error) if error else "the tests use nothing of the program")
        return {"bad_tests": detail[:MAX_DETAIL]}
    requests.aliases.look(requests.records)
    failures = _failures(tests, requests, cases, error)
    if failures and not requests.fault and (reason := _unlike_one_interpreter(task, tests, requests, error, failures[0])):
        return {"bad_tests": reason[:MAX_DETAIL]}
    num_passed = cases.num_passed if task["partial"] else 0
    num_failed = max(len(failures), tests.num_asserts - num_passed)
    verdict: dict[str, Any] = {"num_passed": num_passed, "num_failed": num_failed, "detail": failures[0][:MAX_DETAIL] if failures else ""}
    if failures and not num_passed:
        return verdict
    if doubt := _doubt(tests, requests) or ("" if failures else _unmade(tests, requests, cases)):
        return {"bad_tests": doubt}
    verdict |= {} if failures else {"num_passed": max(cases.num_passed, tests.num_asserts, 1), "num_failed": 0}
    return verdict if tests.sides and tests.sides.are_fixed else verdict | _to_repeat(task, requests, cases)


def _to_repeat(task: dict[str, Any], requests: ProgramRequests, cases: _Cases) -> dict[str, Any]:
    """The "record" for the next run of the tests, if there is one; the program has to make the same changes in the first two."""
    if "record" not in task and not requests.given & {"changes", "files"}:
        return {}
    if task.get("record", {}).get("changes", requests.changes) != requests.changes:
        return {"bad_tests": "the program changed other arguments when the tests ran again"}
    about: dict[str, Any] = {"changes": requests.changes}
    if "record" in task:
        about |= {"max_requests": 2 * requests.num_requests + _SPARE_REQUESTS, "sides": [cases.record.found]}
    return {"record": {**about, "has_changed_results": "results" in requests.given}}


def _failures(tests: Tests, requests: ProgramRequests, cases: _Cases, error: BaseException | None) -> list[str]:
    failures = list(cases.failures)
    if requests.fault or error is not None:
        failures.append(requests.fault or _located(error, tests))
    if failures:
        return failures
    if requests.raised and not tests.expect_errors:  # __getitem__ or getattr of the tests has hidden the exception
        return [requests.raised]
    if tests.num_asserts and not cases.num_passed and not cases.num_empty:
        return ["no assert was reached"]
    return []


def _unlike_one_interpreter(task: dict[str, Any], tests: Tests, requests: ProgramRequests, error: Any, failure: str) -> str:
    """The reason why tests that fail here may hold where they share the program's interpreter; "" if there is none."""
    if isinstance(error, AttributeError | KeyError) and "subclass" in requests.given:
        return f"{failure}; the program gave a container of its own class, whose attributes and defaults stay with it"
    if isinstance(error, AttributeError | TypeError) and tests.library:
        return f"{failure}; the tests use {min(tests.library)} without importing it"
    if "seed" in tests.words and task["draws"]:
        return f"{failure}; the tests seed random numbers that the program draws in another process"
    return ""


def _doubt(tests: Tests, requests: ProgramRequests) -> str:
    """The reason why comparisons are blind to what the program gave; "" if there is none."""
    return next((doubt for value, doubt in DOUBTS.items() if value in requests.given - tests.expected), "")


def _unmade(tests: Tests, requests: ProgramRequests, cases: _Cases) -> str:
    """The reason why tests that hold have not checked all results; "" if there is none."""
    if cases.caught:
        return f"the tests caught a failure of their own: {cases.caught}"[:MAX_DETAIL]
    gave_nothing = cases.gave_nothing or "nothing" in requests.given
    is_over_nothing = cases.was_over_nothing or (gave_nothing and cases.is_over_nothing)
    if (tests.num_asserts and not cases.num_passed) or is_over_nothing:
        return "the tests hold for all of nothing"
    if requests.raised and tests.hide_errors:  # which exception was expected is not known
        return f"the tests may have hidden {requests.raised}"
    if "empty array" in requests.given or (tests.use_arrays and gave_nothing):
        return "the program gave something empty, which arrays find equal to anything"
    if cases.has_skipped:
        return "a test was skipped, or was expected to fail"
    for owed in tests.owed:
        if (owed.under is None or owed.under in cases.reached) and not owed.marks & cases.reached:
            return f"a check was never made, and the program may have decided that: {tests.lines[min(owed.marks)[0] - 1].strip()!r:.80}"
    if requests.reads_prints and not requests.has_printed and re.search("readouterr|getvalue", "\n".join(tests.lines)):
        return "the tests read what the program prints, and it prints nothing"
    return cases.doubt


_READS_PRINTS = re.compile(r"\b(?:capsys|redirect_std(?:out|err)|std(?:out|err))\b")
"""Words of tests that read what the program prints."""


def _namespace(task: dict[str, Any], tests: Tests, entry_point: str, requests: ProgramRequests, cases: _Cases) -> dict[str, Any]:
    namespace = _Namespace(requests, tests.constants)
    namespace.update(__case__=cases, all=cases.all, any=cases.any, next=cases.next, map=_map, filter=_filter, eval=_evaluator(requests))
    for code in prelude(task["prompt_code"], entry_point):
        exec(code, namespace)
    exec(compile(task["setup"], "<setup>", "exec"), namespace)
    requests.records, requests.raising_lines = record_classes(namespace), tests.raising_lines
    requests.array_methods = frozenset(dir(sys.modules["numpy"].ndarray)) if tests.use_arrays and "numpy" in sys.modules else frozenset()
    requests.reads_prints = bool(_READS_PRINTS.search(task["tests"]))
    if "seed" in tests.words and task["draws"]:
        requests.random_states = _watch_seeds()
    namespace.update({name: Handle(requests, ["name", name]) for name in tests.names - tests.constants})
    namespace.update({name: library_value(name, is_module) for name, is_module in tests.library.items()})
    errors = {name: ErrorType(name, (Exception,), {"__module__": TESTS_MODULE}) for name in tests.errors}
    namespace.update(errors)
    shared = frozenset(namespace)

    def find_error(name: str) -> type | None:
        kind: Any = dict.get(namespace, name)
        is_own = type(kind) in (type, ErrorType) and issubclass(kind, Exception) and kind.__module__ == TESTS_MODULE
        if is_own and name not in shared | requests.thrown:
            raise requests.unscored(f"the program raises {name}, by which the tests steer themselves")
        return kind if is_own else None

    requests.find_error = find_error
    if "candidate" in tests.names and entry_point:
        namespace["candidate"] = Handle(requests, ["name", entry_point])
        if not entry_point.isidentifier():  # Solution().method
            exec(f"def candidate(*a, **k): return {entry_point}(*a, **k)", namespace)
    namespace["run_program"] = lambda text: _text(requests, requests.ask("main", text))
    solution = sys.modules["solution"] = types.ModuleType("solution")
    vars(solution).update(errors)
    vars(solution)["__getattr__"] = lambda name: _name_of_program(requests, name)  # for ``from solution import ...``
    return namespace


def _watch_seeds() -> Callable[[], tuple[Any, ...]]:
    """A function that gives how often the tests have seeded random numbers, and the states of those of the standard library and of
    numpy, if it is loaded."""
    of_numpy, num_seeds = sys.modules["numpy"].random if "numpy" in sys.modules else None, [0]

    def counted(seed: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            num_seeds[0] += 1
            return seed(*arguments, **keywords)

        return call

    def states() -> tuple[Any, ...]:
        if of_numpy is None:
            return num_seeds[0], random.getstate()
        kind, keys, *rest = of_numpy.get_state()
        return num_seeds[0], random.getstate(), (kind, tuple(keys.tolist()), *rest)

    for module in (random, *([of_numpy] if of_numpy else [])):
        module.seed = counted(module.seed)
    return states


def _name_of_program(requests: ProgramRequests, name: str) -> Handle:
    if name.startswith("__"):  # imports of other modules look at all modules
        raise AttributeError(name)
    handle = Handle(requests, ["name", name])
    return requests.ask("value", handle) if name.isupper() else handle  # a constant


def _text(requests: ProgramRequests, output: Any) -> str:
    if type(output) is not str:
        raise requests.failed("the program sent an invalid reply")
    return output


def _evaluator(requests: ProgramRequests) -> Callable[..., Any]:
    """The built-in ``eval`` of the tests, for literals and operators: no code of the program runs here, nor reads what is right."""

    def evaluate(source: Any, *_: Any) -> Any:
        tree = ast.parse(source.strip() if isinstance(source, str) else "code", mode="eval")
        if any(isinstance(node, ast.Name | ast.Attribute) for node in ast.walk(tree)):
            raise requests.unscored("the tests evaluate text that is more than literals and operators")
        return eval(compile(tree, "<text>", "eval"), {})

    return evaluate


def _located(error: BaseException | None, tests: Tests) -> str:
    """Description of the exception, with the line of the tests that raised it."""
    places = traceback.walk_tb(error.__traceback__ if error else None)
    line = max((number for frame, number in places if frame.f_code.co_filename == "<tests>"), default=0)
    source = tests.lines[line - 1].strip() if 0 < line <= len(tests.lines) else ""
    return describe_error(error) + (f" at {source!r}" if source else "")
