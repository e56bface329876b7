"""Requests of the test process to the program, one at a time, and the checks of its replies."""

import builtins
import gc
import io
import sys
import threading
import types
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, get_args

from megatron_rl.graders.analysis.blind_spots import asks_for_nothing
from megatron_rl.graders.sandbox.aliases import Aliases
from megatron_rl.graders.sandbox.channel import FrameChannel, PeerGone
from megatron_rl.graders.sandbox.other_answers import other_reply
from megatron_rl.graders.sandbox.program_objects import Handle, Iterator, reference_of
from megatron_rl.graders.sandbox.program_process import describe, parameters_of
from megatron_rl.graders.sandbox.side_record import content_of
from megatron_rl.graders.sandbox.values import NotSerializable, decode, dress, encode, is_unchanged, snapshot

MAX_DETAIL = 300
_Shares = Literal["all", "arguments", "none", "other"]
RUNS: tuple[_Shares, ...] = get_args(_Shares)
"""Values of ``shares`` in the runs of tests. From the second run on, the sides of comparisons are recorded."""
TESTS_MODULE = "tests"
"""``__name__`` in the namespace of the tests."""
_MAX_LENT, _MAX_PARTS = 32, 256
"""How many of the last containers program and tests share, and of how many parts at most: each may change them."""
_MAX_ARGUMENTS = 4


class ProtocolViolation(BaseException):
    """The program violated the protocol, or the tests need what it cannot prove. Not an Exception, so that tests cannot
    catch it."""


class ErrorType(type):
    """The type of the tests' classes for exceptions of the program: an exception may have further bases, and its class is yet the same."""

    def __eq__(cls, other: object) -> bool:
        return type(other) is ErrorType and cls.__name__ == other.__name__

    def __hash__(cls) -> int:
        return hash(cls.__name__)


class ProgramRequests:
    """Sends requests to the program process and checks its replies; one request at a time, from any thread.

    Args:
        shares: Containers of which changes shall reach the tests: "all", "arguments" (not what the program gave earlier), "none" (the
            program gets copies), or "other": none, and other answers than the program's reach the tests, whose functions that it gets
            are called once more.
        tell: Called with b"s" before the program starts, and with b"t" (once) when a thread must wait, because another
            thread's request is in progress.
    """

    def __init__(self, wire: FrameChannel, tell: Callable[[bytes], object], *, shares: _Shares = "all") -> None:
        self._wire, self._tell, self._shares = wire, tell, shares
        self._is_apart, self._alters = shares in ("none", "other"), shares == "other"
        self._turn = threading.RLock()
        self._functions: list[Any] = []
        self._function_numbers: dict[tuple[Any, ...], int] = {}
        """Index in ``_functions`` by id."""
        self._handles: dict[int, Handle] = {}
        self._lent: deque[types.SimpleNamespace] = deque(maxlen=_MAX_LENT)
        """Containers that both sides have: number, container, and content that the other side has."""
        self._num_lent = 0
        self._begun: set[int] = set()
        """Ids of the program's iterators that have given an item; handles are kept, so an id stays one object's."""
        self._ended: set[int] = set()
        """Ids of those that have given an item after their last."""
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
        "method", "narrow", "rounded" and the like (``decode``), "subclass" of a container; and "changes" of what the tests have,
        of "results" given before, and of "files"."""
        self.raising_lines: frozenset[int] = frozenset()
        """Lines of the tests that raise in a ``with`` whatever the program gives."""
        self.array_methods: frozenset[str] = frozenset()
        """Methods of numpy's arrays, if the tests use arrays: what stands for one decides by them."""
        self.aliases = Aliases(self.given)
        self.changes = 0
        """Hash of all changes of arguments, in their order."""
        self.num_requests, self.max_requests = 0, sys.maxsize
        self.secret = ""
        """Text that the program does not know, from which other answers are made."""
        self.random_states: Callable[[], Any] = lambda: None
        """How often the tests have seeded random numbers, and their states, from which the program continues."""
        self._sent_states: Any = None
        self.asks_for_nothing = False
        """True if the last call had an argument that is 0 or empty."""
        self.reads_prints = False
        """True if the tests read what the program prints: it is printed here, where they may have redirected it."""
        self.has_printed = False
        self.watch: AbstractContextManager[None] = nullcontext()  # around each request

    @property
    def plus(self) -> int:
        """Number by which this request's answer changes (``other_reply``)."""
        return 3 + hash((self.secret, self.num_requests)) % 29

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
                    self._ask("seed", states[1:])
                return self._ask(what, values)
        finally:
            self._turn.release()

    def _ask(self, what: str, values: tuple[Any, ...]) -> Any:
        if self.fault:
            raise ProtocolViolation(self.fault)
        self.num_requests += 1
        if self.num_requests > self.max_requests:
            raise self.failed("the tests do not end")
        self.aliases.look(self.records)
        lent, containers = self._send(what, values)
        before, arguments = self.given.copy(), _arguments(values)
        is_for_nothing = self.asks_for_nothing = asks_for_nothing(arguments)
        try:
            what = "enter" if what == "operate" and values[0] == "enter" else what
            result = self._answered(what, lent, containers, arguments)
        except StopIteration:
            if id(values[0]) not in self._begun:
                self.given.add("nothing")
            if self._alters and id(values[0]) not in self._ended:
                self._ended.add(id(values[0]))
                return self.plus
            raise
        if what == "next":
            self._begun.add(id(values[0]))
        if is_for_nothing:
            self.given -= {"nothing", "empty array"} - before
            self._begun.add(id(result))
        return result

    def _answered(self, what: str, lent: list[types.SimpleNamespace], containers: list[Any], arguments: list[Any]) -> Any:
        """The result of a request, which may be one of its arguments."""
        for each in lent:
            each.is_result = each.is_result and not any(each.container is own for own in arguments)
        results = {id(each.container) for each in lent if each.is_result}
        result = self._reply(what, lent, containers)
        if self.aliases.known:
            self.aliases.look(self.records, _parts_of(arguments, containers), containers)
        if containers or what == "enter":
            self.aliases.add(result, [each for each in containers if id(each) not in results], is_live=what == "enter")
        return result

    def _send(self, what: str, values: tuple[Any, ...]) -> tuple[list[types.SimpleNamespace], list[Any]]:
        """Send a request; returns the containers that both sides had before, and all of the message."""
        # The tests neither see nor make a further change of a container that only this list holds.
        lent = [each for each in self._lent if sys.getrefcount(each.container) > 2 or not is_unchanged(each.container, each.content)]
        self._lent = deque(lent, _MAX_LENT)
        known, contents = [each.container for each in lent], [each.content for each in lent]
        try:
            num_functions = len(self._functions)
            message, containers = encode(values, self._export, self.records, known, contents)
            for function in self._functions[num_functions:] if self._alters else ():
                _call(function, self.plus)
            if self._is_apart:
                containers = decode(message, lambda each: self._import(each) if type(each[1]) is int else None, self.records)[1]
            first = not self.started
            self.started = True
            if first:
                self._tell(b"s")
            if first and what != "main":
                self._load()
            about = {"do": what, "depth": sys.getrecursionlimit(), "reads_prints": self.reads_prints}
            self._wire.send({**message, **about, "lent": [each.number for each in lent]})
        except (NotSerializable, ValueError) as error:
            raise self.unscored(f"the tests give the program {error}") from None
        except PeerGone as gone:
            raise self.failed(str(gone)) from None
        _renew(lent, message["nodes"])
        return lent, containers

    def _load(self) -> None:
        try:
            self.ask("load")
        except BaseException as error:  # a test must not mistake a load error for an expected exception
            raise self.failed(describe_error(error)) from None

    def _reply(self, what: str, lent: list[types.SimpleNamespace], containers: list[Any]) -> Any:
        while True:
            reply = self._received_reply(what, containers)
            if self.reads_prints and what != "load":
                self._print(reply.get("printed", ["", ""]))
            if "fault" in reply:
                raise self.failed(str(reply["fault"])[:MAX_DETAIL])
            if "raise" in reply:
                error = self._rebuilt(reply, lent, containers)
                self.raised = self.raised or ("" if what in ("get", "operate", "enter") else describe_error(error))
                raise error
            if what == "next" and "end" in reply:
                raise StopIteration
            try:
                if "callback" not in reply:
                    (result,) = self._results(reply, lent, containers, is_live=what == "enter")
                    return result
                (given, keywords), received = self._received(reply, containers)
                self._note_changes(reply, lent, containers)
                if type(reply["callback"]) is not int or type(given) is not tuple or type(keywords) is not dict:
                    raise ValueError("not a call")
                function = self._functions[reply["callback"]]
            except (ValueError, TypeError, KeyError, IndexError):
                raise self.failed("the program sent an invalid reply") from None
            self._call_back(function, given, keywords, received)

    def _received_reply(self, what: str, known: list[Any]) -> dict[str, Any]:
        try:
            reply = self._wire.receive()
        except PeerGone as gone:
            raise self.failed(str(gone)) from None
        if not self._alters or what == "load" or (what == "operate" and type(reply.get("values", [0])[0]) in (bool, type(None))):
            return reply  # what an operator says of itself has one form
        return other_reply(reply, encode([], self._export, self.records, known)[0]["nodes"], self.plus)

    def _print(self, texts: Any) -> None:
        if type(texts) is not list or [*map(type, texts)] != [str, str]:
            raise self.failed("the program sent an invalid reply")
        for text, stream in zip(texts, (sys.stdout, sys.stderr), strict=True):
            stream.write(text)
        self.has_printed |= any(texts)

    def _results(self, reply: dict[str, Any], lent: list[types.SimpleNamespace], known: list[Any], *, is_live: bool) -> list[Any]:
        values, containers = self._received(reply, known)
        changed = self._note_changes(reply, lent, known)
        if self._is_apart:
            return values
        self._num_lent += len(containers) - len(lent)
        of_arguments = _parts_of(known, containers[len(known) :] if changed else [])
        for number in range(max(len(lent), len(containers) - _MAX_LENT), len(containers)):
            container, content = containers[number], snapshot(containers[number])
            num_parts = len(content) if type(content) is list else sum(map(len, content))
            is_result = id(container) not in of_arguments and not is_live  # with f() as x: changes of x are meant
            if num_parts <= _MAX_PARTS and (self._shares == "all" or not is_result):
                number += self._num_lent - len(containers)
                self._lent.append(types.SimpleNamespace(container=container, content=content, number=number, is_result=is_result))
        return values

    def _note_changes(self, reply: dict[str, Any], lent: list[types.SimpleNamespace], known: list[Any]) -> list[int]:
        """Numbers of the ``known`` containers that a message has changed."""
        _renew(lent, reply["nodes"])
        changed = [number for number in range(len(known)) if reply["nodes"][number] is not None]
        if changed:
            is_late = any(number < len(lent) and lent[number].is_result for number in changed)
            self.given |= {"changes", "results"} if is_late else {"changes"}
            if own := [known[number] for number in changed if number >= len(lent) or not lent[number].is_result]:
                self.changes = hash((self.changes, content_of(own, self.records)))
        return changed

    def _received(self, reply: dict[str, Any], known: list[Any]) -> tuple[list[Any], list[Any]]:
        """(values, containers) of a reply; ``known`` containers are updated in place."""
        self._has_new_object = False
        values, containers = decode(reply, self._import, self.records, known, self.given.add)
        fresh = [each for each, node in zip(containers, reply["nodes"], strict=True) if node is not None]
        if self._has_new_object and any(type(each) in self.records.values() for each in fresh):
            raise self.unscored("an instance of the prompt's class holds an object of the program")
        return values, containers

    def _call_back(self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], received: list[Any]) -> None:
        """Run a function of the tests that the program calls; ``received`` are the containers in its arguments."""
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

    def _rebuilt(self, reply: dict[str, Any], lent: list[types.SimpleNamespace], known: list[Any]) -> BaseException:
        """Closest built-in exception, with the arguments and attributes of the program's. Excludes exceptions that steer
        loops and generators, which could end tests early."""
        try:
            name, bases, text = reply["raise"]
            kinds = [_library_error(base) for base in (name, *bases)]
            named = [found for base in dict.fromkeys(bases) if (found := self.find_error(base))]
            before = self.given.copy()
            values = self._results(reply, lent, known, is_live=False) if "values" in reply else [(str(text),), {}]
            arguments, attributes = values
            if type(arguments) is not tuple or type(attributes) is not dict:
                raise ValueError("not an exception")
            attributes = {key: value for key, value in attributes.items() if not key.startswith("__")}
            self.given &= before | {"changes", "results"}  # an exception without attributes gives nothing that tests compare
        except (TypeError, ValueError, KeyError, IndexError, AttributeError):
            return self.failed("the program sent an invalid reply")
        text = str(text)[:1000]
        own = [each for each in kinds if isinstance(each, type) and issubclass(each, BaseException)]
        closest = tuple(dict.fromkeys(each for each in own if not any(other is not each and issubclass(other, each) for other in own)))
        kind: Any = types.new_class(name, closest) if len(closest) > 1 else closest[0] if closest else None
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
                self._functions.append(_Stream(iter(()) if self._is_apart else value, self.given) if is_stream else value)
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
        if plain and isinstance(plain[0], list | dict | set):
            self.given.add("subclass")
        return dress(plain[0], self._handles[number]) if plain else self._handles[number]


def _call(function: Any, value: int) -> None:
    """Call a function, which is no stream, with as many arguments as it takes."""
    for number in range(0 if type(function) is _Stream else _MAX_ARGUMENTS):
        try:
            return function(*[value] * number)
        except TypeError:
            continue
        except Exception:
            return


def _library_error(name: str) -> Any:
    """The built-in of that name, or for "module:name" what a loaded module of the library has."""
    module, is_path, own = name.rpartition(":")
    if not is_path:
        return getattr(builtins, name, None)
    is_library = module.partition(".")[0] in sys.stdlib_module_names - {"unittest"} or module.startswith("numpy.")
    return vars(sys.modules[module]).get(own) if is_library and module in sys.modules else None


def _arguments(values: tuple[Any, ...]) -> list[Any]:
    """Arguments of a call."""
    is_call = len(values) == 3 and type(values[1]) is type(values[2]) is tuple
    return [*values[1], *(value for _, value in values[2])] if is_call else []


def _parts_of(roots: list[Any], fresh: list[Any]) -> set[int]:
    """Ids of ``roots`` and of those of the ``fresh`` containers that they hold."""
    sought, found = {id(each) for each in fresh}, {id(each) for each in roots}
    waiting = [*roots] if fresh else []
    while waiting:
        for part in gc.get_referents(waiting.pop()):
            if id(part) not in found and (id(part) in sought or type(part) in (tuple, dict, frozenset)):
                found.add(id(part))
                waiting.append(part)
    return found


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
