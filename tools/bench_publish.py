"""Measure the driver's cost of a publish without the weights' bytes: CPU seconds, HTTP requests and bytes, for a model without data.

Names and shapes are those of a mixture of experts of about 200 billion parameters (Qwen3-235B-A22B with fewer layers); its
tensors have no memory. Servers are stubs that accept every bucket immediately, or after ``--load-ms``, and count requests; the
pipeline stages are processes with real messages. A GPU's work is omitted: gathering, filling and sending buckets.

    python tools/bench_publish.py --servers 32 --stages 8
    python tools/bench_publish.py --model path/to/a/model    # only its config.json is read
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import re
import resource
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

RANK = "_rank"
"""First argument of the ranks that this program starts."""
QWEN3_235B: dict[str, Any] = dict(
    hidden_size=4096, num_attention_heads=64, num_key_value_heads=4, head_dim=128, vocab_size=151936, intermediate_size=12288,
    num_experts=128, num_experts_per_tok=8, moe_intermediate_size=1536, tie_word_embeddings=False,
)  # fmt: skip
MAX_LOAD_S = 600.0


def main() -> None:
    if sys.argv[1:2] == [RANK]:
        run_rank(json.loads(sys.argv[2]))
        return
    arguments = parse()
    ports, own = multiprocessing.Pipe()
    servers = multiprocessing.Process(target=serve, args=(own, arguments["servers"], arguments["load_ms"] / 1e3), daemon=True)
    servers.start()
    arguments["ports"] = ports.recv()
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments['stages']}"]
    status = subprocess.run([sys.executable, *launcher, __file__, RANK, json.dumps(arguments)], check=False).returncode
    servers.terminate()
    if status:
        sys.exit(f"bench_publish: error: the ranks ended with status {status}; look for the first traceback above")


def parse() -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, default=32)
    parser.add_argument("--server-tp", type=int, default=16)
    parser.add_argument("--stages", type=int, default=8, help="pipeline stages of the trainer, one process each")
    parser.add_argument("--layers", type=int, default=80, help="layers of Qwen3-235B-A22B; 80 are 200 billion parameters")
    parser.add_argument("--model", default="", help="another model, with all of its layers: a Hugging Face folder")
    parser.add_argument("--bucket-mb", type=int, default=1024)
    parser.add_argument("--load-ms", type=float, default=0.0, help="load time of a bucket; servers reply after 0.5 to 1.5 times this")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = vars(parser.parse_args())
    for name in ("servers", "server_tp", "stages", "layers", "bucket_mb", "repeats"):
        if arguments[name] < 1:
            sys.exit(f"bench_publish: error: --{name.replace('_', '-')} {arguments[name]}: expected at least 1")
    if not 0 <= arguments["load_ms"] < 1e3 * MAX_LOAD_S / 2:
        sys.exit(f"bench_publish: error: --load-ms {arguments['load_ms']}: expected 0 to {500 * MAX_LOAD_S:.0f}")
    if arguments["model"] and not os.path.isfile(os.path.join(arguments["model"], "config.json")):
        sys.exit(f"bench_publish: error: --model {arguments['model']}: there is no config.json")
    layers = layers_of(arguments["model"]) if arguments["model"] else arguments["layers"]
    if arguments["stages"] > layers:
        sys.exit(f"bench_publish: error: --stages {arguments['stages']}: the model has {layers} layers, and each stage one or more")
    return arguments


def layers_of(model: str) -> int:
    with open(os.path.join(model, "config.json")) as file:
        found = json.load(file)
    return int((found.get("text_config") or found).get("num_hidden_layers", 0))


# The servers.


class Stub(asyncio.Protocol):
    """Serve one connection of a stub server that accepts everything."""

    def __init__(self, index: int, load_s: float, versions: dict[int, str], asked: Counter[str]) -> None:
        """``asked``: requests by path, and bytes of their bodies by "bytes of" path; of all servers."""
        self._index, self._load_s, self._versions, self._asked = index, load_s, versions, asked
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while b"\r\n\r\n" in self._buffer:
            head, _, rest = self._buffer.partition(b"\r\n\r\n")
            lines = head.decode().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in lines[1:])
            length = int(headers.get("content-length", 0))
            if len(rest) < length:
                return
            body, self._buffer = rest[:length], rest[length:]
            self.answer(lines[0].split(" ")[1], body)

    def answer(self, path: str, body: bytes) -> None:
        content: Any = {"success": True, "message": ""}
        delay_s = 0.0
        if path == "/counts":
            content = dict(self._asked)
            self._asked.clear()
        else:
            self._asked[path] += 1
            self._asked[f"bytes of {path}"] += len(body)
        if path == "/update_weights_from_distributed":
            # Unlike each other, and from bucket to bucket, but the same in every run.
            delay_s = self._load_s * (0.5 + (self._index * 7919 + self._asked[path] // len(self._versions) * 104729) % 997 / 997)
            if b"weight_version" in body:
                self._versions[self._index] = json.loads(body)["weight_version"]
        elif path == "/model_info":
            content = {"weight_version": self._versions[self._index]}
        text = json.dumps(content).encode()
        answer = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text)
        asyncio.get_running_loop().call_later(delay_s, self._transport.write, answer)


def serve(ports: Connection, num_servers: int, load_s: float) -> None:
    async def run() -> None:
        loop, versions, asked = asyncio.get_running_loop(), dict.fromkeys(range(num_servers), ""), Counter()
        servers = [
            await loop.create_server(lambda index=index: Stub(index, load_s, versions, asked), "127.0.0.1", 0)
            for index in range(num_servers)
        ]
        ports.send([server.sockets[0].getsockname()[1] for server in servers])
        await asyncio.sleep(3600)

    asyncio.run(run())


# The trainer.


class NoGroup:
    """A SyncGroup whose bytes go nowhere."""

    address, port, connect_timeout_s, timeout_s = "127.0.0.1", 1, 10.0, 10.0

    def __init__(self, spec: Any, *, driver: str = "") -> None:
        self.spec = spec

    def join_bodies(self) -> list[dict]:
        return [{"group_name": self.spec.name, "rank_offset": rank} for rank in self.spec.first_ranks]

    def open(self) -> None: ...
    def broadcast(self, bucket: Any) -> None: ...
    def close(self) -> None: ...


class Group:
    """The part of a trainer's ranks that ``TrainerWeights`` calls."""

    def __init__(self, hf_config: Any, stage: int, num_stages: int) -> None:
        import torch

        self._hf_config, self._num_stages = hf_config, num_stages
        self.stage, self.kind = stage, dict(dtype=torch.bfloat16, device="meta")
        layers = hf_config.get_text_config().num_hidden_layers
        own = range(layers * stage // num_stages, layers * (stage + 1) // num_stages)

        def is_own(name: str) -> bool:
            if layer := re.search(r"\.layers\.(\d+)\.", name):
                return min(int(layer[1]), layers - 1) in own  # those that only predict further tokens come last
            return stage == (0 if "embed" in name or "visual" in name else num_stages - 1)

        self.names = [(name, shape) for name, shape in self.expected_weights("policy").items() if is_own(name)]

    def expected_weights(self, engine: str) -> dict[str, tuple[int, ...]]:
        from megatron_rl.models.hf.weights import expected_names

        return expected_names(self._hf_config, "policy")

    def export_weights(self, engine: str, to: Any) -> Iterator[tuple[str, Any]]:
        import torch

        return ((name, torch.empty(shape, **self.kind)) for name, shape in self.names)

    def topology_of(self, engine: str) -> Any:
        from types import SimpleNamespace

        return SimpleNamespace(world_size=self._num_stages, pp_size=self._num_stages)


def run_rank(arguments: dict) -> None:
    import torch
    import torch.distributed as dist

    from megatron_rl.config.schema import Config, RolloutConfig
    from megatron_rl.parallel import topology
    from megatron_rl.system.gpu.torchvision_ops import declare_torchvision_ops
    from megatron_rl.system.processes.gc_pauses import gc_disabled
    from megatron_rl.training.export import control_channel
    from megatron_rl.weights import publish, source_ranks

    declare_torchvision_ops()
    from transformers import AutoConfig

    rank, num_ranks = int(os.environ["RANK"]), arguments["stages"]
    dist.init_process_group("gloo")
    topology._control_plane = topology.ControlPlane(group=dist.group.WORLD, timeout_s=MAX_LOAD_S, store=None)
    publish.SyncGroup = source_ranks.SyncGroup = NoGroup
    publish.device_of = lambda backend: torch.device("meta")
    made = dict(num_hidden_layers=arguments["layers"], **QWEN3_235B)
    model = arguments["model"]
    group = Group(AutoConfig.from_pretrained(model) if model else AutoConfig.for_model("qwen3_moe", **made), rank, num_ranks)
    bucket_bytes = arguments["bucket_mb"] << 20
    if rank > 0:
        source = source_ranks.StageRank(control_channel(0, MAX_LOAD_S), bucket_bytes)
        for _ in range(arguments["repeats"] + 1):
            dist.barrier()
            source.serve(group.export_weights("policy", None), torch.device("meta"))
        return
    with gc_disabled():  # what is there by now is looked at no more, as in a run that has begun
        config = Config(rollout=RolloutConfig(bucket_bytes=bucket_bytes))
    measure(arguments, config, group, dist.barrier)


def measure(arguments: dict, config: Any, group: Group, barrier: Any) -> None:
    from megatron_rl.rollout.weight_sources import TrainerWeights
    from megatron_rl.system.http.json_http import get_once
    from megatron_rl.weights.bucket_plan import ServerAddress
    from megatron_rl.weights.publish import WeightPublisher

    servers = [ServerAddress(f"http://127.0.0.1:{port}", arguments["server_tp"], 1) for port in arguments["ports"]]
    publisher = WeightPublisher(config.rollout.bucket_bytes, MAX_LOAD_S, "gloo")
    weights = TrainerWeights(config, group, "policy")
    cpu_s, wall_s = [], []
    for version in range(arguments["repeats"] + 1):
        barrier()
        time.sleep(0.5)
        get_once(f"{servers[0].url}/counts", timeout_s=10)
        before, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        result = weights.publish(publisher, servers, version)
        after = resource.getrusage(resource.RUSAGE_SELF)
        wall_s.append(time.perf_counter() - started)
        cpu_s.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    counts = get_once(f"{servers[0].url}/counts", timeout_s=10).json()
    asked = sum(number for path, number in counts.items() if path.startswith("/"))
    sent = sum(number for path, number in counts.items() if path.startswith("bytes"))
    print(
        f"{result.num_bytes / 2e9:.0f} billion parameters, {len(servers)} servers, {arguments['stages']} stages, "
        f"{result.num_buckets} buckets of {arguments['bucket_mb']} MiB"
    )
    print(f"  requests {asked}, {sent / 1e6:.1f} MB of bodies")
    print(
        f"  driver CPU {statistics.median(cpu_s[1:]):.2f} s (median of {len(cpu_s) - 1}; first, with groups, {cpu_s[0]:.2f} s), "
        f"wall {statistics.median(wall_s[1:]):.2f} s"
    )
    with contextlib.suppress(Exception):
        publisher.close({server.url for server in servers})


if __name__ == "__main__":
    main()
