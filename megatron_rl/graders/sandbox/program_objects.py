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
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from megatron_rl.graders.sandbox.channel import FrameChannel, PeerGone
from megatron_rl.graders.sandbox.values import NotSerializable, decode, encode

MAX_DETAIL = 300
TESTS_MODULE = "tests"
"""``__name__`` in the namespace of the tests."""
_MAX_DIMENSIONS = 64
"""Maximum number of dimensions of an array."""


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
        self._num_objects = 0
        self.records: dict[str, type] = {}
        self.errors: dict[str, type] = {}
        """Exception classes of the program that the tests name."""
        self.started = self.has_waited = False
        self.fault = ""
        """First fault; tests cannot pass after it."""
        self.is_unscored = False
        """True if the fault is not the program's."""
        self.raised = ""
        """First exception of a call; attributes and operators may be missing."""
        self.has_given_nothing = False
        """True if the program has given an empty list or array."""
        self.has_given_nan = False

    def failed(self, text: str) -> ProtocolViolation:
        self.fault = self.fault or text
        return ProtocolViolation(text)

    def unscored(self, text: str) -> ProtocolViolation:
        self.is_unscored = self.is_unscored or not self.fault
        return self.failed(text)

    def ask(self, what: str, *values: Any) -> Any:
        """Send a request; returns a plain value or a Handle. An exception of the program is raised as a built-in
        exception, or as a class of ``errors``."""
        if not self._turn.acquire(blocking=False):
            self.has_waited = self.has_waited or bool(self._tell(b"t"))  # once: nobody reads until the verdict
            self._turn.acquire()
        try:
            return self._ask(what, values)
        finally:
            self._turn.release()

    def _ask(self, what: str, values: tuple[Any, ...]) -> Any:
        if self.fault:
            raise ProtocolViolation(self.fault)
        try:
            message, containers = encode(values, self._export, self.records)
            first = not self.started
            self.started = True
            if first:
                self._tell(b"s")
            if first and what != "main":
                self._load()
            self._wire.send({**message, "do": what})
        except NotSerializable as error:
            raise self.unscored(f"the tests give the program {error}") from None
        except PeerGone as gone:
            raise self.failed(str(gone)) from None
        return self._reply(what, containers)

    def _load(self) -> None:
        try:
            self.ask("load")
        except BaseException as error:  # a test must not mistake a load error for an expected exception
            raise self.failed(describe_error(error)) from None

    def _reply(self, what: str, containers: list[Any]) -> Any:
        while True:
            try:
                reply = self._wire.receive()
            except PeerGone as gone:
                raise self.failed(str(gone)) from None
            if "fault" in reply:
                raise self.failed(str(reply["fault"])[:MAX_DETAIL])
            if "raise" in reply:
                error = self._rebuilt(reply["raise"])
                self.raised = self.raised or ("" if what in ("get", "operate") else describe_error(error))
                raise error
            if what == "next" and "end" in reply:
                raise StopIteration
            try:
                if "callback" not in reply:
                    changes = what in ("call", "make") and reply["values"] == [None]
                    return self._received(reply, containers if changes else [])
                arguments, keywords = self._received(reply, [])
                if type(reply["callback"]) is not int or type(arguments) is not tuple or type(keywords) is not dict:
                    raise ValueError("not a call")
                function = self._functions[reply["callback"]]
            except (ValueError, TypeError, KeyError, IndexError):
                raise self.failed("the program sent an invalid reply") from None
            self._call_back(function, arguments, keywords)

    def _received(self, reply: dict[str, Any], known: list[Any]) -> Any:
        """The value of a reply, or the two values of a call; ``known`` containers are updated in place."""
        known = known if len(reply["nodes"]) >= len(known) else []
        num_objects = self._num_objects
        values, containers = decode(reply, self._import, self.records, known)
        if self._num_objects > num_objects and any(type(each) in self.records.values() for each in containers):
            raise self.unscored("an instance of the prompt's class holds an object of the program")
        self.has_given_nan |= any(map(_has_nan, (*values, *containers)))
        self.has_given_nothing |= any(_is_empty(each) for each in (*values, *containers))
        return values if "callback" in reply else values[0]

    def _call_back(self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Run a function of the tests that the program calls."""
        raised = self.raised
        try:
            answer = encode([function(*arguments, **keywords)], self._export, self.records)[0]
        except AssertionError as error:
            raise self.failed(f"AssertionError: {error}") from None
        except NotSerializable as error:
            raise self.unscored(f"the tests give the program {error}") from None
        except Exception as error:
            self.raised = raised  # the program may handle it
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
            named = [self.errors[base] for base in dict.fromkeys(bases) if base in self.errors]
        except (TypeError, ValueError):
            return self.failed("the program sent an invalid reply")
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseException):
                if issubclass(kind, Exception | SystemExit) and not issubclass(
                    kind, StopIteration | StopAsyncIteration
                ):
                    try:
                        return (types.new_class(named[0].__name__, (*named, kind)) if named else kind)(str(text)[:1000])
                    except TypeError:  # UnicodeError and similar classes need more arguments
                        continue
                break
        return self.failed(f"{name}: {text}"[:MAX_DETAIL])

    def _export(self, value: Any) -> list[Any]:
        handle = (
            value if isinstance(value, Handle) else getattr(value, "__dict__", {}).get("_handle")
        )  # a dressed value
        if isinstance(handle, Handle):
            return reference_of(handle)
        module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
        home = sys.modules.get(module) if isinstance(module, str) and module != TESTS_MODULE else None
        if home is not None and getattr(home, name, None) is value:
            return ["import", f"{module}:{name}"]
        if hasattr(type(value), "__next__") and not isinstance(value, io.IOBase):
            self._functions.append(value.__next__)
            return ["stream", len(self._functions) - 1]
        if callable(value) and not isinstance(value, type):
            self._functions.append(value)
            return ["callback", len(self._functions) - 1]
        raise NotSerializable(f"an object of class {type(value).__name__}")

    def _import(self, reference: list[Any]) -> Any:
        kind, number, *plain = reference
        if type(number) is not int or number < 0:
            raise ValueError("not a reference")
        if kind == "callback":
            return self._functions[number]
        if kind not in ("object", "iterator"):
            raise ValueError("not a reference")
        handle = (Iterator if kind == "iterator" else Handle)(self, ["object", number])
        self._num_objects += not plain
        return dress(plain[0], handle) if plain else handle


def _has_nan(value: Any) -> bool:
    """True for nan, and for a list, tuple or array that contains nan."""
    if type(value) in (list, tuple):
        return any(type(part) is float and part != part for part in value)
    is_number = type(value) is float or (type(value).__module__ == "numpy" and value.dtype.kind in "fc")
    return is_number and bool((value != value) if type(value) is float else (value != value).any())


def _is_empty(value: Any, depth: int = 0) -> bool:
    """True for an empty array, and for a list or tuple that becomes one."""
    if type(value) in (list, tuple):
        return depth < _MAX_DIMENSIONS and all(_is_empty(part, depth + 1) for part in value)
    return type(value).__module__ == "numpy" and value.size == 0


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
        result = _requests(self).ask("make" if makes else "call", self, arguments, keywords)
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


# ------------------------------------------------------------------------------------- plain values of the program's types


def dress(plain: Any, handle: Handle) -> Any:
    """``plain`` with the further attributes that the program's subclass has; operators run here, on the plain value. A
    container that can change comes without."""
    if not isinstance(plain, int | float | str | bytes | tuple):
        return plain
    kind: Any = _dressed(type(plain))  # type: ignore[arg-type]
    dressed = kind._make(plain) if hasattr(plain, "_fields") else kind(plain)
    vars(dressed)["_handle"] = handle
    return dressed


@lru_cache(maxsize=256)
def _dressed(kind: Any) -> Any:
    return type(kind.__name__, (kind,), {"__getattr__": _attribute})


def _attribute(value: Any, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(vars(value)["_handle"], name)
