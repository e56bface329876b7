"""Laws of weights that go from memory to memory: what a handle says, who waits for whom, and failures; no server."""

import base64
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.multiprocessing

from megatron_rl.weights.buckets import Bucket
from megatron_rl.weights.colocated import ColocatedSender, follow, handle_of
from megatron_rl.weights.plan import Coverage, CoverageError, ServerAddress, TensorSpec

CPU = torch.device("cpu")
WEIGHTS = {f"layer{i}": torch.full((3, 2), float(i)) for i in range(5)}
EXPECTED = {name: tuple(weight.shape) for name, weight in WEIGHTS.items()}
NUM_RANKS, TP_SIZE, BUCKET_BYTES, TIMEOUT_S = 4, 2, 50, 20
SERVERS = [ServerAddress(f"http://server{i}", TP_SIZE, 1, first_rank=i * TP_SIZE) for i in range(2)]


def read(handle: str) -> dict[str, torch.Tensor]:
    """What a server makes of a handle."""
    payload = pickle.loads(base64.b64decode(handle))
    return {
        meta.name: payload["flattened_tensor"][meta.start_idx : meta.end_idx].view(meta.dtype).reshape(meta.shape)
        for meta in payload["metadata"]
    }


def test_a_handle_lets_another_read_the_bucket_where_it_lies():
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


class Room:
    """What the ranks of one trainer say to each other, for ranks that are threads."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(NUM_RANKS)
        self._handles = [""] * NUM_RANKS
        self._word = False

    def seat(self, rank: int) -> "Seat":
        return Seat(self, rank)


class Seat:
    def __init__(self, room: Room, rank: int) -> None:
        self._room, self._rank = room, rank

    def gather(self, handle: str) -> list[str]:
        self._room._handles[self._rank] = handle
        self._room._barrier.wait(TIMEOUT_S)
        handles = list(self._room._handles) if self._rank == 0 else []
        self._room._barrier.wait(TIMEOUT_S)
        return handles

    def agree(self, go_on: bool) -> bool:
        if self._rank == 0:
            self._room._word = go_on
        self._room._barrier.wait(TIMEOUT_S)
        word = self._room._word
        self._room._barrier.wait(TIMEOUT_S)
        return word


def stream_of(rank: int, walked: list[str]):
    for name, weight in WEIGHTS.items():
        walked.append(name)
        yield name, weight + 100 * rank  # ranks differ here, so that it shows whose memory was read


def publish(act, expected=EXPECTED):
    """Run ``act(sender, requests)`` as the driver next to followers; returns what each rank walked."""
    room, walked = Room(), [[] for _ in range(NUM_RANKS)]
    with ThreadPoolExecutor(NUM_RANKS) as threads:
        followers = [
            threads.submit(follow, stream_of(rank, walked[rank]), BUCKET_BYTES, CPU, room.seat(rank))
            for rank in range(1, NUM_RANKS)
        ]
        sender = ColocatedSender(stream_of(0, walked[0]), BUCKET_BYTES, CPU, room.seat(0))
        try:
            act(sender, sender.requests(SimpleNamespace(servers=SERVERS), 7, Coverage(expected)))
        except Exception:
            assert sender.finish(failed=True) == ""
            raise
        finally:
            sender.finish(failed=False)
            for follower in followers:
                follower.result(TIMEOUT_S)
            assert walked == [list(WEIGHTS)] * NUM_RANKS
    return walked


def test_each_worker_reads_the_rank_beside_it_and_every_tensor_arrives_once():
    received = [{} for _ in range(NUM_RANKS)]
    versions = []

    def act(sender, requests):
        for request in requests:
            for server, body in zip(SERVERS, request.bodies, strict=True):
                for worker, handle in enumerate(body["serialized_named_tensors"]):
                    found = {name: tensor.clone() for name, tensor in read(handle).items()}
                    assert not found.keys() & received[server.first_rank + worker].keys()
                    received[server.first_rank + worker] |= found
            versions.append((request.bodies[0].get("weight_version"), request.bodies[0]["flush_cache"]))
            request.start(None)

    publish(act)
    for rank, tensors in enumerate(received):
        assert list(tensors) == list(WEIGHTS)
        assert all(torch.equal(tensors[name], WEIGHTS[name] + 100 * rank) for name in WEIGHTS)
    assert versions == [(None, False)] * (len(versions) - 1) + [("7", True)] and len(versions) == 3


def test_a_bucket_stays_intact_until_the_driver_speaks_after_the_next_one():
    def act(sender, requests):
        earlier = None
        for request in requests:
            if earlier is not None:  # servers may still be reading it
                for name, tensor in earlier.items():
                    assert torch.equal(tensor, WEIGHTS[name] + 300)
            earlier = read(request.bodies[1]["serialized_named_tensors"][1])
            request.start(None)

    publish(act)


@pytest.mark.parametrize("sent", [0, 1, 2])
def test_a_failure_at_any_bucket_lets_all_ranks_through(sent):
    def act(sender, requests):
        for i, request in enumerate(requests):
            if i == sent:
                raise ConnectionError("a server died")
            request.start(None)

    with pytest.raises(ConnectionError):
        publish(act)


def test_a_failure_before_and_after_all_buckets_lets_all_ranks_through():
    def before(sender, requests):
        raise ConnectionError("cannot wake")

    def after(sender, requests):
        for request in requests:
            request.start(None)
        raise ConnectionError("the last bucket")

    for act in (before, after):
        with pytest.raises(ConnectionError):
            publish(act)


@pytest.mark.parametrize("change", [{"absent": (1,)}, {"layer2": (9,)}])
def test_wrong_tensors_are_refused_and_all_ranks_get_through(change):
    with pytest.raises(CoverageError):
        publish(lambda sender, requests: [request.start(None) for request in requests], EXPECTED | change)
