"""Carries the trainer's weights into running SGLang servers.

The way of a publish: the tensors of a stream are copied into flat buckets; each bucket is announced to every server by
HTTP and travels once, one bucket at a time. How it travels is the method: over process groups whose sources are the
first ranks of the pipeline stages (``broadcast.py``, ``senders.py``), through memory of the devices that trainer and
servers share (``colocated.py``), or the whole stream as files (``disk.py``). While bucket k travels, the next one of
each source is gathered and filled, so a source holds two buckets and one tensor.

Invariants:

- nothing travels before every server has opened its update session, and a bucket only after all its tensors passed
  the coverage check;
- the version is stamped, and the prefix cache flushed, with the last bucket only: a server that shows version v holds
  all of v;
- after a failure the groups are closed, which frees servers that wait inside a broadcast, and the next publish builds
  new ones;
- every rank's stream is walked to its end, also after a failure, so that trainer ranks inside its collectives get
  through.

Who waits for whom: the driver waits for the servers, at most ``timeout_s`` at each step (a session, a bucket, a check),
and for the other sources' buckets. A server waits inside a broadcast for its source. Opening a session waits until the
server's running requests finish, unless ``pause`` moves them back to its queue first. Trainer ranks that send nothing
wait only inside the stream.
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import torch

from megatron_rl.errors import UserError
from megatron_rl.weights import disk
from megatron_rl.weights.broadcast import Connections, Parcel, broadcast_parcels
from megatron_rl.weights.buckets import NamedTensors, TensorStreamError, drain, guarded
from megatron_rl.weights.colocated import ColocatedSender, Ranks
from megatron_rl.weights.plan import Coverage, ServerAddress, unique_addresses
from megatron_rl.weights.senders import Link, LocalSource, RemoteSource
from megatron_rl.weights.server_calls import ServerCallError, ServerCalls, wait_for_all
from megatron_rl.weights.sync_group import device_of

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")

class WeightSyncError(UserError, RuntimeError):
    """A publish did not complete. The next one starts from scratch; until then servers may hold mixed weights."""


@dataclass(frozen=True)
class PublishResult:
    seconds: float
    num_bytes: int
    """Payload, counted once however many servers received it."""
    num_buckets: int


class WeightPublisher:
    """The driver's end of weight sync; keeps the process groups between publishes.

    ``method="disk"`` goes through safetensors under ``folder`` (which the servers must see under the same path), for
    clusters that cannot build a group; ``method="colocated"`` through memory on the devices that servers and trainer
    ranks share. ``master_address`` is where servers reach this process; by default the local address of the route
    towards them.
    """

    def __init__(
        self,
        bucket_bytes: int,
        timeout_s: float,
        backend: str | None = None,
        *,
        method: Literal["broadcast", "disk", "colocated"] = "broadcast",
        folder: str | Path | None = None,
        master_address: str | None = None,
    ):
        if method not in ("broadcast", "disk", "colocated"):
            raise ValueError(f"method is broadcast, disk or colocated, got {method!r}")
        if method == "disk" and folder is None:
            raise ValueError("method='disk' needs a folder that trainer and servers share")
        self._method = method
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._folder = Path(folder) if method == "disk" else None
        self._connections = Connections(
            backend or ("nccl" if torch.cuda.is_available() else "gloo"), timeout_s, master_address
        )
        self._paused: set[ServerAddress] = set()

    def publish(
        self,
        named_tensors: NamedTensors,
        servers: Sequence[ServerAddress | tuple[str, int, int]],
        version: int,
        *,
        expected: Mapping[str, Sequence[int]] | None = None,
        pause: bool = False,
        links: Sequence[Link] = (),
        ranks: Ranks | None = None,
    ) -> PublishResult:
        """Bring all ``servers`` to ``version``; returns once each of them confirmed it.

        ``named_tensors`` are what this rank has to send: everything, or with ``links`` to the other stages' sources
        (whose ranks are inside ``StageRank.serve``) the tensors of its own stage. ``ranks``: the others of a colocated
        trainer, inside ``colocated.follow``. ``expected`` maps the model's own names to shapes (``disk.read_shapes``
        reads them from a checkpoint); tensors that do not match are refused before their bucket is sent. ``pause``
        moves running requests back to the servers' queues for the time of the update and recomputes their prefixes
        with the new weights. Raises WeightSyncError.
        """
        addresses = unique_addresses(servers)
        with ServerCalls(addresses, self._timeout_s) as calls:
            transfer = _Transfer(calls, version, started=time.perf_counter())
            way = self._way(named_tensors, links, ranks)
            try:
                self._pause_if_asked(calls, pause)
                way.send(transfer, Coverage(expected))
                notes = way.finish(failed=False)
                if notes:
                    raise TensorStreamError(notes)
                transfer.check_version()
                self._continue_paused(calls)
            except Exception as error:
                self._clean_up(transfer)
                also = way.finish(failed=True)
                message = transfer.describe_failure(error) + (f" Afterwards: {also}." if also else "")
                raise WeightSyncError(message) from error
            except BaseException:
                self._connections.close()
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
        """Leave the groups on both sides; a server that does not answer any more is left alone."""
        self._connections.close()
        try:
            self._connections.leave_servers()
        except ServerCallError as error:
            logger.warning("the weight sync group was not closed on every server: %s", error)

    def _way(self, named_tensors: NamedTensors, links: Sequence[Link], ranks: Ranks | None) -> "_Way":
        if self._folder is not None:
            return _ThroughDisk(named_tensors, self._folder, self._bucket_bytes)
        if self._method == "colocated":
            device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else CPU
            return _ThroughMemory(ColocatedSender(named_tensors, self._bucket_bytes, device, ranks or _Alone()))
        device = device_of(self._connections.backend)
        local = LocalSource(named_tensors, self._bucket_bytes, device)
        return _ThroughGroups(local, [RemoteSource(link) for link in links], self._connections)

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
        self._connections.close()
        if not transfer.touched:
            try:
                self._continue_paused(transfer.calls)
            except ServerCallError as error:
                logger.warning("a paused server could not be resumed after a failed publish: %s", error)


class _Way(Protocol):
    """How the weights of one publish reach the servers."""

    def send(self, transfer: "_Transfer", coverage: Coverage) -> None: ...

    def finish(self, *, failed: bool) -> str:
        """Walk every rank's stream to its end; returns what else went wrong. A second call does nothing."""


@dataclass
class _ThroughGroups:
    local: LocalSource
    remote: Sequence[RemoteSource]
    connections: Connections

    def send(self, transfer: "_Transfer", coverage: Coverage) -> None:
        names = self.connections.connect(self.local, self.remote, transfer.calls)
        sources, num_servers = [self.local, *self.remote], len(transfer.calls.servers)
        transfer.send_all(broadcast_parcels(sources, names, num_servers, transfer.version, coverage))

    def finish(self, *, failed: bool) -> str:
        notes = [source.finish(failed=failed) for source in (*self.remote, self.local)]
        return "; ".join(note for note in notes if note)


@dataclass
class _ThroughMemory:
    sender: ColocatedSender

    def send(self, transfer: "_Transfer", coverage: Coverage) -> None:
        transfer.send_all(self.sender.parcels(transfer.calls.servers, transfer.version, coverage))

    def finish(self, *, failed: bool) -> str:
        return self.sender.finish(failed=failed)


class _ThroughDisk:
    def __init__(self, named_tensors: NamedTensors, folder: Path, shard_bytes: int) -> None:
        self._stream = guarded(named_tensors)
        self._folder = folder
        self._shard_bytes = shard_bytes

    def send(self, transfer: "_Transfer", coverage: Coverage) -> None:
        folder = disk.write_version(self._stream, self._folder, transfer.version, self._shard_bytes, coverage)
        transfer.load_from_disk(folder)
        disk.remove_other_versions(self._folder, keep=folder)

    def finish(self, *, failed: bool) -> str:
        return drain(self._stream)


class _Alone:
    """A trainer of one rank."""

    def gather(self, handle: str) -> list[str]:
        return [handle]

    def agree(self, go_on: bool) -> bool:
        return go_on


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

    def send_all(self, parcels: Iterator[Parcel]) -> None:
        session_open = False
        try:
            for parcel in parcels:
                if not session_open:
                    self._begin()
                    session_open = True
                self._wait_for_bucket()
                self._start(parcel)
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

    def _start(self, parcel: Parcel) -> None:
        self.touched = True
        self.num_buckets += 1
        self.num_bytes += parcel.num_bytes
        self._in_flight = self.calls.submit(parcel.path, parcel.bodies)
        self._in_flight += parcel.start(self.calls)

    def _wait_for_bucket(self) -> None:
        in_flight, self._in_flight = self._in_flight, []
        wait_for_all(in_flight, self.calls.timeout_s, f"the servers to receive and load bucket {self.num_buckets}")
