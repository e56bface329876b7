"""Processes that share their imports: the commands, ranks and SGLang servers that a test starts with ``subprocess``.

Imports are most of what a small run costs: five CPU seconds per command and per rank, six per server. Inside ``preloading``
``subprocess.Popen`` asks a template, a process that has imported what such processes need, to fork; everything else starts as
usual. The fork has the command line, environment, folder, session and standard streams of the process that it replaces, is a
child of the process that asked, and runs the same module as ``__main__`` to its end. Ranks are forked for torchrun by a copy of
their launcher from before it began. A server that a forked command or rank starts cannot be its child, for it has imported other
modules: it is the child of a keeper, which ends it with the process that asked.

Tests of how processes start and end, and of what only ``exec`` sets (the environment in /proc, by which the launcher finds the rank
that takes a signal), start them outside of it.
"""

import ctypes
import gc
import importlib
import os
import pickle
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from megatron_rl.commands import WITHOUT_TORCH
from megatron_rl.rollout.sglang.process.options import ServerOptions, server_environment
from megatron_rl.rollout.sglang.process.server import SglangServer

_SERVER = "sglang.launch_server"
_PRELOADED = {
    "trainer": (
        "megatron_rl.rollout.server_pool",
        "megatron_rl.run.launch",
        "megatron_rl.step.driver",
        "megatron_rl.step.input_checks",
        "megatron_rl.training.trainer_group",
        "transformers.generation.utils",
    ),
    "server": (
        "sglang.srt.entrypoints.http_server",
        "sglang.srt.managers.scheduler",
        "sglang.srt.managers.detokenizer_manager",
    ),
}
"""Template -> modules. What they import is loaded as well. Not the server's ``model_runner``: its import adapts SGLang to the
options of the server."""
_LAUNCHERS = ("megatron_rl.cli", "torch.distributed.run")
_MODULES = (
    *_LAUNCHERS,
    "tests.integration.colocated_worker",
    "tests.integration.forked_ranks",
    "tests.integration.presets_worker",
)
_REPOSITORY = str(Path(__file__).parents[2])
_READ_AT_IMPORT = (
    "PYTHON",
    "OMP_",
    "MKL_",
    "ATEN_",
    "CUDA_",
    "LD_",
    "NUMBA_",
    "SGLANG_",
    "TORCH_COMPILE",
    "HF_",
    "TRANSFORMERS_",
)
"""Starts of names of variables; a process in which one has another value starts as usual."""
_READ_LATER = ("SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE", "SGLANG_CPU_OMP_THREADS_BIND")
_PR_SET_CHILD_SUBREAPER = 36
_START_TIMEOUT_S = 60.0
_THREADS_THAT_FORK = {"jemalloc_bg_thd"}
"""Arrow's allocator stops and restarts its thread around a fork."""
_MAX_REQUEST_BYTES = 1 << 20
_REAL = subprocess.Popen

_templates: dict[str, "_Template | _Keepers"] = {}
_keepers: "_Keepers | None" = None
"""Keepers of the servers that forks start; None if these start as usual."""
_lock = threading.Lock()
_set_by_imports: dict[str, str] = {}
"""In a template: variables of the environment that its imports have set."""


@contextmanager
def preloading(*, servers: bool = True) -> Iterator[None]:
    """Fork processes inside the block where it is possible; ``servers``: those that forks start, too."""
    global _keepers
    _keepers = _Keepers() if servers else None
    subprocess.Popen = _Popen  # type: ignore[misc]
    try:
        yield
    finally:
        subprocess.Popen = _REAL  # type: ignore[misc]


@contextmanager
def serving(server: SglangServer) -> Iterator[SglangServer]:
    """Start ``server`` with its imports, and stop it at the end of the block."""
    try:
        with preloading():
            server.start()
        yield server
    finally:
        server.stop(grace_s=0.0)


class _Popen(_REAL):  # type: ignore[type-arg, valid-type]
    """The child is forked by a template, if there is one for it. As it is a child of this process, all the rest is inherited.

    With a ``keeper`` it is no child, and the keeper says how it ended."""

    keeper: socket.socket | None = None

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *others: Any) -> None:
        _, _, cwd, env, _, _, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *rest = others
        words = [] if shell or isinstance(args, (str, bytes)) else [os.fspath(word) for word in args]
        environment = dict(os.environ if env is None else env)
        template = None if preexec_fn else _template_for(words, environment)
        if template is None:
            return super()._execute_child(args, executable, preexec_fn, *others)
        streams = [inherited if fd == -1 else fd for fd, inherited in ((p2cread, 0), (c2pwrite, 1), (errwrite, 2))]
        *_, start_new_session, process_group = rest
        assert process_group == -1, "not needed so far"
        request = _Request(os.getpid(), words, environment, os.fspath(cwd or os.getcwd()), bool(start_new_session), _keepers)
        self.pid, self.keeper = template.fork(request, streams)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]

    def _internal_poll(self, *arguments: Any, **options: Any) -> int | None:
        if self.keeper is None:
            return super()._internal_poll(*arguments, **options)  # type: ignore[misc]
        if self.returncode is None and self._waitpid_lock.acquire(blocking=False):  # else another thread waits
            try:
                _, status = self._try_wait(os.WNOHANG)
                if status is not None:
                    self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode

    def _try_wait(self, wait_flags: int) -> tuple[int, int | None]:
        if self.keeper is None:
            return super()._try_wait(wait_flags)  # type: ignore[misc]
        try:
            status = self.keeper.recv(4, socket.MSG_DONTWAIT if wait_flags else 0)
        except BlockingIOError:
            return 0, None
        return self.pid, int.from_bytes(status, "big") if status else signal.SIGKILL


class _Request(NamedTuple):
    parent: int
    words: list[str]
    environment: dict[str, str]
    folder: str
    new_session: bool
    keepers: "_Keepers | None"

    def asked(self, channel: socket.socket, streams: list[int]) -> int:
        """The id of the new process, from a template at the other end of ``channel``."""
        content = pickle.dumps(self)
        assert len(content) < _MAX_REQUEST_BYTES
        socket.send_fds(channel, [len(content).to_bytes(4, "big")], streams)
        channel.sendall(content)
        answer = channel.recv(4, socket.MSG_WAITALL)
        assert answer, "the template of this process has ended; see its traceback"
        return int.from_bytes(answer, "big")


def _template_for(words: Sequence[str], environment: dict[str, str]) -> "_Template | _Keepers | None":
    """The template that can fork the command; None if it has to start as usual."""
    words = _without_u(words) if words[:1] == [sys.executable] else []
    if words[:1] == ["-m"] and "RANK" in environment:
        kind = "ranks"
    elif words[:1] == ["-m"] and words[1] in _MODULES and words[2] not in WITHOUT_TORCH:
        kind = "trainer"
    elif words[:2] == ["-S", "-c"] and _SERVER in words:
        kind = "server"
    else:
        return None
    with _lock:
        for needed in (kind, "server") if _keepers else (kind,):
            if needed in _PRELOADED and needed not in _templates:
                _templates[needed] = _Template.started(needed, _base(needed))
    template = _templates.get(kind)
    return template if template and template.can_fork(environment) else None


class _Template:
    """The socket of a process that forks."""

    def __init__(self, channel: socket.socket, environment: Mapping[str, str], process: Any = None) -> None:
        self._channel = channel
        self._environment = environment
        self._process = process

    @classmethod
    def started(cls, kind: str, environment: Mapping[str, str]) -> "_Template":
        ours, theirs = socket.socketpair()
        listener = socket.socket(socket.AF_UNIX)
        if kind == "server":
            listener.bind(_Keepers().address)
            listener.listen()
        program = f"from {__name__} import run_template; run_template({kind!r}, {theirs.fileno()}, {listener.fileno()})"
        process = _REAL(
            [sys.executable, "-u", "-c", program],
            env=environment,
            pass_fds=[theirs.fileno(), listener.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        listener.close()
        return cls(ours, environment, process)

    def can_fork(self, environment: Mapping[str, str]) -> bool:
        return _read_at_import(environment) == _read_at_import(self._environment)

    def fork(self, request: _Request, streams: list[int]) -> tuple[int, None]:
        """The process id of the new child of this process."""
        with _lock:
            _set_subreaper(1)  # the template's grandchild becomes a child of this process
            try:
                return request.asked(self._channel, streams), None
            finally:
                _set_subreaper(0)


class _Keepers:
    """Keepers of the servers that forks of this process start. Forks get a copy."""

    def __init__(self) -> None:
        self.address = f"\0{__name__}.{os.getpid()}"
        self._environment = _base("server")

    def can_fork(self, environment: Mapping[str, str]) -> bool:
        return _read_at_import(environment) == _read_at_import(self._environment)

    def fork(self, request: _Request, streams: list[int]) -> tuple[int, socket.socket]:
        """The process id of the new child of a keeper, and the socket that keeps it alive."""
        keeper = socket.socket(socket.AF_UNIX)
        keeper.connect(self.address)
        return request.asked(keeper, streams), keeper


def _base(kind: str) -> dict[str, str]:
    """Variables with which a template starts: those of this process, one thread, and in servers those of every server."""
    base = os.environ | {"OMP_NUM_THREADS": "1"}
    return server_environment(ServerOptions(""), base, [0]) if kind == "server" else base


def _without_u(words: Sequence[str]) -> list[str]:
    """The arguments of Python without the -u with which every template runs."""
    return list(words[2 if words[1:2] == ["-u"] else 1 :])


def _read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that a fork would read too late."""
    found = {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_AT_IMPORT) and name not in _READ_LATER
    }
    folders = [path for path in found.pop("PYTHONPATH", "").split(os.pathsep) if path not in ("", _REPOSITORY)]
    return found | {"PYTHONPATH": os.pathsep.join(folders)}


def _set_subreaper(value: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, value, 0, 0, 0)


# ------------------------------------------------------------------------------------------------------- in the template


def run_template(kind: str, fd: int, listener_fd: int) -> None:
    """Import the modules of ``kind`` and fork for the process at the other end of ``fd`` until it ends; a fork runs its module.

    Forks of the template that ask at the listener have a keeper for each of their servers."""
    gc.disable()
    before = dict(os.environ)
    if kind == "server":
        sys.orig_argv = [sys.executable, "-m", _SERVER]  # the platform plugin prepares only servers
    for name in _PRELOADED[kind]:
        importlib.import_module(name)
    if kind != "server":  # servers enable it themselves
        gc.enable()
    gc.freeze()
    _set_by_imports.update({name: value for name, value in os.environ.items() if before.get(name) != value})
    threads = {
        Path("/proc/self/task", task, "comm").read_text().strip()
        for task in {*os.listdir("/proc/self/task")} - {str(os.getpid())}
    }
    assert threads <= _THREADS_THAT_FORK, f"a template with the threads {threads} cannot fork"
    channel, listener = socket.socket(fileno=fd), socket.socket(fileno=listener_fd)
    _serve(channel, listener if kind == "server" else None)()


def _received(channel: socket.socket) -> tuple[_Request, list[int]]:
    """A request and its streams. Ends this process at the end of the asking one."""
    head, streams, _, _ = socket.recv_fds(channel, 4, 3)
    if not head:
        os._exit(0)
    return pickle.loads(channel.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL)), streams


def _serve(channel: socket.socket, listener: socket.socket | None = None) -> Callable[[], None]:
    """Fork a process per request until the asking process has ended. Returns in each fork, with what it is to run."""
    while True:
        if listener and listener in select.select([channel, listener], [], [])[0]:
            asking, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                channel.close()
                return _keep(asking)
            asking.close()
            continue
        request, streams = _received(channel)
        read, write = os.pipe()
        between = os.fork()
        if between == 0:
            child = os.fork()
            if child:
                os.write(write, child.to_bytes(4, "big"))
                os._exit(0)
            for fd in (channel.detach(), read, write, *([listener.detach()] if listener else [])):
                os.close(fd)
            return _begin(request, streams)
        os.waitpid(between, 0)
        channel.sendall(os.read(read, 4))
        for fd in (*streams, read, write):
            os.close(fd)


def _keep(asking: socket.socket) -> Callable[[], None]:
    """Fork the process that is asked for, end it with the asking process, and tell that of its end. Returns in the fork."""
    request, streams = _received(asking)
    keeper = os.getpid()
    child = os.fork()
    if child == 0:
        asking.close()
        return _begin(request._replace(parent=keeper), streams)
    asking.sendall(child.to_bytes(4, "big"))
    ended = os.pidfd_open(child)
    if ended not in select.select([ended, asking], [], [])[0]:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with suppress(BrokenPipeError):
        asking.sendall(status.to_bytes(4, "big"))
    os._exit(0)


def _begin(request: _Request, streams: list[int]) -> Callable[[], None]:
    """Take over what the process gets from its parent. Returns the run of its module."""
    global _keepers
    _, words, environment, folder, new_session, _keepers = request
    deadline = time.monotonic() + _START_TIMEOUT_S
    while os.getppid() != request.parent:
        assert time.monotonic() < deadline, f"process {request.parent} did not become the parent"
        time.sleep(0.001)
    if new_session:
        os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ |= environment | _set_by_imports
    tempfile.tempdir = None
    _templates.clear()
    _PRELOADED.clear()  # what this process starts is started as usual, except its ranks and servers
    if _keepers:
        _templates["server"] = _keepers
        subprocess.Popen = _Popen  # type: ignore[misc]
    if "-c" in words[:3]:
        words = _words_after_exec(words[words.index("-c") + 1 :])
    sys.orig_argv = words
    _, module, *arguments = _without_u(words)
    if module in _LAUNCHERS and "RANK" not in environment:
        from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

        ours, theirs = socket.socketpair()
        if os.fork() == 0:
            ours.close()
            return _serve(theirs)
        theirs.close()
        _templates["ranks"] = _Template(ours, dict(os.environ))
        subprocess.Popen = subprocess_handler.Popen = _Popen  # type: ignore[misc, assignment]
    sys.argv = [module, *arguments]
    return partial(runpy.run_module, module, run_name="__main__", alter_sys=True)


def _words_after_exec(program: list[str]) -> list[str]:
    """Run the program of ``python -c`` up to its ``execv``. Returns the command line that it would execute."""
    executed: list[list[str]] = []
    parent = int(program[1])  # or its keeper
    with patch("os.execv", lambda path, words: executed.append(words)), patch("os.getppid", lambda: parent):
        sys.argv = ["-c", *program[1:]]
        exec(program[0], {"__name__": "__main__"})
    return executed[0]
