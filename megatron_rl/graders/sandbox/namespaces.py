"""Puts this process into namespaces of its own where bubblewrap is not installed: the same walls, built by system calls.

Inside there is no network device and no other process, and a read-only root contains the given paths only. Needs Linux
5.12 and user namespaces, or root.
"""

import ctypes
import os
import signal
import stat
import struct
from collections.abc import Sequence

from megatron_rl.graders.sandbox.guards import drop_capabilities

_NEW_USER = 0x10000000
_OTHERS = 0x20000 | 0x2000000 | 0x4000000 | 0x8000000 | 0x20000000 | 0x40000000
"""Mounts, control groups, host name, IPC, process ids and network."""
_NOSUID, _NODEV, _NOEXEC, _RECURSIVE, _PRIVATE, _DETACH = 2, 4, 8, 0x4000, 0x40000, 2
_PIVOT_ROOT, _OPEN_TREE, _MOVE_MOUNT, _SET_ATTRIBUTES = 155, 428, 429, 442
_DIE_WITH_PARENT, _NO_NEW_PRIVILEGES = 1, 38
_HERE, _CLONE, _WHOLE_TREE, _EMPTY_PATH, _OF_DESCRIPTOR = -100, 1 | 0o2000000, 0x8000, 0x1000, 4
_DEVICES = [f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom")]
_ROOT = "/tmp"
"""Mount point of the new root until it is the root; nothing is written below it."""
_LIBC = ctypes.CDLL(None, use_errno=True)


def enter_namespaces(paths: Sequence[str]) -> None:
    """Continue in a fork that is process 1 of new namespaces and sees ``paths`` alone; this process exits with the fork.

    The process must not have threads yet. The fork keeps user and group, and has no capability.

    Raises:
        OSError: the kernel refuses; in the fork if only a mount fails.
    """
    uid, gid = os.getuid(), os.getgid()
    try:
        _call("unshare", _NEW_USER | _OTHERS)
    except OSError:
        if uid != 0:
            raise
        _call("unshare", _OTHERS)  # root needs no user namespace, which a kernel may refuse
    else:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    pid = os.fork()
    if pid:
        os.closerange(3, 1 << 16)  # the client must see the end of its socket when the fork exits
        os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF)
    _call("prctl", _DIE_WITH_PARENT, signal.SIGKILL)
    _build_root(paths)
    _call("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    drop_capabilities()


def _build_root(paths: Sequence[str]) -> None:
    """Replace the root by an empty one with ``paths`` read-only, devices without hardware, and /tmp and /dev/shm in memory."""
    _mount("none", "/", None, _RECURSIVE | _PRIVATE)
    # Opened before anything is mounted over them.
    trees, devices = {path: _open_tree(path) for path in paths}, {path: _open_tree(path) for path in _DEVICES}
    for tree in trees.values():
        _make_read_only(tree, b"", _WHOLE_TREE | _EMPTY_PATH)
    _mount("tmpfs", _ROOT, "tmpfs", _NOSUID | _NODEV, "mode=755")
    os.mkdir(f"{_ROOT}/proc")
    for path in ("/tmp", "/dev/shm"):
        os.makedirs(f"{_ROOT}{path}")
        _mount("tmpfs", f"{_ROOT}{path}", "tmpfs", _NOSUID | _NODEV, "mode=1777")
    for path, tree in {**trees, **devices}.items():
        _move_mount(tree, f"{_ROOT}{path}")
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"{_ROOT}/dev/{name}")
    os.symlink("/proc/self/fd", f"{_ROOT}/dev/fd")
    _make_read_only(_HERE, _ROOT.encode(), 0)
    # While the old /proc can be seen: the kernel compares.
    _mount("proc", f"{_ROOT}/proc", "proc", _NOSUID | _NODEV | _NOEXEC)
    os.chdir(_ROOT)
    _syscall(_PIVOT_ROOT, b".", b".")
    _call("umount2", b".", _DETACH)  # the old root, which lies over the new one
    os.chdir("/")


def _open_tree(path: str) -> int:
    """Descriptor of a detached copy of the mounts at ``path``."""
    return _syscall(_OPEN_TREE, _HERE, path.encode(), _CLONE | _WHOLE_TREE)


def _make_read_only(descriptor: int, path: bytes, flags: int) -> None:
    """Set the mount read-only, and programs and devices in it powerless."""
    attributes = struct.pack("4Q", 1 | _NOSUID | _NODEV, 0, 0, 0)  # struct mount_attr
    _syscall(_SET_ATTRIBUTES, descriptor, path, flags, attributes, ctypes.c_ulong(len(attributes)))


def _move_mount(tree: int, path: str) -> None:
    """Attach the mounts of a descriptor at ``path``, which is created, and close the descriptor."""
    if stat.S_ISDIR(os.fstat(tree).st_mode):
        os.makedirs(path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
    _syscall(_MOVE_MOUNT, tree, b"", _HERE, path.encode(), _OF_DESCRIPTOR)
    os.close(tree)


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    _call("mount", source.encode(), target.encode(), kind and kind.encode(), ctypes.c_ulong(flags), options.encode())


def _syscall(number: int, *arguments: object) -> int:
    return _call("syscall", ctypes.c_long(number), *arguments)


def _call(name: str, *arguments: object) -> int:
    result: int = getattr(_LIBC, name)(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result
