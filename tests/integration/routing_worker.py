"""One rank of tests/integration/test_routing_replay.py: runs every scenario of its world, writes one file of results.

Usage: routing_worker.py MODELS OUT, by torchrun or alone. MODELS holds the folders qwen3_moe and deepseek_v3, each with
the config.json of a tiny mixture-of-experts model; weights come from a seed. Rank 0 writes OUT/results.pt, a dict by
scenario.
"""

import os
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.config.schema import (
    AlgorithmConfig,
    Dispatcher,
    Init,
    LoadBalancing,
    MoeConfig,
    OptimizerConfig,
    ParallelConfig,
    Recompute,
    RoutingReplay,
)
from megatron_rl.data.batch import ROUTES, PackedBatch, cu_seqlens_of
from megatron_rl.parallel import topology as topologies
from megatron_rl.training import losses
from megatron_rl.training.batching import plan_microbatches
from megatron_rl.training.engine import Engine

# After Megatron has been prepared for a CPU by the modules above.
from megatron.core.transformer.moe.moe_layer import MoELayer  # isort: skip

LENGTHS = [9, 17, 33, 6, 21, 12, 7]
PROMPT_TOKENS = 4
ALGORITHM = AlgorithmConfig(entropy_coef=0.01)
OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-3, max_grad_norm=0.5)
BALANCED = MoeConfig(load_balancing=LoadBalancing.aux_loss, aux_loss_coef=0.5)
REPLAYED = replace(BALANCED, routing_replay=RoutingReplay.R2)


@dataclass(frozen=True)
class Scenario:
    name: str
    parallel: dict[str, Any] = field(default_factory=dict)
    max_tokens: int = 1000
    recompute: Recompute = Recompute.none
    dispatcher: Dispatcher = Dispatcher.alltoall


SCENARIOS: dict[int, list[Scenario]] = {
    1: [Scenario("reference"), Scenario("split-recompute", max_tokens=40, recompute=Recompute.full)],
    2: [
        Scenario("dp2", max_tokens=40),
        Scenario("tp2-sp", dict(tensor_parallel_size=2, sequence_parallel=True), max_tokens=40),
        Scenario("ep2", dict(expert_parallel_size=2), max_tokens=40),
        Scenario("ep2-allgather", dict(expert_parallel_size=2), max_tokens=40, dispatcher=Dispatcher.allgather),
        # Experts split over the ranks, and whole ones on each.
        Scenario(
            "tp2-etp2-allgather",
            dict(tensor_parallel_size=2, sequence_parallel=True),
            max_tokens=40,
            dispatcher=Dispatcher.allgather,
        ),
        Scenario("cp2", dict(context_parallel_size=2), max_tokens=40),
        Scenario("pp2-recompute", dict(pipeline_parallel_size=2), max_tokens=40, recompute=Recompute.full),
    ],
}

BIASED = ("split-recompute", "ep2", "ep2-allgather", "tp2-etp2-allgather", "pp2-recompute")
BIAS_NAME = "e_score_correction_bias"
BIAS_RATE = 0.01


def make_batch() -> PackedBatch:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.tensor(LENGTHS)
    total = int(lengths.sum())
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    return PackedBatch(
        tokens=torch.randint(3, 128, (total,), generator=generator),
        cu_seqlens=cu_seqlens_of(lengths),
        fields={
            "mask": positions >= PROMPT_TOKENS,
            "advantages": torch.randn(total, generator=generator),
            "noise": 0.2 * torch.randn(total, generator=generator),
        },
    )


class Trial:
    """An engine in one layout and this rank's share of the batch."""

    def __init__(self, scenario: Scenario, moe: MoeConfig, model: Path, place: topologies.Topology) -> None:
        self.place = place
        self.engine = Engine(
            "policy",
            model,
            parallel=ParallelConfig(**scenario.parallel, collective_timeout_s=120.0),
            topology=place,
            optimizer=OPTIMIZER,
            init=Init.random,
            recompute=scenario.recompute,
            moe=replace(moe, dispatcher=scenario.dispatcher),
        )
        self.batch = make_batch()
        self.plan = plan_microbatches(LENGTHS, place.dp_size, scenario.max_tokens)[place.dp_rank]

    def microbatches(self, **fields: torch.Tensor) -> list[PackedBatch]:
        return [self.batch.with_fields(**fields).select(indices) for indices in self.plan]

    def logprobs(self, *, record: bool = False, **fields: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probs [T] and, if asked for, routes [T, L, K] of the whole batch, on every rank."""
        microbatches = self.microbatches(**fields)
        logprobs = self.engine.logprobs(microbatches, record_routes=record)
        routes = self.engine.pop_routes() if record else None
        if not self.engine.is_output_rank:
            return self.whole([]), self.whole([]) if record else None
        return self.whole(logprobs), self.whole(routes) if record else None

    def whole(self, parts: list[torch.Tensor]) -> torch.Tensor:
        gathered: list[Any] = [None] * self.place.world_size
        dist.all_gather_object(gathered, list(zip(self.plan, parts)))
        starts, ends = self.batch.cu_seqlens[:-1].tolist(), self.batch.cu_seqlens[1:].tolist()
        pieces = {}
        for indices, values in (pair for pairs in gathered for pair in pairs):
            sizes = [ends[index] - starts[index] for index in indices]
            pieces |= dict(zip(indices, values.split(sizes)))
        return torch.cat([pieces[index] for index in range(len(LENGTHS))])

    def update(self, **fields: torch.Tensor) -> dict[str, Any]:
        counts = {"mask": float(self.batch.fields["mask"].sum()), "policy": float(self.batch.fields["mask"].sum())}
        loss = losses.build("policy", ALGORITHM, counts)
        return asdict(self.engine.update(self.microbatches(**fields), loss))

    def weights(self) -> dict[str, torch.Tensor]:
        weights = self.engine.export_weights()
        return {name: value.detach().cpu().clone() for name, value in weights if value is not None}


def shuffled(routes: torch.Tensor) -> torch.Tensor:
    """Every token gets the routes of another one."""
    order = torch.randperm(len(routes), generator=torch.Generator().manual_seed(7))
    return routes[order]


def run(scenario: Scenario, model: Path, place: topologies.Topology) -> dict[str, Any]:
    native, replaying = (Trial(scenario, moe, model, place) for moe in (BALANCED, REPLAYED))
    before = replaying.weights()
    logprobs, routes = native.logprobs(record=True)
    replayed, followed = replaying.logprobs(record=True, **{ROUTES: routes})
    reordered = replaying.logprobs(**{ROUTES: routes.flip(-1)})[0]
    half = torch.where((torch.arange(len(routes)) % 2 == 0)[:, None, None], routes, 0)
    old = {"old_logprobs": logprobs + native.batch.fields["noise"]}
    results = {
        "dispatchers": {
            type(module.token_dispatcher).__name__
            for chunk in native.engine.chunks
            for module in chunk.modules()
            if isinstance(module, MoELayer)
        },
        "logprobs": logprobs,
        "routes": routes,
        "replayed": replayed,
        "followed": followed,
        "reordered": reordered,
        "half": replaying.logprobs(**{ROUTES: half})[0],
        "shuffled": replaying.logprobs(**{ROUTES: shuffled(routes)})[0],
        "native steps": [native.update(**old)],
        "replayed steps": [replaying.update(**old, **{ROUTES: routes})],
        "weights before": before,
        "native weights": native.weights(),
        "replayed weights": replaying.weights(),
    }
    # From here on the weights have moved: native choices drift away from the record, replayed ones do not.
    results["replayed steps"] += [replaying.update(**old, **{ROUTES: routes}) for _ in range(2)]
    results["later routes"] = replaying.logprobs(record=True)[1]
    results["later followed"] = replaying.logprobs(record=True, **{ROUTES: routes})[1]
    results["later weights"] = replaying.weights()
    return results


def run_biased(scenario: Scenario, model: Path, place: topologies.Topology) -> dict[str, Any]:
    """A model with expert biases and shared experts: frozen, and moved after an update (which computes layers twice)."""

    def biases(trial: Trial) -> dict[str, torch.Tensor]:
        return {name: value for name, value in trial.weights().items() if name.endswith(BIAS_NAME)}

    frozen = Trial(scenario, MoeConfig(), model, place)
    moving = Trial(scenario, MoeConfig(load_balancing=LoadBalancing.bias, bias_update_rate=BIAS_RATE), model, place)
    results = {"before": biases(moving)}
    logprobs, routes = moving.logprobs(record=True)
    results |= {"after answers": biases(moving), "routes": routes, "logprobs": logprobs}
    old = {"old_logprobs": logprobs + moving.batch.fields["noise"]}
    results["grad_norm"] = frozen.update(**old)["grad_norm"]
    moving.update(**old)
    results |= {"frozen": biases(frozen), "moved": biases(moving)}
    return results


def main() -> None:
    models, out = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for scenario in SCENARIOS[int(os.environ.get("WORLD_SIZE", "1"))]:
        place = topologies.initialize(ParallelConfig(**scenario.parallel, collective_timeout_s=120.0), seed=1)
        results[scenario.name] = run(scenario, models / "qwen3_moe", place)
        if scenario.name in BIASED:
            results[f"{scenario.name}/bias"] = run_biased(scenario, models / "deepseek_v3", place)
        topologies.destroy()
    if place.rank == 0:
        torch.save(results, out / "results.pt")


if __name__ == "__main__":
    main()
