"""SGLang server processes: start, watch, restart, stop.

``SglangServer`` owns one server and all its child processes. It is synchronous and meant for the thread that drives
the run; ``server_pool.py`` groups the servers of a run and ``client.py`` sends their requests.

Invariants: a started server has its own process group, and after ``stop`` no process of that group is left. If the
process that started it ends, even by SIGKILL, the kernel kills the server and SGLang's workers follow it. A server
keeps its URL over restarts; its ``incarnation`` counts them, so callers with state inside the server (the
weight-sync group, current weights) notice that this state is gone. Every wait has a deadline, and its error names
both sides.
"""

import logging
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil

from megatron_rl.rollout.requests import ServerError
from megatron_rl.rollout.sglang.process.cleanup import (
    REMOVE_SHARED_MEMORY,
    SHARED_MEMORY,
    note_shared_memory,
    remove_abandoned_shared_memory,
    remove_shared_memory,
    temporary_files_in,
    unlink_shared_memory,
    write_secret,
)
from megatron_rl.rollout.sglang.process.options import ServerOptions, server_command, server_environment
from megatron_rl.system.files.atomic_files import TemporaryFolder
from megatron_rl.system.files.hub_cache import download_hint
from megatron_rl.system.http.json_http import HttpError, bearer, get_once
from megatron_rl.system.processes.child_process import start_on_own_thread

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_WAITING_S = 5.0
_PROGRESS_S = 15.0
_STOP_GRACE_S = 15.0
"""Grace period before a stopped server is killed (SGLang polls for SIGTERM every 5 s)."""
_MAX_PORT_ATTEMPTS = 3
_AUTOMATIC_PORTS = range(10_000, 64_000)
"""Ports that ``port=0`` may choose; SGLang adds up to 1,000 for its own ports."""
_MAX_PORT_PROBES = 100
_REMEDIES: tuple[tuple[str, str], ...] = (
    (
        r"address already in use|port \d+ is (already in use|not available)",
        "another process took the port: choose another rollout.port, or set it to 0 for any free port",
    ),
    (
        r"does not recognize this architecture|not supported for now|Unrecognized model|Should have a `model_type`",
        "SGLang or transformers does not know this model type: check model_type and architectures in the model "
        "folder's config.json, or use versions that support them",
    ),
    (
        r"unrecognized arguments|error: argument|invalid choice|expected one argument",
        "an option in rollout.server_args is not one of this SGLang version's: see `python -m sglang.launch_server -h`",
    ),
    (
        r"Cannot find any model weights|No safetensors|does not appear to have a file named|HFValidationError",
        "the model folder is incomplete: it needs config.json and *.safetensors (the weights may be left out only "
        "when the server starts without loading them)",
    ),
    (
        r"out of memory|OutOfMemoryError|Not enough memory|mem.fraction.static|DefaultCPUAllocator",
        "not enough memory: lower mem-fraction-static or max-total-tokens in rollout.server_args, or use a larger "
        "rollout.tensor_parallel_size",
    ),
    (
        r"sgl_kernel|Failed to infer device|No accelerator|Torch not compiled with CUDA",
        "SGLang found no usable device: without a GPU it needs this package's platform plugin, so install the package "
        "(pip install -e .) into the environment that runs the server",
    ),
    (r"ModuleNotFoundError|ImportError", "a package is missing: install requirements/cpu.txt or requirements/gpu.txt"),
)
"""(regular expression for the log, remedy), most specific first."""

Progress = Callable[[str], None]


# Runs before the server in its process: ask the kernel to kill it when its parent dies, then become the server.
# It cannot be a function called between fork and exec: the trainer has threads, and Python is not safe there.
# SGLang's workers rendezvous in an unnamed file that disappears with the process. SGLang's default is a TCPStore, which
# listens on all addresses without authentication.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the process that started this server died")
if "--dist-init-addr" not in sys.argv:
    store = f"file:///proc/{os.getpid()}/fd/{os.memfd_create('store', 0)}"
    os.environ.setdefault("SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE", store)
os.execv(sys.argv[2], sys.argv[2:])
"""


class SglangServer:
    """One managed server process. ``start`` returns once it answers; the log is written to ``log_path``."""

    is_ours = True
    """This process can restart the server."""

    def __init__(
        self,
        options: ServerOptions,
        log_path: str | Path,
        *,
        start_timeout_s: float = 300.0,
        max_restarts: int = 3,
    ) -> None:
        self.options = options
        self.log_path = Path(log_path)
        self.start_timeout_s = start_timeout_s
        self.max_restarts = max_restarts
        self.incarnation = 0
        self.port = options.port
        self.progress: Progress = logger.info
        self._process: subprocess.Popen[bytes] | None = None
        self.num_restarts = 0
        """Restarts counted against ``max_restarts``; a resumed run sets the number."""
        self._has_served = False
        """True once callers know the URL, which is then fixed."""
        self._abandoned = threading.Event()
        self._started_at = 0.0
        self._log_start = 0
        self._folder: TemporaryFolder | None = None
        """Folder of the process's temporary files."""

    @property
    def url(self) -> str:
        return f"http://{self.options.host}:{self.port}"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self, while_waiting: Callable[[], None] = lambda: None) -> None:
        """Start the server and wait until it answers; ``while_waiting`` as in ``wait_ready``.

        Raises ServerError with the last lines of the log and the likely remedy; nothing is left running then.
        """
        self.spawn()
        try:
            self.wait_ready(while_waiting)
        except BaseException:
            self.stop(grace_s=0.0)
            raise

    def spawn(self) -> None:
        """Start only the process; ``wait_ready`` must follow."""
        if self.alive():
            raise ServerError(f"server {self.url} already runs as process {self.pid}: stop() it or use restart()")
        if self._abandoned.is_set():
            raise ServerError(f"server {self.url} is not restarted: the run ends")
        _check_model_folder(self.options.model_path)
        if self.port == 0:
            self.port = free_port(self.options.host)
        _check_port(self.options.host, self.port)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
        self._started_at = time.monotonic()
        remove_abandoned_shared_memory()
        self._folder = TemporaryFolder("sglang", also=REMOVE_SHARED_MEMORY)
        command = server_command(self.options, self.port, write_secret(self.options, self._folder.path))
        try:
            self._process = start_on_own_thread(partial(self._popen, command), f"sglang-{self.port}")
        except OSError as error:
            raise ServerError(f"cannot start {command[0]}: {error}") from error
        self.incarnation += 1

    def wait_ready(self, while_waiting: Callable[[], None] = lambda: None) -> None:
        """Wait until the started server answers, at most ``start_timeout_s`` after its start.

        ``while_waiting`` is called every few seconds on this thread, for example to keep other processes from
        timing out. If another process took the automatically chosen port first, the server is started again: on
        another port, or on the same port if the server has served there.
        """
        for attempt in range(1, _MAX_PORT_ATTEMPTS + 1):
            exit_code = self._wait_healthy(while_waiting)
            if exit_code is None:
                if self.pid is not None:
                    unlink_shared_memory(group_members(self.pid), self.url, self.options)
                self._has_served = True
                return
            log = self.log_end()
            # SGLang runs on for a while without its port, and its later log lines hide the reason.
            lost_port = port_taken(last_lines(self.log_path, self._log_start, count=1000))
            self.stop()
            if not (self.options.port == 0 and lost_port and attempt < _MAX_PORT_ATTEMPTS):
                raise ServerError(start_failure(self.url, exit_code, self.log_path, log))
            if self._has_served:
                _wait_port_free(self.options.host, self.port)
            else:
                self.port = 0
            self.spawn()

    def alive(self) -> bool:
        """True if the process runs (it may be busy or still starting)."""
        return self._process is not None and self._process.poll() is None

    def healthy(self, timeout_s: float = 5.0) -> bool:
        """True if the process runs and both the server and its scheduler answer within ``timeout_s``."""
        return self.alive() and is_healthy(self.url, timeout_s) and _scheduler_answers(self, timeout_s)

    def abandon(self) -> None:
        """Allow no restart from now on, because the run ends; a restart in progress raises ServerError."""
        self._abandoned.set()

    def restart(self, while_waiting: Callable[[], None] = lambda: None) -> None:
        """Kill the rest of the server and start it again under the same URL, with a new incarnation.

        The server starts with the weights of its model folder: send it the current weights before it serves. Raises
        ServerError once ``max_restarts`` are used up.
        """
        if self.num_restarts >= self.max_restarts:
            raise ServerError(
                f"server {self.url} failed again after {self.max_restarts} restarts; its log is {self.log_path}. "
                "Fix the cause named there, or raise rollout.max_restarts."
            )
        self.num_restarts += 1
        self.progress(f"restarting server {self.url}, restart {self.num_restarts} of {self.max_restarts}")
        self.stop(grace_s=0.0)
        _wait_port_free(self.options.host, self.port)
        self.start(while_waiting)

    def stop(self, grace_s: float = _STOP_GRACE_S) -> None:
        """Send SIGTERM and kill the process group after ``grace_s``. No process of the group survives."""
        if self._process is None:
            return
        process, self._process = self._process, None
        if process.poll() is None and grace_s > 0:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(grace_s)
            except subprocess.TimeoutExpired:
                logger.warning("server %s did not stop within %.0f s and is killed", self.url, grace_s)
        pids = group_members(process.pid)
        _kill_group(process.pid)
        process.wait()
        remove_shared_memory(pids)
        if self._folder is not None:
            self._folder.remove()

    def log_end(self) -> str:
        """Last lines of this process's log, with the API key masked."""
        lines = last_lines(self.log_path, self._log_start)
        return lines.replace(self.options.api_key, "***") if self.options.api_key else lines

    def __enter__(self) -> "SglangServer":
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _popen(self, command: list[str]) -> subprocess.Popen[bytes]:
        assert self._folder is not None, "spawn() makes it"
        environment = server_environment(self.options, os.environ, sorted(os.sched_getaffinity(0)))
        # SGLang logs its options, including the API key.
        with open(self.log_path, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as log:
            return subprocess.Popen(
                [sys.executable, "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment | temporary_files_in(self._folder.path),
                start_new_session=True,  # own process group, so that Ctrl-C in the terminal stops only the trainer
            )

    def _wait_healthy(self, while_waiting: Callable[[], None]) -> int | None:
        """Return None once the server answers, or its exit code if it exits first. Raises ServerError at the deadline."""
        process, folder = self._process, self._folder
        assert process is not None and folder is not None, "spawn() comes first"
        next_progress = self._started_at + _PROGRESS_S
        next_call = time.monotonic() + _WAITING_S
        seen: list[Path] = []
        while True:
            if time.monotonic() > next_call:
                next_call += _WAITING_S
                while_waiting()
            exit_code = process.poll()
            if exit_code is not None:
                return exit_code
            if is_healthy(self.url, timeout_s=2.0):
                return None
            waited_s = time.monotonic() - self._started_at
            if waited_s > self.start_timeout_s:
                log = self.log_end()
                self.stop(grace_s=0.0)
                raise ServerError(
                    f"server {self.url} did not answer within {self.start_timeout_s:.0f} s of its start and was "
                    f"killed. Raise rollout.start_timeout_s (serve: --start-timeout-s) if it was still loading; its log "
                    f"{self.log_path} ends:\n"
                    + log
                )
            if time.monotonic() > next_progress:
                next_progress += _PROGRESS_S
                self.progress(f"waiting for server {self.url} ({waited_s:.0f} s); its log: {self.log_path}")
            if (made := list(SHARED_MEMORY.glob("sgl*"))) != seen:  # looking through its processes takes milliseconds
                seen = made
                note_shared_memory(group_members(process.pid), folder.path)
            if self._abandoned.wait(_POLL_S):
                raise ServerError(f"stopped waiting for server {self.url}: the run ends")


def _check_model_folder(model_path: str) -> None:
    if not (Path(model_path) / "config.json").is_file():
        raise ServerError(
            f"no config.json in the model folder {model_path!r}. Expected a local Hugging Face model folder "
            f"(config.json, safetensors, tokenizer); download the model first or correct policy.path{download_hint(model_path, 'model')}."
        )


def is_healthy(url: str, timeout_s: float) -> bool:
    """True if a server at ``url`` answers that it is up."""
    try:
        return get_once(f"{url}/health", timeout_s=timeout_s).status == 200
    except HttpError:
        return False


def _scheduler_answers(server: SglangServer, timeout_s: float) -> bool:
    """True if the scheduler, which contributes to this reply, is not hung."""
    try:
        answer = get_once(f"{server.url}/server_info", timeout_s=timeout_s, headers=bearer(server.options.api_key))
    except HttpError:
        return False
    return answer.status == 200


def port_is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # Like the server: ports of recently closed connections count as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _wait_port_free(host: str, port: int, timeout_s: float = 10.0) -> None:
    """Wait until the kernel has released the port of a killed server."""
    deadline = time.monotonic() + timeout_s
    while not port_is_free(host, port) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _check_port(host: str, port: int) -> None:
    """Check that a server can listen on the port. Raises ServerError if not."""
    if not port_is_free(host, port):
        raise ServerError(
            f"port {port} on {host} is in use (or {host} is not an address of this machine). Find its owner with "
            f"`ss -ltnp | grep {port}`, choose another rollout.port, or set it to 0 for any free port."
        )


def free_port(host: str) -> int:
    """Return a free port outside the kernel's ephemeral range, or any free port if no such port was found.

    The kernel gives ephemeral ports to the connections of all processes, so such a port may be taken while its
    server restarts.
    """
    ephemeral = ephemeral_ports()
    candidates = [port for port in _AUTOMATIC_PORTS if port not in ephemeral]
    # Random, so that two runs that start together on a node rarely choose the same port.
    for port in secrets.SystemRandom().sample(candidates, min(len(candidates), _MAX_PORT_PROBES)):
        if port_is_free(host, port):
            return port
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def ephemeral_ports() -> range:
    """Ports that the kernel chooses for connections of this network namespace; empty if the kernel does not report them."""
    try:
        first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split())
    except OSError:
        return range(0)
    return range(first, last + 1)


def _kill_group(group: int, timeout_s: float = 10.0) -> None:
    """SIGKILL every process of the group and wait until none is left."""
    deadline = time.monotonic() + timeout_s
    while members := group_members(group):
        if time.monotonic() > deadline:
            raise ServerError(f"processes {members} of a stopped server survived SIGKILL for {timeout_s:.0f} s")
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            return
        time.sleep(0.02)


def group_members(group: int) -> list[int]:
    """Process ids of a process group, zombies excluded."""
    members = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return members


def last_lines(path: Path, start: int, count: int = 25, max_bytes: int = 65536) -> str:
    """Last ``count`` non-empty lines written to ``path`` after byte ``start``."""
    if not path.exists():
        return ""
    with path.open("rb") as log:
        size = log.seek(0, 2)
        log.seek(max(start, size - max_bytes))
        lines = log.read().decode(errors="replace").splitlines()
    # SGLang logs all its options in one line of 25,000 characters.
    return "\n".join([line[:500] for line in lines if line.strip()][-count:])


def port_taken(log: str) -> bool:
    return re.search(_REMEDIES[0][0], log, re.IGNORECASE) is not None


def remedy(log: str) -> str:
    for pattern, advice in _REMEDIES:
        if re.search(pattern, log, re.IGNORECASE):
            return advice
    return "read the log from its first error on"


def start_failure(url: str, exit_code: int, log_path: Path, log: str) -> str:
    """Error message with the exit code, a likely remedy and the end of the log."""
    how = f"was killed by signal {-exit_code}" if exit_code < 0 else f"exited with code {exit_code}"
    return f"server {url} {how} while starting. Likely remedy: {remedy(log)}. Its log {log_path} ends:\n{log}"
