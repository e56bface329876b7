"""Assigns tensors to buckets and server workers to ranks, and checks that all tensors of the model are sent. Pure.

Weights are sent in flat byte buckets. Tensors are assigned while they are streamed (``place`` needs only the
previous tensor's place), so the trainer never stores the whole model. Invariants:

- every tensor is placed exactly once, and the order of the stream is kept;
- a bucket has at most ``bucket_bytes``; a larger tensor gets a separate bucket;
- inside a bucket a tensor starts at a multiple of its item size (SGLang refuses other buckets);
- rank 0 of a sync group is a source rank of the trainer; the next ranks are the workers of the servers, in order.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_rl.families.parameters import TensorSpec
from megatron_rl.system.http.json_http import ApiKey

_MAX_NAMES_SHOWN = 8
"""Largest number of names in an error message."""


class ServerAddress(NamedTuple):
    """A server that receives weights."""

    url: str
    tp_size: int
    """Number of server workers that receive weights; each has its own rank in a sync group."""
    incarnation: int
    """Number that changes when the server restarts: the new process does not have the old sync groups."""
    first_rank: int = 0
    """Colocated: the trainer rank on the device of the server's first worker; the next ranks are on the next workers'."""
    api_key: ApiKey = ApiKey()
    """API key of the server's requests."""


class CoverageError(ValueError):
    """The tensors of a stream differ from the served model's."""


@dataclass(frozen=True)
class GroupSpec:
    """Description of a process group: the source is rank 0, followed by the workers of ``servers`` in order.

    Raises ValueError if there are no servers, or if a server has no workers.
    """

    name: str
    servers: tuple[ServerAddress, ...]
    backend: str
    """Backend of torch.distributed: nccl or gloo."""
    timeout_s: float
    """Longest wait for a broadcast."""

    def __post_init__(self) -> None:
        tp_sizes = [server.tp_size for server in self.servers]
        if not tp_sizes or min(tp_sizes) < 1:
            raise ValueError(f"expected at least one server, each with tp_size >= 1, got tp sizes {tp_sizes}")

    @property
    def world_size(self) -> int:
        """Number of ranks: the source and all server workers."""
        return 1 + sum(server.tp_size for server in self.servers)

    @property
    def first_ranks(self) -> tuple[int, ...]:
        """Rank of the first worker of each server."""
        sizes = [server.tp_size for server in self.servers[:-1]]
        return tuple(itertools.accumulate(sizes, initial=1))


def place(spec: TensorSpec, previous: tuple[int, int] | None, bucket_bytes: int) -> tuple[int, int]:
    """Place of the tensor ``spec``: (index of the bucket, end of the tensor's bytes in the bucket).

    ``previous``: place of the previous tensor; None for the first.
    """
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes must be positive, got {bucket_bytes}")
    if spec.num_bytes == 0:
        raise ValueError(f"{spec.name} has shape {list(spec.shape)}: a tensor without elements cannot be sent")
    if previous is None:
        return 0, spec.num_bytes
    # A misaligned tensor starts a new bucket, because SGLang's format has no padding between tensors.
    bucket, end = previous
    if end + spec.num_bytes <= bucket_bytes and end % spec.dtype.itemsize == 0:
        return bucket, end + spec.num_bytes
    return bucket + 1, spec.num_bytes


def unique_addresses(servers: Sequence[ServerAddress | tuple[str, int, int]]) -> tuple[ServerAddress, ...]:
    """The servers in order, without trailing slashes. Raises ValueError if there are none or if a URL is duplicate."""
    addresses = tuple(ServerAddress(url.rstrip("/"), *rest) for url, *rest in servers)
    urls = [address.url for address in addresses]
    if not urls or len(set(urls)) != len(urls):
        raise ValueError(f"expected at least one server and every URL once, got {urls}")
    return addresses


class Coverage:
    """Compares the tensors of a stream with the model's.

    A server ignores unknown names and keeps the old values of tensors that it does not receive, so the trainer must
    detect both. ``expected`` maps names to shapes; without it only duplicates are detected.
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
        """Raise CoverageError for wrong tensors so far and, if the stream is ``complete``, for missing tensors."""
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
                f"the trainer's tensors are not the served model's: {listed}. Check the Hugging Face name mapping of "
                "this model family and that the trainer and the servers use the same config.json"
            )


def _shorten(names: list[str]) -> str:
    """The first names of a long list and the number of the others, for an error message."""
    shown = ", ".join(names[:_MAX_NAMES_SHOWN])
    num_hidden = len(names) - _MAX_NAMES_SHOWN
    return f"{shown} and {num_hidden} more" if num_hidden > 0 else shown
