"""Publishes the trainer's weights to running SGLang servers.

A publish copies the tensors of a stream into flat buckets. Each bucket is announced to every server by HTTP and
sent once, in sequence. The method determines the transport: process groups whose sources are the first ranks of the
pipeline stages (``GroupSender``, ``source_ranks.py``), memory of devices that trainer and servers share
(``colocated.py``), or files (``disk.py``). While bucket k is sent, each source gathers and fills its next bucket,
on a GPU on a separate stream (``buckets.py``), so a source stores two buckets and one tensor. Two buckets are in
progress: a server that has loaded bucket k gets the request for k + 1 while slower servers still load k.

Invariants:

- nothing is sent before every server has opened its update session; a bucket is sent only after all its tensors passed
  the coverage check;
- every server receives the buckets in the same order, one at a time;
- the version is stamped, and the prefix cache flushed, with the last bucket only: a server that reports version v has
  all of v, and no cached prefix of older weights;
- a publish that pauses the servers (``pauses``) resumes them once all have confirmed the version; after a failure, running
  requests resume only if no server's weights have changed, and are aborted otherwise;
- after a failure the groups are closed, which frees servers that wait inside a broadcast, and the next publish creates
  new groups;
- every rank's stream is exhausted, also after a failure, because other trainer ranks wait in its collectives.

The driver waits for the servers, at most ``timeout_s`` at each step (a session, a bucket, a check), and for the
other sources' buckets. A server waits inside a broadcast for its source. Opening a session waits until the server's
running requests have finished, unless they are paused. Trainer ranks that send nothing wait only inside the stream.

Process groups, one per source rank, are kept between publishes. All groups are recreated, in the order of the
stages, if the set of servers or an incarnation has changed, or after a failed publish.

Adapters: servers have the base model, and an adapter is loaded under a name that contains its version (``served_name``),
which every request names. So a server that lacks it refuses the request instead of running the base model, and a cached
prefix belongs to one version, because SGLang's prefix cache is keyed by adapter too. The server compares every tensor's
SHA-256 with the trainer's. The version is stamped once the adapter is loaded; adapters of older versions are unloaded after
that, which waits for their requests.
"""

import base64
import hashlib
import logging
import pickle
import time
import uuid
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.config.derived import WeightMethod
from megatron_rl.errors import UserError
from megatron_rl.families.adapters import served_name
from megatron_rl.weights.bucket_plan import Coverage, GroupSpec, ServerAddress, unique_addresses
from megatron_rl.weights.buckets import Bucket, BucketStream, NamedTensors, TensorStreamError
from megatron_rl.weights.colocated import ColocatedSender, RankMessaging
from megatron_rl.weights.disk import DiskSender
from megatron_rl.weights.server_calls import ServerCallError, ServerCalls, wait_for_all
from megatron_rl.weights.source_ranks import Channel, RemoteSource, SyncGroup, device_of
from megatron_rl.weights.transfer import CLOSE_TIMEOUT_S, PublishTransfer, UpdateRequest

logger = logging.getLogger(__name__)
_LOAD, _UNLOAD = "/load_lora_adapter_from_tensors", "/unload_lora_adapter"


class Connections:
    """The groups of all sources with one set of servers."""

    def __init__(self, backend: str, timeout_s: float) -> None:
        self.backend = backend
        self._timeout_s = timeout_s
        self._servers: tuple[ServerAddress, ...] = ()
        self._names: tuple[str, ...] = ()
        self._own: SyncGroup | None = None
        self._on_servers: dict[ServerAddress, tuple[str, ...]] = {}

    def connect(self, remote: Sequence[RemoteSource], calls: ServerCalls) -> tuple[SyncGroup, tuple[str, ...]]:
        """Return (this process's group, the names of all groups, one per source). Raises ServerCallError.

        All groups are recreated if there are none or if the servers or the number of sources have changed.
        """
        own = self._own
        if own is None or self._servers != calls.servers or len(self._names) != 1 + len(remote):
            own = self._make(remote, calls)
        return own, self._names

    def close(self) -> None:
        """Close this process's group and drop the others, which their sources close."""
        self._servers = ()
        if self._own is not None:
            self._own.close()
            self._own = None

    def release_servers(self, timeout_s: float, *, but: Collection[str]) -> None:
        """Make the servers, except the URLs ``but``, destroy their groups. Raises ServerCallError if a server is silent.

        ``timeout_s`` is a server's time limit for all its groups.
        """
        self._destroy_on(tuple(server for server in self._on_servers if server.url not in but), timeout_s)

    def _make(self, remote: Sequence[RemoteSource], calls: ServerCalls) -> SyncGroup:
        self.close()
        calls.get("/model_info")  # checked first: the other servers would wait for an unreachable one in the rendezvous
        self._destroy_on(calls.servers, self._timeout_s)
        # Unique names, because a server may still have a group of an earlier name after a failure.
        run = uuid.uuid4().hex[:12]
        self._names = tuple(f"weight-sync-{run}-{stage}" for stage in range(1 + len(remote)))
        self._on_servers.update({address: self._names for address in calls.servers})
        spec = GroupSpec(self._names[0], calls.servers, self.backend, self._timeout_s)
        self._own = _open_own(spec, calls)
        for name, source in zip(self._names[1:], remote, strict=True):
            source.open_group(calls, replace(spec, name=name))
        self._servers = calls.servers
        return self._own

    def _destroy_on(self, servers: tuple[ServerAddress, ...], timeout_s: float) -> None:
        """Destroy the groups that an earlier connection left on ``servers``; groups that no longer exist are ignored."""
        known = tuple(server for server in servers if server in self._on_servers)
        if not known:
            return
        names = [self._on_servers.pop(server) for server in known]
        deadline_s = time.monotonic() + timeout_s
        with ServerCalls(known, timeout_s) as calls:
            for stage in range(max(map(len, names))):
                calls.timeout_s = max(0.1, deadline_s - time.monotonic())
                # A server with fewer groups gets its last name again, and refuses it.
                bodies = [{"group_name": own[min(stage, len(own) - 1)]} for own in names]
                calls.accepts("/destroy_weights_update_group", bodies)


class GroupSender:
    """The driver's part of one publish: sends its own stage's buckets and schedules the other sources' buckets."""

    def __init__(
        self,
        connections: Connections,
        remote: Sequence[RemoteSource],
        named_tensors: NamedTensors,
        bucket_bytes: int,
        device: torch.device,
    ) -> None:
        self._connections = connections
        self._remote = remote
        self._stream = BucketStream(named_tensors, bucket_bytes, device)
        # Immediately, because the other ranks wait for rank 0 in the stream's first collectives.
        self._stream.prepare()

    def send(self, transfer: PublishTransfer, coverage: Coverage) -> None:
        """Send all sources' buckets; errors as of ``requests`` and ``PublishTransfer.send_all``."""
        transfer.send_all(self.requests(transfer.calls, transfer.version, coverage))

    def requests(self, calls: ServerCalls, version: int, coverage: Coverage) -> Iterator[UpdateRequest]:
        """Yield the sources' buckets, alternating between the sources until each has sent its last.

        Raises:
            ServerCallError: a group could not be created.
            CoverageError: the next bucket has a wrong tensor; it is not sent.
            TensorStreamError: a source's stream failed.
        """
        group, names = self._connections.connect(self._remote, calls)

        def send_own(calls: ServerCalls) -> list[Future]:
            return [calls.run(group.broadcast, self._stream.take())]

        offers = [self._stream.look, *(source.offer for source in self._remote)]
        starts = [send_own, *(source.send for source in self._remote)]
        waiting = deque(zip(names, offers, starts, strict=True))
        while waiting:
            name, offer, start = waiting.popleft()
            bucket = offer()
            if not bucket.last:
                waiting.append((name, offer, start))
            for spec in bucket.specs:
                coverage.add(spec)
            # Complete only after the last source, because a missing tensor may still come from another source.
            coverage.check(complete=not waiting)
            body = _body(bucket, name, version, last=not waiting)
            bodies = (body,) * len(calls.servers)
            yield UpdateRequest("/update_weights_from_distributed", bodies, bucket.num_bytes, start)

    @property
    def peak_buffer_bytes(self) -> int:
        return self._stream.peak_buffer_bytes

    def finish(self, *, failed: bool) -> str:
        """End the publish on the other sources and exhaust this rank's stream; returns the failures."""
        notes = [source.finish(failed=failed) for source in self._remote]
        notes.append(self._stream.finish())
        return "; ".join(note for note in notes if note)


def _open_own(spec: GroupSpec, calls: ServerCalls) -> SyncGroup:
    group = SyncGroup(spec)
    futures = calls.submit("/init_weights_update_group", group.join_bodies())
    futures.append(calls.run(group.open))
    try:
        what = f"all servers to join the group at {group.address}:{group.port}"
        wait_for_all(futures, group.connect_timeout_s, what)
    except ServerCallError:
        group.close()
        raise
    return group


def _body(bucket: Bucket, group_name: str, version: int, *, last: bool) -> dict[str, Any]:
    return {
        "names": [spec.name for spec in bucket.specs],
        "dtypes": [str(spec.dtype).removeprefix("torch.") for spec in bucket.specs],
        "shapes": [list(spec.shape) for spec in bucket.specs],
        "group_name": group_name,
        "load_format": "flattened_bucket",
        "flush_cache": last,
        **({"weight_version": str(version)} if last else {}),
    }


class WeightSyncError(UserError, RuntimeError):
    """A publish that did not complete. The next publish starts from scratch; until then servers may have mixed weights."""


@dataclass(frozen=True)
class PublishResult:
    seconds: float
    num_bytes: int
    """Payload, counted once for any number of servers."""
    num_buckets: int
    """Number of buckets; files count as one bucket."""
    buffer_bytes: int = 0
    """Largest memory of this rank's buckets at one time; 0 if weights were sent as files."""


class WeightPublisher:
    """The driver's end of weight sync; keeps the process groups between publishes."""

    def __init__(
        self,
        bucket_bytes: int,
        timeout_s: float,
        backend: str | None = None,
        *,
        method: WeightMethod = WeightMethod.broadcast,
        folder: str | Path | None = None,
        pauses: bool = False,
    ) -> None:
        """
        Args:
            bucket_bytes: size of a bucket.
            timeout_s: longest wait for each step of a publish.
            backend: backend of torch.distributed; None: nccl with GPUs, else gloo.
            method: transport of the buckets.
            folder: target of ``WeightMethod.disk``.
            pauses: pause running requests during a publish; they resume from their last token with the new weights.
        """
        self._pauses = pauses
        self._folder: Path | None = None
        if method is WeightMethod.disk:
            if folder is None:
                raise ValueError("WeightMethod.disk needs a folder that trainer and servers share")
            self._folder = Path(folder)
        self._method = method
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._connections = Connections(backend or ("nccl" if torch.cuda.is_available() else "gloo"), timeout_s)

    def publish(
        self,
        named_tensors: NamedTensors,
        servers: Sequence[ServerAddress | tuple[str, int, int]],
        version: int,
        *,
        expected: Mapping[str, Sequence[int]] | None = None,
        links: Sequence[Channel] = (),
        ranks: RankMessaging | None = None,
    ) -> PublishResult:
        """Send ``named_tensors`` to all ``servers`` as ``version``; returns once every server has confirmed the version.

        Args:
            named_tensors: tensors that this rank sends: all, or with ``links`` the tensors of its own stage.
            servers: the servers that receive the weights.
            version: the new weight version.
            expected: maps the model's tensor names to shapes; other tensors are refused before their bucket is sent.
            links: channels to the other stages' sources, whose ranks run ``StageRank.serve``.
            ranks: messaging with the other ranks of a colocated trainer, which run ``colocated.follow``.

        Raises:
            WeightSyncError: the publish did not complete.
        """
        addresses = unique_addresses(servers)
        with ServerCalls(addresses, self._timeout_s, pauses=self._pauses) as calls:
            transfer = PublishTransfer(calls, version, started=time.perf_counter())
            sender = self._sender(named_tensors, links, ranks or RankMessaging())
            try:
                sender.send(transfer, Coverage(expected))
                # Before the version check, so that the other ranks do not wait for it.
                notes = sender.finish(failed=False)
                if notes:
                    raise TensorStreamError(notes)
                transfer.check_version()
                transfer.buffer_bytes = sender.peak_buffer_bytes
                if self._pauses:
                    calls.go_on()
            except Exception as error:
                self._connections.close()
                also = sender.finish(failed=True)
                message = transfer.describe_failure(error) + (f" Afterwards: {also}." if also else "")
                transfer.free_servers()
                raise WeightSyncError(message) from error
            except BaseException:  # the process is exiting: only the servers are freed
                self._connections.close()
                transfer.free_servers()
                raise
        seconds = time.perf_counter() - transfer.started
        return PublishResult(seconds, transfer.num_bytes, transfer.num_buckets, transfer.buffer_bytes)

    def close(self, lost_urls: Collection[str] = ()) -> None:
        """Close the groups on both sides within seconds; a server that does not reply is skipped with a warning.

        ``lost_urls``: servers that are not called.
        """
        self._connections.close()
        try:
            self._connections.release_servers(min(self._timeout_s, CLOSE_TIMEOUT_S), but=lost_urls)
        except ServerCallError as error:
            logger.warning("the weight sync group was not closed on every server: %s", error)

    def _sender(
        self, named_tensors: NamedTensors, links: Sequence[Channel], ranks: RankMessaging
    ) -> GroupSender | ColocatedSender | DiskSender:
        """The sender of this publish.

        A sender has ``send``; ``finish``, which exhausts every rank's stream and returns additional failures (a
        second call does nothing); and ``peak_buffer_bytes`` (``PublishResult.buffer_bytes``).
        """
        if self._folder is not None:
            return DiskSender(named_tensors, self._folder, self._bucket_bytes)
        if self._method is WeightMethod.colocated:
            device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
            return ColocatedSender(named_tensors, self._bucket_bytes, device, ranks)
        remote = [RemoteSource(link) for link in links]
        device = device_of(self._connections.backend)
        return GroupSender(self._connections, remote, named_tensors, self._bucket_bytes, device)


def publish_adapters(
    tensors: Mapping[str, Tensor],
    settings: Mapping[str, Any],
    servers: Sequence[ServerAddress],
    version: int,
    timeout_s: float,
    *,
    further_versions: Sequence[int] = (),
) -> PublishResult:
    """Load the adapter ``tensors`` (peft's names) on all ``servers`` as ``version``, and unload all others.

    ``settings``: adapter_config.json. ``further_versions``: versions under which running requests ask for the same adapter.
    Raises ServerCallError.
    """
    started_s = time.perf_counter()
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    data = base64.b64encode(pickle.dumps(copies)).decode()
    body = {
        "config_dict": {**settings, "lora_alpha": served_alpha(settings), "use_rslora": False},
        "expected_checksums": {name: _checksum(tensor) for name, tensor in copies.items()},
    }
    names = [served_name(own) for own in (*further_versions, version)]
    with ServerCalls(unique_addresses(servers), timeout_s) as calls:
        loaded: list[set[str]] = []
        for name in names:
            # Left by a publish that failed after this call.
            calls.accepts(_UNLOAD, [{"lora_name": name}] * len(calls.servers))
            bodies = [
                {**body, "lora_name": name, "serialized_named_tensors": [data] * server.tp_size}
                for server in calls.servers
            ]
            replies = wait_for_all(calls.submit(_LOAD, bodies), timeout_s, f"the servers to load {name}")
            loaded = [set(reply["loaded_adapters"]) for reply in replies]
        PublishTransfer(calls, version, started=started_s).stamp_version()
        for old in sorted(set().union(*loaded) - set(names)):
            calls.accepts(_UNLOAD, [{"lora_name": old}] * len(calls.servers))
        # Frees the prefixes of older versions, which no request can use; a busy server refuses, and evicts them when it must.
        calls.accepts("/flush_cache")
    num_bytes = sum(tensor.nbytes for tensor in copies.values())
    return PublishResult(time.perf_counter() - started_s, num_bytes, num_buckets=1, buffer_bytes=len(data))


def served_alpha(settings: Mapping[str, Any]) -> float:
    """The alpha with which SGLang, whose factor is always alpha / rank, computes the adapters' factor."""
    return settings["lora_alpha"] * (settings["r"] ** 0.5 if settings["use_rslora"] else 1)


def _checksum(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.view(-1).view(torch.uint8).numpy().data).hexdigest()
