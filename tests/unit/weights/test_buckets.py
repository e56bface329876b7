"""Laws of the two streams of a publish on a GPU, tested with a fake device that only records enqueued work."""

import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.weights import buckets, source_ranks
from megatron_rl.weights.bucket_plan import Coverage, ServerAddress
from megatron_rl.weights.buckets import SideStream
from megatron_rl.weights.publish import GroupSender
from megatron_rl.weights.server_calls import ServerCalls
from megatron_rl.weights.source_ranks import SyncGroup

CPU = torch.device("cpu")
WEIGHTS = {f"layer{i}": torch.full((4,), float(i)) for i in range(7)}
BUCKET_BYTES = 32
"""Bucket size: two tensors."""


class Device:
    """Log of a GPU: pairs (stream, enqueued work)."""

    def __init__(self):
        self.log = []
        self._active = threading.local()

    def current(self):
        return getattr(self._active, "stream", None) or Stream(self, "default")

    @contextmanager
    def stream(self, stream):
        before = self.current()
        self._active.stream = stream
        yield
        self._active.stream = before

    def note(self, what):
        self.log.append((self.current().name, what))


class Stream:
    device = "gpu"

    def __init__(self, owner, name):
        self._owner, self.name = owner, name

    def wait_stream(self, other):
        self._owner.log.append((self.name, f"waits for {other.name}"))

    def wait_event(self, event):
        self._owner.log.append((self.name, f"waits for {event}"))

    def record_event(self):
        event = f"event {len(self._owner.log)}"
        self._owner.log.append((self.name, event))
        return event

    def synchronize(self):
        self._owner.log.append((self.name, "is waited for"))


@pytest.fixture
def device(monkeypatch):
    device = Device()
    sides = {purpose: SideStream(Stream(device, purpose)) for purpose in ("fill", "send")}
    monkeypatch.setattr("torch.cuda.current_stream", lambda of: device.current())
    monkeypatch.setattr("torch.cuda.stream", device.stream)
    for module in (buckets, source_ranks):
        monkeypatch.setattr(module, "side_stream", lambda of, purpose: sides[purpose])
    return device


def group_on(device, monkeypatch, received):
    def send(flat, group_src, group):
        device.note("broadcasts")
        received.append(flat.clone())

    monkeypatch.setattr(source_ranks.dist, "broadcast", send)
    group = SyncGroup.__new__(SyncGroup)
    group._process_group = None
    return SimpleNamespace(connect=lambda remote, calls: (group, ["group"]))


def publish(connections, weights):
    sender = GroupSender(connections, [], weights, BUCKET_BYTES, CPU)
    with ServerCalls([ServerAddress("http://server", 1, 1)], 1.0) as calls:
        in_flight = []
        for request in sender.requests(calls, 7, Coverage()):
            for future in in_flight:
                future.result(20)
            in_flight = request.start(calls)
        for future in in_flight:
            future.result(20)
    assert sender.finish(failed=False) == ""
    return sender


def test_buckets_are_filled_and_sent_on_different_streams_in_order(device, monkeypatch):
    def gathered():
        for name, tensor in WEIGHTS.items():
            device.note(f"gathers {name}")
            yield name, tensor

    received = []
    publish(group_on(device, monkeypatch, received), gathered())
    assert torch.equal(torch.cat(received).view(torch.float32), torch.cat(list(WEIGHTS.values())))
    log = device.log
    assert {stream for stream, what in log if what.startswith("gathers")} == {"fill"}
    sends = [i for i, entry in enumerate(log) if entry == ("send", "broadcasts")]
    assert len(sends) == len(received) == 4
    filled = [what for stream, what in log if stream == "fill" and what.startswith("event")]
    for bucket, place in enumerate(sends):
        # The sending stream waits for the event after the bucket's tensors, and the host waits for the broadcast.
        waits = [what for stream, what in log[:place] if stream == "send" and what.startswith("waits for event")]
        assert waits[-1] == f"waits for {filled[bucket]}"
        assert ("send", "is waited for") in log[place:]
    # The next update must not change weights that are still being read.
    assert log[-1] == ("default", "waits for fill")
    assert log[0] == ("fill", "waits for default")


def test_next_bucket_is_filled_in_other_memory_during_a_send():
    """Work on the host, in the same log as both devices."""
    changed, copied_bytes, sent = threading.Condition(), [0], []

    class Group:
        def broadcast(self, bucket):
            before = bucket.flat.clone()
            up_to_here = sum(one.nbytes for one in sent) + bucket.flat.nbytes
            with changed:
                more = bucket.last or changed.wait_for(lambda: copied_bytes[0] > up_to_here, 20)
            assert more, "nothing was filled while a bucket travelled"
            assert torch.equal(bucket.flat, before)
            sent.append(before)

    def gathered():
        for name, tensor in WEIGHTS.items():
            yield name, tensor
            with changed:
                copied_bytes[0] += tensor.nbytes
                changed.notify_all()

    connections = SimpleNamespace(connect=lambda remote, calls: (Group(), ["group"]))
    sender = publish(connections, gathered())
    assert torch.equal(torch.cat(sent).view(torch.float32), torch.cat(list(WEIGHTS.values())))
    assert sender.peak_buffer_bytes == 2 * BUCKET_BYTES


def test_bucket_memory_is_two_buffers_plus_oversized_tensors():
    def peak(sizes, **options):
        weights = {f"t{i}": torch.zeros(size, dtype=torch.uint8) for i, size in enumerate(sizes)}
        stream, last = buckets.BucketStream(weights.items(), 64, CPU, **options), False
        while not last:
            last = stream.take().last
        return stream.peak_buffer_bytes

    assert peak([10]) == 64
    assert peak([60] * 9) == 128
    assert peak([60, 60, 200, 60, 60]) == 128 + 200
    assert peak([60, 60, 200, 300, 60]) == 128 + 500
    assert peak([60] * 9, reuse_buffers=False) == 128


def test_side_streams_do_nothing_on_a_cpu():
    side = buckets.side_stream(CPU, "fill")
    with side.active(after=side.work_enqueued()):
        pass
    side.join()
    side.wait()
    assert side.work_enqueued() is None and side is buckets.side_stream(CPU, "fill")
