"""Laws of the groups of trainer and servers: their GPUs, the order of broadcasts, and the effects of a failure."""

import os
import threading
from datetime import timedelta
from queue import Queue
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import distributed_c10d

from megatron_rl.config.checks.servers import Node, gpu_problems
from megatron_rl.config.load import load_config
from megatron_rl.rollout import server_pool
from megatron_rl.rollout.sglang.process.options import server_command
from megatron_rl.rollout.sglang.process.server import SglangServer
from megatron_rl.training.export import source_ranks
from megatron_rl.weights import server_calls
from megatron_rl.weights.bucket_plan import GroupSpec, ServerAddress
from megatron_rl.weights.publish import WeightPublisher
from megatron_rl.weights.server_calls import ServerCallError
from megatron_rl.weights.source_ranks import StageRank, SyncGroup
from tests.unit.examples.test_examples import ROOT
from tests.unit.local_service import local_service
from tests.unit.weights import recording
from tests.unit.weights.test_source_ranks import QueueLink

SERVERS = (ServerAddress("http://127.0.0.1:9", 1, 1),)


@pytest.fixture
def record():
    record = recording.Record()
    recording.install(record)
    return record


def devices_of_servers(config, num_gpus, num_ranks, monkeypatch, tmp_path):
    """The GPUs of each server's workers, from the servers' command lines."""
    started = []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_ranks))
    monkeypatch.setattr(server_pool, "count_gpus", lambda: num_gpus)
    monkeypatch.setattr(server_pool, "detect_device", lambda: "cuda")
    monkeypatch.setattr(SglangServer, "spawn", lambda server: started.append(server))
    first_gpu = server_pool.first_free_gpu(config.rollout, lambda text: None)
    options = server_pool.server_options(config, load_weights=False, tokenizer=False, first_gpu=first_gpu)
    server_pool.ServerPool.spawn(options, config.rollout.num_servers, tmp_path)
    words = [server_command(server.options, 1) for server in started]
    bases = [int(one[one.index("--base-gpu-id") + 1]) for one in words]
    return [[f"gpu{base + i}" for i in range(config.rollout.tensor_parallel_size)] for base in bases]


@pytest.mark.parametrize(
    ("recipe", "overrides", "num_ranks", "fits"),
    [
        ("one_node_disaggregated", [], 4, True),
        ("one_node_disaggregated", ["rollout.num_servers=2", "rollout.tensor_parallel_size=2"], 4, True),
        ("one_node_disaggregated", ["parallel.pipeline_parallel_size=2"], 4, True),
        ("one_node_disaggregated", ["parallel.num_ranks=8"], 8, False),
        ("tppo", [], 8, False),
        ("tppo", ["parallel.tensor_parallel_size=2", "parallel.pipeline_parallel_size=3"], 6, True),
        ("tppo", ["rollout.num_servers=3"], 6, False),
    ],
)
def test_node_check_accepts_exactly_layouts_with_a_gpu_per_member(
    record, monkeypatch, tmp_path, recipe, overrides, num_ranks, fits
):
    config = load_config([ROOT / "examples" / "gpu" / f"{recipe}.yaml"], overrides)
    assert (not list(gpu_problems(config, Node(8, num_ranks), num_ranks, "train"))) is fits
    devices = devices_of_servers(config, 8, num_ranks, monkeypatch, tmp_path)
    servers = tuple(ServerAddress(f"http://127.0.0.1:{9 + i}", len(own), 1) for i, own in enumerate(devices))
    failures = []
    for stage, rank in enumerate(source_ranks(SimpleNamespace(world_size=num_ranks, pp_size=config.parallel.pipeline_parallel_size))):
        record.devices[str(stage)] = f"gpu{rank}"
        group = SyncGroup(GroupSpec(f"{tmp_path.name}-{stage}", servers, recording.BACKEND, recording.TIMEOUT_S))
        workers = [recording.Workers(record, f"server {i}", own) for i, own in enumerate(devices)]
        failures.append(recording.open_group(group, workers))
    assert any("Duplicate GPU detected: gpu0" in failure for failure in failures) is not fits
    assert any(failures) is not fits


def test_all_members_see_broadcasts_of_two_groups_in_one_order(record):
    """Two servers that wait in different groups would wait forever."""
    weights = {f"layer{i}": torch.full((5,), float(i)) for i in range(9)}
    names = list(weights)
    record.devices = {"0": "gpu0", "1": "gpu1"}
    workers = [recording.Workers(record, f"server {i}", [f"gpu{2 + i}"]) for i in range(2)]

    def server(own):
        def answer(path, body):
            if path == "/init_weights_update_group":
                own.join(body)
            elif path == "/update_weights_from_distributed":
                own.take(body)
            return {"success": True, "weight_version": "1"}

        return answer

    there, back = Queue(), Queue()
    stage = StageRank(QueueLink(0, back, there), bucket_bytes=48)
    other = threading.Thread(
        target=stage.serve, args=(((name, weights[name]) for name in names[3:]), torch.device("cpu")), daemon=True
    )
    with local_service(server(workers[0])) as one, local_service(server(workers[1])) as two:
        other.start()
        publisher = WeightPublisher(48, recording.TIMEOUT_S, backend=recording.BACKEND)
        addresses = [(one.url, 1, 1), (two.url, 1, 1)]
        result = publisher.publish(
            ((name, weights[name]) for name in names[:3]), addresses, 1, links=[QueueLink(1, there, back)]
        )
        other.join(10)
        publisher.close()
    stage.close()
    first, second = (record.seen[f"server {i} worker 0"] for i in range(2))
    assert first == second and len(first) == result.num_buckets >= 4
    assert len({group for group, _ in first}) == 2
    for source in ("source 0", "source 1"):
        own = record.seen[source]
        assert own and own == [one for one in first if one[0] == own[0][0]]


@pytest.fixture
def made(monkeypatch):
    """Record the arguments with which torch is called to create a group, without creating the group."""
    seen = {}

    def helper(*arguments, timeout, **named):
        seen["timeouts"] = [timeout]
        seen["environment"] = dict(os.environ)
        group = SimpleNamespace(set_timeout=seen["timeouts"].append, abort=lambda: seen.setdefault("aborted", True))
        return group, None

    monkeypatch.setattr(distributed_c10d, "_new_process_group_helper", helper)
    monkeypatch.setattr(distributed_c10d, "_world", SimpleNamespace(pg_group_ranks=_ById()))
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda group: None)
    return seen


class _ById(dict):
    def __setitem__(self, key, value):
        super().__setitem__(id(key), value)


@pytest.mark.parametrize(("backend", "longest_s"), [("nccl", 360.0), ("gloo", 300.0)])
def test_http_timeout_is_shorter_than_the_nccl_timeout(made, backend, longest_s):
    """NCCL's watchdog aborts with a less specific message; gloo's timeout is an ordinary error."""
    group = SyncGroup(GroupSpec("g", SERVERS, backend, 300.0))
    group.open()
    assert made["timeouts"] == [timedelta(seconds=60), timedelta(seconds=longest_s)]
    assert backend == "gloo" or group.timeout_s > group.spec.timeout_s + server_calls._CONNECT_TIMEOUT_S  # of wait_for_all
    group.close()
    assert ("aborted" in made) is (backend == "nccl")


def test_failed_broadcast_spares_trainer_and_other_watchdogs(made, monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    monkeypatch.delenv("TORCH_NCCL_DUMP_ON_TIMEOUT", raising=False)
    SyncGroup(GroupSpec("g", SERVERS, "nccl", 300.0)).open()
    assert made["environment"]["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2"
    assert made["environment"]["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3" and "TORCH_NCCL_DUMP_ON_TIMEOUT" not in os.environ


def test_nccl_errors_report_the_variables_that_must_agree(made, monkeypatch):
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")

    def fail(*arguments, **named):
        raise RuntimeError("ncclUnhandledCudaError: Call to CUDA function failed. Last error: ...")

    group = SyncGroup(GroupSpec("g", SERVERS, "nccl", 300.0))
    group.open()
    monkeypatch.setattr(torch.distributed, "broadcast", fail)
    with pytest.raises(ServerCallError, match="NCCL_CUMEM_ENABLE=1 NCCL_NVLS_ENABLE=0.*same environment"):
        group.broadcast(SimpleNamespace(flat=torch.zeros(4, dtype=torch.uint8), num_bytes=4, ready=None))
    monkeypatch.setattr(distributed_c10d, "_new_process_group_helper", fail)
    with pytest.raises(ServerCallError, match="NCCL_CUMEM_ENABLE=1"):
        SyncGroup(GroupSpec("h", SERVERS, "nccl", 300.0)).open()
