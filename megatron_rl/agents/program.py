"""Runs a user's command in a process of its own, within limits, from the run's event loop (``program_supervisor.py`` enforces them).

Invariants: the command is no shell's; secrets travel over pipes, not in command lines; it gets a small environment, not that
of the run. It ends with this process. Waiting for its end takes no thread.
"""

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

_SUPERVISOR = Path(__file__).with_name("program_supervisor.py")
_END_S = 20.0
"""Seconds in which a stopped program must have ended; its supervisor kills it after some."""
_SYSTEM_PATHS = (
    *("/usr", "/lib", "/lib64", "/bin", "/sbin", "/opt", "/etc/ssl", "/etc/hosts", "/etc/resolv.conf", "/etc/nsswitch.conf"),
    *("/etc/passwd", "/etc/group", "/etc/localtime", "/etc/ld.so.cache", "/etc/alternatives", "/etc/mime.types"),
)


@dataclass(frozen=True)
class AgentLimits:
    """Options of every program: its sandbox, and what it may use."""

    sandbox: Literal["files", "none"] = "files"
    """files: it reads the system, Python and ``readable`` alone, writes in its workspace alone, and connects to the endpoint and
    ``ports`` alone (Linux 6.7; older kernels: to any address). none: it may do what the run's user may."""
    readable: list[str] = field(default_factory=list)
    """Further files and folders that it may read; the folders of files that the command names are among them."""
    ports: list[int] = field(default_factory=list)
    """Further TCP ports that a sandboxed program may connect to, such as that of a tool server."""
    time_limit_s: float = 600.0
    """Seconds of its own; the time in which it waits for the policy does not count."""
    memory_mb: int = 4096
    num_processes: int = 128
    file_mb: int = 256
    """Largest file that it may write."""
    output_kb: int = 256
    """Output that is kept."""


@dataclass(frozen=True)
class AgentEnd:
    code: int
    reason: str = ""
    """Why it was stopped; empty if it ended by itself."""

    @property
    def failure(self) -> str:
        """Text for the user; empty if the program succeeded."""
        if self.reason:
            return self.reason
        return f"exit code {self.code}" if self.code >= 0 else f"killed by signal {-self.code}"

    @property
    def succeeded(self) -> bool:
        return not self.reason and self.code == 0


class AgentProcess:
    """One process of a user's command. Used on the event loop that made it."""

    def __init__(self, process: subprocess.Popen[bytes], limits: AgentLimits) -> None:
        self._process = process
        self._limits = limits
        self._reason = ""
        self._exited = exit_of(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self, reason: str) -> None:
        """Ask for the end of the program and of all its processes."""
        self._reason = self._reason or reason
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    async def end(self, waited_s: Callable[[], float] = lambda: 0.0) -> AgentEnd:
        """Wait for the end; stop a program that exceeds its time. ``waited_s()``: seconds that do not count so far."""
        clock = asyncio.get_running_loop().time
        start_s = clock()
        while not self._exited.done() and not self._reason:
            left_s = self._limits.time_limit_s - (clock() - start_s - waited_s())
            if left_s <= 0:
                self.stop(f"it took more than time_limit_s={self._limits.time_limit_s:g} of its own")
            await self._wait(max(left_s, 0.01))
        if not await self._wait(_END_S):
            self._process.kill()
            await self._wait(_END_S)
        return self._report()

    async def _wait(self, timeout_s: float) -> bool:
        await asyncio.wait([self._exited], timeout=timeout_s)
        return self._exited.done()

    def _report(self) -> AgentEnd:
        self.stop("")
        assert self._process.stdout is not None
        with self._process.stdout as pipe:
            text = pipe.read() if self._exited.done() else b""  # a short line, which fits in the pipe
        try:
            report = json.loads(text)
        except ValueError:
            return AgentEnd(-9, self._reason or "its supervisor was killed")
        return AgentEnd(report["code"], self._reason or report["reason"])


def exit_of(process: subprocess.Popen[bytes]) -> "asyncio.Future[int]":
    """The exit code of a process once it has ended, without a thread that waits."""
    event_loop = asyncio.get_running_loop()
    exited: asyncio.Future[int] = event_loop.create_future()
    descriptor = os.pidfd_open(process.pid)

    def note() -> None:
        event_loop.remove_reader(descriptor)
        os.close(descriptor)
        code = process.wait()
        if not exited.done():
            exited.set_result(code)

    event_loop.add_reader(descriptor, note)
    return exited


def start_program(
    command: Sequence[str],
    workspace: Path,
    output: Path,
    limits: AgentLimits,
    *,
    environment: Mapping[str, str],
    port: int = 0,
) -> AgentProcess:
    """Start a command in ``workspace``; its output goes to the file ``output``. ``port``: the endpoint's."""
    # The program runs in its workspace, so files that the command names get absolute paths.
    words = [os.path.abspath(word) if os.path.isfile(word) and (i or os.sep in word) else word for i, word in enumerate(command)]
    settings = {
        "command": words,
        "folder": str(workspace),
        "environment": _small_environment(workspace) | dict(environment),
        "output": str(output),
        "output_bytes": limits.output_kb << 10,
        "memory_mb": limits.memory_mb,
        "file_mb": limits.file_mb,
        "num_processes": limits.num_processes,
        "sandbox": limits.sandbox,
        "readable": [*_SYSTEM_PATHS, *_python_paths(), *_named_paths(words), *map(os.path.abspath, limits.readable)],
        "writable": [str(workspace)],
        "ports": [port, *limits.ports] if port else [],
    }
    process = subprocess.Popen(
        # Isolated and without site-packages: it starts in milliseconds, and nothing of the user's is imported.
        [sys.executable, "-I", "-S", str(_SUPERVISOR)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(json.dumps(settings).encode() + b"\n")
        process.stdin.flush()
    return AgentProcess(process, limits)


def _small_environment(workspace: Path) -> dict[str, str]:
    """Environment without the run's secrets."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL", "TZ", "SSL_CERT_FILE", "SSL_CERT_DIR") if name in os.environ}
    return {"PATH": os.defpath, **kept, "HOME": str(workspace), "TMPDIR": str(workspace), "PYTHONUNBUFFERED": "1"}


def _named_paths(words: Sequence[str]) -> list[str]:
    """Folders of the files in a command; of an executable in ``bin`` the whole installation."""
    files = [found for word in words for found in [shutil.which(word) if word is words[0] else word] if found and os.path.isfile(found)]
    folders = {os.path.dirname(path) for file in files for path in (file, os.path.realpath(file))}
    return sorted({os.path.dirname(path) if os.path.basename(path) == "bin" else path for path in folders} - {"/"})


def _python_paths() -> list[str]:
    paths = {sys.prefix, sys.base_prefix, os.path.dirname(os.path.realpath(sys.executable)), *sysconfig.get_paths().values()}
    return sorted({*paths, *map(os.path.realpath, paths)})
