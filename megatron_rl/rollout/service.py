"""Rollout service of the training loop: servers with the current weights, and windows generated on them.

Which thread waits for what: ``publish`` (main thread, collective over the trainer ranks) waits until every server
has taken the weights; an in-flight publish pauses running requests. ``generate`` (asyncio thread) waits for the
servers' replies. A lost server is restarted in the background and gets the current weights from the main thread,
through ``call_on_trainer``, before it serves again.

A publish covers all running servers and restarts a server that crashed since its last reply. A server that is
already restarting gets its weights at the end of its own recovery; if the policy has been updated by then, it gets
the newer weights under the newer version. Colocated servers sleep from ``sleep`` to the next ``publish`` or
``wake`` (all on the main thread).
"""

import asyncio
import itertools
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.config.derived import (
    bucket_bytes,
    model_vocab_size,
    num_rollout_workers,
    policy_model,
    shares_devices,
    weight_method,
)
from megatron_rl.config.schedule_facts import Overlap, overlap_of
from megatron_rl.config.schema import BatchConfig, Config
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.data.trajectory import TokenParts, Trajectory
from megatron_rl.environments.base import Environment, Services
from megatron_rl.rollout.environment_calls import OpenRow, wait_until_started
from megatron_rl.rollout.generation import GenerationPlan, SamplingOverrides, make_plan
from megatron_rl.rollout.recovering_client import RecoveringClient, follow_discovery
from megatron_rl.rollout.requests import ServerError, ServerLost
from megatron_rl.rollout.server_pool import Server, ServerPool, attach_one, open_servers
from megatron_rl.rollout.sglang.process.cleanup import KV_CACHE, WEIGHTS, ServerMemory
from megatron_rl.rollout.sglang.wire.response_validation import ApiKeyRejected, InvalidReply
from megatron_rl.rollout.windows import TRAINING, WindowGenerator
from megatron_rl.rollout.workers.remote_calls import RemoteWorkerInfo
from megatron_rl.rollout.workers.worker_pool import WorkerFailed
from megatron_rl.system.gpu.gpu_environment import detect_device
from megatron_rl.system.http.json_http import ApiKey
from megatron_rl.weights.bucket_plan import ServerAddress
from megatron_rl.weights.publish import PublishResult, WeightPublisher, WeightSyncError
from megatron_rl.weights.server_calls import ServerCallError
from megatron_rl.weights.verify import ChecksumReport, compare_checksums

if TYPE_CHECKING:  # imports Megatron, which the driver loads after it has started the servers
    from megatron_rl.rollout.weight_sources import FolderWeights, TrainerWeights

logger = logging.getLogger(__name__)

_SERVER_ERRORS = (ServerError, ServerLost, InvalidReply, ApiKeyRejected, WorkerFailed, WeightSyncError, ServerCallError)
_CLOSE_TIMEOUT_S = 5.0
_ENVIRONMENT_TIMEOUT_S = 30.0
"""Time limit of an environment's ``start`` and ``close``."""
_HEALTH_TIMEOUT_S = 20.0
"""Health check timeout after a failed publish; a server that does not answer by then is restarted."""


@dataclass(frozen=True)
class TrainerHooks:
    """Callbacks through which the rollout service uses the driver."""

    weights: "TrainerWeights | FolderWeights"
    """Weights to publish; used on the main thread only."""
    call_on_trainer: Callable[[Callable[[], Any]], Future]
    """Runs a function on the main thread between its other work."""
    note: Callable[[str], None]
    warn: Callable[[str], None]
    far_workers: Callable[[int], Sequence[RemoteWorkerInfo]] = lambda num_workers: ()
    """Starts the given number of rollout workers on each node except the driver's (main thread, collective)."""
    while_waiting: Callable[[], None] = lambda: None
    """Callback every few seconds while the main thread waits for servers, so that the other trainer ranks do not time out."""


class RolloutService:
    """Publishes weights and generates windows on the run's servers.

    ``publish``, ``sleep`` and ``wake`` run on the main thread, ``generate`` on the event loop.
    """

    def __init__(
        self,
        config: Config,
        servers: ServerPool,
        publisher: WeightPublisher,
        plan: GenerationPlan,
        trainer: TrainerHooks,
    ) -> None:
        self._config = config.rollout
        self._servers = servers
        self.publisher = publisher
        self._plan = plan
        self._trainer = trainer
        num_workers = num_rollout_workers(config, len(servers.urls), len(os.sched_getaffinity(0)))
        self._live = RecoveringClient(
            config.rollout,
            servers,
            vocab_size=model_vocab_size(config),
            warn=trainer.warn,
            readmit=self._readmit_on_trainer,
            settled=self._settled,
            num_workers=num_workers,
            far_workers=trainer.far_workers(num_workers),
        )
        self._live.client.needs_adapter = trainer.weights.sends_adapters
        sleeps = shares_devices(config.rollout)
        self._memory = ServerMemory(config.rollout.weight_sync_timeout_s) if sleeps else None
        self._asleep = False
        self._model = partial(policy_model, config)
        self.weight_version = 0
        """Weight version that the servers have."""
        self._num_ahead = 0

    @property
    def trainer_version(self) -> int:
        """Version of the trainer's current weights, which a restarted server receives."""
        return self.weight_version + self._num_ahead

    def weights_changed(self) -> None:
        """Record that the trainer has started to change the policy since the last ``publish``."""
        self._num_ahead = 1

    @property
    def num_restarts(self) -> int:
        """Number of server restarts in this run."""
        return self._live.num_restarts

    @property
    def num_refused(self) -> int:
        return self._live.client.num_refused

    def restart_counts(self) -> list[int]:
        """Restarts of each server so far, for a checkpoint."""
        return [server.num_restarts for server in self._servers.servers]

    def add_restart_counts(self, earlier: Sequence[int]) -> None:
        """Add the ``restarts()`` of an interrupted run; they count against ``max_restarts`` too."""
        # A resumed run may have another number of servers.
        for server, number in zip(self._servers.servers, earlier, strict=False):
            server.num_restarts += number
        self._live.num_restarts += sum(earlier)

    @property
    def num_live_servers(self) -> int:
        """Number of servers that currently receive requests."""
        return self._live.num_live

    @property
    def urls(self) -> list[str]:
        return self._servers.urls

    @property
    def remarks(self) -> tuple[tuple[str, str], ...]:
        """(difference between an attached server and the trainer, remedy), if any."""
        return self._servers.remarks

    def addresses(self, only_url: str = "") -> list[ServerAddress]:
        """Addresses of all servers, or of the server ``only_url``; callers may also send their own requests there."""
        size = self._config.tensor_parallel_size
        return [
            ServerAddress(server.url, size, server.incarnation, first_rank=size * i, api_key=ApiKey(self._servers.api_key))
            for i, server in enumerate(self._servers.servers)
            if only_url in ("", server.url)
        ]

    @property
    def lost_urls(self) -> set[str]:
        return set(self._live.restarting)

    def texts(self, tokenizer: Tokenizer) -> Callable[[Sequence[TokenParts]], Awaitable[list[str]]] | None:
        """Function that decodes many sequences in the rollout workers (asyncio thread); None without workers."""
        if self._live.workers is None or not tokenizer.as_json:
            return None
        return partial(self._live.workers.texts, tokenizer.as_json)

    async def check_servers(self) -> int:
        """Check all servers and return how many are running. A crashed server starts to recover (asyncio thread)."""
        await self._live.client.check()
        return self._live.num_live

    async def start_environment(self, tokenizer: Tokenizer, output_dir: Path, batch: BatchConfig) -> None:
        """Let the run's environment begin, if there is one (asyncio thread)."""
        if self._plan.dialogue is not None:
            services = Services(
                tokenizer=tokenizer,
                server_urls=lambda: [url for url in self.urls if url not in self.lost_urls],
                api_key=self._servers.api_key,
                output_dir=output_dir,
                max_prompt_tokens=batch.max_prompt_tokens,
                max_response_tokens=batch.max_response_tokens,
                warn=self._trainer.warn,
            )
            await self._plan.dialogue.environment.start(services)

    async def close_environment(self) -> None:
        """End all dialogues and the environment (asyncio thread)."""
        if self._plan.dialogue is not None:
            self._plan.dialogue.calls.stop_all()
            await self._plan.dialogue.environment.close()

    async def close(self) -> None:
        """End the requests and recoveries in progress (asyncio thread)."""
        await self._live.close()

    def publish(self) -> PublishResult:
        """Send the policy's weights as a new version to every server. Colocated servers are awake afterwards."""
        self._num_ahead = 1
        # From here a restarted server gets the weights that are being published, so it gets their version.
        self._live.client.is_publishing = True
        try:
            result = self._send_to_all()
        finally:
            self._live.client.is_publishing = False
        # Last, because a window that starts during the publish may still be answered with the previous weights.
        self.weight_version, self._num_ahead = self.weight_version + 1, 0
        return result

    def sleep(self) -> None:
        """Colocated servers release their memory to the trainer, until the next ``publish`` or ``wake``."""
        if self._memory is None or self._asleep:
            return
        self._asleep = True
        for address in self.addresses():
            if address.url in self._live.restarting:
                continue  # its recovery puts the server to sleep
            try:
                # One server at a time, so that a crashed one does not keep the others awake.
                self._memory.sleep([address])
            except ServerCallError as error:
                if self._is_healthy(address.url):
                    raise
                self._trainer.warn(f"{error}. The server will be restarted for the next weights")

    def wake(self) -> None:
        """Wake sleeping colocated servers and send their weights again, because weights do not survive a sleep."""
        if self._asleep:
            self._send_to_all()

    def compare_weights(self) -> ChecksumReport:
        """Compare the servers' weights with the trainer's (slow; main thread, collective)."""
        self.wake()
        weights, timeout_s = self._trainer.weights.whole(), self._config.weight_sync_timeout_s
        return compare_checksums(self.addresses(), weights, timeout_s, self._model().get("n_shared_experts"))

    def differing_weights(self) -> list[str]:
        """Names of parameters whose bytes differ between a server and the trainer; same threads as ``compare_weights``."""
        return sorted({name for names in self.compare_weights().differing.values() for name in names})

    async def generate(
        self,
        trajectories: Sequence[Trajectory],
        *,
        step: int,
        window_tokens: int,
        draw: SamplingOverrides | None = None,
        kind: str = TRAINING,
        is_enough: Callable[[], bool] | None = None,
        open_row: OpenRow | None = None,
    ) -> dict[int, float]:
        """Grow every trajectory by one window; the run's environment answers dialogues.

        Only ``kind="train"`` uses hot tokens (FIRE) and the run's sampling parameters; other kinds may pass a
        ``draw``. Once ``is_enough()`` returns True, the remaining requests are aborted and keep their tokens.
        ``open_row`` makes further rows of an episode (``WindowGenerator.generate``); without it these do not train.
        Returns the seconds that the servers spent on each trajectory, keyed by trajectory id.
        """
        plan = self._plan if kind == TRAINING else self._plan.without_training(draw)
        window = WindowGenerator(
            self._live.client,
            self._live.wait_for_server,
            plan,
            step=step,
            num_tokens=window_tokens,
            weight_version=self.weight_version,
            kind=kind,
            warn=self._trainer.warn,
        )
        await window.generate(trajectories, is_enough, open_row or _rows_beside(trajectories))
        return window.server_s

    def stop_dialogues(self, trajectories: Iterable[Trajectory]) -> None:
        """End the environment's part in dialogues that leave the pool before their end (event loop)."""
        if self._plan.dialogue is not None:
            self._plan.dialogue.calls.stop_all([f"{TRAINING}-{t.id}" for t in trajectories])

    async def follow_servers(self, attach: Callable[[str], Server]) -> None:
        """Keep the servers equal to the list in ``rollout.urls_file`` or of the router, until cancelled."""
        while not self.weight_version:  # the first publish sends weights to all servers
            await asyncio.sleep(0.1)
        await follow_discovery(self._servers.named_by, self._servers.api_key, self._live, attach, self._trainer.warn)

    async def _settled(self) -> None:
        """Wait for publishes that have already started."""
        # The main thread makes calls in order, so an empty call returns after every publish before it.
        await asyncio.wrap_future(self._trainer.call_on_trainer(lambda: None))

    async def _readmit_on_trainer(self, url: str) -> str:
        await asyncio.wrap_future(self._trainer.call_on_trainer(lambda: self._readmit(url)))
        return f"weight version {self.trainer_version}"

    def _readmit(self, url: str) -> None:
        """Bring a restarted server into the state of the other servers (main thread)."""
        if self._memory is not None and self._asleep:
            self._memory.sleep(self.addresses(url))
        else:
            self._send(self.addresses(url))
        # Publishes run on this thread too: the next publish either includes the server or skips it.
        self._live.restarting.discard(url)

    def _send_to_all(self) -> PublishResult:
        """Send the weights to every running server; if servers crashed meanwhile, restart them and send once more."""
        addresses = self._addresses_now()
        if not addresses:
            raise WeightSyncError(
                f"cannot publish weight version {self.trainer_version}: all SGLang servers are down "
                f"({', '.join(self._servers.urls)}). See their logs for the cause"
            )
        try:
            result = self._send(addresses)
        except (WeightSyncError, ServerCallError) as error:
            # Retry only if a server crashed or was replaced; any other failure is caused by the trainer.
            dead = [address.url for address in addresses if not self._is_healthy(address.url)]
            if not dead and self._addresses_now() == addresses:
                raise
            if dead:
                self._trainer.warn(f"{error} Restarting {', '.join(dead)}")
            for url in dead:
                self._restart_or_give_up(url)
            result = self._send(self._addresses_now())
        self._asleep = False
        return result

    def _addresses_now(self) -> list[ServerAddress]:
        return [address for address in self.addresses() if address.url not in self._live.restarting]

    def _restart_or_give_up(self, url: str) -> None:
        """Restart a server. Raises ServerError if the restart fails and no other server is left."""
        try:
            self._live.restart(url, self._trainer.while_waiting)
        except ServerError as error:
            self._live.remove_server(url, error)
            # Other servers can continue the run.
            if not self._addresses_now():
                raise

    def _send(self, addresses: list[ServerAddress]) -> PublishResult:
        if self._memory is not None:
            # The servers need the memory that the trainer's allocators cache.
            self._trainer.weights.free_memory()
            self._memory.wake(addresses, WEIGHTS)
        result = self._trainer.weights.publish(self.publisher, addresses, self.trainer_version)
        if self._memory is not None:
            # Again before the KV cache wakes: the publish reloaded the policy's weights.
            self._trainer.weights.free_memory()
            self._memory.wake(addresses, KV_CACHE)
        return result

    def _is_healthy(self, url: str) -> bool:
        return self._servers.at(url).healthy(_HEALTH_TIMEOUT_S)


def _rows_beside(trajectories: Sequence[Trajectory]) -> OpenRow:
    """Return a function that makes further rows of these episodes, for responses that do not train."""
    ids = itertools.count(max((t.id for t in trajectories), default=0) + 1)
    return lambda first, token_ids: first.further_row(next(ids), token_ids)


def _close(
    service: RolloutService, publisher: WeightPublisher | None, servers: ServerPool, event_loop: asyncio.AbstractEventLoop
) -> None:
    """Close within seconds, even if servers hang, because neither their requests nor the clean-up may block the exit."""
    servers.abandon_restarts()
    _finish(service.close(), event_loop, _CLOSE_TIMEOUT_S, "the requests in progress did not end")
    # Servers of this run are killed next, so only attached servers have to leave the process groups.
    if publisher is not None:
        publisher.close({server.url for server in servers.servers if server.is_ours} | service.lost_urls)


def _finish(closing: Coroutine[Any, Any, None], event_loop: asyncio.AbstractEventLoop, timeout_s: float, problem: str) -> None:
    """Wait for a coroutine of the event loop; warns of the ``problem`` if it takes longer."""
    try:
        asyncio.run_coroutine_threadsafe(closing, event_loop).result(timeout=timeout_s)
    except TimeoutError:
        logger.warning("%s within %.0f s", problem, timeout_s)


@contextmanager
def open_rollout(
    config: Config,
    event_loop: asyncio.AbstractEventLoop,
    trainer: TrainerHooks,
    *,
    tokenizer: Tokenizer,
    environment: Environment | None,
    spawned: ServerPool | None = None,
    publisher: WeightPublisher | None = None,
) -> Iterator[RolloutService]:
    """Open the servers (``open_servers``), their client on ``event_loop`` and the weight sync; close all of them at the end.

    ``publisher``: publisher of the run's other servers, which stays open. Source ranks are in the groups of one publisher only.
    """
    plan = replace(make_plan(config, tokenizer, environment), has_adapters=trainer.weights.sends_adapters)
    folder = Path(config.run.output_dir)
    # load_weights=False: the trainer sends its own weights before the first request.
    with open_servers(
        config,
        folder / "logs",
        trainer.note,
        load_weights=False,
        tokenizer=plan.needs_text,
        while_waiting=trainer.while_waiting,
        spawned=spawned,
    ) as servers:
        is_shared, publisher = publisher is not None, publisher or WeightPublisher(
            bucket_bytes(config.rollout, detect_device()),
            config.rollout.weight_sync_timeout_s,
            method=weight_method(config.rollout),
            folder=folder.resolve() / "weights",
            pauses=overlap_of(config.schedule) is Overlap.publish,
        )
        service = RolloutService(config, servers, publisher, plan, trainer)
        # An evaluation uses one weight version, so evaluation servers do not change after the start.
        followed = service.follow_servers(lambda url: attach_one(url, config, trainer.note)) if servers.named_by and not is_shared else None
        following = asyncio.run_coroutine_threadsafe(followed, event_loop) if followed else None
        try:
            if not is_shared:
                started = asyncio.run_coroutine_threadsafe(service.start_environment(tokenizer, folder, config.batch), event_loop)
                wait_until_started(started, config.environment.name, _ENVIRONMENT_TIMEOUT_S)
            yield service
        except _SERVER_ERRORS as error:
            # Warn before the clean-up, which may wait for broken servers.
            trainer.warn(f"the run ends: {error}")
            raise
        finally:
            if following is not None:
                following.cancel()
            if not is_shared:
                _finish(service.close_environment(), event_loop, _ENVIRONMENT_TIMEOUT_S, "the environment did not close")
            _close(service, None if is_shared else publisher, servers, event_loop)
