"""Laws of sources on other ranks: offered buckets, failures, and exhausted streams."""

import threading
from queue import Queue

import pytest
import torch

from megatron_rl.weights.bucket_plan import GroupSpec, ServerAddress
from megatron_rl.weights.buckets import TensorStreamError
from megatron_rl.weights.server_calls import ServerCallError, ServerCalls
from megatron_rl.weights.source_ranks import RemoteSource, StageRank

CPU = torch.device("cpu")
WEIGHTS = {f"layer{i}": torch.full((4,), float(i)) for i in range(6)}
NOBODY = (ServerAddress("http://127.0.0.1:9", 1, 1),)


class QueueLink:
    """One end of a pair of queues; ``None`` in a queue means that the other rank is lost."""

    def __init__(self, rank: int, outgoing: Queue, incoming: Queue) -> None:
        self.rank, self._outgoing, self._incoming = rank, outgoing, incoming

    def send(self, message):
        self._outgoing.put(message)

    def receive(self):
        message = self._incoming.get(timeout=10)
        if message is None:
            raise RuntimeError("rank 0 lost rank 3")
        return message


class Stage:
    """A StageRank in a thread, and the driver's proxy of it."""

    def __init__(self, stream) -> None:
        there, back = Queue(), Queue()
        self.walked: list[str] = []
        self.rank = StageRank(QueueLink(0, back, there), bucket_bytes=32)
        self.source = RemoteSource(QueueLink(3, there, back))
        self.back = back
        self._thread = threading.Thread(target=self.rank.serve, args=(self._counted(stream), CPU), daemon=True)
        self._thread.start()

    def _counted(self, stream):
        for name, tensor in stream:
            self.walked.append(name)
            yield name, tensor

    def has_ended(self) -> bool:
        self._thread.join(10)
        return not self._thread.is_alive()


def test_source_can_be_released_after_offering_a_bucket():
    stage = Stage(WEIGHTS.items())
    offer = stage.source.offer()
    assert [spec.name for spec in offer.specs] == ["layer0", "layer1"]
    assert (offer.num_bytes, offer.last) == (32, False)
    assert stage.source.offer() == offer  # until it is sent
    assert stage.source.finish(failed=True) == ""
    assert stage.has_ended() and stage.walked == list(WEIGHTS)


def test_stream_failure_is_reported_with_rank_and_reason():
    def broken():
        yield "layer0", torch.zeros(4)
        raise OSError("gather timed out")

    stage = Stage(broken())
    with pytest.raises(TensorStreamError, match="rank 3: .* failed after 1 tensors with OSError: gather timed out"):
        stage.source.offer()
    stage.source.finish(failed=True)
    assert stage.has_ended()


def test_stream_failure_after_an_abort_is_reported():
    def broken():
        yield from WEIGHTS.items()
        raise OSError("gather timed out")

    stage = Stage(broken())
    stage.source.offer()
    assert "rank 3: the trainer's stream" in stage.source.finish(failed=True)
    assert stage.has_ended()


def test_lost_source_rank_is_reported_and_not_waited_for():
    stage = Stage(WEIGHTS.items())
    stage.back.put(None)
    assert stage.source.finish(failed=True) == "rank 3 is lost: rank 0 lost rank 3"
    assert stage.source.finish(failed=True) == ""


def test_group_without_servers_fails_and_the_source_continues(monkeypatch):
    monkeypatch.setattr("megatron_rl.weights.source_ranks.MAX_CONNECT_S", 0.5)
    stage = Stage(WEIGHTS.items())
    with ServerCalls(NOBODY, 5.0) as calls, pytest.raises(ServerCallError, match="127.0.0.1:9 is unreachable"):
        stage.source.open_group(calls, GroupSpec("name", NOBODY, "gloo", 5.0))
    assert not stage.source.offer().last
    assert stage.source.finish(failed=True) == ""
    assert stage.has_ended() and stage.walked == list(WEIGHTS)
