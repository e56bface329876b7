"""Arrays shared by several processes of a machine: one process writes them into an unnamed file, others map it.

The file (memfd) is sparse and has its final length from the start, so each process maps it once and sees everything that is
written later. The writer allocates a range of the file per array. When the reader has no more references to a range, the writer
frees its memory by punching a hole. The file disappears with its processes, however they end, and the size of /dev/shm does not
limit it. Arrays of the file are read-only.

The memory address of an array determines its file and its position there (``files_of``). Another process of the same user on
the same machine opens the file as /proc/PID/fd/NUMBER of a process that has mapped it and still refers to it.

A file of another node is mapped as addresses without memory (``MappedFile.remote``): its arrays have shape and address, but no
content. Nodes are numbered from 0, the driver's node.
"""

import bisect
import ctypes
import errno
import mmap
import os
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from megatron_rl.errors import UserError

FILE_BYTES = 1 << 37
"""Length of a file, which without its holes is smaller than the machine's memory; an address space fits a thousand files."""
_ALIGNMENT = 64
_MAX_PARTS = 1024
"""Largest number of parts of one write (IOV_MAX on POSIX systems)."""
_PUNCH_HOLE = 3
"""FALLOC_FL_PUNCH_HOLE with FALLOC_FL_KEEP_SIZE, see fallocate(2)."""
_LIBC = ctypes.CDLL(None, use_errno=True)


class ArrayRange(NamedTuple):
    """The bytes of an array in a file."""

    first: int
    num_bytes: int


NODE = 1 << 32
"""Factor of the node in the pid of an address: ``node * NODE + pid``."""


class Address(NamedTuple):
    """The location of an array on this machine or on another node."""

    pid: int
    """A process that has the file open, with its node: ``node * NODE + pid``."""
    fd: int
    """The file's descriptor in that process."""
    first: int
    num_bytes: int


def new_file(name: str) -> int:
    """Create an empty file and return its descriptor; ``name`` appears in listings of a process's descriptors."""
    fd = os.memfd_create(name)
    os.ftruncate(fd, FILE_BYTES)
    return fd


class _Area:
    """Memory that numpy arrays refer to; calls ``on_drop`` when the last reference is gone."""

    __slots__ = ("__array_interface__", "_file", "_range")

    def __init__(self, file: "MappedFile", range_: ArrayRange) -> None:
        data = (file.base + range_.first, True)
        self.__array_interface__ = {"data": data, "shape": (range_.num_bytes,), "typestr": "|u1", "version": 3}
        self._file, self._range = file, range_

    def __del__(self) -> None:
        self._file.on_drop(*self._range)


def _keep(first: int, num_bytes: int) -> None:
    pass


class MappedFile:
    """A whole file, mapped once. ``on_drop(first, num_bytes)`` is called, on any thread, when a range has no more references."""

    def __init__(self, fd: int, on_drop: Callable[[int, int], None] = _keep) -> None:
        self.pid, self.fd, self.on_drop = os.getpid(), os.dup(fd), on_drop
        weakref.finalize(self, os.close, self.fd).atexit = False
        status = os.fstat(fd)
        self.identity = status.st_dev, status.st_ino
        self._map(fd, access=mmap.ACCESS_READ)

    @classmethod
    def remote(cls, pid: int, fd: int, on_drop: Callable[[int, int], None] = _keep) -> "MappedFile":
        """Return a placeholder for a file of another node: its arrays have addresses and call ``on_drop``, but no content.

        ``pid`` includes the node, as in ``Address``.
        """
        self = cls.__new__(cls)
        self.pid, self.fd, self.on_drop, self.identity = pid, fd, on_drop, (0, 0)
        self._map(-1, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
        return self

    def _map(self, fd: int, **options: int) -> None:
        try:
            memory = mmap.mmap(fd, FILE_BYTES, **options)
        except OSError as error:
            raise UserError(
                f"cannot map a shared file of {FILE_BYTES >> 30} GiB, of which only the used part takes memory: {error}; "
                "check that the address space of processes is not limited (ulimit -v unlimited)"
            ) from error
        # Otherwise a core dump would contain the arrays of every process.
        memory.madvise(mmap.MADV_DONTDUMP)
        self.raw = np.frombuffer(memory, np.uint8)
        """[FILE_BYTES] uint8"""
        self.base: int = self.raw.__array_interface__["data"][0]
        with _MAPPED_LOCK:
            bisect.insort(_BASES, self.base)
            _BY_BASE[self.base] = weakref.ref(self)
        weakref.finalize(self, _unregister, self.base).atexit = False

    def at(self, range_: ArrayRange) -> np.ndarray:
        """Return [bytes] uint8: an array of the file; its range is dropped with its last view."""
        return np.asarray(_Area(self, range_)) if range_.num_bytes else self.raw[:0]

    def range_of(self, raw: memoryview) -> ArrayRange | None:
        """Return the range of an array in this file; None if the array is not in this file."""
        first = np.frombuffer(raw, np.uint8).__array_interface__["data"][0] - self.base
        return ArrayRange(first, raw.nbytes) if 0 <= first < FILE_BYTES else None


_MAPPED_LOCK = threading.RLock()
"""Guards the registry of files. Reentrant, because the garbage collector may end a file while another one is registered."""
_BASES: list[int] = []
"""Memory addresses of all files that this process has mapped, ascending."""
_BY_BASE: dict[int, "weakref.ref[MappedFile]"] = {}
_OPENED: "weakref.WeakValueDictionary[tuple[int, int], MappedFile]" = weakref.WeakValueDictionary()


def _unregister(base: int) -> None:
    with _MAPPED_LOCK:
        _BASES.remove(base)
        del _BY_BASE[base]


def files_of(arrays: Iterable[np.ndarray]) -> tuple[list[MappedFile], np.ndarray, np.ndarray]:
    """Return (files, [k] index of each array's file or -1, [k] first byte in that file) for contiguous arrays."""
    pointers = np.array([array.__array_interface__["data"][0] for array in arrays], np.int64)
    with _MAPPED_LOCK:
        bases = np.array(_BASES, np.int64)
        index = np.searchsorted(bases, pointers, "right") - 1
        first = pointers - (bases[index] if len(bases) else 0)
        index[first >= FILE_BYTES] = -1
        used = np.unique(index[index >= 0])
        files = [_BY_BASE[base]() for base in bases[used].tolist()]
    found = [file for file in files if file is not None]
    assert len(found) == len(files)  # an array keeps its file
    return found, np.where(index < 0, -1, np.searchsorted(used, index)), first


def address_of(array: np.ndarray) -> Address | None:
    """Return the address of a contiguous array; None if the array is in this process's own memory."""
    files, _, (first,) = files_of([array])
    return Address(files[0].pid, files[0].fd, int(first), array.nbytes) if files else None


def map_file(pid: int, fd: int) -> MappedFile:
    """Map the file that process ``pid`` has open as ``fd``; each file is mapped once.

    Raises OSError if the other process has exited, or belongs to another user or machine.
    """
    path = f"/proc/{pid % NODE}/fd/{fd}"
    found, status = _OPENED.get((pid, fd)), os.stat(path)
    # The descriptor may have been closed and reused for another file.
    if found is None or found.identity != (status.st_dev, status.st_ino):
        own = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            found = _OPENED[pid, fd] = MappedFile(own)
        finally:
            os.close(own)
    return found


def bytes_at(addresses: np.ndarray) -> list[np.ndarray]:
    """Return the bytes of arrays on this node at ``addresses`` [k, 4], rows of ``Address`` fields. Raises as ``map_file``."""
    files = {(pid, fd): map_file(pid, fd).raw for pid, fd in np.unique(addresses[:, :2], axis=0).tolist()}
    return [files[pid, fd][first : first + num_bytes] for pid, fd, first, num_bytes in addresses.tolist()]


class SharedFile:
    """The writer of a file. Ranges are allocated in order, and from the start again at the end of the file."""

    def __init__(self, fd: int) -> None:
        self._fd = os.dup(fd)
        weakref.finalize(self, os.close, self._fd).atexit = False
        self._live: OrderedDict[int, int] = OrderedDict()
        """Maps the first byte of each allocated range to its bytes; the first entry is the next range after ``_end``."""
        self._users: dict[int, int] = {}
        """Maps each page to the number of ranges that begin or end there."""
        self._end = 0
        self._take_over()

    def put(self, raw: memoryview) -> ArrayRange:
        """Copy an array into the file."""
        return self.put_together([raw])

    def put_together(self, parts: Sequence[Any]) -> ArrayRange:
        """Copy arrays without gaps into one range of the file."""
        waiting = [part for part in (memoryview(part).cast("B") for part in parts if memoryview(part).nbytes)][::-1]
        num_bytes = sum(part.nbytes for part in waiting)
        found = ArrayRange(self._allocate(num_bytes), num_bytes)
        start = found.first
        while waiting:
            start += (written := os.pwritev(self._fd, waiting[: -_MAX_PARTS - 1 : -1], start))
            while waiting and written >= waiting[-1].nbytes:
                written -= waiting.pop().nbytes
            if written:
                waiting[-1] = waiting[-1][written:]
        return found

    def at(self, range_: ArrayRange) -> bytes:
        """Return a copy of a range, because the reader may drop the range while a call still needs its content."""
        return os.pread(self._fd, range_.num_bytes, range_.first)

    def free(self, first: int, num_bytes: int) -> None:
        """Free the memory of a range that its reader has dropped, regardless of the process that wrote it."""
        start, end = first // mmap.PAGESIZE, (first + num_bytes - 1) // mmap.PAGESIZE + 1
        if self._live.get(first) == num_bytes:
            del self._live[first]
            # Neighbors on the first or the last page still need that page.
            keeps_first = self._leave(start)
            keeps_last = keeps_first if start == end - 1 else self._leave(end - 1)
            start, end = start + keeps_first, end - keeps_last
        else:
            # An earlier writer allocated this range, so its neighbors are unknown.
            start, end = -(-first // mmap.PAGESIZE), (first + num_bytes) // mmap.PAGESIZE
        if start < end:
            _punch(self._fd, start * mmap.PAGESIZE, (end - start) * mmap.PAGESIZE)

    def _allocate(self, num_bytes: int) -> int:
        num_rounds = 0
        while num_rounds < 2:
            first = _aligned(self._end, num_bytes)
            obstacle = next(iter(self._live), -1)
            limit = obstacle if obstacle >= self._end else FILE_BYTES
            if first + num_bytes <= limit:
                self._add(first, num_bytes)
                return first
            if limit == FILE_BYTES:
                self._end, num_rounds = 0, num_rounds + 1
            else:
                self._end = obstacle + self._live[obstacle]
                self._live.move_to_end(obstacle)
        raise UserError(
            f"a shared file of {FILE_BYTES >> 30} GiB has no range of {num_bytes} bytes left; use more rollout workers "
            "(rollout.num_workers), each with its own file, or fewer responses per step"
        )

    def _add(self, first: int, num_bytes: int) -> None:
        if num_bytes:
            self._live[first], self._end = num_bytes, first + num_bytes
            start, last = first // mmap.PAGESIZE, (first + num_bytes - 1) // mmap.PAGESIZE
            self._users[start] = self._users.get(start, 0) + 1
            if last > start:
                self._users[last] = self._users.get(last, 0) + 1

    def _leave(self, page: int) -> bool:
        """Remove a range from its page. Returns True if the page has other ranges."""
        number = self._users.pop(page) - 1
        if number:
            self._users[page] = number
        return number > 0

    def _take_over(self) -> None:
        """Register the ranges that an earlier writer has left in the file."""
        end = 0
        while True:
            try:
                start = os.lseek(self._fd, end, os.SEEK_DATA)
            except OSError as error:
                if error.errno != errno.ENXIO:  # ENXIO: no data after ``end``
                    raise
                return
            end = os.lseek(self._fd, start, os.SEEK_HOLE)
            self._add(start, end - start)


def _aligned(end: int, num_bytes: int) -> int:
    """Return the start of the next range after ``end``: on a new page, unless the rest of the page is large enough."""
    start = -(-end // _ALIGNMENT) * _ALIGNMENT
    return start if start % mmap.PAGESIZE + num_bytes <= mmap.PAGESIZE else -(-start // mmap.PAGESIZE) * mmap.PAGESIZE


def _punch(fd: int, first: int, num_bytes: int) -> None:
    if _LIBC.fallocate(fd, _PUNCH_HOLE, ctypes.c_long(first), ctypes.c_long(num_bytes)):
        number = ctypes.get_errno()
        raise OSError(number, f"cannot free memory of a shared file: {os.strerror(number)}")


def empty_file(fd: int) -> None:
    """Free the memory of all ranges of a file."""
    _punch(fd, 0, FILE_BYTES)


class SharedArrays:
    """Arrays of this process that other processes of the machine can map; each exists while this process refers to it."""

    def __init__(self) -> None:
        fd = new_file("megatron_rl_arrays")
        self._file, self._lock = SharedFile(fd), threading.Lock()
        self._mapped = MappedFile(fd, _freeing(self._file, self._lock))
        os.close(fd)

    def put(self, array: np.ndarray) -> np.ndarray:
        """Return ``array`` in a shared file: the array itself if it is in one or empty, otherwise a copy."""
        if not array.nbytes or (array.flags.c_contiguous and address_of(array) is not None):
            return array
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return self.put_together([raw]).view(array.dtype).reshape(array.shape)

    def put_together(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Return [bytes] uint8: copies of ``arrays``, concatenated; at least one of them is not empty."""
        with self._lock:
            range_ = self._file.put_together(arrays)
        return self._mapped.at(range_)


def _freeing(file: SharedFile, lock: threading.Lock) -> Callable[[int, int], None]:
    dropped: deque[tuple[int, int]] = deque()

    def drop(first: int, num_bytes: int) -> None:
        dropped.append((first, num_bytes))
        # The garbage collector may call this inside ``put``, which has the lock: then the next drop frees the range.
        if lock.acquire(blocking=False):
            try:
                while dropped:
                    file.free(*dropped.popleft())
            finally:
                lock.release()

    return drop
