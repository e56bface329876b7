"""Confines a process permanently, and provides the folder that it may write to.

- filter: Landlock confines files, and a seccomp filter allows only the system calls that computing needs. No allowed
  call starts a process, accesses another process, opens a connection or changes a file's owner, mode or times.
- namespaces: the same, in a supervisor that bubblewrap (sandbox.py) or itself (namespaces.py) has put into its own namespaces.
- none: resource limits, and the parts of the filter that this kernel supports.

Invariant: if the machine does not support a guard of the level, OSError or RuntimeError is raised before any program
runs.
"""

import contextlib
import ctypes
import errno
import os
import resource
import secrets
import signal
import stat
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from typing import Any

_MAX_ENTRIES, _MAX_PATH_CHARS = 4096, 1024
"""Maximum number of files and folders of a program, and maximum length of a path."""
_MIN_MEMORY_FOLDER_BYTES = 256 << 20
_PREFIX = "megatron_rl_sandbox_"
_STACK_BYTES = 64 << 20
_PDEATHSIG, _DUMPABLE, _NO_NEW_PRIVS, _SET_NAME, _GET_NAME = 1, 4, 38, 15, 16
_CLONE_THREAD, _CLONE_NAMESPACES = 0x10000, 0x7E020080

_ALLOWED = """
read write readv writev pread64 pwrite64 preadv pwritev close close_range fstat newfstatat stat lstat statx lseek mmap
munmap mprotect mremap madvise msync brk rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack rt_sigtimedwait
rt_sigsuspend rt_sigpending pause access faccessat faccessat2 pipe pipe2 select pselect6 poll ppoll epoll_create
epoll_create1 epoll_ctl epoll_wait epoll_pwait eventfd eventfd2 dup dup2 dup3 nanosleep clock_nanosleep clock_gettime
clock_getres gettimeofday time times getitimer setitimer alarm getpid gettid getppid getuid geteuid getgid getegid
getresuid getresgid getgroups getpgrp getpgid getsid uname sysinfo getrusage getrlimit setrlimit getcwd chdir fchdir
rename renameat renameat2 mkdir mkdirat rmdir creat unlink unlinkat readlink readlinkat open openat getdents getdents64
truncate ftruncate fsync fdatasync flock umask sched_yield sched_getaffinity sched_getparam sched_getscheduler
getpriority getcpu get_mempolicy futex set_robust_list get_robust_list set_tid_address arch_prctl rseq membarrier
getrandom exit exit_group restart_syscall statfs fstatfs copy_file_range sendfile wait4 waitid sendto recvfrom sendmsg
recvmsg getsockname getpeername getsockopt setsockopt shutdown
""".split()
"""Allowed system calls. The only sockets are connected pairs, which asyncio uses to wake itself."""
_IOCTLS = (0x5421, 0x5450, 0x5451, 0x541B)  # FIONBIO, FIONCLEX, FIOCLEX, FIONREAD
_FCNTLS = (0, 1, 2, 3, 4, 5, 6, 7, 1030)  # all but those that send signals, and leases


@dataclass(frozen=True)
class ProgramLimits:
    time_s: float = 3.0
    """CPU seconds of program and tests together, not counting their imports."""
    memory_mb: int = 512
    """Address space of the program's process, in MiB."""
    disk_mb: int = 16
    num_processes: int = 64
    """Maximum number of threads; child processes cannot be started."""
    wall_s: float = 4.5
    """Seconds by the clock, waiting and imports included."""


def visible_paths() -> list[str]:
    """Paths that a program may read: the Python installation and the system's libraries."""
    paths = [sys.prefix, sys.base_prefix, sys.exec_prefix, os.path.dirname(os.path.realpath(sys.executable))]
    paths += "/usr /lib /lib64 /bin /sbin /etc/ld.so.cache /etc/localtime".split()
    paths += sysconfig.get_paths().values()
    paths += [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]
    paths += [os.path.realpath(path) for path in paths]  # a virtual environment may be a symlink
    paths = sorted({os.path.abspath(path) for path in paths if os.path.exists(path)})
    return [path for path in paths if not any(path != other and path.startswith(f"{other}/") for other in paths)]


class Guards:
    """Guards of one level, prepared once; ``confine`` applies them to a forked process."""

    def __init__(self, level: str) -> None:
        """Prepare the guards.

        Raises:
            OSError, RuntimeError: this machine does not support the level.
        """
        self.level = level
        self._rules: Any = None
        self._filter: Any = None
        with open("/proc/self/statm") as file:
            self.base_bytes = int(file.read().split()[0]) * resource.getpagesize()
        """Address space of the supervisor in bytes; its forks start with it."""
        self.folder = make_folder()
        with contextlib.nullcontext() if level != "none" else contextlib.suppress(Exception):
            self._filter = _system_calls()
        with contextlib.nullcontext() if level == "filter" else contextlib.suppress(Exception):
            self._rules = _files(self.folder)
        self.files = set() if self._rules is None else {self._rules._fd}
        """File descriptors that a process needs until it is confined."""

    def confine(self, limits: ProgramLimits, parent_pid: int) -> None:
        os.setsid()
        os.chdir(self.folder)
        memory = (limits.memory_mb << 20) + self.base_bytes
        for what, value in (
            (resource.RLIMIT_AS, memory),
            (resource.RLIMIT_STACK, _STACK_BYTES),
            (resource.RLIMIT_FSIZE, max(limits.disk_mb, 1) << 20),
            (resource.RLIMIT_NOFILE, 64),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_MEMLOCK, 0),
            (resource.RLIMIT_MSGQUEUE, 0),
        ):
            ceiling = resource.getrlimit(what)[1]
            value = value if ceiling == resource.RLIM_INFINITY else min(value, ceiling)
            resource.setrlimit(what, (value, value))
        _prctl(_PDEATHSIG, signal.SIGKILL)
        _prctl(_DUMPABLE, 0)
        _prctl(_NO_NEW_PRIVS, 1)
        if os.getppid() != parent_pid:
            os._exit(1)
        if self._rules is not None:
            self._rules.apply()
            os.close(self._rules._fd)
        if self.level != "none":
            drop_capabilities()
        if self._filter is not None:
            self._filter.load()

    def close(self) -> None:
        empty_folder(self.folder)
        os.rmdir(self.folder)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None).prctl(option, *map(ctypes.c_ulong, (value, 0, 0, 0))):
        raise OSError(f"prctl({option}) failed")


def drop_capabilities() -> None:
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    if ctypes.CDLL(None).capset(header, (ctypes.c_uint32 * 6)()):
        raise OSError("capset failed")


def limit_cpu(seconds: float) -> None:
    """Limit this process's CPU time to ``seconds`` from now, plus 1 to 2 s, because the kernel counts whole seconds.

    The supervisor enforces the limit more exactly; this one holds even without the supervisor.
    """
    usage = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(usage.ru_utime + usage.ru_stime + seconds) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))


def _files(folder: str) -> Any:
    try:
        import landlock

        access = landlock.FSAccess
        rules = landlock.Ruleset()
        read = access.EXECUTE | access.READ_FILE
        for path in [*visible_paths(), *(f"/dev/{name}" for name in ("zero", "full", "random", "urandom"))]:
            rules.allow(path, rules=read | access.READ_DIR if os.path.isdir(path) else read)
        rules.allow("/dev/null", rules=read | access.WRITE_FILE)
        rules.allow(folder)
    except (OSError, ImportError) as error:
        raise OSError(f"Landlock does not work here: {error}; it needs Linux 5.13 with landlock in CONFIG_LSM") from error
    return rules


def _system_calls() -> Any:
    try:
        import pyseccomp
    except (ImportError, RuntimeError, OSError) as error:
        raise OSError(f"{error} (Debian, Ubuntu: apt-get install libseccomp2)") from error

    allow, arg = pyseccomp.ALLOW, pyseccomp.Arg
    rules = pyseccomp.SyscallFilter(pyseccomp.ERRNO(errno.EPERM))
    rules.set_attr(pyseccomp.Attr.ACT_BADARCH, pyseccomp.KILL_PROCESS)

    def add(name: str, *arguments: Any, action: int = allow) -> None:
        number = pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name)
        if number >= 0:  # this machine has it
            rules.add_rule(action, number, *arguments)

    for name in _ALLOWED:
        add(name)
    for name, commands in (("ioctl", _IOCTLS), ("fcntl", _FCNTLS), ("prctl", (_SET_NAME, _GET_NAME))):
        for command in commands:
            add(name, arg(0 if name == "prctl" else 1, pyseccomp.MASKED_EQ, 0xFFFFFFFF, command))
    add("prlimit64", arg(0, pyseccomp.EQ, 0))
    add("clone", arg(0, pyseccomp.MASKED_EQ, _CLONE_THREAD | _CLONE_NAMESPACES, _CLONE_THREAD))
    add("clone3", action=pyseccomp.ERRNO(errno.ENOSYS))  # libc then uses clone, whose flags a filter can read
    stream, kind_bits, unix = 1, 0xF, 1
    add("socketpair", arg(0, pyseccomp.EQ, unix), arg(1, pyseccomp.MASKED_EQ, kind_bits, stream))
    return rules


# ------------------------------------------------------------------------------------------------------------- folder


def make_folder() -> str:
    """Create an empty folder of this process, in memory if there is enough. Folders of killed supervisors are removed
    first."""
    root = tempfile.gettempdir()
    if os.access("/dev/shm", os.W_OK):
        about = os.statvfs("/dev/shm")
        if about.f_bavail * about.f_frsize > _MIN_MEMORY_FOLDER_BYTES:
            root = "/dev/shm"
    for name in os.listdir(root):
        pid, path = name.removeprefix(_PREFIX).partition("_")[0], f"{root}/{name}"
        if name.startswith(_PREFIX) and pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            with contextlib.suppress(FileNotFoundError):  # another process may remove it at the same time
                if os.stat(path).st_uid == os.geteuid():
                    empty_folder(path)
                    os.rmdir(path)
    return tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}_", dir=root)


def folder_bytes(folder: str) -> int:
    """Size of a folder's content in bytes; more than any limit if it has too many entries, or too long paths, to be
    scanned."""
    num_bytes, num_entries, waiting = 0, 0, [folder]
    while waiting:
        path = waiting.pop()
        try:
            for entry in os.scandir(path):
                num_entries += 1
                if num_entries > _MAX_ENTRIES or len(entry.path) > _MAX_PATH_CHARS:
                    return sys.maxsize
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                else:
                    num_bytes += entry.stat(follow_symlinks=False).st_blocks * 512
        except (FileNotFoundError, PermissionError):
            pass  # deleted during the scan, or not readable
        except OSError:
            return sys.maxsize
    return num_bytes


def empty_folder(folder: str) -> None:
    """Delete a folder's content at any depth: subfolders are moved up instead of recursing into them."""
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
