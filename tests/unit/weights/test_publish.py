"""Laws of filling buckets from a stream, of buckets in progress, and of the files of the disk fallback; no process group."""

import threading
import time
from contextlib import ExitStack

import pytest
import torch
from aiohttp import web
from safetensors.torch import load_file

from megatron_rl.config.derived import WeightMethod
from megatron_rl.weights.bucket_plan import Coverage, CoverageError, ServerAddress, unique_addresses
from megatron_rl.weights.buckets import Bucket, BucketStream
from megatron_rl.weights.disk import remove_other_versions, write_version
from megatron_rl.weights.publish import GroupSender, WeightPublisher, WeightSyncError
from megatron_rl.weights.server_calls import ServerCalls
from megatron_rl.weights.transfer import PublishTransfer
from tests.unit.local_service import local_service

CPU = torch.device("cpu")
WEIGHTS = {
    "embed": torch.arange(12, dtype=torch.float32).view(3, 4),
    "scale": torch.tensor(2.5),
    "odd": torch.arange(5, dtype=torch.bfloat16),
    "transposed": torch.arange(6, dtype=torch.float32).view(2, 3).t(),
    "large": torch.arange(40, dtype=torch.float32),
    "last": torch.arange(3, dtype=torch.int64),
}


def unpack(bucket: Bucket) -> dict[str, torch.Tensor]:
    tensors = {}
    position = 0
    for spec in bucket.specs:
        tensors[spec.name] = bucket.flat[position : position + spec.num_bytes].view(spec.dtype).view(spec.shape).clone()
        position += spec.num_bytes
    assert position == bucket.flat.numel()
    return tensors


def filled(weights=WEIGHTS, bucket_bytes=64):
    stream, last = BucketStream(weights.items(), bucket_bytes, CPU), False
    while not last:
        bucket = stream.take()
        last = bucket.last
        yield bucket


class OtherSource:
    """Fake of a source on another rank."""

    def __init__(self, stream, bucket_bytes):
        self._stream = BucketStream(stream.items(), bucket_bytes, CPU)
        self.offer = self._stream.look

    def send(self, calls):
        self._stream.take()
        return []


class NoGroup:
    """Connections whose broadcasts do nothing."""

    broadcast = staticmethod(lambda flat: None)

    def connect(self, remote, calls):
        return self, [f"group{i}" for i in range(1 + len(remote))]


def bodies_of(*streams, bucket_bytes=64, expected=None):
    """The requests to the servers, one per bucket; one stream per source."""
    own, *others = streams
    remote = [OtherSource(stream, bucket_bytes) for stream in others]
    sender = GroupSender(NoGroup(), remote, own.items(), bucket_bytes, CPU)
    with ServerCalls([ServerAddress("http://server", 1, 1)], 1.0) as calls:
        for request in sender.requests(calls, 7, Coverage(expected)):
            for future in request.start(calls):
                future.result()
            yield request.bodies[0]


@pytest.mark.parametrize("bucket_bytes", [1, 64, 100, 10_000])
def test_receiver_rebuilds_tensors_from_names_shapes_and_dtypes(bucket_bytes):
    received = {}
    for bucket in filled(bucket_bytes=bucket_bytes):
        received |= unpack(bucket)
    assert list(received) == list(WEIGHTS)
    for name, weight in WEIGHTS.items():
        assert received[name].dtype == weight.dtype
        assert torch.equal(received[name], weight)


def test_bucket_stays_intact_while_the_next_is_filled():
    previous = None
    for bucket in filled(bucket_bytes=64):
        if previous is not None:
            assert all(torch.equal(tensor, WEIGHTS[name]) for name, tensor in unpack(previous).items())
        previous = bucket


def test_only_the_final_bucket_is_marked_last():
    marks = [bucket.last for bucket in filled(bucket_bytes=64)]
    assert len(marks) > 2
    assert marks == [False] * (len(marks) - 1) + [True]


def test_bucket_with_an_unexpected_tensor_is_never_sent():
    expected = {name: tuple(weight.shape) for name, weight in WEIGHTS.items() if name != "odd"}
    given_out = []
    with pytest.raises(CoverageError, match="unexpected: odd"):
        for body in bodies_of(WEIGHTS, bucket_bytes=48, expected=expected):
            given_out += body["names"]
    assert given_out in ([], ["embed"])


def test_final_bucket_is_not_sent_if_a_tensor_is_missing():
    expected = {name: tuple(weight.shape) for name, weight in WEIGHTS.items()} | {"absent": (1,)}
    versions = []
    with pytest.raises(CoverageError, match="missing: absent"):
        for body in bodies_of(WEIGHTS, bucket_bytes=48, expected=expected):
            versions.append(body.get("weight_version"))
    assert versions and set(versions) == {None}


def test_sources_alternate_and_the_last_bucket_has_the_version():
    names = list(WEIGHTS)
    first, second = ({n: WEIGHTS[n] for n in part} for part in (names[:5], names[5:]))
    expected = {name: tuple(weight.shape) for name, weight in WEIGHTS.items()}
    bodies = list(bodies_of(first, second, bucket_bytes=48, expected=expected))
    groups = [body["group_name"] for body in bodies]
    assert groups[:3] == ["group0", "group1", "group0"] and groups.count("group1") == 1
    assert sorted(name for body in bodies for name in body["names"]) == sorted(WEIGHTS)
    stamped = [("weight_version" in body, body["flush_cache"]) for body in bodies]
    assert stamped == [(False, False)] * (len(bodies) - 1) + [(True, True)]


class Loading:
    """Two servers that load buckets; ``slow`` finishes a bucket only after ``quick`` got the request for the next."""

    def __init__(self) -> None:
        self.log: list[tuple[str, str, int]] = []
        self.names: dict[str, list[str]] = {"quick": [], "slow": []}
        self._changed = threading.Condition()

    def server(self, who):
        def answer(path, body):
            if path == "/update_weights_from_distributed":
                number = sum((who, "asked") == entry[:2] for entry in self.log)
                self._note(who, "asked", number)
                self.names[who] += body["names"]
                if who == "slow" and "weight_version" not in body:
                    with self._changed:
                        assert self._changed.wait_for(lambda: ("quick", "asked", number + 1) in self.log, 20)
                self._note(who, "loaded", number)
            return {"success": True}

        return answer

    def _note(self, *entry):
        with self._changed:
            self.log.append(entry)
            self._changed.notify_all()


def test_slow_server_does_not_delay_other_servers_next_bucket():
    class SlowGroup(NoGroup):
        def broadcast(self, bucket):
            before = bucket.flat.clone()
            time.sleep(0.02)
            assert torch.equal(bucket.flat, before)

    loading = Loading()
    with ExitStack() as stack:
        services = [stack.enter_context(local_service(loading.server(who))) for who in ("quick", "slow")]
        addresses = [ServerAddress(service.url, 1, 1) for service in services]
        calls = stack.enter_context(ServerCalls(addresses, 30.0))
        sender = GroupSender(SlowGroup(), [], WEIGHTS.items(), 48, CPU)
        transfer = PublishTransfer(calls, 7, time.perf_counter())
        sender.send(transfer, Coverage({name: tuple(weight.shape) for name, weight in WEIGHTS.items()}))
    assert transfer.num_buckets >= 4
    assert loading.names == {"quick": list(WEIGHTS), "slow": list(WEIGHTS)}
    for service in services:
        paths = [path for path, _ in service.requests]
        assert (paths[0], paths[-1]) == ("/begin_weight_update", "/end_weight_update")
        assert service.most_in_progress == 1
    at = loading.log.index
    for number in range(transfer.num_buckets - 2):
        assert at(("quick", "asked", number + 2)) > at(("slow", "loaded", number))  # at most one bucket ahead


def test_tensor_sent_by_two_stages_is_rejected():
    with pytest.raises(CoverageError, match="duplicate: embed"):
        list(bodies_of({"embed": WEIGHTS["embed"]}, {"embed": WEIGHTS["embed"]}))


@pytest.mark.parametrize(("shard_bytes", "num_files"), [(64, 4), (10_000, 2)])
def test_written_version_has_the_given_shapes(tmp_path, shard_bytes, num_files):
    folder = write_version(WEIGHTS.items(), tmp_path, 3, shard_bytes, Coverage())
    assert folder == tmp_path / "weights-3"
    files = list(folder.glob("*.safetensors"))
    written = {name: tuple(tensor.shape) for file in files for name, tensor in load_file(file).items()}
    assert written == {name: tuple(weight.shape) for name, weight in WEIGHTS.items()}
    assert len(files) == num_files


def test_rejected_version_leaves_no_files(tmp_path):
    with pytest.raises(CoverageError):
        write_version(WEIGHTS.items(), tmp_path, 3, 64, Coverage({"embed": (3, 4)}))
    assert list(tmp_path.iterdir()) == []


def test_only_the_kept_version_remains(tmp_path):
    folders = [write_version(WEIGHTS.items(), tmp_path, version, 64, Coverage()) for version in (1, 2)]
    remove_other_versions(tmp_path, keep=folders[1])
    assert list(tmp_path.iterdir()) == [folders[1]]


def test_disk_publish_waits_until_a_busy_server_is_idle(tmp_path):
    refusals = [True, True]

    def answer(path, body):
        if path == "/flush_cache" and refusals:
            refusals.pop()
            return web.json_response({}, status=400)
        return {"weight_version": "3", "success": True}

    with local_service(answer) as service:
        publisher = WeightPublisher(64, 5.0, method=WeightMethod.disk, folder=tmp_path)
        publisher.publish(WEIGHTS.items(), [(service.url, 1, 1)], 3)
    asked = [path for path, _ in service.requests]
    assert asked == ["/flush_cache"] * 3 + ["/update_weights_from_disk", "/model_info"]


def test_in_flight_publish_pauses_requests_first_and_resumes_them_last(tmp_path):
    with local_service(lambda path, body: {"weight_version": "3", "success": True}) as service:
        publisher = WeightPublisher(64, 5.0, method=WeightMethod.disk, folder=tmp_path, pauses=True)
        publisher.publish(WEIGHTS.items(), [(service.url, 1, 1)], 3)
        publisher.close()
    assert [path for path, _ in service.requests] == [
        "/pause_generation", "/flush_cache", "/update_weights_from_disk", "/model_info", "/continue_generation"
    ]  # fmt: skip
    assert service.requests[0][1] == {"mode": "retract"}


@pytest.mark.parametrize(
    ("fails_at", "afterwards"),
    [
        ("/flush_cache", [("/continue_generation", {})]),
        (
            "/update_weights_from_disk",
            [
                ("/update_weight_version", {"new_version": "not 3", "abort_all_requests": True}),
                ("/continue_generation", {}),
            ],
        ),
    ],
)
def test_failed_publish_resumes_requests_only_on_unchanged_weights(tmp_path, fails_at, afterwards):
    def answer(path, body):
        return web.json_response({}, status=500) if path == fails_at else {"weight_version": "3", "success": True}

    with local_service(answer) as service:
        publisher = WeightPublisher(64, 5.0, method=WeightMethod.disk, folder=tmp_path, pauses=True)
        with pytest.raises(WeightSyncError):
            publisher.publish(WEIGHTS.items(), [(service.url, 1, 1)], 3)
        publisher.close()
    paths = [path for path, _ in service.requests]
    assert service.requests[paths.index(fails_at) + 1 :] == afterwards


def test_older_files_remain_until_a_version_is_loaded(tmp_path):
    with local_service(lambda path, body: web.json_response({}, status=500 if "disk" in path else 200)) as service:
        write_version(WEIGHTS.items(), tmp_path, 2, 64, Coverage())
        publisher = WeightPublisher(64, 5.0, method=WeightMethod.disk, folder=tmp_path)
        with pytest.raises(WeightSyncError, match="the same path"):
            publisher.publish(WEIGHTS.items(), [(service.url, 1, 1)], 3)
    assert {path.name for path in tmp_path.iterdir()} == {"weights-2", "weights-3"}


@pytest.mark.parametrize("servers", [[], [("http://a:1", 1, 0), ("http://a:1/", 1, 1)]])
def test_publish_rejects_empty_and_duplicate_server_lists(servers):
    with pytest.raises(ValueError, match="every URL once"):
        unique_addresses(servers)


def test_disk_method_needs_a_folder():
    with pytest.raises(ValueError, match="folder"):
        WeightPublisher(64, 1.0, method=WeightMethod.disk)
