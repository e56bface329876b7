"""A rank of test_two_hosts.py: ``first`` is the driver, which starts a server on its host, ``second`` a pipeline stage.

argv: a folder for results, and which of the two. The server stands for SGLang: it joins groups and takes broadcasts as
SGLang's workers do.
"""

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_rl.config.schema import Config, ParallelConfig
from megatron_rl.models.hf.gather import GatherTarget
from megatron_rl.run.launch import choose_interface
from megatron_rl.system.processes.signals import die_with_parent
from megatron_rl.training.export import WeightExport, control_channel
from megatron_rl.weights.bucket_plan import ServerAddress
from megatron_rl.weights.publish import WeightPublisher
from tests.unit.local_service import local_service

OWN = {"embed": torch.arange(64.0), "layer0": torch.arange(8.0)}
OTHER = {"layer1": torch.arange(100.0, 130.0), "head": torch.full((50,), 7.0)}
TIMEOUT_S = 60.0


class Server:
    """Answers as SGLang does; one worker."""

    def __init__(self) -> None:
        self.groups: dict[str, dist.ProcessGroup] = {}
        self.seen: dict[str, Any] = {"addresses": [], "tensors": {}}
        self.version = "default"

    def __call__(self, path: str, body: Any) -> Any:
        if path == "/init_weights_update_group":
            self.join(body)
        elif path == "/update_weights_from_distributed":
            self.take(body)
        return {"success": True, "message": "", "weight_version": self.version, "seen": self.seen}

    def join(self, body: dict[str, Any]) -> None:
        self.seen["addresses"].append(body["master_address"])
        name = body["group_name"]
        store = dist.TCPStore(
            body["master_address"], body["master_port"], body["world_size"], False, timeout=timedelta(seconds=TIMEOUT_S)
        )
        self.groups[name], _ = distributed_c10d._new_process_group_helper(
            body["world_size"],
            body["rank_offset"],
            [],
            dist.Backend(body["backend"]),
            dist.PrefixStore(name, store),
            group_name=distributed_c10d.GroupName(name),
            timeout=timedelta(seconds=TIMEOUT_S),
        )
        distributed_c10d._world.pg_group_ranks[self.groups[name]] = {rank: rank for rank in range(body["world_size"])}

    def take(self, body: dict[str, Any]) -> None:
        assert set(body["dtypes"]) == {"float32"}
        sizes = [torch.Size(shape).numel() for shape in body["shapes"]]
        flat = torch.empty(4 * sum(sizes), dtype=torch.uint8)
        dist.broadcast(flat, group_src=0, group=self.groups[body["group_name"]])
        for name, tensor in zip(body["names"], flat.view(torch.float32).split(sizes), strict=True):
            self.seen["tensors"][name] = tensor.tolist()
        self.version = body.get("weight_version", self.version)


def serve(folder: Path) -> None:
    die_with_parent()
    server = Server()
    with local_service(server) as service:
        (folder / "url").write_text(service.url)
        while True:
            time.sleep(1)
            (folder / "seen.json").write_text(json.dumps(server.seen | {"gloo": os.environ.get("GLOO_SOCKET_IFNAME")}))


def first(folder: Path) -> None:
    """The driver: its servers listen on 127.0.0.1, as those that a run starts."""
    from megatron_rl.parallel import topology as topologies

    server = os.fork()  # no thread yet, and all imported
    if server == 0:
        serve(folder)
    topologies.initialize(ParallelConfig(num_ranks=2, pipeline_parallel_size=2), seed=1)
    while not (folder / "url").exists():
        time.sleep(0.05)
    servers = [ServerAddress((folder / "url").read_text(), 1, 1)]
    publisher = WeightPublisher(100, TIMEOUT_S, backend="gloo")
    result = publisher.publish(OWN.items(), servers, 1, links=[control_channel(1, 2 * TIMEOUT_S)])
    written = (folder / "seen.json").stat().st_mtime_ns if (folder / "seen.json").exists() else 0
    while not (folder / "seen.json").exists() or (folder / "seen.json").stat().st_mtime_ns <= written:
        time.sleep(0.05)
    publisher.close()
    (folder / "result.json").write_text(json.dumps({"buckets": result.num_buckets}))
    os.kill(server, signal.SIGKILL)
    os.waitpid(server, 0)


def second() -> None:
    from megatron_rl.parallel import topology as topologies

    topology = topologies.initialize(ParallelConfig(num_ranks=2, pipeline_parallel_size=2), seed=1)
    engine = SimpleNamespace(export_weights=lambda to, merged: iter(OTHER.items()), topology=topology)
    WeightExport(config()).run(engine, GatherTarget.stage, merged=True)


def config() -> Config:
    config = Config()
    config.rollout.bucket_bytes, config.rollout.weight_sync_timeout_s = 100, TIMEOUT_S
    return config


def main() -> None:
    folder, role = Path(sys.argv[1]), sys.argv[2]
    os.environ["RANK"] = {"first": "0", "second": "1"}[role]
    choose_interface(config())
    if role == "first":
        first(folder)
    else:
        second()


if __name__ == "__main__":
    main()
