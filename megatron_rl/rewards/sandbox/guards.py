"""How a program is confined, at one of the levels of kernel.py, and how nothing of it is left."""

import os
import resource
import signal
import sys
import time
from dataclasses import dataclass

from megatron_rl.rewards.sandbox import kernel
from megatron_rl.rewards.sandbox.folders import MAX_ENTRIES, empty_folder, folder_bytes, make_folder

_BOX = "/box"
"""Working, home and temporary folder of a program, where it has a root of its own."""
_ROOT_BYTES = 1 << 20
_MAX_WATCHED = 1000
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_MAX_OPEN_FILES = 64
_STACK_BYTES = 64 << 20
_FIRST_GUEST_UID, _NUM_GUEST_UIDS = 61184, 4335
"""User ids that systemd reserves for users who own nothing; a supervisor takes one, so that process limits are its own."""


@dataclass(frozen=True)
class Limits:
    time_s: float
    """Since the start, less what the processes waited for a CPU: a busy machine fails no program."""
    wall_s: float
    """Since the start, whatever the machine did; a program that had less than its fair share is unscored."""
    memory_bytes: int
    disk_bytes: int
    num_processes: int


class Guards:
    """One level of confinement. A forked process confines itself for good; ``sweep`` leaves nothing of it."""

    def __init__(self, level: str) -> None:
        """``level``: namespaces, filter, or none (resource limits only).

        Raises:
            OSError: the kernel cannot do this level.
        """
        self.level = level
        self.folder = _BOX
        self._is_root = os.geteuid() == 0
        self._guest = _FIRST_GUEST_UID + os.getpid() % _NUM_GUEST_UIDS
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
        self.folder = make_folder()

    def prepare(self, limits: Limits) -> None:
        """An empty folder for the processes of one request."""
        if self.level == "namespaces":
            uid, gid = (self._guest, self._guest) if self._is_root else (os.geteuid(), os.getegid())
            options = f"size={limits.disk_bytes},nr_inodes={MAX_ENTRIES},mode=700,uid={uid},gid={gid}"
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
        num_pages = sum(int((self._read(f"{pid}/statm").split() or ["0", "0"])[1]) for pid in tree)
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
        delay_ns = sum(int((self._read(f"{pid}/schedstat").split() or ["0", "0"])[1]) for pid in pids)
        ticks = 0
        for pid in self._tree(pids):
            fields = self._read(f"{pid}/stat").rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))  # of its threads, and of its children that have ended
        return max(elapsed_s - delay_ns / 1e9, ticks / _TICKS_PER_S)

    def disk_bytes(self) -> int:
        """In the working folder, where its size is not limited by its file system."""
        if self.level == "namespaces":
            return 0
        return folder_bytes(self.folder)

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
            empty_folder(self.folder)
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
            empty_folder(self.folder)
            os.rmdir(self.folder)


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
