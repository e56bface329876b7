"""Laws of colocated publishes: handles, synchronization of ranks, and failures; the servers are stubs."""

import base64
import inspect
import io
import pickle
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from queue import Queue
from types import SimpleNamespace

import pytest
import torch
import torch.multiprocessing
from aiohttp import web
from torch.multiprocessing import reductions

from megatron_rl.config.derived import WeightMethod
from megatron_rl.families.parameters import TensorSpec
from megatron_rl.weights.bucket_plan import Coverage, ServerAddress
from megatron_rl.weights.buckets import Bucket
from megatron_rl.weights.colocated import RankMessaging, follow, handle_of
from megatron_rl.weights.publish import WeightPublisher, WeightSyncError
from tests.unit.local_service import local_service

CPU = torch.device("cpu")
WEIGHTS = {f"layer{i}": torch.full((3, 2), float(i)) for i in range(5)}
EXPECTED = {name: tuple(weight.shape) for name, weight in WEIGHTS.items()}
NUM_RANKS, TP_SIZE, BUCKET_BYTES, TIMEOUT_S = 4, 2, 50, 20
NUM_BUCKETS = 3


def read(handle: str) -> dict[str, torch.Tensor]:
    """The tensors that a server reads through a handle."""
    payload = pickle.loads(base64.b64decode(handle))
    return {
        meta.name: payload["flattened_tensor"][meta.start_idx : meta.end_idx].view(meta.dtype).reshape(meta.shape)
        for meta in payload["metadata"]
    }


def test_handle_lets_another_process_read_the_bucket_in_place():
    flat = torch.zeros(64, dtype=torch.uint8)
    specs = (TensorSpec("a", (2, 3), torch.float32), TensorSpec("b", (), torch.bfloat16))
    flat[:24].view(torch.float32).copy_(torch.arange(6.0))
    flat[24:26].view(torch.bfloat16).fill_(1.5)
    strategy = torch.multiprocessing.get_sharing_strategy()
    handle = handle_of(Bucket(specs, last=True, flat=flat[:26]))
    assert torch.multiprocessing.get_sharing_strategy() == strategy
    seen = read(handle)
    assert torch.equal(seen["a"], torch.arange(6.0).view(2, 3)) and seen["b"].item() == 1.5
    flat[:4].view(torch.float32).fill_(7.0)
    assert seen["a"][0, 0] == 7.0  # the same memory, not a copy


def test_a_cuda_handle_names_its_device_by_uuid_and_a_server_finds_its_own_number(monkeypatch):
    """SGLang's own code reads the handle; the calls into CUDA are fakes."""
    from sglang.srt.utils import patch_torch
    from sglang.srt.utils.common import SafeUnpickler

    names = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    arguments = ["storage" if name == "storage_handle" else 0 for name in names]
    monkeypatch.setattr(reductions, "reduce_tensor", lambda tensor: (reductions.rebuild_cuda_tensor, tuple(arguments)))
    uuids = ["trainer's device 0"]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuids[device]))
    handle = handle_of(Bucket((), last=True, flat=SimpleNamespace(is_cuda=True)))
    uuids[:] = ["another device", "trainer's device 0"]
    seen = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
    monkeypatch.setattr(reductions, "_rebuild_cuda_tensor_original", lambda *found: seen.append(found), raising=False)
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", patch_torch._rebuild_cuda_tensor_modified)
    SafeUnpickler(io.BytesIO(base64.b64decode(handle))).load()
    arguments[names.index("storage_device")] = 1
    assert seen == [tuple(arguments)]


class Room:
    """Messaging between the ranks of one trainer, for ranks that are threads; ``said`` counts the messages."""

    def __init__(self) -> None:
        self._queues = {(a, b): Queue() for a in range(NUM_RANKS) for b in range(NUM_RANKS)}
        self.said: Counter[object] = Counter()

    def seat(self, rank: int) -> RankMessaging:
        def put(word, peer):
            self._queues[rank, peer].put(word)

        def take(peer):
            return self._queues[peer, rank].get(timeout=TIMEOUT_S)

        def send(word, peer):
            self.said[rank, peer] += 1
            put(word, peer)

        def tell(word):
            self.said["tell", rank] += 1
            if rank > 0:
                return take(0)
            for peer in range(1, NUM_RANKS):
                put(word, peer)
            return word

        def report(word):
            self.said["report", rank] += 1
            if rank > 0:
                put(word, 0)
                return []
            return [word, *(take(peer) for peer in range(1, NUM_RANKS))]

        return RankMessaging(rank, tell, report, send, take)


class Server:
    """A stub server that reads its handles; ``refuses``: number of the bucket to which it replies with an error."""

    def __init__(self, refuses: int | None = None) -> None:
        self.received: list[dict[str, torch.Tensor]] = [{} for _ in range(TP_SIZE)]
        self.versions: list[object] = []
        self.changed = 0
        self._refuses = refuses

    def answer(self, path, body):
        if path == "/model_info":
            return {"weight_version": self.versions[-1]}
        if path != "/update_weights_from_tensor":
            return {"success": True}
        if len(self.versions) == self._refuses:
            return web.json_response({"success": False, "message": "it hurts"}, status=400)
        self.versions.append(body.get("weight_version"))
        assert body["flush_cache"] == ("weight_version" in body) and body["load_format"] == "flattened_bucket"
        for worker, handle in enumerate(body["serialized_named_tensors"]):
            seen = read(handle)
            first = {name: tensor.clone() for name, tensor in seen.items()}
            time.sleep(0.02)  # the ranks fill their next buckets meanwhile
            self.changed += sum(not torch.equal(first[name], tensor) for name, tensor in seen.items())
            assert not first.keys() & self.received[worker].keys()
            self.received[worker] |= first
        return {"success": True}


def stream_of(rank: int, walked: list[str], barrier: threading.Barrier, fails_at: str = ""):
    for name, weight in WEIGHTS.items():
        barrier.wait(TIMEOUT_S)  # like the collectives of an export
        walked.append(name)
        if name == fails_at:
            raise OSError("no memory")
        yield name, weight + 100 * rank  # different per rank, to show whose memory was read


def publish(*servers: Server, only: int | None = None, change: dict | None = None, failing: int | None = None):
    """Run one publish to ``servers`` (or ``only`` to one); returns the messaging and the result. All ranks must finish.

    ``change``: of what rank 0 expects; ``failing``: the rank whose last tensor cannot be had.
    """
    room, walked, barrier = Room(), [[] for _ in range(NUM_RANKS)], threading.Barrier(NUM_RANKS)
    streams = [
        stream_of(rank, walked[rank], barrier, "layer4" if rank == failing else "") for rank in range(NUM_RANKS)
    ]
    with ExitStack() as stack, ThreadPoolExecutor(NUM_RANKS) as threads:
        urls = [stack.enter_context(local_service(server.answer)).url for server in servers]
        addresses = [ServerAddress(url, TP_SIZE, 1, first_rank=i * TP_SIZE) for i, url in enumerate(urls)]
        followers = [
            threads.submit(follow, streams[rank], BUCKET_BYTES, CPU, room.seat(rank), Coverage(EXPECTED))
            for rank in range(1, NUM_RANKS)
        ]
        publisher = WeightPublisher(BUCKET_BYTES, TIMEOUT_S, method=WeightMethod.colocated)
        addresses = addresses if only is None else [addresses[only]]
        try:
            expected = EXPECTED | (change or {})
            result = publisher.publish(streams[0], addresses, 7, expected=expected, ranks=room.seat(0))
        finally:
            for follower in followers:
                follower.result(TIMEOUT_S)
            assert walked == [list(WEIGHTS)] * NUM_RANKS
    return room.said, result


def test_each_worker_reads_its_own_rank_and_gets_every_tensor_once():
    servers = [Server(), Server()]
    _, result = publish(*servers)
    for index, server in enumerate(servers):
        for worker, tensors in enumerate(server.received):
            rank = index * TP_SIZE + worker
            assert list(tensors) == list(WEIGHTS)
            assert all(torch.equal(tensors[name], WEIGHTS[name] + 100 * rank) for name in WEIGHTS)
        assert server.versions == [None] * (NUM_BUCKETS - 1) + ["7"]
        assert not server.changed  # memory is not refilled while a server reads it
    assert (result.num_buckets, result.num_bytes) == (NUM_BUCKETS, sum(weight.nbytes for weight in WEIGHTS.values()))


def test_driver_uses_two_collectives_per_colocated_publish():
    said, _ = publish(Server(), Server())
    words = {key: number for key, number in said.items() if key[0] in ("tell", "report")}
    assert set(words.values()) == {1} and len(words) == 2 * NUM_RANKS
    between = {key: number for key, number in said.items() if key not in words}
    assert between == dict.fromkeys([(1, 0), (0, 1), (3, 2), (2, 3)], NUM_BUCKETS)


def test_colocated_publish_can_update_one_of_two_servers():
    """Simulates a publish after a restart: the other servers' ranks take part, and the server's own ranks may not include the driver."""
    servers = [Server(), Server()]
    _, result = publish(*servers, only=1)
    assert servers[1].versions[-1] == "7" and not servers[0].versions
    assert result.num_buckets == NUM_BUCKETS


@pytest.mark.parametrize("at", range(NUM_BUCKETS))
@pytest.mark.parametrize("which", [0, 1])
def test_refused_bucket_is_reported_and_all_ranks_finish(which, at):
    servers = [Server(), Server()]
    servers[which] = Server(refuses=at)
    with pytest.raises(WeightSyncError, match="http.* 400: it hurts.*mix of old and new"):
        publish(*servers)
    assert len(servers[which].versions) == at and "7" not in servers[which].versions


def test_refused_session_fails_before_any_bucket():
    class Closed(Server):
        def answer(self, path, body):
            return web.Response(status=500) if path == "/begin_weight_update" else super().answer(path, body)

    servers = [Server(), Closed()]
    with pytest.raises(WeightSyncError, match="before any bucket.*keep their old weights"):
        publish(*servers)
    assert not servers[0].versions and not servers[1].versions


@pytest.mark.parametrize("change", [{"absent": (1,)}, {"layer2": (9,)}])
def test_wrong_tensors_are_rejected_and_all_ranks_finish(change):
    servers = [Server(), Server()]
    with pytest.raises(WeightSyncError, match="not the served model"):
        publish(*servers, change=change)
    assert "7" not in servers[0].versions
    assert not servers[0].received[0].keys() & change.keys()


@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_missing_tensor_on_a_rank_ends_its_servers_publish(rank):
    servers = [Server(), Server()]
    with pytest.raises(WeightSyncError, match=f"rank {rank}: .*OSError: no memory"):
        publish(*servers, failing=rank)
    assert "7" not in servers[rank // TP_SIZE].versions
