"""Program process: loads the tested program on the first request, and handles requests in sequence.

No guard is here, because the program controls this interpreter. All messages from it are validated in trusted_process.py.
"""

import atexit
import builtins
import concurrent.futures
import contextlib
import gc
import importlib
import inspect
import io
import operator
import os
import random
import re
import resource
import shutil
import sys
import threading
import types
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

from megatron_rl.graders.analysis.source import compose, infer_entry_point, prelude
from megatron_rl.graders.sandbox.channel import FrameChannel, PeerGone, taken, text_stream
from megatron_rl.graders.sandbox.values import NotSerializable, decode, encode, named_tuple, record_classes, snapshot

_MAX_OUTPUT_BYTES = 8 << 20
_MAX_STACK_BYTES = 64 << 20
"""Largest stack of a thread: contest programs ask for more than the memory limit."""


def _plain_tuple(value: Any) -> Any:
    parts = tuple(tuple.__iter__(value))
    return named_tuple(type(value).__name__, value._fields)._make(parts) if hasattr(value, "_fields") else parts


_PLAIN_BASES: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (int, int.__index__),
    (float, float.__float__),
    (complex, complex.__pos__),
    (str, lambda value: str.__getitem__(value, slice(None))),
    (bytes, lambda value: bytes.__getitem__(value, slice(None))),
    (tuple, _plain_tuple),
    (list, lambda value: list(list.__iter__(value))),
    (dict, lambda value: dict(dict.items(value))),
    (set, lambda value: set(set.__iter__(value))),
)
"""Plain content of instances of the program's own subclasses."""
_OPERATORS: dict[str, Callable[..., Any]] = {
    "enter": lambda value: type(value).__enter__(value),
    "exit": lambda value, *raised: type(value).__exit__(value, *_exception(*raised)),
    "bool": lambda value: not {"__bool__", "__len__"} & {*dir(type(value))},
}


def _exception(name: str = "", arguments: Any = ()) -> tuple[Any, Any, None]:
    kind = getattr(builtins, name) if name else None
    return kind, kind and kind(*arguments), None


class ProgramProcess:
    def __init__(self, program: dict[str, str], wire: FrameChannel) -> None:
        self._program = program
        self._wire = wire
        self._namespace: dict[str, Any] = {}
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        """Index in ``_objects`` by id."""
        self._callbacks: dict[int, _Callback] = {}
        self._lent: dict[int, Any] = {}
        """Containers that the tests have too, and may change."""
        self._num_lent = 0
        self._shared: tuple[list[Any], list[Any]] = [], []
        """Containers of the request that is answered, and what they held before: a call of the tests may be about them."""
        self._records: dict[str, type] = {}
        self._makes = False
        self._depth = sys.getrecursionlimit()
        """Depth of calls that the tests allow."""
        self._streams: tuple[io.TextIOWrapper, ...] = ()
        """Standard output and standard error, if the tests read them."""
        self._turn = threading.RLock()
        """Held by the thread that calls a function of the tests."""
        self._handlers: dict[str, Callable[..., Any]] = {
            "load": self._load, "main": self._run_script, "call": _call, "make": _call, "operate": _operate,
            "get": getattr, "set": setattr, "next": next, "value": lambda value: value, "seed": _seed,
        }  # fmt: skip

    def serve(self) -> None:
        """Handle requests until the test process is gone."""
        sys.argv = ["solution.py"]
        if re.search(r"multiprocessing|ProcessPool", self._program["code"]):
            _use_threads_as_processes()
        set_limit = resource.setrlimit
        # Contest programs raise it; their calls need no stack here.
        resource.setrlimit = lambda what, limits: None if what == resource.RLIMIT_STACK else set_limit(what, limits)
        shutil.copymode = shutil.copystat = lambda *_, **__: None  # neither can be set here
        stack_size = threading.stack_size
        threading.stack_size = lambda size=0: stack_size(min(size, _MAX_STACK_BYTES))
        while True:
            self.reply(self._wire.receive())

    def reply(self, request: Any) -> None:
        if request["reads_prints"] and not self._streams:
            self._streams = sys.stdout, sys.stderr = text_stream(), text_stream()
        try:
            self._send(self._answer(request))
        except NotSerializable as error:
            self._wire.send({"fault": f"the program gives {error}"})
        except MemoryError:
            self._wire.send({"fault": "memory limit"})

    def _send(self, message: dict[str, Any]) -> None:
        """Send a message with what was printed since the last one, if the tests read it."""
        texts = taken(self._streams)
        self._wire.send(message | ({"printed": texts} if any(texts) else {}))

    def _answer(self, request: Any) -> Any:
        """Handle one request.

        Replies: {"values", "nodes"} with the result, after the containers of the request; {"raise": [name, bases,
        message]}, with the values [args, attributes]; {"end"}; {"fault": text}.
        """
        shared, known, before = self._shared, list[Any](), list[Any]()
        try:
            self._lent = {number: self._lent[number] for number in request["lent"]}
            lent = [*self._lent.values()]
            values, known = decode(request, self._import, self._records, lent)
            before = [snapshot(value) for value in known]
            self._shared = known, before
            if request["depth"] != self._depth:
                sys.setrecursionlimit(request["depth"])
                self._depth = request["depth"]
            result = self._handlers[request["do"]](*values)
            self._makes = request["do"] == "make"
            return self._message([result], known, before)
        except PeerGone:
            _exit(0)
        except NotSerializable as error:
            return {"fault": f"the program gives {error}"}
        except RecursionError as error:
            return {"raise": ["RecursionError", [], str(error)[:500]]}
        except BaseException as error:
            if request.get("do") == "next" and isinstance(error, StopIteration):
                return {"end": True}
            return self._raised(error, known, before)
        finally:
            self._shared = shared

    def _message(self, values: list[Any], known: list[Any], before: list[Any]) -> dict[str, Any]:
        """Values with the changes of ``known`` containers, of which the tests have all that the message holds from now on."""
        message, containers = encode(values, self._export, self._records, known, before)
        fresh = containers[len(self._lent) :]
        self._lent |= enumerate(fresh, self._num_lent)
        self._num_lent += len(fresh)
        return message

    def _raised(self, error: BaseException, known: list[Any], before: list[Any]) -> dict[str, Any]:
        answer: dict[str, Any] = {"raise": describe(error)}
        with contextlib.suppress(BaseException):  # arguments that cannot be sent, or the program's own attributes
            name = getattr(error, "filename", None) if isinstance(error, OSError) else None
            answer |= self._message([error.args if name is None else (*error.args, name), vars(error)], known, before)
        return answer

    def _load(self) -> None:
        random.seed(0)  # scores must be reproducible
        module = sys.modules["solution"] = types.ModuleType("solution")
        program, self._namespace = self._program, module.__dict__
        entry_point = program["entry_point"] or infer_entry_point(program["prompt_code"])
        shared: dict[str, Any] = {"__name__": "solution"}
        for code in prelude(program["prompt_code"], entry_point):
            exec(code, shared)
        exec(compile(program["setup"], "<setup>", "exec"), shared)
        self._records = record_classes(shared)
        module.__dict__.update(shared)
        for code in compose(program["code"], program["prompt_code"], entry_point):
            exec(code, module.__dict__)
        # Tests send instances of the prompt's classes; the program may have redefined a class under the same name.
        self._records = {name: own for name in self._records if isinstance(own := self._namespace.get(name), type)}

    def _run_script(self, text: str) -> str:
        """Run the program as a script with ``text`` as standard input; returns its output."""
        random.seed(0)
        gc.collect()  # a file object of the previous input must not close this input
        while (spare := os.open(os.devnull, os.O_RDWR)) < 3:  # the script may have closed its streams
            pass
        os.close(spare)
        if "fileinput" in sys.modules:
            sys.modules["fileinput"]._state = None  # type: ignore[attr-defined]
        with open("stdin", "wb+") as given, open("stdout", "wb+") as printed:
            given.write(text.encode(errors="surrogatepass"))
            given.seek(0)
            os.dup2(given.fileno(), 0)
            os.dup2(printed.fileno(), 1)
            sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
            vars(sys).update(__stdin__=sys.stdin, __stdout__=sys.stdout)
            module = sys.modules["__main__"] = types.ModuleType("__main__")
            try:
                os._exit = _leave_script  # type: ignore[assignment]
                exec(compile(self._program["setup"], "<setup>", "exec"), module.__dict__)
                exec(compile(self._program["code"], "<solution>", "exec"), module.__dict__)
                _end_script()
            except _Left as leaving:
                if leaving.code:
                    raise
            except SystemExit as leaving:
                if leaving.code not in (None, 0):
                    raise
                _end_script()
            finally:
                os._exit = _exit
            output = os.pread(printed.fileno(), _MAX_OUTPUT_BYTES + 1, 0)
        if len(output) > _MAX_OUTPUT_BYTES:
            raise NotSerializable(f"more than {_MAX_OUTPUT_BYTES >> 20} MB of output")
        return output.decode(errors="replace")

    def _export(self, value: Any) -> list[Any] | tuple[Any, int]:
        if type(value) in (_Callback, _Stream):
            return ["callback" if type(value) is _Callback else "stream", value.number]
        number = self._numbers.setdefault(id(value), len(self._objects))
        if number == len(self._objects):
            self._objects.append(value)
        for base, plain in _PLAIN_BASES:
            # An instance that the tests have made stays here, because a plain copy misses changes and operators.
            if issubclass(type(value), base) and not (self._makes and _is_more(type(value), base)):
                return plain(value), number
        return ["iterator" if {"__next__", "__iter__"} <= {*dir(type(value))} else "object", number]

    def _import(self, reference: list[Any]) -> Any:
        kind, key, *about = reference
        if kind in ("callback", "stream"):
            make = _Callback if kind == "callback" else _Stream
            return self._callbacks[key] if key in self._callbacks else self._callbacks.setdefault(key, make(self, key, *about))
        if kind == "import":  # from the standard library: the test process imports nothing else
            module, _, name = key.partition(":")
            return getattr(importlib.import_module(module), name)
        return self._objects[key] if kind == "object" else self._named(key)

    def _named(self, name: str) -> Any:
        if name in self._namespace:
            return self._namespace[name]
        if hasattr(self._namespace.get("Solution"), name):
            return getattr(self._namespace["Solution"](), name)
        raise NotSerializable(f"nothing: it does not define {name!r}")

    def call_tests(self, number: int, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Call a function of the tests and return its result."""
        known, before = self._shared
        message, containers = encode([arguments, keywords], self._export, self._records, known, before)
        with self._turn:
            self._send({**message, "callback": number})
            while "do" in (reply := self._wire.receive()):  # the function may call the program in turn
                self.reply(reply)
        result = None if "raise" in reply else decode(reply, self._import, self._records, containers)[0][0]
        before[:] = map(snapshot, known)  # the tests have these, and know what they have changed
        if "raise" in reply:
            name, bases, text = reply["raise"]
            base = getattr(builtins, next((base for base in (name, *bases) if hasattr(builtins, base)), "Exception"))
            raise (base if base.__name__ == name else type(name, (base,), {}))(text)
        return result


def _call(function: Any, arguments: Any, keywords: Any) -> Any:
    return function(*arguments, **dict(keywords))


def _seed(state: Any, *of_numpy: Any) -> None:
    random.setstate(state)
    for each in of_numpy:
        importlib.import_module("numpy").random.set_state(each)


def _operate(name: str, *operands: Any) -> Any:
    return (_OPERATORS.get(name) or getattr(operator, name, None) or getattr(builtins, name))(*operands)


def _use_threads_as_processes() -> None:
    """Let ``multiprocessing`` start threads, because no process can be started, and use their locks."""
    dummy, context, heap = (importlib.import_module(f"multiprocessing.{name}") for name in ("dummy", "context", "heap"))
    for name in ("Lock", "RLock", "Semaphore", "BoundedSemaphore", "Condition", "Event"):
        setattr(context.BaseContext, name, staticmethod(getattr(threading, name)))
    vars(sys.modules["multiprocessing"]).update({name: getattr(dummy, name) for name in dummy.__all__})
    heap.Arena._dir_candidates = []  # of shared values: only this folder can be written to
    concurrent.futures.ProcessPoolExecutor = concurrent.futures.ThreadPoolExecutor  # type: ignore[assignment,misc]


class _Left(SystemExit):
    """The script has called os._exit."""


_exit = os._exit


def _leave_script(code: int) -> None:
    """``os._exit`` of a script, whose output is to be read in this process. In another thread it ends that thread."""
    if code and threading.current_thread() is not threading.main_thread():
        _exit(code)
    raise _Left(code)


def _end_script() -> None:
    """End the script as an interpreter does."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    if sys.__stdout__:
        sys.__stdout__.flush()


class _Callback:
    """A function of the tests, as seen by the program."""

    def __init__(self, process: ProgramProcess, number: int, name: str = "", parameters: Sequence[Any] = ()) -> None:
        self._process, self.number = process, number
        self.__name__, self.__qualname__ = name.rpartition(".")[2], name
        kinds = [inspect.Parameter(each, kind, default=default) for each, kind, *default in parameters]
        self.__signature__ = inspect.Signature(kinds)
        names = tuple(each for each, kind, *_ in parameters if kind <= inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self.__code__ = types.SimpleNamespace(co_argcount=len(names), co_varnames=names, co_name=name)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._process.call_tests(self.number, arguments, keywords)


class _Stream(_Callback):
    """An iterator of the tests, as seen by the program."""

    def __iter__(self) -> "_Stream":
        return self

    def __next__(self) -> Any:
        return self()


def _is_more(kind: type, base: type) -> bool:
    """True if instances of ``kind`` can change, or behave unlike those of the plain type ``base``."""
    if issubclass(base, list | dict | set):
        return True
    own = {name for each in kind.__mro__ if issubclass(each, base) and each is not base for name in vars(each)}
    tuples = {"__repr__", "__getnewargs__"} if hasattr(kind, "_fields") else set()
    return not issubclass(kind, Enum) and bool(own & set(dir(base)) - {"__new__", "__init__", "__doc__"} - tuples)


def parameters_of(function: Any) -> list[list[Any]]:
    """[name, kind] of each parameter, with null at the end if there is a default; empty if it is not known."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [[each.name, int(each.kind), *([None] * (each.default is not each.empty))] for each in parameters]


def describe(error: BaseException) -> list[Any]:
    """[name, names of the class and its bases, "module:name" too for those of the library, text] of an exception."""
    kinds = type(error).__mro__
    paths = [f"{kind.__module__}:{kind.__qualname__}" for kind in kinds if kind.__module__ != "builtins"]
    bases = [*(kind.__name__ for kind in kinds), *paths]
    try:
        text = str(error.args[0] if isinstance(error, KeyError) and error.args else error)[:1000]
    except BaseException:  # the program's own __str__
        text = ""
    return [type(error).__name__[:200], bases, text]
