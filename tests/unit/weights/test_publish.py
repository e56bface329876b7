"""Laws of filling buckets from a stream, and of the files of the disk fallback; no server, no process group."""

import pytest
import torch

from megatron_rl.weights.broadcast import broadcast_parcels
from megatron_rl.weights.buckets import Bucket, fill_buckets
from megatron_rl.weights.disk import read_shapes, remove_other_versions, write_version
from megatron_rl.weights.plan import Coverage, CoverageError, unique_addresses
from megatron_rl.weights.publish import WeightPublisher
from megatron_rl.weights.senders import LocalSource

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
    return fill_buckets(iter(weights.items()), bucket_bytes, CPU)


def parcels(*streams, bucket_bytes=64, expected=None):
    """What the servers are asked, bucket by bucket; a stream a source."""
    sources = [LocalSource(stream.items(), bucket_bytes, CPU) for stream in streams]
    names = [f"group{i}" for i in range(len(sources))]
    given = broadcast_parcels(sources, names, 1, 7, Coverage(expected))
    for parcel in given:
        source = sources[names.index(parcel.bodies[0]["group_name"])]
        source._shelf.take()
        yield parcel.bodies[0]


@pytest.mark.parametrize("bucket_bytes", [1, 64, 100, 10_000])
def test_a_receiver_rebuilds_every_tensor_from_names_shapes_and_dtypes(bucket_bytes):
    received = {}
    for bucket in filled(bucket_bytes=bucket_bytes):
        received |= unpack(bucket)
    assert list(received) == list(WEIGHTS)
    for name, weight in WEIGHTS.items():
        assert received[name].dtype == weight.dtype
        assert torch.equal(received[name], weight)


def test_a_bucket_stays_intact_while_the_next_one_is_filled():
    previous = None
    for bucket in filled(bucket_bytes=64):
        if previous is not None:
            assert all(torch.equal(tensor, WEIGHTS[name]) for name, tensor in unpack(previous).items())
        previous = bucket


def test_only_the_final_bucket_is_marked_as_last():
    marks = [bucket.last for bucket in filled(bucket_bytes=64)]
    assert len(marks) > 2
    assert marks == [False] * (len(marks) - 1) + [True]


def test_a_bucket_with_an_unexpected_tensor_is_never_given_out():
    expected = {name: tuple(weight.shape) for name, weight in WEIGHTS.items() if name != "odd"}
    given_out = []
    with pytest.raises(CoverageError, match="unexpected: odd"):
        for body in parcels(WEIGHTS, bucket_bytes=48, expected=expected):
            given_out += body["names"]
    assert given_out in ([], ["embed"])


def test_the_final_bucket_is_held_back_when_a_tensor_is_missing():
    expected = {name: tuple(weight.shape) for name, weight in WEIGHTS.items()} | {"absent": (1,)}
    versions = []
    with pytest.raises(CoverageError, match="missing: absent"):
        for body in parcels(WEIGHTS, bucket_bytes=48, expected=expected):
            versions.append(body.get("weight_version"))
    assert versions and set(versions) == {None}


def test_sources_take_turns_and_the_version_goes_with_the_last_bucket_of_all():
    names = list(WEIGHTS)
    first, second = ({n: WEIGHTS[n] for n in part} for part in (names[:5], names[5:]))
    expected = {name: tuple(weight.shape) for name, weight in WEIGHTS.items()}
    bodies = list(parcels(first, second, bucket_bytes=48, expected=expected))
    groups = [body["group_name"] for body in bodies]
    assert groups[:3] == ["group0", "group1", "group0"] and groups.count("group1") == 1
    assert sorted(name for body in bodies for name in body["names"]) == sorted(WEIGHTS)
    stamped = [("weight_version" in body, body["flush_cache"]) for body in bodies]
    assert stamped == [(False, False)] * (len(bodies) - 1) + [(True, True)]


def test_a_tensor_that_two_stages_send_is_refused():
    with pytest.raises(CoverageError, match="duplicate: embed"):
        list(parcels({"embed": WEIGHTS["embed"]}, {"embed": WEIGHTS["embed"]}))


@pytest.mark.parametrize(("shard_bytes", "num_files"), [(64, 4), (10_000, 2)])
def test_a_written_version_declares_the_shapes_it_was_given(tmp_path, shard_bytes, num_files):
    folder = write_version(WEIGHTS.items(), tmp_path, 3, shard_bytes, Coverage())
    assert folder == tmp_path / "weights-3"
    assert read_shapes(folder) == {name: tuple(weight.shape) for name, weight in WEIGHTS.items()}
    assert len(list(folder.glob("*.safetensors"))) == num_files


def test_a_refused_version_leaves_no_files(tmp_path):
    with pytest.raises(CoverageError):
        write_version(WEIGHTS.items(), tmp_path, 3, 64, Coverage({"embed": (3, 4)}))
    assert list(tmp_path.iterdir()) == []


def test_only_the_kept_version_survives(tmp_path):
    folders = [write_version(WEIGHTS.items(), tmp_path, version, 64, Coverage()) for version in (1, 2)]
    remove_other_versions(tmp_path, keep=folders[1])
    assert list(tmp_path.iterdir()) == [folders[1]]


def test_a_folder_without_safetensors_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        read_shapes(tmp_path)


@pytest.mark.parametrize("servers", [[], [("http://a:1", 1, 0), ("http://a:1/", 1, 1)]])
def test_no_servers_and_a_server_twice_are_refused(servers):
    with pytest.raises(ValueError, match="every URL once"):
        unique_addresses(servers)


def test_the_disk_method_needs_a_folder():
    with pytest.raises(ValueError, match="folder"):
        WeightPublisher(64, 1.0, method="disk")
