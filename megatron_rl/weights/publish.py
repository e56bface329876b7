"""Publishes the trainer's weights to running SGLang servers.

A publish copies the tensors of a stream into flat buckets. Each bucket is announced to every server by HTTP and sent
once, in sequence. The method determines the transport: process groups whose sources are the first ranks of the pipeline
stages (``broadcast.py``, ``source_ranks.py``), memory of devices that trainer and servers share (``colocated.py``), or files
(``disk.py``). While bucket k is sent, each source gathers and fills its next bucket, on a GPU on a separate stream
(``cuda_streams.py``), so a source stores two buckets and one tensor. Two buckets are in progress: a server that has
loaded bucket k gets the request for k + 1 while slower servers still load k.

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

The driver waits for the servers, at most ``timeout_s`` at each step (a session, a bucket, a check), and for the other
sources' buckets. A server waits inside a broadcast for its source. Opening a session waits until the server's running
requests have finished, unless they are paused. Trainer ranks that send nothing wait only inside the stream.
"""

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_rl.config.derived import WeightMethod
from megatron_rl.errors import UserError
from megatron_rl.weights.broadcast import Connections, GroupSender
from megatron_rl.weights.bucket_plan import Coverage, ServerAddress, unique_addresses
from megatron_rl.weights.buckets import NamedTensors, TensorStreamError
from megatron_rl.weights.colocated import ColocatedSender, RankMessaging
from megatron_rl.weights.disk import DiskSender
from megatron_rl.weights.server_calls import ServerCallError, ServerCalls
from megatron_rl.weights.source_ranks import Channel, RemoteSource
from megatron_rl.weights.sync_group import device_of
from megatron_rl.weights.transfer import CLOSE_TIMEOUT_S, PublishTransfer

logger = logging.getLogger(__name__)


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

        A sender has ``send``; ``finish``, which exhausts every rank's stream and returns additional failures (a second
        call does nothing); and ``peak_buffer_bytes`` (``PublishResult.buffer_bytes``).
        """
        if self._folder is not None:
            return DiskSender(named_tensors, self._folder, self._bucket_bytes)
        if self._method is WeightMethod.colocated:
            device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
            return ColocatedSender(named_tensors, self._bucket_bytes, device, ranks)
        remote = [RemoteSource(link) for link in links]
        device = device_of(self._connections.backend)
        return GroupSender(self._connections, remote, named_tensors, self._bucket_bytes, device)
