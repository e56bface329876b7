"""Carries the trainer's weights into running SGLang servers.

The way of a publish: the tensors of a stream are copied into flat buckets; each bucket is announced to every server by
HTTP and travels once, one bucket after the other. How it travels is the method: over process groups whose sources are the
first ranks of the pipeline stages (``broadcast.py``, ``source_ranks.py``), through memory of the devices that trainer and
servers share (``colocated.py``), or the whole stream as files (``disk.py``). While bucket k travels, the next one of
each source is gathered and filled, on a GPU on a stream of its own (``cuda_streams.py``), so a source holds two buckets and
one tensor. Two buckets are in progress: a server that has loaded bucket k is asked for k + 1 while slower ones still load k.

Invariants:

- nothing travels before every server has opened its update session, and a bucket only after all its tensors passed
  the coverage check;
- every server takes the buckets in one order, and is asked for one at a time;
- the version is stamped, and the prefix cache flushed, with the last bucket only: a server that shows version v holds
  all of v, and no prefix that older weights computed;
- a publish that pauses the servers (``pauses``) lets them go on once all of them have confirmed the version; after a failure
  what had been running goes on only if no server has other weights than before, and is aborted otherwise;
- after a failure the groups are closed, which frees servers that wait inside a broadcast, and the next publish builds
  new ones;
- every rank's stream is walked to its end, also after a failure, so that trainer ranks inside its collectives get
  through.

Who waits for whom: the driver waits for the servers, at most ``timeout_s`` at each step (a session, a bucket, a check),
and for the other sources' buckets. A server waits inside a broadcast for its source. Opening a session waits until the
server's running requests finish, unless they are paused. Trainer ranks that send nothing wait only inside the stream.
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
    """A publish did not complete. The next one starts from scratch; until then servers may hold mixed weights."""


@dataclass(frozen=True)
class PublishResult:
    seconds: float
    num_bytes: int
    """Payload, counted once however many servers received it."""
    num_buckets: int
    """Files count as one."""
    buffer_bytes: int = 0
    """Largest memory of this rank's buckets at one time; 0 where weights went as files."""


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
        """``folder`` is where ``WeightMethod.disk`` writes. ``backend``: of torch.distributed; None: nccl with GPUs, else gloo.
        ``pauses``: requests that run meanwhile pause, and go on with the new weights from their last token.
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
        """Bring all ``servers`` to ``version``; returns once each of them confirmed it.

        ``named_tensors`` are what this rank has to send: everything, or with ``links`` to the other stages' sources
        (whose ranks are inside ``StageRank.serve``) the tensors of its own stage. ``ranks``: the others of a colocated
        trainer, inside ``colocated.follow``. ``expected`` maps the model's own names to shapes; tensors that do not
        match are refused before their bucket is sent. Raises WeightSyncError.
        """
        addresses = unique_addresses(servers)
        with ServerCalls(addresses, self._timeout_s, pauses=self._pauses) as calls:
            transfer = PublishTransfer(calls, version, started=time.perf_counter())
            sender = self._sender(named_tensors, links, ranks or RankMessaging())
            try:
                sender.send(transfer, Coverage(expected))
                # Before the version is checked: the other ranks need not wait for that.
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
            except BaseException:  # the process is to end: only the servers are freed
                self._connections.close()
                transfer.free_servers()
                raise
        seconds = time.perf_counter() - transfer.started
        return PublishResult(seconds, transfer.num_bytes, transfer.num_buckets, transfer.buffer_bytes)

    def close(self, lost_urls: Collection[str] = ()) -> None:
        """Leave the groups on both sides, within seconds; a server that does not answer any more is left alone.

        ``lost_urls``: servers that are not even asked.
        """
        self._connections.close()
        try:
            self._connections.release_servers(min(self._timeout_s, CLOSE_TIMEOUT_S), but=lost_urls)
        except ServerCallError as error:
            logger.warning("the weight sync group was not closed on every server: %s", error)

    def _sender(
        self, named_tensors: NamedTensors, links: Sequence[Channel], ranks: RankMessaging
    ) -> GroupSender | ColocatedSender | DiskSender:
        """What sends this publish. Each has a ``send``, and a ``finish`` that walks every rank's stream to its
        end and returns what else went wrong; a second call of it does nothing. ``peak_buffer_bytes``: as in PublishResult.
        """
        if self._folder is not None:
            return DiskSender(named_tensors, self._folder, self._bucket_bytes)
        if self._method is WeightMethod.colocated:
            device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
            return ColocatedSender(named_tensors, self._bucket_bytes, device, ranks)
        remote = [RemoteSource(link) for link in links]
        device = device_of(self._connections.backend)
        return GroupSender(self._connections, remote, named_tensors, self._bucket_bytes, device)
