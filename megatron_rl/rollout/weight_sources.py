"""Sources of the servers' weights: the trainer (driver's side of weight sync) or a model folder."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_rl.config.derived import WeightMethod, sends_adapters, weight_method
from megatron_rl.config.schema import Config
from megatron_rl.models.hf.gather import GatherTarget
from megatron_rl.training.export import control_channel, control_ranks, rank_timeout_s, source_ranks
from megatron_rl.training.trainer_group import TrainerGroup
from megatron_rl.weights.bucket_plan import ServerAddress
from megatron_rl.weights.disk import load_folder
from megatron_rl.weights.publish import PublishResult, WeightPublisher, publish_adapters
from megatron_rl.weights.server_calls import ServerCalls

_DESTINATIONS = {
    WeightMethod.broadcast: GatherTarget.stage,
    WeightMethod.disk: GatherTarget.driver,
    WeightMethod.colocated: GatherTarget.everywhere,
}
"""Ranks on which each method needs the full tensors."""


class TrainerWeights:
    """Weights of one trainer model, sent by the configured method (driver's side)."""

    def __init__(self, config: Config, group: TrainerGroup, engine: str) -> None:
        self._group = group
        self._engine = engine
        self._method = weight_method(config.rollout)
        self._timeout_s = rank_timeout_s(config)
        self._server_timeout_s = config.rollout.weight_sync_timeout_s
        self.sends_adapters = sends_adapters(config)
        """True if servers have the base model, and each request must name its adapter."""
        self._with_base: set[ServerAddress] = set()

    @cached_property
    def expected(self) -> Mapping[str, Sequence[int]]:
        """Maps the Hugging Face name of every tensor that the servers have to its shape."""
        return self._group.expected_weights(self._engine)

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """All full tensors on this rank, one at a time. Collective; must be exhausted."""
        return self._group.export_weights(self._engine, merged=not self.sends_adapters)

    def publish(self, publisher: WeightPublisher, servers: Sequence[ServerAddress], version: int) -> PublishResult:
        """Send the weights as ``version``. Collective over the trainer ranks. Raises WeightSyncError, or ServerCallError for adapters."""
        if not self.sends_adapters:
            return self._publish_whole(publisher, servers, version)
        started_s, new = time.perf_counter(), [server for server in servers if server not in self._with_base]
        num_bytes = self._publish_whole(publisher, new, version).num_bytes if new else 0
        # Requests that began on a server before it was restarted name the version before.
        options = {"further_versions": [version - 1]} if new and version > 1 else {}
        tensors, settings = self._group.export_adapters(self._engine), self._group.adapter_config(self._engine)
        sent = publish_adapters(tensors, settings, servers, version, self._server_timeout_s, **options)
        self._with_base |= set(new)
        return replace(sent, seconds=time.perf_counter() - started_s, num_bytes=num_bytes + sent.num_bytes)

    def _publish_whole(self, publisher: WeightPublisher, servers: Sequence[ServerAddress], version: int) -> PublishResult:
        options: dict[str, Any] = {"expected": self.expected}
        if self._method is WeightMethod.colocated:
            options["ranks"] = control_ranks(self._timeout_s)
        elif self._method is WeightMethod.broadcast:
            # The first source is this rank itself.
            ranks = source_ranks(self._group.topology_of(self._engine))[1:]
            options["links"] = [control_channel(rank, self._timeout_s) for rank in ranks]
        weights = self._group.export_weights(self._engine, _DESTINATIONS[self._method], merged=not self.sends_adapters)
        return publisher.publish(weights, servers, version, **options)

    def free_memory(self) -> None:
        """Return unused memory of the ranks' allocators to their devices, for the servers on the same devices."""
        self._group.free_memory()


class FolderWeights:
    """Weights of a Hugging Face folder, which the servers read themselves."""

    sends_adapters = False

    def __init__(self, folder: Path, timeout_s: float) -> None:
        self.folder = folder
        self._timeout_s = timeout_s

    def publish(self, publisher: WeightPublisher, servers: Sequence[ServerAddress], version: int) -> PublishResult:
        """Have the servers load the folder. Raises ServerCallError."""
        started_s = time.perf_counter()
        with ServerCalls(servers, self._timeout_s) as calls:
            num_bytes = load_folder(calls, self.folder, version)
        return PublishResult(time.perf_counter() - started_s, num_bytes, num_buckets=1)

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        raise NotImplementedError("the servers read the folder themselves")

    def free_memory(self) -> None:
        """Does nothing: no trainer shares the servers' devices."""
