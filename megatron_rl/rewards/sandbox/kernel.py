"""What the sandbox asks of the Linux kernel, by direct system calls: no compiler, no helper binary, no root needed.

Two levels, chosen once per sandbox (supervisor.py):

- namespaces: programs live in their own user (unless root), mount, network, IPC and PID namespaces. They see a read-only
  root that holds the Python installation only, have no network device, and die with the first process of their PID
  namespace, however they fork.
- filter, where the kernel refuses namespaces: Landlock confines files and a seccomp filter forbids to start processes
  and to touch others.

A seccomp filter forbids sockets and the calls that reach other processes or widen the kernel's surface at both levels.

Invariant: what cannot be enforced raises OSError; nothing here falls back by itself.
"""

import ctypes
import errno
import os
import platform
import signal
import struct
from collections.abc import Iterable

_CLONE_THREAD = 0x00010000
CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
_CLONE_NAMESPACES = 0x7E020080
"""Every CLONE_NEW* flag."""

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18
_MNT_DETACH = 2

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
_SECCOMP_MODE_FILTER = 2

# PyDLL keeps the interpreter lock: a process made by ``clone`` must come back with it.
_libc = ctypes.PyDLL(None, use_errno=True)

_X86_64 = {
    "ioctl": 16, "sched_setparam": 142, "sched_setscheduler": 144, "clone": 56, "fork": 57, "vfork": 58, "kill": 62,
    "fcntl": 72, "socket": 41, "ptrace": 101, "syslog": 103, "rt_sigqueueinfo": 129, "setpriority": 141,
    "pivot_root": 155, "chroot": 161, "acct": 163, "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168,
    "reboot": 169, "init_module": 175, "delete_module": 176, "quotactl": 179, "tkill": 200, "sched_setaffinity": 203,
    "tgkill": 234, "mbind": 237, "mq_open": 240, "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250,
    "ioprio_set": 251, "migrate_pages": 256, "unshare": 272, "move_pages": 279, "rt_tgsigqueueinfo": 297,
    "perf_event_open": 298, "fanotify_init": 300, "prlimit64": 302, "open_by_handle_at": 304, "setns": 308,
    "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "finit_module": 313, "sched_setattr": 314,
    "seccomp": 317, "memfd_create": 319, "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323,
    "shmget": 29, "semget": 64, "msgget": 68,
}  # fmt: skip
_AARCH64 = {
    "ioctl": 29, "sched_setparam": 118, "sched_setscheduler": 119, "clone": 220, "kill": 129, "fcntl": 25,
    "socket": 198, "ptrace": 117, "syslog": 116, "rt_sigqueueinfo": 138, "setpriority": 140, "pivot_root": 41,
    "chroot": 51, "acct": 89, "mount": 40, "umount2": 39, "swapon": 224, "swapoff": 225, "reboot": 142,
    "init_module": 105, "delete_module": 106, "quotactl": 60, "tkill": 130, "sched_setaffinity": 122, "tgkill": 131,
    "mbind": 235, "mq_open": 180, "kexec_load": 104, "add_key": 217, "request_key": 218, "keyctl": 219,
    "ioprio_set": 30, "migrate_pages": 238, "unshare": 97, "move_pages": 239, "rt_tgsigqueueinfo": 240,
    "perf_event_open": 241, "fanotify_init": 262, "prlimit64": 261, "open_by_handle_at": 265, "setns": 268,
    "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "finit_module": 273, "sched_setattr": 274,
    "seccomp": 277, "memfd_create": 279, "kexec_file_load": 294, "bpf": 280, "userfaultfd": 282,
    "shmget": 194, "semget": 190, "msgget": 186,
}  # fmt: skip
_EVERYWHERE = {
    "pidfd_send_signal": 424, "io_uring_setup": 425, "open_tree": 428, "move_mount": 429, "fsopen": 430,
    "fsmount": 432, "pidfd_open": 434, "clone3": 435, "pidfd_getfd": 438, "process_madvise": 440,
    "mount_setattr": 442, "landlock_create_ruleset": 444, "landlock_add_rule": 445, "landlock_restrict_self": 446,
    "process_mrelease": 448,
}  # fmt: skip
"""System calls from 424 on have one number on all machines."""
_MACHINES = {"x86_64": (0xC000003E, _X86_64), "aarch64": (0xC00000B7, _AARCH64)}

_NEVER = (
    "socket", "ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "process_mrelease", "kcmp",
    "pidfd_open", "pidfd_getfd", "pidfd_send_signal", "mount", "umount2", "pivot_root", "chroot", "open_tree",
    "move_mount", "fsopen", "fsmount", "mount_setattr", "unshare", "setns", "bpf", "perf_event_open", "userfaultfd",
    "io_uring_setup", "keyctl", "add_key", "request_key", "kexec_load", "kexec_file_load", "init_module",
    "finit_module", "delete_module", "open_by_handle_at", "fanotify_init", "acct", "swapon", "swapoff", "reboot",
    "quotactl", "syslog", "shmget", "semget", "msgget", "mq_open", "memfd_create", "migrate_pages", "move_pages",
)  # fmt: skip
_ALONE = (
    "fork", "vfork", "tkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "setpriority", "ioprio_set",
    "sched_setparam", "sched_setscheduler", "sched_setattr", "sched_setaffinity",
)  # fmt: skip
"""Beyond ``_NEVER``, for a program that shares its PID namespace with others."""


class Unsupported(OSError):
    """The kernel or the machine cannot do this."""


def machine() -> tuple[int, dict[str, int]]:
    """(audit architecture, system call numbers)."""
    name = platform.machine()
    if name not in _MACHINES:
        raise Unsupported(errno.ENOSYS, f"the sandbox knows {' and '.join(_MACHINES)}, this machine is {name}")
    audit_arch, numbers = _MACHINES[name]
    return audit_arch, numbers | _EVERYWHERE


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise Unsupported(number, f"{what}: {os.strerror(number)}")
    return result


def _call(name: str, *arguments: int | bytes | ctypes.Array | None) -> int:
    values = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return _check(_libc.syscall(ctypes.c_long(machine()[1][name]), *values), name)


def prctl(option: int, *arguments: int | ctypes.c_void_p) -> None:
    values = [ctypes.c_ulong(a) if isinstance(a, int) else a for a in (*arguments, 0, 0, 0, 0)[:4]]
    _check(_libc.prctl(ctypes.c_int(option), *values), f"prctl({option})")


def unshare(flags: int) -> None:
    _call("unshare", flags)


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """``kind`` is a file system, or "" for a bind, a remount or a change of propagation."""
    arguments = [os.fsencode(text) if text else None for text in (source, target, kind)]
    result = _libc.mount(*arguments, ctypes.c_ulong(flags), options.encode() or None)
    _check(result, f"mount {source} on {target}")


def unmount(target: str) -> None:
    _check(_libc.umount2(os.fsencode(target), _MNT_DETACH), f"umount {target}")


def make_read_only(target: str) -> None:
    """A mount and all mounts below it: read-only, without devices and set-user-ID programs."""
    at_fdcwd, at_recursive = -100, 0x8000
    attributes = struct.pack("QQQQ", MS_RDONLY | MS_NOSUID | MS_NODEV, 0, 0, 0)
    _call("mount_setattr", at_fdcwd, os.fsencode(target), at_recursive, attributes, len(attributes))


def change_root(new_root: str) -> None:
    """Make the mount ``new_root`` the root and let go of the old one."""
    os.chdir(new_root)
    _call("pivot_root", b".", b".")
    unmount(".")
    os.chdir("/")


def clone(flags: int) -> int:
    """Like os.fork, into new namespaces: 0 in the child, the child's PID in the parent. For single-threaded callers."""
    python = ctypes.pythonapi
    python.PyOS_BeforeFork()
    pid = _libc.syscall(
        ctypes.c_long(machine()[1]["clone"]), ctypes.c_long(flags | signal.SIGCHLD), *[ctypes.c_long()] * 4
    )
    if pid == 0:
        python.PyOS_AfterFork_Child()
        return 0
    number = ctypes.get_errno()
    python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise Unsupported(number, f"clone: {os.strerror(number)}")
    return pid


def drop_capabilities() -> None:
    """Of a process that is root in its own user namespace only."""
    version_3 = 0x20080522
    header = ctypes.create_string_buffer(struct.pack("Ii", version_3, 0))
    _check(_libc.capset(header, ctypes.create_string_buffer(24)), "capset")


# ------------------------------------------------------------------------------------------------------------ seccomp

_LOAD, _JUMP_EQUAL, _JUMP_ANY_BIT, _JUMP_AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER_AT, _ARCH_AT = 0, 4
_X32_BIT = 0x40000000

INSTRUCTION = struct.Struct("HBBI")
Instruction = tuple[int, int, int, int]
"""Operation, instructions to skip if true, if false, and the operand."""


def _argument_at(index: int) -> int:
    """Offset of the low half of a system call argument (both machines are little-endian)."""
    return 16 + 8 * index


def filter_program(*, alone: bool, own_pid: int) -> bytes:
    """Classic BPF that allows everything but the calls above; a forbidden call fails with EPERM.

    Args:
        alone: No new processes, and no calls upon other processes than ``own_pid``.
    """
    audit_arch, numbers = machine()
    refuse = (_RETURN, 0, 0, _REFUSE | errno.EPERM)
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCH_AT),
        (_JUMP_EQUAL, 1, 0, audit_arch),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
    ]
    if "fork" in numbers:  # x86_64, whose x32 variants have numbers of their own
        program += [(_JUMP_AT_LEAST, 0, 1, _X32_BIT), refuse]
    for name in (*_NEVER, *(_ALONE if alone else ())):
        if name in numbers:
            program += [(_JUMP_EQUAL, 0, 1, numbers[name]), refuse]
    # libc then uses clone, whose flags a filter can read.
    program += [(_JUMP_EQUAL, 0, 1, numbers["clone3"]), (_RETURN, 0, 0, _REFUSE | errno.ENOSYS)]

    def on_argument(name: str, index: int, *test: Instruction) -> None:
        """For the call ``name``: load an argument; ``test`` ends in a refusal or an allowance."""
        body = [(_LOAD, 0, 0, _argument_at(index)), *test]
        program.extend([(_JUMP_EQUAL, 0, len(body), numbers[name]), *body])

    allow = (_RETURN, 0, 0, _ALLOW)
    if alone:
        on_argument(
            "clone",
            0,
            (_JUMP_ANY_BIT, 0, 1, _CLONE_NAMESPACES),
            refuse,
            (_JUMP_ANY_BIT, 1, 0, _CLONE_THREAD),
            refuse,
            allow,
        )
        for name in ("kill", "tgkill"):
            on_argument(name, 0, (_JUMP_EQUAL, 1, 0, own_pid), refuse, allow)
        on_argument("prlimit64", 0, (_JUMP_EQUAL, 2, 0, 0), (_JUMP_EQUAL, 1, 0, own_pid), refuse, allow)
        for command in (8, 10, 15):  # F_SETOWN, F_SETSIG, F_SETOWN_EX: signals by way of a file
            on_argument("fcntl", 1, (_JUMP_EQUAL, 0, 1, command), refuse, (_LOAD, 0, 0, _NUMBER_AT))
        for command in (0x8901, 0x8902):  # FIOSETOWN, SIOCSPGRP
            on_argument("ioctl", 1, (_JUMP_EQUAL, 0, 1, command), refuse, (_LOAD, 0, 0, _NUMBER_AT))
    else:
        on_argument("clone", 0, (_JUMP_ANY_BIT, 0, 1, _CLONE_NAMESPACES), refuse, allow)
    # TIOCSTI pushes characters into a terminal.
    on_argument("ioctl", 1, (_JUMP_EQUAL, 0, 1, 0x5412), refuse, (_LOAD, 0, 0, _NUMBER_AT))
    return b"".join(INSTRUCTION.pack(*instruction) for instruction in (*program, allow))


def install_filter(code: bytes) -> None:
    """For this process and all its descendants; cannot be taken back. Needs no_new_privs."""
    instructions = ctypes.create_string_buffer(code, len(code))

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

    handle = Program(len(code) // INSTRUCTION.size, ctypes.addressof(instructions))
    prctl(PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.c_void_p(ctypes.addressof(handle)))


# ----------------------------------------------------------------------------------------------------------- Landlock

_FS_RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}
"""Number of file-system rights, by the version of the interface that brought them."""
_READ = 0b1101
"""Execute, read a file, list a folder."""
_FILE_RIGHTS = 0b1100_0000_0000_0111
"""Those that make sense for a file: execute, write, read, truncate and ioctl."""
_SCOPES_SINCE, _SCOPES = 6, 0b11
"""Abstract sockets and signals stay inside."""


def landlock_version() -> int:
    """0 where the kernel has none."""
    try:
        return _call("landlock_create_ruleset", None, 0, 1)
    except OSError:
        return 0


def confine_files(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Landlock: this process and its descendants reach nothing outside of the given files and folders.

    Raises:
        Unsupported: no Landlock in this kernel.
    """
    version = landlock_version()
    if not version:
        raise Unsupported(errno.ENOSYS, "Landlock: this kernel has none")
    rights = (1 << max(count for since, count in _FS_RIGHTS.items() if since <= version)) - 1
    attributes = struct.pack("QQQ", rights, 0, _SCOPES if version >= _SCOPES_SINCE else 0)
    size = 24 if version >= _SCOPES_SINCE else 8
    ruleset = _call("landlock_create_ruleset", attributes, size, 0)
    try:
        for path, allowed in (*((p, _READ) for p in readable), *((p, rights) for p in writable)):
            folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                if not os.path.isdir(path):
                    allowed &= _FILE_RIGHTS
                _call("landlock_add_rule", ruleset, 1, struct.pack("<Qi", allowed & rights, folder), 0)
            finally:
                os.close(folder)
        _call("landlock_restrict_self", ruleset, 0)
    finally:
        os.close(ruleset)
