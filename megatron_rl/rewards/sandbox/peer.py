"""The conversation of a referee, which runs tests, with a player, which runs the tested code, over one socket.

The tests never share an interpreter with the tested code: a function of it is a ``Remote`` in the referee. Calling one
sends the arguments and waits for the result; results of plain types arrive as values (sandbox_values.py), all other
objects stay in the player and are ``Remote`` too. What a call changes in its arguments comes back with the result.
Functions that the tests pass to the tested code are called back.

Invariants: whatever the player sends, nothing of it runs in the referee. A plain value is compared in the referee, by its
own types; an object of the player equals a plain value only through the plain value that it holds.

Who waits for whom: each side waits for the other's reply, serving the other's requests meanwhile; the sandbox's
deadline ends both.
"""

import builtins
import copy
import importlib
import operator
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

from megatron_rl.rewards.sandbox.values import Unsendable, decode, encode, plain_base, read_text, write_text

MAX_FRAME_BYTES = 1 << 24
_TESTS_MODULE = "tests"
"""``__name__`` in the tests' namespace."""
_HEADER = struct.Struct("!I")

Message = dict[str, Any]


class Gone(BaseException):
    """The other side has ended, or does not keep to the protocol. Not an Exception: tests must not catch it."""


class _RemoteError(Exception):
    """An exception of a class that only the player knows."""


class _Peer:
    """One end of the conversation. Subclasses say what a request does and how references are made."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._stream = connection.makefile("rb")

    def send(self, message: Message) -> None:
        body = write_text(message)
        if len(body) > MAX_FRAME_BYTES:
            raise Unsendable(f"a value of more than {MAX_FRAME_BYTES >> 20} MB")
        try:
            self._connection.sendall(_HEADER.pack(len(body)) + body)
        except OSError as error:
            raise Gone("the program ended") from error

    def receive(self) -> Message:
        try:
            header = self._stream.read(_HEADER.size)
            length = _HEADER.unpack(header)[0] if len(header) == _HEADER.size else None
            body = self._stream.read(length) if length is not None and length <= MAX_FRAME_BYTES else None
        except OSError as error:
            raise Gone("the program ended") from error
        if length is None or (body is not None and len(body) < length):
            raise Gone("the program ended")
        if body is None:
            raise Gone("the program sent something that is no answer")
        try:
            message = read_text(body)
        except ValueError as error:
            raise Gone("the program sent something that is no answer") from error
        if not isinstance(message, dict):
            raise Gone("the program sent something that is no answer")
        return message

    def ask(self, request: Message) -> Message:
        """The reply to a request; requests of the other side are answered while waiting."""
        self.send(request)
        while True:
            message = self.receive()
            if "do" not in message:
                return message
            self.send_answer(message)

    def send_answer(self, request: Message) -> None:
        try:
            answer = self.answer(request)
            self.send(answer)
        except Unsendable as error:
            self.send({"raise": ["ValueError", [], f"cannot return {error}"]})

    def answer(self, request: Message) -> Message:
        raise NotImplementedError


# ------------------------------------------------------------------------------------------------------------- player


def describe_exception(error: BaseException) -> list[Any]:
    """[name of the class, names of its built-in bases, text]."""
    bases = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
    try:
        text = str(error)[:1000]
    except BaseException:  # the program's own __str__
        text = ""
    return [type(error).__name__[:200], bases, text]


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    *positional, keywords = arguments
    return function(*positional, **keywords)


def _convert(kind: type) -> Callable[[Any], Any]:
    return lambda value: kind(value)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": _call,
    "self": lambda value: value,
    "plain": plain_base,
    "getattr": lambda value, name: getattr(value, name),
    "setattr": lambda value, name, new: setattr(value, name, new),
    "isinstance": lambda kind, value: isinstance(value, kind),
    "format": format,
    "iter": lambda value: list(value) if hasattr(type(value), "__len__") else iter(value),
    "next": next,
    "round": round,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    **{name: _convert(kind) for name, kind in (("str", str), ("bool", bool), ("int", int), ("float", float))},
    **{function.__name__: function for function in (len, repr, hash, abs, dir, reversed)},
    **{
        name: getattr(operator, name)
        for name in (
            "getitem setitem delitem contains eq ne lt le gt ge neg pos invert add sub mul truediv floordiv mod pow "
            "matmul and_ or_ xor lshift rshift index"
        ).split()
    },
}


class Player(_Peer):
    """Answers with the tested code's namespace."""

    def __init__(self, connection: socket.socket, namespace: dict[str, Any]) -> None:
        super().__init__(connection)
        self._namespace = namespace
        self._objects: list[Any] = []

    def serve(self) -> None:
        while True:
            self.send_answer(self.receive())

    def answer(self, request: Message) -> Message:
        try:
            arguments = [decode(argument, self._import) for argument in request["arguments"]]
            value = _OPERATIONS[request["do"]](*arguments)
            reply: Message = {"value": encode(value, self._export)}
            changed = [
                [index, after]
                for index, argument in enumerate(request["arguments"])
                if isinstance(argument, list) and argument[0] in _MUTABLE
                if (after := encode(arguments[index], self._export)) != argument
            ]
            return {**reply, "changed": changed} if changed else reply
        except Gone:
            raise
        except BaseException as error:  # SystemExit too: the tests decide what an exception means
            return {"raise": describe_exception(error)}

    def _export(self, value: Any) -> list[Any]:
        if isinstance(value, _Callback):
            return ["callback", value.id]
        self._objects.append(value)
        return ["object", len(self._objects) - 1, type(value).__name__]

    def _import(self, reference: list[Any]) -> Any:
        kind, key = reference
        if kind == "import":  # of the standard library: the referee imports nothing else
            module, _, name = key.partition(":")
            return getattr(importlib.import_module(module), name)
        if kind == "callback":
            return _Callback(self, key)
        if kind == "object":
            return self._objects[key]
        if key not in self._namespace:
            raise NameError(f"name {key!r} is not defined")
        return self._namespace[key]


class _Callback:
    """A function of the tests, as the tested code sees it."""

    def __init__(self, player: Player, key: int) -> None:
        self._player = player
        self.id = key

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        player = self._player
        encoded = [encode(argument, player._export) for argument in (*arguments, keywords)]
        reply = player.ask({"do": self.id, "arguments": encoded})
        if "raise" in reply:
            raise _rebuild(reply["raise"])
        return decode(reply["value"], player._import)


_MUTABLE = {"list", "dict", "set", "bytearray", "deque"}


def _rebuild(description: Any) -> Exception:
    """The closest built-in exception to one of the other side."""
    try:
        name, bases, text = description
        kinds = [getattr(builtins, str(base), None) for base in (name, *bases)]
    except (TypeError, ValueError) as error:
        raise Gone("the program sent something that is no answer") from error
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, Exception) and kind is not Exception:
            try:
                return kind(text if kind.__name__ == name else f"{name}: {text}")
            except TypeError:  # UnicodeError and its like take more
                break
    return _RemoteError(f"{name}: {text}")


# -------------------------------------------------------------------------------------------------------------- referee


class Referee(_Peer):
    """The tests' end: asks the player for operations on its objects."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection)
        self._functions: list[Callable[..., Any]] = []
        self.unsendable = ""
        """Why tests could not be run apart from the tested code; "" if they could."""

    def name(self, name: str) -> "Remote":
        """What the tested code calls ``name``; looked up at each use."""
        return Remote(self, ["name", name])

    def operate(self, operation: str, *arguments: Any) -> Any:
        """Raises what the operation raises in the player, as a built-in exception."""
        try:
            encoded = [encode(argument, self._export) for argument in arguments]
            reply = self.ask({"do": operation, "arguments": encoded})
        except Unsendable as error:
            self.unsendable = str(error)
            raise Gone(f"the tests give the program {error}") from error
        if "raise" in reply:
            raise _rebuild(reply["raise"])
        try:
            for index, after in reply.get("changed", []):
                _replace(arguments[index], decode(after, self._import))
            return decode(reply["value"], self._import)
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise Gone("the program sent something that is no answer") from error

    def answer(self, request: Message) -> Message:
        """The tested code calls a function of the tests."""
        try:
            *positional, keywords = [decode(argument, self._import) for argument in request["arguments"]]
            function = self._functions[request["do"]]
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise Gone("the program sent something that is no answer") from error
        try:
            return {"value": encode(function(*positional, **keywords), self._export)}
        except Unsendable as error:
            self.unsendable = str(error)
            raise Gone(f"the tests give the program {error}") from error
        except Exception as error:
            return {"raise": describe_exception(error)}

    def _export(self, value: Any) -> list[Any]:
        if isinstance(value, Remote):
            return object.__getattribute__(value, "_reference")[:2]
        if isinstance(value, (FunctionType, MethodType)) and value.__module__ == _TESTS_MODULE:
            self._functions.append(value)
            return ["callback", len(self._functions) - 1]
        module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
        home = sys.modules.get(module) if isinstance(module, str) and module != _TESTS_MODULE else None
        if home is not None and getattr(home, name, None) is value:
            return ["import", f"{module}:{name}"]
        raise Unsendable(f"an object of class {type(value).__name__}")

    def _import(self, reference: list[Any]) -> Any:
        if reference[0] == "callback":
            return self._functions[reference[1]]
        if reference[0] != "object" or not isinstance(reference[1], int):
            raise ValueError(f"no reference: {reference!r}")
        return Remote(self, reference)


def _replace(container: Any, new: Any) -> None:
    """Give a container, and the containers in it, the content that the player left them with."""
    if type(container) is not type(new) and not (isinstance(container, dict) and isinstance(new, dict)):
        raise ValueError("an argument has become something else")
    if isinstance(new, (list, deque)) and len(new) == len(container):
        for index, item in enumerate(new):
            container[index] = _kept(container[index], item)
    elif isinstance(new, (list, bytearray)):
        container[:] = new
    elif isinstance(new, deque):
        container.clear()
        container.extend(new)
    elif isinstance(new, dict):
        items = {key: _kept(container.get(key), item) for key, item in new.items()}
        container.clear()
        container.update(items)
    elif isinstance(new, set):
        container.clear()
        container.update(new)
    else:
        raise ValueError("an argument that cannot change has changed")


def _kept(old: Any, new: Any) -> Any:
    """``old``, brought up to date, if it is a container of the same kind; so that other names for it see the change."""
    if type(old) is type(new) and isinstance(new, (list, dict, set, bytearray, deque)):
        _replace(old, new)
        return old
    return new


_COMPARISONS = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}


class Remote:
    """An object of the player, as the tests see it."""

    def __init__(self, referee: Referee, reference: list[Any]) -> None:
        # Past __setattr__ below, which would ask the player.
        object.__setattr__(self, "_referee", referee)
        object.__setattr__(self, "_reference", reference)

    def _operate(self, operation: str, *arguments: Any) -> Any:
        return object.__getattribute__(self, "_referee").operate(operation, self, *arguments)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._operate("call", *arguments, keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__name__", "__doc__", "__dict__"):
            raise AttributeError(name)
        return self._operate("getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._operate("setattr", name, value)

    def __iter__(self) -> Any:
        items = self._operate("iter")
        return items if isinstance(items, Remote) else iter(items)

    def __next__(self) -> Any:
        return self._operate("next")

    def __pow__(self, other: Any) -> Any:
        return self._operate("pow", other)

    def __rpow__(self, other: Any) -> Any:
        return self._reflected("pow", other)

    def __round__(self, digits: int | None = None) -> Any:
        return self._operate("round", *([] if digits is None else [digits]))

    def __deepcopy__(self, _memo: dict[int, Any]) -> Any:
        return self._operate("deepcopy")

    def __contains__(self, item: Any) -> bool:
        held = self._held()
        return item in held if held is not None else bool(self._operate("contains", item))

    def _held(self) -> Any:
        """The plain value that the object is or holds; None if there is none."""
        value = self._operate("self")
        if not isinstance(value, Remote):
            return value
        return self._operate("plain")

    def _reflected(self, operation: str, other: Any) -> Any:
        return object.__getattribute__(self, "_referee").operate(operation, other, self)

    def _compare(self, operation: str, other: Any) -> Any:
        if isinstance(other, Remote) and self._held() is None:
            return bool(self._operate(operation, other))
        held = self._held()
        if held is None:
            return NotImplemented
        return _COMPARISONS[operation](held, other)


def _delegate(operation: str) -> Callable[..., Any]:
    return lambda self, *arguments: self._operate(operation, *arguments)


def _reflect(operation: str) -> Callable[..., Any]:
    return lambda self, other: self._reflected(operation, other)


def _comparison(operation: str) -> Callable[..., Any]:
    return lambda self, other: self._compare(operation, other)


for _name in (
    "str repr hash len bool int float index abs neg pos invert getitem setitem delitem format reversed dir"
).split():
    setattr(Remote, f"__{_name}__", _delegate(_name))
for _name in "add sub mul truediv floordiv mod matmul and_ or_ xor lshift rshift".split():
    setattr(Remote, f"__{_name.rstrip('_')}__", _delegate(_name))
    setattr(Remote, f"__r{_name.rstrip('_')}__", _reflect(_name))
for _name in _COMPARISONS:
    setattr(Remote, f"__{_name}__", _comparison(_name))
for _name, _operation in (("copy", "copy"), ("instancecheck", "isinstance")):
    setattr(Remote, f"__{_name}__", _delegate(_operation))
