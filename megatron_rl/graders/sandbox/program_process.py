"""Program process: loads the tested program on the first request, and handles requests in sequence.

No guard is here, because the program controls this interpreter. All messages from it are validated in trusted_process.py.
"""

import atexit
import builtins
import importlib
import io
import os
import random
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

from megatron_rl.graders.sandbox.channel import FrameChannel, PeerGone
from megatron_rl.graders.sandbox.source import compose, infer_entry_point, prelude, record_classes
from megatron_rl.graders.sandbox.values import NotSerializable, decode, encode

_MAX_OUTPUT_BYTES = 8 << 20
_PLAIN_BASES: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (int, int.__index__),
    (float, float.__float__),
    (str, lambda value: str.__getitem__(value, slice(None))),
    (bytes, lambda value: bytes.__getitem__(value, slice(None))),
    (tuple, lambda value: tuple(tuple.__iter__(value))),
)
_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))


def play(program: dict[str, str], wire: FrameChannel) -> None:
    """Handle requests until the test process is gone."""
    player = ProgramProcess(program, wire)
    while True:
        player.reply(wire.receive())


class ProgramProcess:
    def __init__(self, program: dict[str, str], wire: FrameChannel) -> None:
        self._program = program
        self._wire = wire
        self._namespace: dict[str, Any] = {}
        self._objects: list[Any] = []
        self._records: dict[str, type] = {}

    def reply(self, request: Any) -> None:
        try:
            self._wire.send(self._answer(request))
        except NotSerializable as error:
            self._wire.send({"fault": f"the program gives {error}"})
        except MemoryError:
            self._wire.send({"fault": "memory limit"})

    def _answer(self, request: Any) -> Any:
        """Handle one request.

        Replies: {"values", "nodes"} with the result; {"raise": [name, built-in bases, message]}; {"end"}; {"fault":
        text}.
        """
        try:
            values, containers = decode(request, self._import, self._records)
            result = getattr(self, f"_do_{request['do']}")(*values)
            # A call that returns None is expected to change its arguments, so send them back.
            return encode([result], self._export, self._records, containers if result is None else ())[0]
        except PeerGone:
            os._exit(0)
        except NotSerializable as error:
            return {"fault": f"the program gives {error}"}
        except RecursionError as error:
            return {"raise": ["RecursionError", [], str(error)[:500]]}
        except BaseException as error:
            if request.get("do") == "next" and isinstance(error, StopIteration):
                return {"end": True}
            return {"raise": _describe(error)}

    def _do_load(self) -> None:
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

    def _do_call(self, function: Any, arguments: Any, keywords: Any) -> Any:
        return function(*arguments, **keywords)

    def _do_get(self, value: Any, name: str) -> Any:
        return getattr(value, name)

    def _do_set(self, value: Any, name: str, new: Any) -> None:
        setattr(value, name, new)

    def _do_next(self, value: Any) -> Any:
        return next(value)

    def _do_value(self, value: Any) -> Any:
        return value

    def _do_main(self, text: str) -> str:
        """Run the program as a script with ``text`` as standard input; returns its output."""
        random.seed(0)
        with open("stdin", "wb+") as given, open("stdout", "wb+") as printed:
            given.write(text.encode(errors="surrogatepass"))
            given.seek(0)
            os.dup2(given.fileno(), 0)
            os.dup2(printed.fileno(), 1)
            sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
            sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "wb", closefd=False)))
            vars(sys).update(__stdin__=sys.stdin, __stdout__=sys.stdout)
            module = sys.modules["__main__"] = types.ModuleType("__main__")
            try:
                exec(compile(self._program["setup"], "<setup>", "exec"), module.__dict__)
                exec(compile(self._program["code"], "<solution>", "exec"), module.__dict__)
            except SystemExit as leaving:
                if leaving.code not in (None, 0):
                    raise
            finally:
                for thread in threading.enumerate():
                    if thread is not threading.current_thread() and not thread.daemon:
                        thread.join()
                atexit._run_exitfuncs()
                sys.stdout.flush()
                if sys.__stdout__:
                    sys.__stdout__.flush()
            output = os.pread(printed.fileno(), _MAX_OUTPUT_BYTES + 1, 0)
        if len(output) > _MAX_OUTPUT_BYTES:
            raise NotSerializable(f"more than {_MAX_OUTPUT_BYTES >> 20} MB of output")
        return output.decode(errors="replace")

    def _export(self, value: Any) -> list[Any] | tuple[Any]:
        if isinstance(value, _Callback):
            return ["callback", value.number]
        for base, plain in _PLAIN_BASES:
            if isinstance(value, base):
                return (plain(value),)
        if type(value) in _VIEWS:
            value = iter(value)
        self._objects.append(value)
        return ["iterator" if hasattr(type(value), "__next__") else "object", len(self._objects) - 1]

    def _import(self, reference: list[Any]) -> Any:
        kind, key = reference
        if kind == "callback":
            return _Callback(self, key)
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


class _Callback:
    """A function of the tests, as seen by the program."""

    def __init__(self, player: ProgramProcess, number: int) -> None:
        self._player, self.number = player, number

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        player = self._player
        message, _ = encode([arguments, keywords], player._export, player._records)
        player._wire.send({**message, "callback": self.number})
        while "do" in (reply := player._wire.receive()):  # the function may call the program in turn
            player.reply(reply)
        if "raise" in reply:
            name, bases, text = reply["raise"]
            raise getattr(builtins, next((base for base in (name, *bases) if hasattr(builtins, base)), "Exception"))(
                text
            )
        return decode(reply, player._import, player._records)[0][0]


def _describe(error: BaseException) -> list[Any]:
    bases = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
    try:
        text = str(error.args[0] if isinstance(error, KeyError) and error.args else error)[:1000]
    except BaseException:  # the program's own __str__
        text = ""
    return [type(error).__name__[:200], bases, text]
