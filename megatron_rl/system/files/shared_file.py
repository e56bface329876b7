"""Arrays shared by several processes of a machine: one process writes them into an unnamed file, others map it.

The file (memfd) is a sequence of *extents*. Its writer fills one extent after another and never writes to the same
place twice; readers map whole extents, and arrays are views of them. An extent's memory is freed once nothing refers to
it. The file disappears with its processes, however they end, and no size of /dev/shm limits it. Arrays of the file are
read-only.

The address of an array follows from the array itself (``address_of``). Another process of the same user on the same
machine opens the file as /proc/PID/fd/NUMBER of a process that has mapped the array, as long as that process refers to
the array.

An array of another node also has an address, and a local proxy (``FarView``) with its shape but without its content.
Nodes are numbered; 0 is the driver's.
"""

import mmap
import os
import resource
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

_EXTENT_BYTES = 1 << 24
_LARGE_BYTES = 1 << 20
"""Arrays of at least this size get their own extent; in a shared extent, a long-lived small array would keep their
memory."""
_ALIGNMENT = 64
_MOST_AT_ONCE = 1024
"""Maximum number of buffers per write; the POSIX limit (IOV_MAX)."""


class Place(NamedTuple):
    """Location of an array in a file."""

    start: int
    """Start of the extent in the file, in bytes."""
    extent_bytes: int
    offset: int
    """Offset in the extent, in bytes."""
    num_bytes: int


NODE = 1 << 32
"""Factor of the node's number in an address: ``node * NODE + pid``."""


class Address(NamedTuple):
    """Address of an array on this machine or on another node."""

    pid: int
    """Process id with its node: ``node * NODE + pid``."""
    fd: int
    """File descriptor of the file in the process ``pid``."""
    place: Place


class _OpenFile:
    """File that stays open as long as an object refers to it."""

    def __init__(self, fd: int) -> None:
        self.fd = os.dup(fd)
        weakref.finalize(self, os.close, self.fd).atexit = False

    @property
    def pid(self) -> int:
        return os.getpid()


class Extent(mmap.mmap):
    """A mapped extent of a file."""

    file: "_OpenFile | FarView"
    start: int
    address: int
    """Start of the mapping in this process's memory."""

    @classmethod
    def of(cls, file: _OpenFile, start: int, num_bytes: int) -> "Extent":
        return cls(file.fd, num_bytes, offset=start, access=mmap.ACCESS_READ)._at(file, start)

    @classmethod
    def far(cls, file: "FarView", start: int, num_bytes: int) -> "Extent":
        """Extent of another node: its addresses have no content."""
        return cls(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)._at(file, start)

    def _at(self, file: "_OpenFile | FarView", start: int) -> Self:
        self.file, self.start = file, start
        self.address = np.frombuffer(self, np.uint8).__array_interface__["data"][0]
        return self


def address_of(array: np.ndarray) -> Address | None:
    """Address of a contiguous array for other processes; None if the array is in private memory."""
    extent = _extent_of(array)
    if extent is None:
        return None
    return Address(extent.file.pid, extent.file.fd, _place(extent, array))


def _extent_of(owner: Any) -> Extent | None:
    while isinstance(owner, np.ndarray | memoryview):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    return owner if isinstance(owner, Extent) else None


def _place(extent: Extent, array: np.ndarray) -> Place:
    start: int = array.__array_interface__["data"][0]
    return Place(extent.start, len(extent), start - extent.address, array.nbytes)


class SharedFile:
    """Writer of a shared file."""

    def __init__(self, fd: int, large_bytes: int | None = None) -> None:
        """``large_bytes``: arrays of at least this size get their own extent. Appends after the content of an earlier
        writer."""
        allow_many_files()
        self._file = _OpenFile(fd)
        self._end = os.fstat(fd).st_size
        self._large_bytes = _LARGE_BYTES if large_bytes is None else large_bytes
        self._extents: dict[int, mmap.mmap] = {}
        self._open, self._used = -1, _EXTENT_BYTES
        """Start of the extent for small arrays, and the number of bytes used in it."""

    def put(self, raw: memoryview) -> Place:
        """Copy an array into the file."""
        if raw.nbytes >= self._large_bytes:
            num_bytes = -(-raw.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
            start, offset = self._new_extent(num_bytes), 0
        else:
            if self._used + raw.nbytes > _EXTENT_BYTES:
                self._open, self._used = self._new_extent(_EXTENT_BYTES), 0
            start, offset, num_bytes = self._open, self._used, _EXTENT_BYTES
            self._used += -(-raw.nbytes // _ALIGNMENT) * _ALIGNMENT
        if raw.nbytes >= _LARGE_BYTES:
            self._write(start, [raw])
        else:
            self._extents[start][offset : offset + raw.nbytes] = raw
        return Place(start, num_bytes, offset, raw.nbytes)

    def put_together(self, parts: Sequence[np.ndarray]) -> Place:
        """Copy contiguous arrays into the file without gaps; at least one must not be empty."""
        num_bytes = sum(part.nbytes for part in parts)
        if num_bytes < _LARGE_BYTES:
            return self.put(np.concatenate([part.reshape(-1).view(np.uint8) for part in parts]).data)
        extent_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        start = self._new_extent(extent_bytes)
        self._write(start, parts)
        return Place(start, extent_bytes, 0, num_bytes)

    def _write(self, start: int, parts: Sequence[Any]) -> None:
        """Write with system calls, because a page fault per new page of a mapping takes about as long as the copy."""
        waiting = [memoryview(part).cast("B") for part in parts if memoryview(part).nbytes][::-1]
        while waiting:
            start += (written := os.pwritev(self._file.fd, waiting[: -_MOST_AT_ONCE - 1 : -1], start))
            while waiting and written >= waiting[-1].nbytes:
                written -= waiting.pop().nbytes
            if written:
                waiting[-1] = waiting[-1][written:]

    def at(self, place: Place) -> memoryview:
        return memoryview(self._extents[place.start])[place.offset : place.offset + place.num_bytes].toreadonly()

    def drop(self, start: int) -> None:
        """Release an extent that the reader no longer uses; its memory is freed once nothing in this process refers to
        it."""
        extent = self._extents.pop(start)
        # Not at exit: arrays that a writer has sent must survive the writer.
        weakref.finalize(extent, _forget, self._file, start, len(extent)).atexit = False

    def free(self, start: int, num_bytes: int) -> None:
        """Release an extent that the reader no longer uses, regardless of its writer."""
        if start in self._extents:
            self.drop(start)
        else:
            _forget(self._file, start, num_bytes)

    def _new_extent(self, num_bytes: int) -> int:
        start, self._end = self._end, self._end + num_bytes
        os.ftruncate(self._file.fd, self._end)
        self._extents[start] = mmap.mmap(self._file.fd, num_bytes, offset=start)
        return start


def _forget(file: _OpenFile, start: int, num_bytes: int) -> None:
    with mmap.mmap(file.fd, num_bytes, offset=start) as extent:
        extent.madvise(mmap.MADV_REMOVE)


class SharedView:
    """Reader of a shared file. ``on_drop(start)`` is called, on any thread, once nothing refers to an extent."""

    def __init__(self, fd: int, on_drop: Callable[[int], None]) -> None:
        allow_many_files()
        self._file = _OpenFile(fd)
        self._on_drop = on_drop
        self._extents: weakref.WeakValueDictionary[int, Extent] = weakref.WeakValueDictionary()
        self._newest: Extent | None = None
        """Extent that the writer fills; kept mapped, because more arrays will arrive in it."""

    def at(self, place: Place) -> memoryview:
        extent = self._extents.get(place.start)
        if extent is None:
            extent = self._extents[place.start] = Extent.of(self._file, place.start, place.extent_bytes)
            weakref.finalize(extent, self._on_drop, place.start).atexit = False
            if place.num_bytes < _LARGE_BYTES:
                self._newest = extent
        return memoryview(extent)[place.offset : place.offset + place.num_bytes]

    def place_of(self, raw: memoryview) -> Place | None:
        """Location of an array in the file; None if the array is elsewhere."""
        extent = _extent_of(raw)
        return _place(extent, np.frombuffer(raw, np.uint8)) if extent is not None and extent.file is self._file else None


class FarView:
    """Proxy for arrays in a file of another node. ``on_drop(start, num_bytes)``: as in ``SharedView``."""

    def __init__(self, pid: int, fd: int, on_drop: Callable[[int, int], None] = lambda start, num_bytes: None) -> None:
        """``pid``: process id with its node, as in an address."""
        self.pid, self.fd = pid, fd
        self._on_drop = on_drop
        self._extents: weakref.WeakValueDictionary[int, Extent] = weakref.WeakValueDictionary()

    def at(self, place: Place) -> memoryview:
        extent = self._extents.get(place.start)
        if extent is None:
            extent = self._extents[place.start] = Extent.far(self, place.start, place.extent_bytes)
            weakref.finalize(extent, self._on_drop, place.start, place.extent_bytes).atexit = False
        return memoryview(extent)[place.offset : place.offset + place.num_bytes].toreadonly()

    def place_of(self, raw: memoryview) -> Place | None:
        """Location of an array; same as ``SharedView.place_of``."""
        extent = _extent_of(raw)
        return _place(extent, np.frombuffer(raw, np.uint8)) if extent is not None and extent.file is self else None


class SharedArrays:
    """Arrays of this process that other processes of the machine can map; each exists as long as an object refers to
    it."""

    def __init__(self) -> None:
        fd = os.memfd_create("megatron_rl_arrays")
        self._file = SharedFile(fd)
        self._view = SharedView(fd, self._file.drop)
        os.close(fd)

    def put(self, array: np.ndarray) -> np.ndarray:
        """Return ``array`` itself if it has an address, or a copy that has one."""
        if not array.nbytes or (array.flags.c_contiguous and _extent_of(array) is not None):
            return array
        place = self._file.put(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return np.frombuffer(self._view.at(place), array.dtype).reshape(array.shape)

    def put_together(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """[bytes] uint8: copies of ``arrays`` without gaps; at least one must not be empty."""
        return np.frombuffer(self._view.at(self._file.put_together(arrays)), np.uint8)


class MappedFiles:
    """Reads arrays of other processes. Mappings stay until the object is closed or dropped."""

    def __init__(self) -> None:
        allow_many_files()
        self._files: dict[tuple[int, int], _OpenFile] = {}
        self._extents: dict[tuple[int, int, int], Extent] = {}

    def at(self, address: Address) -> memoryview:
        """View of an array. Raises OSError if its file cannot be opened: other user, other machine, or process gone."""
        pid, fd, place = address
        extent = self._extent(pid, fd, place.start, place.extent_bytes)
        return memoryview(extent)[place.offset : place.offset + place.num_bytes]

    def all_at(self, addresses: np.ndarray) -> list[memoryview]:
        """Views of several arrays; ``addresses`` [k, 6] are the fields of ``Address``. Empty arrays have no location."""
        found = []
        for pid, fd, start, extent_bytes, offset, num_bytes in addresses.tolist():
            extent = memoryview(self._extent(pid, fd, start, extent_bytes)) if num_bytes else memoryview(b"")
            found.append(extent[offset : offset + num_bytes])
        return found

    def _extent(self, pid: int, fd: int, start: int, num_bytes: int) -> Extent:
        extent = self._extents.get((pid, fd, start))
        if extent is None:
            extent = self._extents[pid, fd, start] = Extent.of(self._file(pid % NODE, fd), start, num_bytes)
        return extent

    def _file(self, pid: int, fd: int) -> _OpenFile:
        if (pid, fd) not in self._files:
            own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                self._files[pid, fd] = _OpenFile(own)
            finally:
                os.close(own)
        return self._files[pid, fd]


def allow_many_files() -> None:
    """Raise the limit of open files to the hard limit, because each mapped extent counts as one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
