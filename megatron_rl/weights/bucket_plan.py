"""Which tensor travels in which bucket, which rank receives it, and whether all that should travel does. Pure.

Weights travel in flat byte buckets. A plan is made while the tensors stream by (``place`` needs only the slice
before), so the trainer never holds the whole model. Invariants:

- every tensor is placed exactly once and the order of the stream is kept;
- a bucket holds at most ``bucket_bytes``; a tensor larger than that gets a bucket of its own;
- inside a bucket a tensor starts at a multiple of its item size (SGLang refuses a bucket where one does not);
- rank 0 of a sync group is a source rank of the trainer; the ranks after it are the workers of the servers, in order.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_rl.families.parameters import TensorSpec
from megatron_rl.system.http.json_http import ApiKey

_MAX_NAMES_SHOWN = 8
"""Names an error spells out before it only counts."""


class ServerAddress(NamedTuple):
    """A server that takes weights."""

    url: str
    tp_size: int
    """Workers of the server that receive weights, each with a rank of its own."""
    incarnation: int
    """Changes when the server is started again: a new process knows nothing of an old sync group."""
    first_rank: int = 0
    """Colocated: the trainer rank on the device of the server's first worker; the next ranks go with the next workers."""
    api_key: ApiKey = ApiKey()
    """That the server's requests must carry."""


class CoverageError(ValueError):
    """The tensors on offer are not the ones the served model has."""


@dataclass(frozen=True)
class Slice:
    """The bytes of one tensor among those of all buckets."""

    spec: TensorSpec
    bucket: int
    """Index of the bucket, counted from 0."""
    offset: int
    """Bytes from the start of the bucket."""

    @property
    def end(self) -> int:
        return self.offset + self.spec.num_bytes


@dataclass(frozen=True)
class GroupSpec:
    """A process group to be made: source rank 0 and, after it, the workers of ``servers`` in their order.

    Raises ValueError without servers and for one without workers.
    """

    name: str
    servers: tuple[ServerAddress, ...]
    backend: str
    """Of torch.distributed: nccl or gloo."""
    timeout_s: float
    """Longest wait for a broadcast."""

    def __post_init__(self) -> None:
        tp_sizes = [server.tp_size for server in self.servers]
        if not tp_sizes or min(tp_sizes) < 1:
            raise ValueError(f"expected at least one server, each with tp_size >= 1, got tp sizes {tp_sizes}")

    @property
    def world_size(self) -> int:
        """The source rank and all server workers."""
        return 1 + sum(server.tp_size for server in self.servers)

    @property
    def first_ranks(self) -> tuple[int, ...]:
        """Rank of the first worker of each server."""
        sizes = [server.tp_size for server in self.servers[:-1]]
        return tuple(itertools.accumulate(sizes, initial=1))


def place(spec: TensorSpec, previous: Slice | None, bucket_bytes: int) -> Slice:
    """Where ``spec`` goes, given where the tensor before it went (None for the first)."""
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes must be positive, got {bucket_bytes}")
    if spec.num_bytes == 0:
        raise ValueError(f"{spec.name} has shape {list(spec.shape)}: a tensor without elements cannot be sent")
    if previous is None:
        return Slice(spec, bucket=0, offset=0)
    # No gap can be left for alignment: SGLang takes the tensors back to back.
    fits = previous.end + spec.num_bytes <= bucket_bytes and previous.end % spec.dtype.itemsize == 0
    if fits:
        return Slice(spec, previous.bucket, previous.end)
    return Slice(spec, previous.bucket + 1, offset=0)


def unique_addresses(servers: Sequence[ServerAddress | tuple[str, int, int]]) -> tuple[ServerAddress, ...]:
    """Servers in their order; raises ValueError if there are none or one is listed twice."""
    addresses = tuple(ServerAddress(url.rstrip("/"), *rest) for url, *rest in servers)
    urls = [address.url for address in addresses]
    if not urls or len(set(urls)) != len(urls):
        raise ValueError(f"expected at least one server and every URL once, got {urls}")
    return addresses


class Coverage:
    """Compares the tensors that stream by with the ones the model has.

    A server ignores a name it does not know and keeps the old values of one it never receives, so both must be found
    here. ``expected`` maps names to shapes; without it only duplicates are found.
    """

    def __init__(self, expected: Mapping[str, Sequence[int]] | None = None):
        self._expected = expected
        self._seen: set[str] = set()
        self._problems: dict[str, list[str]] = {"unexpected": [], "duplicate": [], "wrong shape": []}

    def add(self, spec: TensorSpec) -> None:
        if spec.name in self._seen:
            self._problems["duplicate"].append(spec.name)
        self._seen.add(spec.name)
        if self._expected is None:
            return
        if spec.name not in self._expected:
            self._problems["unexpected"].append(spec.name)
        elif tuple(self._expected[spec.name]) != spec.shape:
            shapes = f"{list(spec.shape)}, the model has {list(self._expected[spec.name])}"
            self._problems["wrong shape"].append(f"{spec.name} {shapes}")

    def check(self, complete: bool) -> None:
        """Raise CoverageError for what was wrong so far and, when the stream is ``complete``, for what is missing."""
        problems = {kind: names for kind, names in self._problems.items() if names}
        if complete and not self._seen:
            raise CoverageError("there are no tensors to send: the stream was empty")
        if complete and self._expected is not None:
            missing = [name for name in self._expected if name not in self._seen]
            if missing:
                problems["missing"] = missing
        if problems:
            listed = "; ".join(f"{kind}: {_shorten(names)}" for kind, names in problems.items())
            raise CoverageError(
                f"the tensors on offer are not the served model's: {listed}. Check the Hugging Face name mapping of "
                "this model family and that the trainer and the servers use the same config.json"
            )


def _shorten(names: list[str]) -> str:
    """The first names of a long list, for an error message."""
    shown = ", ".join(names[:_MAX_NAMES_SHOWN])
    left = len(names) - _MAX_NAMES_SHOWN
    return f"{shown} and {left} more" if left > 0 else shown
