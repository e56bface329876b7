"""Measure the time of a publish to the same servers: from each pipeline stage's first rank, and through rank 0.

A random dense model is distributed over trainer ranks; servers get its weights by both methods, alternating, several
times. The ratio compares the fastest publishes. On a CPU (gloo, processes that share the cores) it does not predict a
network; on GPUs the same command measures NCCL.

    python tools/bench_weight_sync.py --layout tp2+pp2 --hidden 512 --layers 8 --servers 1
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

RANK = "_rank"
"""First argument of the ranks that this program starts."""


def main() -> None:
    if sys.argv[1:2] == [RANK]:
        run_rank(json.loads(sys.argv[2]))
        return
    arguments = parse()
    from megatron_rl.config.layout import parse_layout, ranks_needed

    parallel, dp_size = parse_layout(arguments["layout"])
    with tempfile.TemporaryDirectory() as folder:
        arguments["folder"] = folder
        arguments["num_ranks"] = ranks_needed(parallel, dp_size)
        make_model(Path(folder), arguments)
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments['num_ranks']}"]
        subprocess.run([sys.executable, *launcher, __file__, RANK, json.dumps(arguments)], check=True)


def parse() -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="pp2", help="short name of a parallel layout, such as tp2+pp2")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--server-tp", type=int, default=1)
    parser.add_argument("--bucket-mb", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    return vars(parser.parse_args())


def make_model(folder: Path, arguments: dict) -> None:
    """A configuration without weights: both sides begin with random ones."""
    from transformers import AutoConfig

    from megatron_rl.system.gpu.torchvision_ops import declare_torchvision_ops

    declare_torchvision_ops()
    hidden = arguments["hidden"]
    AutoConfig.for_model(
        "qwen2",
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=arguments["layers"],
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(2, hidden // 256),
        vocab_size=arguments["vocab"],
        tie_word_embeddings=False,
        architectures=["Qwen2ForCausalLM"],
    ).save_pretrained(folder)


def run_rank(arguments: dict) -> None:
    from megatron_rl.config.layout import parse_layout
    from megatron_rl.config.schema import Config, Dtype, Init, PolicyConfig, RolloutConfig, WeightSync
    from megatron_rl.parallel import topology as topologies
    from megatron_rl.system.processes.signals import die_with_parent
    from megatron_rl.training.engine import Engine
    from megatron_rl.training.trainer_group import TrainerGroup
    from megatron_rl.training.trainer_rank import TrainerRank

    die_with_parent()
    parallel, _ = parse_layout(arguments["layout"])
    rollout = RolloutConfig(bucket_bytes=arguments["bucket_mb"] << 20, weight_sync=WeightSync.broadcast)
    config = Config(policy=PolicyConfig(path=arguments["folder"]), parallel=parallel, rollout=rollout)
    topology = topologies.initialize(parallel, seed=1)
    dtype = Dtype(arguments["dtype"])
    engine = Engine(
        "policy",
        arguments["folder"],
        parallel=parallel,
        topology=topology,
        optimizer=None,
        init=Init.random,
        dtype=dtype,
    )
    worker = TrainerRank(config, topology, {"policy": engine})
    if topology.rank == 0:
        group = TrainerGroup(worker)
        with open_servers(arguments, group) as servers:
            measure(arguments, config, group, servers)
        group.stop()
    else:
        worker.serve()
    topologies.destroy()


@contextmanager
def open_servers(arguments: dict, group) -> Iterator[list]:
    from megatron_rl.rollout.server_pool import ServerPool
    from megatron_rl.rollout.sglang.process.options import ServerOptions
    from megatron_rl.system.gpu.gpu_environment import detect_device
    from megatron_rl.weights.bucket_plan import ServerAddress

    size = arguments["server_tp"]
    options = ServerOptions(
        arguments["folder"],
        dtype=arguments["dtype"],
        tensor_parallel_size=size,
        load_weights=False,
        device=detect_device(),
        first_gpu=arguments["num_ranks"],
    )
    with ServerPool.start(options, arguments["servers"], arguments["folder"], while_waiting=group.heartbeat) as pool:
        yield [ServerAddress(server.url, size, server.incarnation) for server in pool.servers]


def measure(arguments: dict, config, group, servers: list) -> None:
    from megatron_rl.rollout.weight_sources import TrainerWeights
    from megatron_rl.weights.publish import WeightPublisher

    weights = TrainerWeights(config, group, "policy")
    timeout_s = config.rollout.weight_sync_timeout_s
    publishers = {way: WeightPublisher(config.rollout.bucket_bytes, timeout_s) for way in ("stages", "rank 0")}
    seconds: dict[str, list[float]] = {way: [] for way in publishers}
    num_bytes = 0
    for version in range(1, arguments["repeats"] + 2):
        for way, publisher in publishers.items():
            started_s = time.perf_counter()
            if way == "stages":
                result = weights.publish(publisher, servers, version)
            else:
                result = publisher.publish(weights.whole(), servers, version, expected=weights.expected)
            if version > 1:  # the first one makes the groups
                seconds[way].append(time.perf_counter() - started_s)
            num_bytes = result.num_bytes
    for publisher in publishers.values():
        publisher.close()
    print(f"{arguments['layout']}, {len(servers)} server(s) with tp {arguments['server_tp']}, {num_bytes / 1e6:.0f} MB")
    for way, times in seconds.items():
        times.sort()
        speed = num_bytes / times[0] / 1e6
        print(f"  by {way:7}: fastest {times[0]:.2f} s, median {times[len(times) // 2]:.2f} s ({speed:.0f} MB/s)")
    print(f"  ratio stages / rank 0: {seconds['stages'][0] / seconds['rank 0'][0]:.2f}")


if __name__ == "__main__":
    main()
