"""Requests of the test process to the program, and the program's objects as the tests see them.

Calls and attributes are requests to the program. Operators whose result the tests can check (length, text, items,
arithmetic) are requests only for an instance that the tests have made, by calling a name like ``Stack``. Every other use
(comparing, hashing, testing for truth, isinstance, ...) raises a violation, because the program would decide the test.
"""

import builtins
import io
import sys
import threading
import types
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from megatron_rl.graders.sandbox.channel import FrameChannel, PeerGone
from megatron_rl.graders.sandbox.program_process import describe, parameters_of
from megatron_rl.graders.sandbox.values import NotSerializable, asked_for, decode, dress, encode, snapshot

MAX_DETAIL = 300
TESTS_MODULE = "tests"
"""``__name__`` in the namespace of the tests."""
_MAX_LENT, _MAX_PARTS = 32, 256
"""How many of the last containers program and tests share, and of how many parts at most: each may change them."""


class ProtocolViolation(BaseException):
    """The program violated the protocol, or the tests need what it cannot prove. Not an Exception, so that tests cannot
    catch it."""


class ProgramRequests:
    """Sends requests to the program process and checks its replies; one request at a time, from any thread.

    Args:
        tell: Called with b"s" before the program starts, and with b"t" (once) when a thread must wait, because another
            thread's request is in progress.
    """

    def __init__(self, wire: FrameChannel, tell: Callable[[bytes], object]) -> None:
        self._wire, self._tell = wire, tell
        self._turn = threading.RLock()
        self._functions: list[Any] = []
        self._called: set[Any] = set()
        """Code of the functions that the program has called."""
        self._function_numbers: dict[tuple[Any, ...], int] = {}
        """Index in ``_functions`` by id."""
        self._handles: dict[int, Handle] = {}
        self._lent: deque[types.SimpleNamespace] = deque(maxlen=_MAX_LENT)
        """Containers that both sides have: number, container, content that the other side has, and is_own: made by the tests."""
        self._num_lent = 0
        self._begun: set[int] = set()
        """Ids of the program's iterators that have given an item; handles are kept, so an id stays one object's."""
        self.records: dict[str, type] = {}
        self.find_error: Callable[[str], type | None] = lambda name: None
        """The exception class of that name which the tests or the prompt define, or that the tests name."""
        self.started = self.has_waited = False
        self.fault = ""  # the first; tests cannot pass after it
        self.is_unscored = False  # True if the fault is not the program's
        self.raised = ""  # first exception of a call; attributes and operators may be missing
        self.thrown: set[str] = set()  # names of the exceptions that functions of the tests have raised into the program
        self.given: set[str] = set()
        """Values of the program that comparisons may be blind to: "nan", "inf", "nothing" (but for nothing), "empty array",
        "method", "narrow", "rounded" and the like (``decode``); and "changes" of arguments, of their "parts", and of "files"."""
        self.random_states: Callable[[], Any] = lambda: None
        """The states of random numbers that the tests seed, and that the program continues from."""
        self._sent_states: Any = None
        self.watch: AbstractContextManager[None] = nullcontext()  # around each request

    def failed(self, text: str) -> ProtocolViolation:
        self.fault = self.fault or text or "the program sent an invalid reply"
        return ProtocolViolation(text)

    def unscored(self, text: str) -> ProtocolViolation:
        self.is_unscored = self.is_unscored or not self.fault
        return self.failed(text)

    def ask(self, what: str, *values: Any) -> Any:
        """Send a request; returns a plain value or a Handle. An exception of the program is raised as a built-in
        exception, or as a class of ``find_error``."""
        if not self._turn.acquire(blocking=False):
            self.has_waited = self.has_waited or bool(self._tell(b"t"))  # once: nobody reads until the verdict
            self._turn.acquire()
        try:
            with self.watch:
                if what != "main" and (states := self.random_states()) != self._sent_states:
                    self._sent_states = states
                    self._ask("seed", states)
                return self._ask(what, values)
        finally:
            self._turn.release()

    def _ask(self, what: str, values: tuple[Any, ...]) -> Any:
        if self.fault:
            raise ProtocolViolation(self.fault)
        # Nobody can see a change of a container that only this list holds.
        lent = [each for each in self._lent if sys.getrefcount(each.container) > 2]
        self._lent = deque(lent, _MAX_LENT)
        known, contents = [each.container for each in lent], [each.content for each in lent]
        try:
            message, containers = encode(values, self._export, self.records, known, contents)
            first = not self.started
            self.started = True
            if first:
                self._tell(b"s")
            if first and what != "main":
                self._load()
            self._wire.send({**message, "do": what, "lent": [each.number for each in lent], "depth": sys.getrecursionlimit()})
        except NotSerializable as error:
            raise self.unscored(f"the tests give the program {error}") from None
        except PeerGone as gone:
            raise self.failed(str(gone)) from None
        _renew(lent, message["nodes"])
        before, is_for_nothing = self.given.copy(), asked_for(arguments := _arguments(values), 0)
        try:
            result = self._reply(what, lent, containers, arguments)
        except StopIteration:
            if id(values[0]) not in self._begun:
                self.given.add("nothing")
            raise
        if what == "next":
            self._begun.add(id(values[0]))
        if is_for_nothing:
            self.given -= {"nothing", "empty array"} - before
            self._begun.add(id(result))
        if "single" in self.given - before and asked_for(arguments, 1):
            self.given.remove("single")
        return result

    def _load(self) -> None:
        try:
            self.ask("load")
        except BaseException as error:  # a test must not mistake a load error for an expected exception
            raise self.failed(describe_error(error)) from None

    def _reply(self, what: str, lent: list[types.SimpleNamespace], containers: list[Any], arguments: list[Any]) -> Any:
        while True:
            try:
                reply = self._wire.receive()
            except PeerGone as gone:
                raise self.failed(str(gone)) from None
            if "fault" in reply:
                raise self.failed(str(reply["fault"])[:MAX_DETAIL])
            if "raise" in reply:
                error = self._rebuilt(reply)
                self.raised = self.raised or ("" if what in ("get", "operate") else describe_error(error))
                raise error
            if what == "next" and "end" in reply:
                raise StopIteration
            try:
                if "callback" not in reply:
                    return self._result(reply, lent, containers, arguments)
                (given, keywords), received = self._received(reply, [])
                if type(reply["callback"]) is not int or type(given) is not tuple or type(keywords) is not dict:
                    raise ValueError("not a call")
                function = self._functions[reply["callback"]]
            except (ValueError, TypeError, KeyError, IndexError):
                raise self.failed("the program sent an invalid reply") from None
            self._call_back(function, given, keywords, received)

    def _result(self, reply: dict[str, Any], lent: list[types.SimpleNamespace], known: list[Any], arguments: list[Any]) -> Any:
        (value,), containers = self._received(reply, known)
        _renew(lent, reply["nodes"])
        is_own = [each.is_own for each in lent] + [True] * (len(known) - len(lent)) + [False] * (len(containers) - len(known))
        changed = [each for each, own, node in zip(containers, is_own, reply["nodes"], strict=True) if own and node is not None]
        self.given |= {"changes" if any(each is argument for argument in arguments) else "parts" for each in changed}
        self._num_lent += len(containers) - len(lent)
        for number in range(max(len(lent), len(containers) - _MAX_LENT), len(containers)):
            container, content = containers[number], snapshot(containers[number])
            if (len(content) if type(content) is list else sum(map(len, content))) <= _MAX_PARTS:
                about = {"number": self._num_lent - len(containers) + number, "is_own": is_own[number]}
                self._lent.append(types.SimpleNamespace(container=container, content=content, **about))
        return value

    def _received(self, reply: dict[str, Any], known: list[Any]) -> tuple[list[Any], list[Any]]:
        """(values, containers) of a reply; ``known`` containers are updated in place."""
        self._has_new_object = False
        values, containers = decode(reply, self._import, self.records, known, self.given.add)
        fresh = [each for each, node in zip(containers, reply["nodes"], strict=True) if node is not None]
        if self._has_new_object and any(type(each) in self.records.values() for each in fresh):
            raise self.unscored("an instance of the prompt's class holds an object of the program")
        return values, containers

    def has_unused_checks(self) -> bool:
        """True if the program has never called a function with checks that the tests gave it."""
        codes = {code for function in self._functions if (code := getattr(function, "__code__", None))}
        return any(name == "__case__" or name.startswith("assert") for code in codes - self._called for name in code.co_names)

    def _call_back(self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], received: list[Any]) -> None:
        """Run a function of the tests that the program calls; ``received`` are the containers in its arguments."""
        self._called.add(getattr(function, "__code__", None))
        raised, before = self.raised, [snapshot(container) for container in received]
        try:
            result = function(*arguments, **keywords)
            answer = encode([result], self._export, self.records, received, before)[0]
        except AssertionError as error:
            raise self.failed(f"AssertionError: {error}") from None
        except NotSerializable as error:
            raise self.unscored(f"the tests give the program {error}") from None
        except Exception as error:
            self.raised = raised  # the program may handle it
            self.thrown |= {each.__name__ for each in type(error).__mro__}
            answer = {"raise": describe(error)}
        try:
            self._wire.send(answer)
        except (PeerGone, NotSerializable) as error:
            raise self.failed(str(error)) from None

    def _rebuilt(self, reply: dict[str, Any]) -> BaseException:
        """Closest built-in exception, with the arguments and attributes of the program's. Excludes exceptions that steer
        loops and generators, which could end tests early."""
        try:
            name, bases, text = reply["raise"]
            kinds = [getattr(builtins, base, None) for base in (name, *bases)]
            named = [found for base in dict.fromkeys(bases) if (found := self.find_error(base))]
            (arguments, attributes), _ = self._received(reply, []) if "values" in reply else (((str(text),), {}), [])
            if type(arguments) is not tuple or type(attributes) is not dict:
                raise ValueError("not an exception")
            attributes = {key: value for key, value in attributes.items() if not key.startswith("__")}
        except (TypeError, ValueError, KeyError, AttributeError):
            return self.failed("the program sent an invalid reply")
        text = str(text)[:1000]
        kind = next((each for each in kinds if isinstance(each, type) and issubclass(each, BaseException)), None)
        if kind is None or not issubclass(kind, Exception | SystemExit) or issubclass(kind, StopIteration | StopAsyncIteration):
            return self.failed(f"{name}: {text}"[:MAX_DETAIL])
        if issubclass(kind, BaseExceptionGroup):
            raise self.unscored("a group of exceptions stays with the program")
        if named:
            kind = types.new_class(name, (*named, kind), {}, lambda body: body.update(self._error_methods(text)))
        is_whole = not named and _text_of(kind, arguments) == text
        error = kind(*arguments) if is_whole else kind.__new__(kind, text)
        error.args = error.args if is_whole else arguments if named else (text,)
        vars(error).update(attributes)
        return error

    def _error_methods(self, text: str) -> dict[str, Any]:
        """Methods of an exception of the program's own class: its text, and no attribute that only its class has."""

        def attribute(_: Exception, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            raise self.unscored(f"the tests need the attribute {name} of an exception, which stays with the program")

        return {"__str__": lambda _: text, "__getattr__": attribute}

    def _export(self, value: Any) -> list[Any]:
        handle = value if isinstance(value, Handle) else getattr(value, "__dict__", {}).get("_handle")  # of a dressed value
        if isinstance(handle, Handle):
            return reference_of(handle)
        module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
        home = sys.modules.get(module) if isinstance(module, str) and module != TESTS_MODULE else None
        if home is not None and getattr(home, name, None) is value:
            return ["import", f"{module}:{name}"]
        is_stream = hasattr(type(value), "__next__") and not isinstance(value, io.IOBase)
        if is_stream or (callable(value) and not isinstance(value, type)):
            owner = getattr(value, "__self__", None)  # a bound method is a new object at each use
            key = (id(value),) if owner is None else (id(owner), name)
            number = self._function_numbers.setdefault(key, len(self._functions))
            if number == len(self._functions):
                self._functions.append(_Stream(value, self.given) if is_stream else value)
            return ["stream", number] if is_stream else ["callback", number, name, parameters_of(value)]
        raise NotSerializable(f"an object of class {type(value).__name__}")

    def _import(self, reference: list[Any]) -> Any:
        kind, number, *plain = reference
        if type(number) is not int or number < 0:
            raise ValueError("not a reference")
        if kind in ("callback", "stream"):
            function = self._functions[number]
            return function.items if type(function) is _Stream else function
        if kind not in ("object", "iterator"):
            raise ValueError("not a reference")
        if number not in self._handles:
            self._handles[number] = (Iterator if kind == "iterator" else Handle)(self, ["object", number])
        self._has_new_object |= not plain
        return dress(plain[0], self._handles[number]) if plain else self._handles[number]


def _arguments(values: tuple[Any, ...]) -> list[Any]:
    """Arguments of a call."""
    is_call = len(values) == 3 and type(values[1]) is type(values[2]) is tuple
    return [*values[1], *(value for _, value in values[2])] if is_call else []


def _renew(lent: list[types.SimpleNamespace], nodes: list[Any]) -> None:
    """Note the content of the containers that a message has changed."""
    for each, node in zip(lent, nodes, strict=False):
        if node is not None:
            each.content = snapshot(each.container)


class _Stream:
    """An iterator of the tests, which the program calls, and so changes."""

    def __init__(self, items: Any, given: set[str]) -> None:
        self.items, self._given = items, given

    def __call__(self) -> Any:
        self._given.add("changes")
        return next(self.items)


def _text_of(kind: type[BaseException], arguments: tuple[Any, ...]) -> str:
    try:
        return str(arguments[0]) if issubclass(kind, KeyError) and arguments else str(kind(*arguments))
    except Exception:  # arguments that the class does not accept
        return ""


def describe_error(error: BaseException | None) -> str:
    try:
        return f"{type(error).__name__}: {error}".rstrip(": ")
    except BaseException:
        return type(error).__name__


# -------------------------------------------------------------------------------------------------------- the program's objects


class Handle:
    __slots__ = ("_is_made", "_reference", "_requests")

    def __init__(self, requests: "ProgramRequests", reference: list[Any]) -> None:
        # object.__setattr__ bypasses __setattr__ below, which would send a request
        object.__setattr__(self, "_requests", requests)
        object.__setattr__(self, "_reference", reference)
        object.__setattr__(self, "_is_made", False)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        kind, name = reference_of(self)
        makes = kind == "name" and name.lstrip("_")[:1].isupper()
        result = _requests(self).ask("make" if makes else "call", self, arguments, tuple(keywords.items()))
        return _made(result) if makes else result

    def __getattr__(self, name: str) -> Any:
        if (name.startswith("__") and name not in ("__name__", "__doc__")) or name in _JUDGMENTS:
            raise _undecided(self, name)
        return _requests(self).ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        _requests(self).ask("set", self, name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """``isinstance`` reads this attribute if the handle's own type does not match."""
        raise _undecided(self, "class")

    def __exit__(self, kind: Any, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, AssertionError):
            raise _undecided(self, "exit")
        if kind is None:
            _operate(self, "exit", object, self)


class Iterator(Handle):
    """An iterator of the program; items are requested one at a time."""

    __slots__ = ()

    def __iter__(self) -> Any:
        return _operate(self, "iter", Iterator, self) if _is_made(self) else self

    def __len__(self) -> Any:
        if _is_made(self):
            return _operate(self, "len", int, self)
        raise TypeError("an iterator has no len()")  # list() calls len() and ignores this error

    def __next__(self) -> Any:
        return _requests(self).ask("next", self)


def is_object(value: Any) -> bool:
    """True for an object that stays with the program."""
    return type(value) in (Handle, Iterator)


def reference_of(handle: Handle) -> list[Any]:
    return object.__getattribute__(handle, "_reference")


def _requests(handle: Handle) -> ProgramRequests:
    return object.__getattribute__(handle, "_requests")


def _is_made(handle: Handle) -> bool:
    return object.__getattribute__(handle, "_is_made")


def _made(value: Any) -> Any:
    """``value``, marked as an instance of a class that the tests name."""
    if isinstance(value, Handle):
        object.__setattr__(value, "_is_made", True)
    return value


def _undecided(handle: Handle, name: str, *others: object) -> BaseException:
    """The violation of tests that need an answer of the object itself. A plain value is never equal to an object that a
    function has returned, so the program fails there."""
    name = name.strip("_")
    is_plain = name in ("eq", "ne") and all(type(other).__module__ == "builtins" for other in others)
    is_iterator = type(handle) is Iterator and name != "class"
    has_failed = (is_plain or is_iterator) and reference_of(handle)[0] == "object" and not _is_made(handle)
    violation = _requests(handle).failed if has_failed else _requests(handle).unscored
    return violation(f"the program gave an object where the tests need a plain value ({name})")


def _operate(handle: Handle, name: str, result: type, *operands: Any) -> Any:
    """The result of an operator, of the exact type ``result``; a Handle may be an Iterator, object is any type."""
    if not _is_made(handle):
        raise _undecided(handle, name)
    value = _requests(handle).ask("operate", name, *operands)
    if type(value) is not result and not (result in (object, Handle) and issubclass(type(value), result)):
        raise _undecided(handle, name)
    return _made(value) if result is Handle else value


def _operator(name: str, result: type, *, is_swapped: bool = False) -> Callable[..., Any]:
    def operate(handle: Handle, *others: Any) -> Any:
        return _operate(handle, name, result, *((*others, handle) if is_swapped else (handle, *others)))

    return operate


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(handle: Handle, *others: Any, **__: Any) -> Any:
        raise _undecided(handle, name, *others)

    return refuse


_JUDGMENTS = frozenset(
    "equals equal eq isequal is_equal almost_equal almost_equals allclose isclose identical compare issubset issuperset "
    "isdisjoint startswith endswith all any is_integer".split()
) | {name for name in dir(str) if name.startswith("is")}
"""Methods that judge a value, many of them of plain types: the program would judge itself."""
_REFUSED = (
    "eq ne lt le gt ge hash bool contains divmod rdivmod round trunc floor ceil index int float complex bytes dir aenter "
    "aexit await aiter anext instancecheck subclasscheck reduce_ex copy deepcopy fspath delattr array array_ufunc "
    "array_function next"
).split()
_OPERATORS: dict[str, type] = {
    "len": int, "str": str, "repr": str, "format": str, "iter": Iterator, "reversed": Iterator, "getitem": object,
    "setitem": type(None), "delitem": type(None), "enter": object, **dict.fromkeys("neg pos abs invert".split(), Handle),
}  # fmt: skip
"""Maps the operator to the type of its result. Arithmetic gives objects only: ``x - 4`` that gives 0 would decide a test."""


def _install() -> None:
    methods = {name: _refusal(name) for name in _REFUSED}
    methods |= {name: _operator(name, result) for name, result in _OPERATORS.items()}
    for name in "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split():
        function = f"{name}_" if name in ("and", "or") else name
        methods[name] = _operator(function, Handle)
        methods[f"i{name}"] = _operator(f"i{name}", Handle)
        methods[f"r{name}"] = _operator(function, Handle, is_swapped=True)
    for name, method in methods.items():
        setattr(Handle, f"__{name}__", method)


_install()
