"""Compare published measurements with the estimates of ``megatron_rl.desk.costs``: the table of docs/estimates.md.

    python tools/published_points.py            # print it
    python tools/published_points.py --write    # put it into docs/estimates.md

A row is a calibration if a constant was fitted to it or chosen to match it, otherwise a validation.
A row beyond its tolerance states the reason. Tests check both, and the page.
"""

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from published_steps import Point, model, nemo_points, simulated_points, verl_points

from megatron_rl.config.layout import parse_layout, ranks_of_replica
from megatron_rl.config.schema import ParallelConfig, Recompute
from megatron_rl.desk.costs.gpus import gpu
from megatron_rl.desk.costs.parameter_counts import num_parameters
from megatron_rl.desk.costs.rank_memory import PassSettings, RankMemory, layer_bytes, memory_by_rank
from megatron_rl.desk.costs.training_time import publish_seconds, training_seconds

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "estimates.md"
BEGIN, END = "<!-- tools/published_points.py writes this table -->", "<!-- end of the table -->"

MEGATRON_BRIDGE = "NVIDIA-NeMo/Megatron-Bridge@067f987df docs/performance-summary-archive.md"
MBRIDGE = "ISEEKYAN/mbridge@10cb17f memory_estimator/README.md"
PRIME_RL = "PrimeIntellect-ai/prime-rl@559b44772 benchmarks/baselines"
RESHARD = "NVIDIA-NeMo/RL@7ea279abf docs/design-docs/nccl-reshard-refit.md"
MILES = "radixark/miles@31f1ca961 docs/advanced/p2p-weight-transfer.md"


def training_points() -> Iterable[Point]:
    """Megatron-Bridge, packed sequences of one length; experts evenly loaded and dropless."""
    # name, model, GPUs, batch, length, layout, published tokens/s/GPU, release
    rows = [
        ("A1", "llama3-8b", 8, 128, 8192, "tp1", 14451, "25.11"),
        ("A2", "llama3-70b", 64, 256, 8192, "tp4+pp8+vpp5", 1664, "26.04.01"),
        ("A3", "llama3.1-405b", 1024, 1536, 8192, "tp8+pp8+cp2+vpp8", 328, "26.04.01"),
        ("A5", "qwen3-30b-a3b", 16, 1024, 4096, "ep16", 8960, "26.04.01"),
        ("A6", "qwen3-30b-a3b", 16, 1024, 4096, "pp2+vpp12+ep8", 9058, "26.02.01"),
        ("A7", "qwen3-235b-a22b", 256, 8192, 4096, "tp2+pp8+vpp4+ep32+etp1", 1712, "26.04.01"),
        ("A8", "deepseek-v3", 1024, 8192, 4096, "tp2+pp8+vpp4+ep64+etp1", 1297, "25.09"),
        ("A9", "llama3-70b", 32, 32, 4096, "tp4+pp4+vpp5", 1638, "26.06, SFT"),
    ]
    misses = {"A3": "405B reaches more of the peak than 8B: its matrices are the largest of all"}
    for name, model_name, ranks, batch, length, layout, published, release in rows:
        parallel, _ = parse_layout(layout)

        def tokens_per_gpu(
            parallel: ParallelConfig = parallel, model_name: str = model_name, ranks: int = ranks, batch: int = batch, length: int = length
        ) -> float:
            packs = batch * ranks_of_replica(parallel) // ranks
            lengths = [length] * batch
            seconds = training_seconds(model(model_name), parallel, gpu("H100-80G"), lengths, num_ranks=ranks, num_packs=packs)
            return batch * length / seconds / ranks

        yield Point(
            name, f"training {model_name}, {ranks} H100, {layout}", "tokens/s/GPU", published, tokens_per_gpu,
            f"{MEGATRON_BRIDGE}, {release}", 0.10, is_fitted=name in ("A1", "A5", "A8"), why=misses.get(name, ""),
        )  # fmt: skip


def memory_points() -> Iterable[Point]:
    # name, tensor-parallel size, packs of 4096 tokens at once, measured GiB of states, of activations
    rows = [("B1", 2, 1, 5.3, 1.3), ("B2", 2, 2, 5.3, 2.7), ("B3", 1, 1, 8.8, 2.4), ("B4", 1, 2, 8.8, 5.0)]
    for name, tp, size, states, activations in rows:

        def memory(tp: int = tp, size: int = size) -> RankMemory:
            parallel = ParallelConfig(tensor_parallel_size=tp, sequence_parallel=tp > 1)
            passes = PassSettings(4096 * size, keeps_logits=True)
            return memory_by_rank(model("mixtral-8x2b-4-layers"), parallel, passes, num_ranks=8)[0]

        what, source = f"Mixtral 8x2B, 4 layers, 8 GPUs, tp{tp}, {size} x 4096", f"{MBRIDGE}, table, TP {tp} MBS {size}"

        def gib_of_states(memory: Callable[[], RankMemory] = memory) -> float:
            return (memory().weights + memory().gradients + memory().optimizer) / 2**30

        def gib_of_activations(memory: Callable[[], RankMemory] = memory) -> float:
            return memory().activations / 2**30

        yield Point(name, f"weights, gradients, optimizer: {what}", "GiB", states, gib_of_states, source, 0.015)
        yield Point(name, f"activations: {what}", "GiB", activations, gib_of_activations, source, 0.10)
    why = "PyTorch's FSDP2 with unfused layers and the gradients of a recomputed layer, which are not counted here"
    for name, model_name, gpus, low, high in (
        ("B5", "qwen3-4b", "8 H100", 17.10, 36.10),
        ("B6", "qwen3-30b-a3b", "8 H200", 74.6, 105.4),
    ):

        def kilobytes(model_name: str = model_name) -> float:
            config = model(model_name)
            kept, again = layer_bytes(config, ParallelConfig(), Recompute.full, with_experts="a3b" in model_name)
            return (kept * config.num_hidden_layers + again) / 1e3

        yield Point(
            name, f"{model_name}, {gpus}, FSDP2, full recomputation: memory by token from 16k to 65k", "kB/token",
            (high - low) * 2**30 / 49152 / 1e3, kilobytes, f"{PRIME_RL}, rl-full, Recompute", 0.15, why=why,
        )  # fmt: skip


def publish_points() -> Iterable[Point]:
    """Miles: bfloat16, but Kimi-K2, which travels in FP8; models that the hub's files here do not describe by their number."""
    rows: list[tuple[str, str, float, int, int, int, float, float]] = [
        ("D1", "Qwen3-30B-A3B", 2 * num_parameters(model("qwen3-30b-a3b")), 1, 16, 8, 2.670, 2.160),
        ("D2", "GLM-4.5-Air", 2 * num_parameters(model("glm-4.5-air")), 4, 32, 8, 5.001, 2.637),
        ("D3", "Qwen3-235B-A22B", 2 * num_parameters(model("qwen3-235b-a22b")), 4, 64, 32, 10.754, 3.162),
        ("D4", "GLM-5 744B", 2 * 744e9, 8, 128, 64, 58.302, 8.480),
        # Its point-to-point time without the 0.884 s of quantizing again that the document counts into it.
        ("D5", "Kimi-K2 1T in FP8", 1026e9, 8, 256, 32, 53.279, 7.227 - 0.884),
    ]
    whys = {
        ("D3", "point_to_point"): "its gather from 16 ranks ran faster by byte than that of 8 which the constant is from",
        ("D4", "point_to_point"): "as D3, the other way: one constant for all gathers",
        ("D5", "point_to_point"): "as D4; the sender quantizes too",
    }
    for name, title, size, stages, server_gpus, per_server, *published in rows:
        for way, seconds in zip(("broadcast", "point_to_point"), published, strict=True):

            def ours(
                size: float = size, way: Any = way, stages: int = stages, server_gpus: int = server_gpus, per_server: int = per_server
            ) -> float:
                return publish_seconds(
                    size, gpu("H100-80G"), way=way, num_stages=stages, num_server_gpus=server_gpus, gpus_per_server=per_server
                )

            yield Point(
                name, f"{way.replace('_', ' ')} of {title}, {stages} stages to {server_gpus} H100", "s", seconds, ours,
                f"{MILES}, {title}", 0.20, is_fitted=name == "D1" or (name, way) == ("D5", "broadcast"),
                why=whys.get((name, way), ""),
            )  # fmt: skip


def reshard_points() -> Iterable[Point]:
    """NeMo-RL, shard to shard; the middle of the published range."""
    why = "another implementation: it sends shards without gathering whole tensors first"
    for name, title, size, stages, per_server, low, high in (
        ("D6", "qwen3-30b-a3b", 61.1e9, 2, 8, 0.74, 1.00),
        ("D7", "deepseek-v3", 1342e9, 16, 32, 2.39, 2.83),
    ):

        def ours(size: float = size, stages: int = stages, per_server: int = per_server) -> float:
            return publish_seconds(
                size, gpu("H100-80G"), way="point_to_point", num_stages=stages, num_server_gpus=8, gpus_per_server=per_server
            )

        yield Point(
            name, f"reshard of {title}, {stages} stages to servers of {per_server} H100", "s", (low + high) / 2, ours,
            f"{RESHARD}, {title}", 0.20, why=why,
        )  # fmt: skip


def points() -> list[Point]:
    return [*training_points(), *memory_points(), *nemo_points(), *simulated_points(), *verl_points(), *publish_points(), *reshard_points()]


def table(rows: Iterable[Point]) -> str:
    lines = ["| point | what | published | ours | error | use | source |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        use = "calibration" if row.is_fitted else "validation"
        error = f"**{row.error():+.1%}**: {row.why}" if abs(row.error()) > row.within else f"{row.error():+.1%}"
        values = f"{_number(row.published)} {row.unit} | {_number(row.ours())}"
        lines.append(f"| {row.name} | {row.what} | {values} | {error} | {use} | {row.source} |")
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the table into docs/estimates.md")
    text = table(points())
    if parser.parse_args().write:
        page = PAGE.read_text()
        before, after = page.partition(BEGIN)[0], page.partition(END)[2]
        PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")
    else:
        print(text)


if __name__ == "__main__":
    main()
