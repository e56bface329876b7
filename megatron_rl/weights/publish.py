"""Carries the trainer's weights into running SGLang servers.

The way of a publish: the tensors of the stream are copied into flat buckets; each bucket is announced to every server
by HTTP and broadcast once over an extra process group (``group.py``) whose rank 0 is the trainer's source rank. While
bucket k travels, bucket k+1 is gathered and filled, so the source holds two buckets and one tensor.

Invariants:

- nothing is broadcast before every server has opened its update session, and a bucket only after all its tensors passed
  the coverage check;
- the version is stamped, and the prefix cache flushed, with the last bucket only: a server that shows version v holds
  all of v;
- after a failure the group is closed, which frees servers that wait inside a broadcast, and the next publish builds a
  new one;
- the stream is always walked to its end, also after a failure, so that trainer ranks inside its collectives get
  through.

Who waits for whom: the source waits for the servers, at most ``timeout_s`` at each step (a session, a bucket, a check).
A server waits inside a broadcast for the source. Opening a session waits until the server's running requests finish,
unless ``pause`` moves them back to its queue first. The other trainer ranks wait only inside the stream.
"""

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from megatron_rl.errors import UserError
from megatron_rl.weights import disk
from megatron_rl.weights.group import SyncGroup, form_group
from megatron_rl.weights.plan import Coverage, Placement, ServerAddress, TensorSpec, place, unique_addresses
from megatron_rl.weights.servers import ServerCallError, ServerCalls, wait_for_all

logger = logging.getLogger(__name__)

NamedTensors = Iterable[tuple[str, torch.Tensor]]
"""Hugging Face names and full tensors, on CPU or GPU; each tensor is used before the next one is asked for."""


class WeightSyncError(UserError, RuntimeError):
    """A publish did not complete. The next one starts from scratch; until then servers may hold mixed weights."""


class TensorStreamError(RuntimeError):
    """The trainer's own stream of tensors failed; the servers are not at fault."""


@dataclass(frozen=True)
class PublishResult:
    seconds: float
    num_bytes: int
    """Payload, counted once however many servers received it."""
    num_buckets: int


@dataclass(frozen=True)
class Bucket:
    specs: tuple[TensorSpec, ...]
    flat: torch.Tensor
    """The tensors' bytes back to back: uint8 [num_bytes]."""
    last: bool


def take_part(named_tensors: NamedTensors) -> None:
    """What trainer ranks other than the source do in a publish: walk the stream for the collectives inside it."""
    for _ in named_tensors:
        pass


class WeightPublisher:
    """The source rank's end of weight sync; keeps the process group between publishes.

    ``method="disk"`` goes through safetensors under ``folder`` (which the servers must see under the same path) instead
    of a group, for clusters that cannot build one. ``master_address`` is where servers reach this process; by default
    the local address of the route towards them.
    """

    def __init__(
        self,
        bucket_bytes: int,
        timeout_s: float,
        backend: str | None = None,
        *,
        method: Literal["broadcast", "disk"] = "broadcast",
        folder: str | Path | None = None,
        master_address: str | None = None,
    ):
        if method not in ("broadcast", "disk"):
            raise ValueError(f"method is broadcast or disk, got {method!r}")
        if method == "disk" and folder is None:
            raise ValueError("method='disk' needs a folder that trainer and servers share")
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
        self._folder = Path(folder) if method == "disk" else None
        self._master_address = master_address
        self._group: SyncGroup | None = None
        self._groups_on_servers: dict[ServerAddress, str] = {}
        self._paused: set[ServerAddress] = set()

    def publish(
        self,
        named_tensors: NamedTensors,
        servers: Sequence[ServerAddress | tuple[str, int, int]],
        version: int,
        *,
        expected: Mapping[str, Sequence[int]] | None = None,
        pause: bool = False,
    ) -> PublishResult:
        """Bring all ``servers`` to ``version``; returns once each of them confirmed it.

        ``expected`` maps the model's own names to shapes (``disk.read_shapes`` reads them from a checkpoint); tensors
        that do not match are refused before their bucket is sent. ``pause`` moves running requests back to the
        servers' queues for the time of the update and recomputes their prefixes with the new weights. Raises
        WeightSyncError.
        """
        addresses = unique_addresses(servers)
        stream = _guarded(named_tensors)
        coverage = Coverage(expected)
        with ServerCalls(addresses, self._timeout_s) as calls:
            transfer = _Transfer(calls, version, started=time.perf_counter())
            try:
                self._pause_if_asked(calls, pause)
                if self._folder is not None:
                    self._send_through_disk(transfer, stream, coverage)
                else:
                    self._send_through_group(transfer, stream, coverage)
                transfer.check_version()
                self._continue_paused(calls)
            except Exception as error:
                self._clean_up(transfer)
                also = _drain(stream)
                raise WeightSyncError(transfer.describe_failure(error) + also) from error
            except BaseException:
                self._close_group()
                raise
        return transfer.result()

    def publish_from_disk(
        self, folder: str | Path, servers: Sequence[ServerAddress | tuple[str, int, int]], version: int
    ) -> PublishResult:
        """Let the servers load safetensors that are already in ``folder``; raises WeightSyncError."""
        with ServerCalls(unique_addresses(servers), self._timeout_s) as calls:
            transfer = _Transfer(calls, version, started=time.perf_counter())
            try:
                transfer.load_from_disk(Path(folder))
                transfer.check_version()
            except (ServerCallError, OSError) as error:
                raise WeightSyncError(transfer.describe_failure(error)) from error
        return transfer.result()

    def close(self) -> None:
        """Leave the group on both sides; a server that does not answer any more is left alone."""
        self._close_group()
        try:
            self._forget_groups_on(tuple(self._groups_on_servers))
        except ServerCallError as error:
            logger.warning("the weight sync group was not closed on every server: %s", error)

    def _send_through_group(self, transfer: "_Transfer", stream: NamedTensors, coverage: Coverage) -> None:
        group = self._connected_group(transfer.calls)
        buckets = fill_buckets(stream, self._bucket_bytes, coverage, group.device)
        transfer.send_all(buckets, group)

    def _send_through_disk(self, transfer: "_Transfer", stream: NamedTensors, coverage: Coverage) -> None:
        folder = disk.write_version(stream, self._folder, transfer.version, self._bucket_bytes, coverage)
        transfer.load_from_disk(folder)
        disk.remove_other_versions(self._folder, keep=folder)

    def _connected_group(self, calls: ServerCalls) -> SyncGroup:
        """The group of exactly these servers; a new one when the set, an incarnation or a failure asks for it."""
        if self._group is not None and self._group.servers == calls.servers:
            return self._group
        self._close_group()
        calls.get("/model_info")  # an unreachable server would leave the others waiting for it inside the rendezvous
        self._forget_groups_on(calls.servers)
        self._group = form_group(calls, self._backend, self._timeout_s, self._master_address)
        self._groups_on_servers.update({address: self._group.name for address in calls.servers})
        return self._group

    def _close_group(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def _forget_groups_on(self, servers: tuple[ServerAddress, ...]) -> None:
        """Destroy the groups that an earlier connection left on ``servers``; one that is gone already is fine."""
        known = tuple(server for server in servers if server in self._groups_on_servers)
        if not known:
            return
        bodies = [{"group_name": self._groups_on_servers.pop(server)} for server in known]
        with ServerCalls(known, self._timeout_s) as calls:
            calls.post_each("/destroy_weights_update_group", bodies, allow_refusal=True)

    def _pause_if_asked(self, calls: ServerCalls, pause: bool) -> None:
        if pause:
            self._paused.update(calls.servers)
            calls.post("/pause_generation", {"mode": "retract"})

    def _continue_paused(self, calls: ServerCalls) -> None:
        if self._paused.intersection(calls.servers):
            calls.post("/continue_generation")
            self._paused.difference_update(calls.servers)

    def _clean_up(self, transfer: "_Transfer") -> None:
        """After a failure: free servers inside a broadcast; paused ones go on only if their weights are untouched."""
        self._close_group()
        if not transfer.touched:
            try:
                self._continue_paused(transfer.calls)
            except ServerCallError as error:
                logger.warning("a paused server could not be resumed after a failed publish: %s", error)


@dataclass
class _Transfer:
    """One publish under way: counts what was sent and turns a failure into a message."""

    calls: ServerCalls
    version: int
    started: float
    num_bytes: int = 0
    num_buckets: int = 0
    touched: bool = False
    """Some server may hold other weights than before."""
    _in_flight: list = field(default_factory=list)

    def send_all(self, buckets: Iterator[Bucket], group: SyncGroup) -> None:
        session_open = False
        try:
            for bucket in buckets:
                if not session_open:
                    self._begin()
                    session_open = True
                self._wait_for_bucket()
                self._start(bucket, group)
        except (TensorStreamError, ValueError):
            # Let the bucket under way arrive: a broken broadcast would only hide the real error.
            self._wait_for_bucket()
            raise
        self._wait_for_bucket()
        self.calls.post("/end_weight_update")

    def load_from_disk(self, folder: Path) -> None:
        self.num_bytes = disk.count_bytes(folder)
        body = {
            "model_path": str(folder.absolute()),
            "load_format": "auto",  # a server started with dummy weights would otherwise "load" dummy weights again
            "weight_version": str(self.version),
            "flush_cache": True,
        }
        self.touched = True
        self.calls.post("/update_weights_from_disk", body)

    def check_version(self) -> None:
        for server, info in zip(self.calls.servers, self.calls.get("/model_info")):
            if info["weight_version"] != str(self.version):
                raise ServerCallError(
                    f"{server.url} took every bucket but shows weight version {info['weight_version']!r} instead of "
                    f"{str(self.version)!r}: something else updates its weights too, or it was restarted meanwhile"
                )

    def result(self) -> PublishResult:
        return PublishResult(time.perf_counter() - self.started, self.num_bytes, self.num_buckets)

    def describe_failure(self, error: Exception) -> str:
        after_s = time.perf_counter() - self.started
        where = f"at bucket {self.num_buckets} (byte {self.num_bytes})" if self.num_buckets else "before any bucket"
        if self.touched:
            state = "Servers may hold a mix of old and new weights: publish again before anything is generated."
        else:
            state = "The servers keep their old weights."
        return f"weight sync of version {self.version} failed after {after_s:.1f} s {where}: {error}. {state}"

    def _begin(self) -> None:
        """Open a session on every server; one that a failed publish left open is closed first."""
        refused = [not reply.ok for reply in self.calls.post("/begin_weight_update", allow_refusal=True)]
        if not any(refused):
            return
        self.calls.post("/end_weight_update", allow_refusal=True)
        self.calls.post("/begin_weight_update")

    def _start(self, bucket: Bucket, group: SyncGroup) -> None:
        body = {
            "names": [spec.name for spec in bucket.specs],
            "dtypes": [str(spec.dtype).removeprefix("torch.") for spec in bucket.specs],
            "shapes": [list(spec.shape) for spec in bucket.specs],
            "group_name": group.name,
            "load_format": "flattened_bucket",
            "flush_cache": bucket.last,
            **({"weight_version": str(self.version)} if bucket.last else {}),
        }
        self.touched = True
        self.num_buckets += 1
        self.num_bytes += bucket.flat.numel()
        self._in_flight = self.calls.submit("/update_weights_from_distributed", [body] * len(self.calls.servers))
        self._in_flight.append(self.calls.run(group.broadcast, bucket.flat))

    def _wait_for_bucket(self) -> None:
        in_flight, self._in_flight = self._in_flight, []
        wait_for_all(in_flight, self.calls.timeout_s, f"the servers to receive and load bucket {self.num_buckets}")


def fill_buckets(
    stream: NamedTensors, bucket_bytes: int, coverage: Coverage, device: torch.device
) -> Iterator[Bucket]:
    """Copy the stream into buckets on ``device``; two buffers take turns, so a bucket is valid until the next but one.

    Raises CoverageError before a bucket that holds a wrong tensor is given out.
    """
    buffers: list[torch.Tensor | None] = [None, None]
    specs: list[TensorSpec] = []
    flat = torch.empty(0, dtype=torch.uint8)
    placement: Placement | None = None
    for name, tensor in stream:
        spec = TensorSpec(name, tuple(tensor.shape), tensor.dtype)
        coverage.add(spec)
        previous, placement = placement, place(spec, placement, bucket_bytes)
        if previous is not None and placement.bucket != previous.bucket:
            coverage.check(complete=False)
            yield Bucket(tuple(specs), flat[: previous.end], last=False)
            specs = []
        if not specs:
            turn = placement.bucket % 2
            if spec.num_bytes > bucket_bytes:
                flat = torch.empty(spec.num_bytes, dtype=torch.uint8, device=device)
            else:
                if buffers[turn] is None:
                    buffers[turn] = torch.empty(bucket_bytes, dtype=torch.uint8, device=device)
                flat = buffers[turn]
        specs.append(spec)
        flat[placement.offset : placement.end].view(spec.dtype).view(spec.shape).copy_(tensor.detach())
    coverage.check(complete=True)
    yield Bucket(tuple(specs), flat[: placement.end], last=True)


def _guarded(named_tensors: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
    """The same stream; a failure inside it becomes a TensorStreamError that says how far it got."""
    num_tensors = 0
    try:
        for name, tensor in named_tensors:
            yield name, tensor
            num_tensors += 1
    except Exception as error:
        raise TensorStreamError(
            f"the trainer's stream of tensors failed after {num_tensors} tensors with {type(error).__name__}: {error}"
        ) from error


def _drain(stream: Iterator) -> str:
    """Walk the rest of the stream, as other trainer ranks wait inside its collectives; returns a note for the error."""
    try:
        for _ in stream:
            pass
    except TensorStreamError as error:
        return f" Afterwards {error}."
    return ""
