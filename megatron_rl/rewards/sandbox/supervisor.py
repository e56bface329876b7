"""The sandbox's own process: it confines, watches and kills the processes that run untrusted code.

Started once by its client (sandbox.py), it imports what programs often need, and forks a process for each program: a
matter of a millisecond. It reads requests from the control socket one at a time.

Invariants:

- A process runs untrusted code only after every guard of the level is in place; a guard that fails is reported as the
  sandbox's failure, and the code is not run.
- After each request nothing of it is left: no process, no file.
- The supervisor parses neither tests nor verdicts: they go through a socket from the client to the referee, so no fork of the
  supervisor holds them.

Who waits for whom: the client waits for the reply, which comes at the deadline at the latest; the supervisor waits for the
referee, for the deadline, for a limit that is watched (memory, processes, disk) and for the end of the client, whichever
comes first, and then kills. Everything dies with the supervisor, the supervisor with its client.
"""

import gc
import glob
import json
import os
import resource
import secrets
import select
import signal
import socket
import stat
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from megatron_rl.rewards.sandbox import kernel
from megatron_rl.rewards.sandbox.program import play, referee, together

HEADER = struct.Struct("!I")
_GC_THRESHOLD = 20_000
"""New objects between two collections: most programs end before the first one."""
_BOX = "/box"
"""Working, home and temporary folder of a program, where it has a root of its own."""
_ROOT_BYTES = 1 << 20
FAIR_SHARE = 0.1
_TOO_BUSY = "the machine is too busy to run a program within its time"
_WATCH_S = 0.02
"""Between two looks at memory, processes and disk."""
_FIRST_WATCH_S = 0.1
"""Most programs have ended by then."""
_MAX_WATCHED = 1000
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_MAX_OPEN_FILES = 64
_MAX_ENTRIES = 4096
"""Files and folders of a program."""
_MAX_PATH_CHARS = 1024
_MIN_MEMORY_FOLDER_BYTES = 256 << 20
_FOLDER_PREFIX = "megatron_rl_sandbox_"
_STACK_BYTES = 64 << 20
FIRST_GUEST_UID, NUM_GUEST_UIDS = 61184, 4335
"""User ids that systemd reserves for users who own nothing; a supervisor takes one, so that process limits are its own."""
_PRELOADED = (
    "abc argparse array ast base64 bisect calendar cmath collections copy csv dataclasses datetime decimal enum fractions "
    "functools hashlib heapq io itertools json logging math operator os random re statistics string struct sys textwrap "
    "threading time types typing unicodedata unittest uuid"
).split()


@dataclass(frozen=True)
class Limits:
    time_s: float
    """Since the start, less what the processes waited for a CPU: a busy machine fails nobody."""
    wall_s: float
    """Since the start, whatever the machine did; a program that had less than ``FAIR_SHARE`` of its time is unscored."""
    memory_bytes: int
    disk_bytes: int
    num_processes: int


# --------------------------------------------------------------------------------------------------------------- root


def _visible_paths() -> list[str]:
    """What a program may read: the Python installation and the system's libraries."""
    paths = [sys.prefix, sys.base_prefix, sys.exec_prefix, os.path.dirname(os.path.realpath(sys.executable))]
    paths += ["/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime"]
    paths += [os.path.realpath(path) for path in paths]  # a virtual environment may be reached through a link
    paths = sorted({os.path.abspath(path) for path in paths if os.path.exists(path)})
    return [path for path in paths if not any(path != other and path.startswith(f"{other}/") for other in paths)]


def _enter_namespaces() -> None:
    """Give this process a network without devices and a read-only root with the visible paths only.

    Raises:
        OSError: the kernel refuses.
    """
    uid, gid = os.geteuid(), os.getegid()
    flags = kernel.CLONE_NEWNS | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
    try:
        kernel.unshare(flags)
    except OSError:
        kernel.unshare(flags | kernel.CLONE_NEWUSER)
        for name, text in (("setgroups", "deny"), ("uid_map", f"65534 {uid} 1"), ("gid_map", f"65534 {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    # The new root is put together on top of /proc: a folder that always exists and holds nothing that it needs.
    new_root = "/proc"
    kernel.mount("tmpfs", new_root, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, f"size={_ROOT_BYTES},mode=755")
    for path in _visible_paths():
        _show(path, new_root)
    os.mkdir(f"{new_root}/dev")
    for name in ("null", "zero", "full", "random", "urandom"):
        _bind(f"/dev/{name}", f"{new_root}/dev/{name}")
    os.mkdir(f"{new_root}{_BOX}")
    for link in ("/tmp", "/dev/shm"):
        if not os.path.lexists(f"{new_root}{link}"):
            os.symlink(_BOX, f"{new_root}{link}")
    kernel.change_root(new_root)
    kernel.mount(
        "none", "/", "", kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV
    )


def _show(path: str, new_root: str) -> None:
    """Bind a path into the new root, read-only; a link stays a link."""
    target = new_root + path
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    _bind(path, target)
    kernel.make_read_only(target)


def _bind(path: str, target: str) -> None:
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        open(target, "w").close()
    kernel.mount(path, target, "", kernel.MS_BIND | kernel.MS_REC)


# -------------------------------------------------------------------------------------------------------------- guards


class Guards:
    """One level of confinement. ``start`` forks a confined process, ``sweep`` leaves nothing of it."""

    def __init__(self, level: str) -> None:
        """``level``: namespaces, filter, or none (resource limits only).

        Raises:
            OSError: the kernel cannot do this level.
        """
        self.level = level
        self.folder = _BOX
        self._is_root = os.geteuid() == 0
        self._guest = FIRST_GUEST_UID + os.getpid() % NUM_GUEST_UIDS
        self._processes = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.base_bytes = int(self._read("self/statm").split()[0]) * resource.getpagesize()
        """Address space of the supervisor, which its forks start with."""
        if level == "namespaces":
            self._filter = kernel.filter_program(alone=False, own_pid=0)
            _enter_namespaces()
            self._is_root = self._is_root and os.geteuid() == 0
            return
        if level == "filter" and not kernel.landlock_version():
            raise kernel.Unsupported(0, "this kernel has no Landlock")
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
        _remove_leftovers()
        self.folder = tempfile.mkdtemp(prefix=f"{_FOLDER_PREFIX}{os.getpid()}_", dir=_fast_folder())

    def prepare(self, limits: Limits) -> None:
        """An empty folder for the processes of one request."""
        if self.level == "namespaces":
            uid, gid = (self._guest, self._guest) if self._is_root else (os.geteuid(), os.getegid())
            options = f"size={limits.disk_bytes},nr_inodes={_MAX_ENTRIES},mode=700,uid={uid},gid={gid}"
            kernel.mount("tmpfs", _BOX, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)

    def fork(self) -> int:
        return kernel.clone(kernel.CLONE_NEWPID) if self.level == "namespaces" else os.fork()

    def confine(self, limits: Limits, parent_pid: int) -> None:
        """In the forked process: put every guard in place, for good."""
        os.setsid()
        os.chdir(self.folder)
        _limit_resources(limits, self.base_bytes)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        if self.level == "none":
            kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
            return
        if self.level == "filter":
            devices = [f"/dev/{name}" for name in ("zero", "full", "random", "urandom")]
            kernel.confine_files([*_visible_paths(), *devices], [self.folder, "/dev/null"])
        elif self._is_root:
            os.setgroups([])
            os.setresgid(self._guest, self._guest, self._guest)
            os.setresuid(self._guest, self._guest, self._guest)
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of user resets it
        if self.level == "filter" and os.getppid() != parent_pid:
            os._exit(1)
        kernel.drop_capabilities()
        if self.level == "filter":
            kernel.install_filter(kernel.filter_program(alone=True, own_pid=os.getpid()))
        else:
            kernel.install_filter(self._filter)

    def usage(self, pids: list[int]) -> tuple[int, int]:
        """(bytes in memory, number of processes) of process trees."""
        tree = self._tree(pids)
        num_pages = sum(int((self._read(f"{pid}/statm").split() or [0, 0])[1]) for pid in tree)
        return num_pages * resource.getpagesize(), len(tree)

    def _tree(self, pids: list[int]) -> list[int]:
        """Processes and their descendants."""
        tree = list(pids)
        for pid in tree:
            if len(tree) < _MAX_WATCHED:
                tree += map(int, self._read(f"{pid}/task/{pid}/children").split())
        return tree

    def _read(self, name: str) -> str:
        try:
            file = os.open(name, os.O_RDONLY, dir_fd=self._processes)
        except OSError:  # it has ended
            return ""
        try:
            return os.read(file, 1 << 16).decode()
        except OSError:
            return ""
        finally:
            os.close(file)

    def own_s(self, pids: list[int], elapsed_s: float) -> float:
        """Seconds that processes had for themselves: the time since their start less what they waited for a CPU, or the
        CPU time of all that they started, if that is more."""
        delay_ns = sum(int((self._read(f"{pid}/schedstat").split() or [0, 0])[1]) for pid in pids)
        ticks = 0
        for pid in self._tree(pids):
            fields = self._read(f"{pid}/stat").rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))  # of its threads, and of its children that have ended
        return max(elapsed_s - delay_ns / 1e9, ticks / _TICKS_PER_S)

    def disk_bytes(self) -> int:
        """In the working folder, where its size is not limited by its file system."""
        if self.level == "namespaces":
            return 0
        return _folder_bytes(self.folder)

    def sweep(self, pids: list[int]) -> list[int]:
        """Kill processes with all that they started, and empty the folder. Returns the wait statuses."""
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        # The first process of a PID namespace becomes a zombie only when all others of the namespace are gone.
        statuses = [os.waitpid(pid, 0)[1] for pid in pids]
        if self.level == "namespaces":
            kernel.unmount(_BOX)
        else:
            self._sweep_orphans()
            _empty_folder(self.folder)
        return statuses

    def _sweep_orphans(self) -> None:
        for _ in range(1000):
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            own = os.getpid()
            for pid in map(int, self._read(f"{own}/task/{own}/children").split()):
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.001)

    def close(self) -> None:
        if self.level != "namespaces":
            _empty_folder(self.folder)
            os.rmdir(self.folder)


def _folder_bytes(folder: str) -> int:
    """What is in a folder; more than any limit if it has too many entries, or paths too long, to be looked through."""
    num_bytes, num_entries, waiting = 0, 0, [folder]
    while waiting:
        path = waiting.pop()
        if len(path) > _MAX_PATH_CHARS:
            return sys.maxsize
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    num_entries += 1
                    if num_entries > _MAX_ENTRIES:
                        return sys.maxsize
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    else:
                        num_bytes += entry.stat(follow_symlinks=False).st_blocks * 512
        except FileNotFoundError:
            pass  # deleted meanwhile
        except PermissionError:
            pass  # it holds what the program put there before, and can add nothing
        except OSError:
            return sys.maxsize
    return num_bytes


def _empty_folder(folder: str) -> None:
    """Delete what is in a folder, whatever its permissions and however deep it is: by bringing folders up, not by going
    down."""
    prefix, number = f"{folder}/{secrets.token_hex(8)}", 0
    while entries := list(os.scandir(folder)):
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            os.chmod(entry.path, stat.S_IRWXU)
            for child in list(os.scandir(entry.path)):
                if child.is_dir(follow_symlinks=False):
                    os.chmod(child.path, stat.S_IRWXU)
                    os.rename(child.path, f"{prefix}{number}")
                    number += 1
                else:
                    os.unlink(child.path)
            os.rmdir(entry.path)


def _fast_folder() -> str:
    """Where programs write: memory, if there is enough of it, else the temporary folder (TMPDIR)."""
    memory = "/dev/shm"
    if os.access(memory, os.W_OK):
        about = os.statvfs(memory)
        if about.f_bavail * about.f_frsize > _MIN_MEMORY_FOLDER_BYTES:
            return memory
    return tempfile.gettempdir()


def _remove_leftovers() -> None:
    """Folders of supervisors that were killed."""
    for path in glob.glob(f"{_fast_folder()}/{_FOLDER_PREFIX}*"):
        pid = path.rpartition(_FOLDER_PREFIX)[2].partition("_")[0]
        if pid.isdigit() and not os.path.exists(f"/proc/{pid}") and os.stat(path).st_uid == os.geteuid():
            _empty_folder(path)
            os.rmdir(path)


def _limit_resources(limits: Limits, base_bytes: int) -> None:
    with_base = limits.memory_bytes + base_bytes
    cpu_s = int(limits.time_s) + 1
    for what, soft, hard in (
        (resource.RLIMIT_AS, with_base, with_base),
        (resource.RLIMIT_STACK, _STACK_BYTES, _STACK_BYTES),
        (resource.RLIMIT_CPU, cpu_s, cpu_s + 1),
        (resource.RLIMIT_FSIZE, limits.disk_bytes, limits.disk_bytes),
        (resource.RLIMIT_NPROC, limits.num_processes, limits.num_processes),
        (resource.RLIMIT_NOFILE, _MAX_OPEN_FILES, _MAX_OPEN_FILES),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_MEMLOCK, 0, 0),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
    ):
        ceiling = resource.getrlimit(what)[1]
        if ceiling != resource.RLIM_INFINITY:
            soft, hard = min(soft, ceiling), min(hard, ceiling)
        resource.setrlimit(what, (soft, hard))


# ------------------------------------------------------------------------------------------------------------ requests


@dataclass
class _Child:
    pid: int
    status: int
    """Read end of a pipe: it says ``ok`` once the process is confined, and ends with the process."""


class Supervisor:
    def __init__(self, control: socket.socket, guards: Guards) -> None:
        self._control = control
        self._guards = guards

    def serve(self) -> None:
        """Answer requests until the client is gone."""
        while header := self._receive(HEADER.size):
            request = json.loads(self._receive(HEADER.unpack(header)[0]))
            reply = json.dumps(self._run(request)).encode()
            self._control.sendall(HEADER.pack(len(reply)) + reply)

    def _receive(self, size: int) -> bytes:
        """Exactly ``size`` bytes; b"" at the end of the stream."""
        parts = []
        while size:
            part = self._control.recv(size)
            if not part:
                return b""
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _run(self, request: dict[str, Any]) -> dict[str, Any]:
        """One program. The reply says what ended it, and how its processes ended."""
        limits, program = Limits(**request["limits"]), request["program"]
        started_at = time.monotonic()
        children: list[_Child] = []
        open_files: list[socket.socket] = []
        self._guards.prepare(limits)
        try:
            if request["together"]:
                channel = self._receive_channel(open_files)
                children.append(self._start(limits, [channel], lambda: together(program, channel)))
            else:
                ours, theirs = socket.socketpair()
                open_files += [ours, theirs]
                children.append(self._start(limits, [theirs], lambda: play(program, theirs)))
                channel = self._receive_channel(open_files)
                children.append(self._start(limits, [channel, ours], lambda: referee(channel, ours)))
            for file in open_files:
                file.close()
            deadline = started_at + limits.wall_s
            failure = next((text for child in children if (text := self._confined(child, deadline))), "")
            ended_by = "" if failure else self._wait(children, limits, started_at)
            if ended_by == _TOO_BUSY:
                failure = _TOO_BUSY
        finally:
            for file in open_files:
                file.close()
            statuses = self._guards.sweep([child.pid for child in children])
            for child in children:
                os.close(child.status)
        return {"failure": failure, "ended_by": ended_by, "statuses": statuses}

    def _receive_channel(self, open_files: list[socket.socket]) -> socket.socket:
        """The socket between the client and the referee."""
        _, files, _, _ = socket.recv_fds(self._control, 1, 1)
        channel = socket.socket(fileno=files[0])
        open_files.append(channel)
        return channel

    def _start(self, limits: Limits, files: list[socket.socket], body: Callable[[], None]) -> _Child:
        read_end, write_end = os.pipe()
        own_pid = os.getpid()
        pid = self._guards.fork()
        if pid:
            os.close(write_end)
            return _Child(pid, read_end)
        # Whatever happens, the child must not come back into the supervisor's loop.
        try:
            try:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                _keep_files({file.fileno() for file in files} | {write_end})
                self._guards.confine(limits, own_pid)
            except BaseException as error:
                os.write(write_end, f"{type(error).__name__}: {error}".encode()[:500])
                os._exit(1)
            os.write(write_end, b"ok")
            body()
            os._exit(0)
        except BaseException:
            os._exit(1)

    def _confined(self, child: _Child, deadline: float) -> str:
        """Wait until a process is confined. Returns why it is not, or ""."""
        readable, _, _ = select.select([child.status], [], [], max(deadline - time.monotonic(), 0))
        if not readable:
            return "a process was not ready before the deadline"
        text = os.read(child.status, 1000).decode(errors="replace")
        return "" if text.startswith("ok") else f"a process could not be confined: {text or 'it died'}"

    def _wait(self, children: list[_Child], limits: Limits, started_at: float) -> str:
        """Until the referee (the last child) ends. Returns the limit that ended it sooner, or ""."""
        referee_status, pids = children[-1].status, [child.pid for child in children]
        patience_s = _FIRST_WATCH_S
        while True:
            readable, _, _ = select.select([referee_status, self._control], [], [], patience_s)
            if readable:  # the client sends nothing before it has the reply: either the referee or the client has ended
                return "disk limit" if self._guards.disk_bytes() > limits.disk_bytes else ""
            patience_s = _WATCH_S
            elapsed_s = time.monotonic() - started_at
            if elapsed_s > min(limits.time_s, limits.wall_s):
                own_s = self._guards.own_s(pids, elapsed_s)
                if own_s > limits.time_s:
                    return "time limit"
                if elapsed_s > limits.wall_s:
                    return "time limit" if own_s > FAIR_SHARE * limits.time_s else _TOO_BUSY
            num_bytes, num_processes = self._guards.usage(pids)
            if num_bytes > limits.memory_bytes + self._guards.base_bytes:
                return "memory limit"
            if num_processes > limits.num_processes + len(children):
                return "process limit"
            if self._guards.disk_bytes() > limits.disk_bytes:
                return "disk limit"


def _keep_files(kept: set[int]) -> None:
    """Close all files but these; 0, 1 and 2 become /dev/null, so that output costs nothing, however much it is."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    low = 3
    for number in sorted(kept):
        os.closerange(low, number)
        low = number + 1
    os.closerange(low, 1 << 16)


def _leave(_signal_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


def main(start: dict[str, Any]) -> None:
    """Entry point: ``control_fd``, ``level``, ``parent_pid`` and ``preload`` (modules) from the client."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the client's to handle
    control = socket.socket(fileno=start["control_fd"])
    control.set_inheritable(False)
    for name in (*_PRELOADED, *start["preload"]):
        __import__(name)
    installation = (sys.prefix, sys.base_prefix)
    sys.path[:] = [path for path in sys.path if path.startswith(installation)]
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))  # the client's own is not for its supervisor
    guards: Guards | None = None
    try:
        guards = Guards(start["level"])
        failure = ""
    except OSError as error:
        failure = f"{start['level']}: {error.strerror or error}"
    # After the guards: both are lost when a process changes its credentials.
    signal.signal(signal.SIGTERM, _leave)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGTERM)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    if os.getppid() != start["parent_pid"]:
        failure = "the client is gone"
    body = json.dumps({"failure": failure}).encode()
    control.sendall(HEADER.pack(len(body)) + body)
    if guards is None:
        return
    os.umask(0o077)
    os.environ.update(HOME=guards.folder, TMPDIR=guards.folder)
    tempfile.tempdir = None
    gc.collect()
    gc.set_threshold(_GC_THRESHOLD)
    gc.freeze()  # keeps the collector of a forked process from touching, and so copying, shared pages
    try:
        if not failure:
            Supervisor(control, guards).serve()
    finally:
        guards.close()
