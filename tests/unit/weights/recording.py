"""A backend of torch.distributed that enforces NCCL's rules for members and records all broadcasts in order."""

import threading
from collections import defaultdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.multi_threaded_pg import ret_work

from megatron_rl.weights.server_calls import ServerCallError

BACKEND = "recording"
TIMEOUT_S = 10.0


class Record:
    """Record of groups and broadcasts.

    ``devices``: device of each group's source rank, keyed by the end of the group's name. ``seen``: (group, number) pairs,
    keyed by participant.
    """

    def __init__(self) -> None:
        self.devices: dict[str, str] = {}
        self.seen: dict[str, list[tuple[str, int]]] = defaultdict(list)


class RecordingGroup(dist.ProcessGroup):
    def __init__(self, store: dist.Store, rank: int, size: int, *, device: str, who: str, name: str, record: Record) -> None:
        super().__init__(rank, size)
        self._store, self._rank, self._number = store, rank, 0
        self._who, self._name, self._record = who, name, record
        store.set(f"device/{rank}", device)
        devices = [store.get(f"device/{other}").decode() for other in range(size)]
        if doubled := {one for one in devices if devices.count(one) > 1}:
            # Same error as in NCCL (src/init.cc): ncclInvalidUsage.
            raise RuntimeError(f"Duplicate GPU detected: {', '.join(sorted(doubled))} in {devices}")

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> dist.Work:
        number, self._number = self._number, self._number + 1
        self._record.seen[self._who].append((self._name, number))
        flat = tensors[0].view(torch.uint8)
        if self._rank == options.rootRank:
            self._store.set(f"bytes/{number}", flat.numpy().tobytes())
        else:
            flat.copy_(torch.frombuffer(bytearray(self._store.get(f"bytes/{number}")), dtype=torch.uint8))
        return ret_work(tensors)

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> str:
        return self._name


def install(record: Record) -> None:
    """Register BACKEND, so that its process groups write to ``record``; rank 0 of a group is a source of the trainer."""

    def create(options: Any, ignored: object) -> RecordingGroup:
        name = str(options.group_id)
        who = name.rpartition("-")[2]
        return RecordingGroup(
            options.store, options.group_rank, options.group_size, device=record.devices[who], who=f"source {who}", name=name,
            record=record,
        )  # fmt: skip

    if BACKEND.upper() in dist.Backend._plugins:
        dist.Backend._plugins[BACKEND.upper()] = dist.Backend._BackendPlugin(create, True)
    else:
        dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])


class Workers:
    """A server's workers in the groups of a trainer; ``devices`` are the workers' devices."""

    def __init__(self, record: Record, who: str, devices: list[str]) -> None:
        self._record, self._who, self._devices = record, who, devices
        self.groups: dict[str, list[RecordingGroup]] = {}
        self.failures: list[str] = []

    def join(self, body: dict[str, Any]) -> None:
        """Join a group as SGLang does at /init_weights_update_group; returns once the group is complete."""
        joined: list[RecordingGroup] = []
        threads = [threading.Thread(target=self._join_one, args=(body, i, joined)) for i in range(len(self._devices))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * TIMEOUT_S)
        self.groups[body["group_name"]] = joined

    def take(self, body: dict[str, Any]) -> None:
        kinds = zip(body["shapes"], body["dtypes"], strict=True)
        sizes = [torch.Size(shape).numel() * getattr(torch, kind).itemsize for shape, kind in kinds]
        for group in self.groups[body["group_name"]]:
            group.broadcast([torch.empty(sum(sizes), dtype=torch.uint8)], dist.BroadcastOptions())

    def _join_one(self, body: dict[str, Any], index: int, joined: list[RecordingGroup]) -> None:
        name = body["group_name"]
        store = dist.TCPStore(
            body["master_address"], body["master_port"], body["world_size"], False, timeout=timedelta(seconds=TIMEOUT_S)
        )
        # Same nesting of store prefixes as in torch.
        for prefix in (name, f"{name}/", "cpu/"):
            store = dist.PrefixStore(prefix, store)
        try:
            joined.append(
                RecordingGroup(
                    store, body["rank_offset"] + index, body["world_size"], device=self._devices[index],
                    who=f"{self._who} worker {index}", name=name, record=self._record,
                )
            )
        except RuntimeError as error:
            self.failures.append(str(error))


def open_group(group: Any, workers: list[Workers]) -> str:
    """Make the workers join ``group`` (a SyncGroup) while it opens; returns the failure, or an empty string."""
    threads = [
        threading.Thread(target=one.join, args=(body,)) for one, body in zip(workers, group.join_bodies(), strict=True)
    ]
    for thread in threads:
        thread.start()
    failure = ""
    try:
        group.open()
    except ServerCallError as error:
        failure = str(error)
    for thread in threads:
        thread.join(2 * TIMEOUT_S)
    group.close()
    return failure
