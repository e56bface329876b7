"""One rank of tests/integration/test_engine.py: runs every scenario that fits its world, writes one file of results.

Usage: engine_worker.py MODELS OUT, by torchrun or alone. MODELS holds the folders qwen2, qwen3-tied, latent (latent
attention and experts) and experts; rank 0 writes OUT/results.pt, a dict by scenario and objective.
"""

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megatron_rl.config.layout import parse_layout
from megatron_rl.config.schema import (
    AlgorithmConfig,
    DecayStyle,
    Dtype,
    Init,
    OptimizerConfig,
    ParallelConfig,
    Recompute,
)
from megatron_rl.data.batch import PackedBatch, cu_seqlens_of
from megatron_rl.parallel import collectives
from megatron_rl.parallel import topology as topologies
from megatron_rl.training import ddp, losses, model_checkpoint
from megatron_rl.training.batching import plan_microbatches
from megatron_rl.training.engine import Engine, UpdateResult
from megatron_rl.training.model_checkpoint import CheckpointSaveError

LENGTHS = [9, 17, 33, 6, 21, 12, 40, 8, 26, 15]
PROMPT_TOKENS = 4
ALGORITHM = AlgorithmConfig(entropy_coef=0.01, positive_lm_coef=0.1)
# k-projection biases have a gradient of 0 but for rounding; a small eps would blow the rounding up to a full step.
OPTIMIZER = OptimizerConfig(
    lr=1e-3, min_lr=1e-4, warmup_steps=2, decay_style=DecayStyle.cosine, decay_steps=10, eps=1e-3, max_grad_norm=0.5
)
OBJECTIVES = {"policy": "policy", "critic": "critic", "sft": "policy"}
"""Objective -> role of the engine."""


@dataclass(frozen=True)
class Scenario:
    name: str
    layout: str = "tp1"
    max_tokens: int = 1000
    recompute: Recompute = Recompute.none
    model: str = "qwen2"
    all_on_first_rank: bool = False
    """Every other data-parallel rank runs empty micro-batches only."""
    masked_rows: int = 0
    """Further sequences with all masks 0."""
    objectives: tuple[str, ...] = tuple(OBJECTIVES)
    dtype: Dtype = Dtype.float32
    overlaps: bool = False
    """Gradients and weights travel in small buckets while the ranks compute, as on GPUs."""


SCENARIOS: dict[int, list[Scenario]] = {
    1: [
        Scenario("reference"),
        Scenario("reference-tied", model="qwen3-tied", objectives=("policy", "critic")),
        Scenario("reference-latent", model="latent", objectives=("policy",)),
        Scenario("split", max_tokens=48),
        Scenario("one-each", max_tokens=1, objectives=("policy",)),
        Scenario("recompute", recompute=Recompute.full),
        Scenario("selective", recompute=Recompute.selective, objectives=("policy",)),
        Scenario("selective-latent", model="latent", recompute=Recompute.selective, objectives=("policy",)),
        Scenario("masked-rows", masked_rows=3),
    ],
    2: [
        Scenario("dp2"),
        Scenario("dp2-split", max_tokens=48),
        Scenario("dp2-empty", all_on_first_rank=True, max_tokens=64),
        Scenario("dp2-overlap", max_tokens=48, overlaps=True),
        Scenario("tp2", "tp2"),
        Scenario("tp2-tied", "tp2", model="qwen3-tied", objectives=("policy", "critic")),
        Scenario("tp2-sp", "tp2+sp", max_tokens=48),
        Scenario("tp2-sp-recompute", "tp2+sp", recompute=Recompute.full, objectives=("policy",)),
        Scenario("tp2-sp-selective", "tp2+sp", recompute=Recompute.selective, objectives=("policy",)),
        Scenario("cp2-latent-selective", "cp2", model="latent", recompute=Recompute.selective, objectives=("policy",)),
        Scenario("cp2-latent", "cp2", model="latent", max_tokens=48, objectives=("policy",)),
        Scenario("pp2", "pp2", max_tokens=48),
        Scenario("pp2-tied", "pp2", model="qwen3-tied", max_tokens=48, objectives=("policy", "critic")),
    ],
    4: [
        Scenario("dp4", max_tokens=64, objectives=("policy", "critic")),
        Scenario("tp2-dp2", "tp2", max_tokens=48),
        Scenario("tp2-sp-pp2", "tp2+sp+pp2", max_tokens=48, objectives=("policy", "critic")),
        Scenario("tp2-sp-cp2-latent", "tp2+sp+cp2", model="latent", max_tokens=48, objectives=("policy",)),
        Scenario("pp2-dp2-empty", "pp2", all_on_first_rank=True, max_tokens=64, objectives=("policy",)),
        Scenario("pp2-dp2-overlap", "pp2", max_tokens=48, overlaps=True, objectives=("policy", "critic")),
    ],
}

RESUMED: dict[int, list[Scenario]] = {
    1: [Scenario("resume")],
    2: [
        Scenario("dp2", max_tokens=48),
        Scenario("tp2-sp", "tp2+sp"),
        Scenario("dp2-overlap", max_tokens=48, overlaps=True),
    ],
    4: [],
}
RESHARDED: dict[int, list[Scenario]] = {1: [], 2: RESUMED[2][:2], 4: [Scenario("tp2-pp2", "tp2+pp2", max_tokens=48)]}
POISONED: dict[int, list[Scenario]] = {1: RESUMED[1], 2: RESUMED[2], 4: RESHARDED[4]}

DRIFTS: dict[int, list[Scenario]] = {
    1: [Scenario("experts", model="experts")],
    2: [Scenario("experts-bfloat16", "ep2", model="experts", dtype=Dtype.bfloat16, overlaps=True)],
    4: [],
}
"""Many small steps, in float32 and with bfloat16 weights."""
DRIFT = OptimizerConfig(lr=3e-4, weight_decay=0.0)
NUM_DRIFT_STEPS = 16


def make_batch(masked_rows: int = 0) -> PackedBatch:
    """Ten sequences with every field that an objective reads; the first has its mask at 0 but for the LM loss."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.tensor(LENGTHS)
    total = int(lengths.sum())
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    sequence = torch.repeat_interleave(torch.arange(len(LENGTHS)), lengths)
    response = positions >= PROMPT_TOKENS
    fields = {
        "mask": response & (sequence != 0),
        "lm_mask": response & (sequence % 3 == 0),
        "advantages": torch.randn(total, generator=generator),
        "noise": 0.2 * torch.randn(total, generator=generator),
        "returns": torch.randn(total, generator=generator),
        "old_values": 0.5 * torch.randn(total, generator=generator),
    }
    tokens = torch.randint(3, 128, (total,), generator=generator)
    extra = torch.tensor([11 + 7 * row for row in range(masked_rows)], dtype=torch.int64)
    masked = {"mask": False, "lm_mask": False}
    return PackedBatch(
        tokens=torch.cat([tokens, torch.randint(3, 128, (int(extra.sum()),), generator=generator)]),
        cu_seqlens=cu_seqlens_of(torch.cat([lengths, extra])),
        fields={
            name: torch.cat([values, torch.full((int(extra.sum()),), masked.get(name, 2.0), dtype=values.dtype)])
            for name, values in fields.items()
        },
    )


class Trial:
    """One scenario and objective on this rank: an engine and this rank's share of the batch."""

    def __init__(self, scenario: Scenario, objective: str, models: Path, place: topologies.Topology) -> None:
        self.role = OBJECTIVES[objective]
        self.objective = objective
        self.place = place
        self.engine = self.new_engine(scenario, models, Init.checkpoint)
        self.batch = make_batch(scenario.masked_rows)
        lengths = self.batch.lengths.tolist()
        num_planned = 1 if scenario.all_on_first_rank else place.dp_size
        plan = plan_microbatches(lengths, num_planned, scenario.max_tokens)
        plan += [[[] for _ in plan[0]] for _ in range(place.dp_size - num_planned)]
        self.plan = plan[place.dp_rank]
        self.answers_at_start, self.final_values_at_start = self.answers()
        self.batch.fields["old_logprobs"] = self.answers_at_start + self.batch.fields["noise"]

    def new_engine(self, scenario: Scenario, models: Path, init: Init) -> Engine:
        return Engine(
            self.role,
            models / scenario.model,
            parallel=parallel_of(scenario),
            topology=self.place,
            optimizer=OPTIMIZER,
            init=init,
            recompute=scenario.recompute,
            # A fresh value head comes from the seed: the resumed engine must get it from the checkpoint.
            seed=1 if init is Init.checkpoint else 2,
        )

    def microbatches(self) -> list[PackedBatch]:
        return [self.batch.select(indices) for indices in self.plan]

    def loss(self) -> losses.LossFunction:
        names = [name for name in ("mask", "lm_mask") if name == "mask" or self.objective == "policy"]
        counted = {name: float(self.batch.fields[name].sum()) for name in names}
        if self.objective == "policy":
            counted = losses.policy_denominators(self.batch, ALGORITHM)
        return losses.build(self.objective, ALGORITHM, counted)

    def update(self, engine: Engine | None = None, *, keeps_logprobs: bool = False) -> UpdateResult:
        return (engine or self.engine).update(self.microbatches(), self.loss(), keeps_logprobs=keeps_logprobs)

    def first_update(self) -> tuple[UpdateResult, list[bool]]:
        """Update a model. For a policy, also compare its log-probs with the previous pass bit for bit, by micro-batch."""
        result, same = self.update(keeps_logprobs=self.role == "policy"), []
        if self.role == "policy":
            pairs = zip(self.answered, self.engine.pop_logprobs(), strict=True)
            same = [torch.equal(answer, own) for answer, own in pairs]
        gathered: list[Any] = [None] * self.place.world_size
        dist.all_gather_object(gathered, same)
        return result, [is_same for rank in gathered for is_same in rank]

    def answers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probs or values [T], final values [N] or none) of the whole batch; on every rank."""
        engine, microbatches = self.engine, self.microbatches()
        results = engine.logprobs(microbatches) if self.role == "policy" else engine.values(microbatches)
        self.answered = results
        mine = list(zip(self.plan, results)) if engine.is_output_rank else []
        gathered: list[Any] = [None] * self.place.world_size
        dist.all_gather_object(gathered, mine)
        starts, ends = self.batch.cu_seqlens[:-1].tolist(), self.batch.cu_seqlens[1:].tolist()
        tokens = torch.full((len(self.batch.tokens),), torch.nan)
        finals = torch.full((self.batch.num_sequences if self.role == "critic" else 0,), torch.nan)
        for indices, result in (pair for pairs in gathered for pair in pairs):
            per_token, per_sequence = result if self.role == "critic" else (result, None)
            rows = [row for index in indices for row in range(starts[index], ends[index])]
            tokens[rows] = per_token.cpu()
            if per_sequence is not None:
                finals[indices] = per_sequence.cpu()
        return tokens, finals

    def weights(self, engine: Engine | None = None) -> dict[str, torch.Tensor]:
        """Weights by Hugging Face name, on rank 0."""
        weights = (engine or self.engine).export_weights()
        return {name: value.detach().cpu().clone() for name, value in weights if value is not None}


def set_overlap(overlaps: bool) -> None:
    ddp._can_overlap = lambda chunks: overlaps
    ddp._BUCKET_SIZE = 2000 if overlaps else None


def run_cases(cases: Mapping[int, Sequence[Any]], run_case: Callable[[Any, Path, Path, topologies.Topology], Any]) -> None:
    """Run the cases of this number of ranks, each in its layout; the arguments are MODELS and OUT, and rank 0 writes OUT/results.pt."""
    models, out = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    results = {}
    for case in cases[int(os.environ.get("WORLD_SIZE", "1"))]:
        set_overlap(case.overlaps)
        place = topologies.initialize(parse_layout(case.layout, ParallelConfig(collective_timeout_s=120.0))[0], seed=1)
        results[case.name] = run_case(case, models, out, place)
        topologies.destroy()
    if place.rank == 0:
        torch.save(results, out / "results.pt")


def parallel_of(scenario: Scenario) -> ParallelConfig:
    return parse_layout(scenario.layout, ParallelConfig(collective_timeout_s=120.0))[0]


def run_invariance(scenario: Scenario, objective: str, models: Path, place: topologies.Topology) -> dict[str, Any]:
    trial = Trial(scenario, objective, models, place)
    first, are_same = trial.first_update()
    return {
        "answers": trial.answers_at_start,
        "final values": trial.final_values_at_start,
        "own log-probs": are_same,
        "steps": [dataclasses.asdict(step) for step in (first, trial.update())],
        "weights": trial.weights(),
    }


def run_resumed(scenario: Scenario, models: Path, out: Path, place: topologies.Topology) -> dict[str, Any]:
    """The uninterrupted run, and the run that stopped after a step and resumed from the file."""
    results = {}
    for role in ("policy", "critic"):
        trial = Trial(scenario, role, models, place)
        folder = out / f"checkpoint-{role}-{scenario.name}"
        trial.update()
        trial.engine.start_save(folder, in_background=True)
        kept = [dataclasses.asdict(trial.update())]  # while the files are written
        trial.engine.finish_save()
        resumed = trial.new_engine(scenario, models, Init.random)
        resumed.load_state(folder)
        results[role] = {
            "kept": [*kept, dataclasses.asdict(trial.update())],
            "resumed": [dataclasses.asdict(trial.update(resumed)) for _ in range(2)],
            "kept weights": trial.weights(),
            "resumed weights": trial.weights(resumed),
            "full disk": save_to_full_disk(resumed, folder, place),
        }
    return results


def save_to_full_disk(engine: Engine, folder: Path, place: topologies.Topology) -> list[str]:
    """Each rank's error when the last rank cannot write its files, and whether the previous checkpoint still loads."""

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    said = ""
    with pytest.MonkeyPatch.context() as patch:
        if place.rank == place.world_size - 1:
            patch.setattr(model_checkpoint, "_write_file", full)
        try:
            engine.save_state(folder)
        except CheckpointSaveError as error:
            said = str(error)
    engine.load_state(folder)
    return collectives.gather_objects(said)


def run_drift(scenario: Scenario, models: Path, place: topologies.Topology) -> dict[str, Any]:
    """Weights before and after NUM_DRIFT_STEPS of sft, and the loss of each."""
    engine = Engine(
        "policy",
        models / scenario.model,
        parallel=parallel_of(scenario),
        topology=place,
        optimizer=DRIFT,
        dtype=scenario.dtype,
    )
    batch = make_batch()
    plan = plan_microbatches(LENGTHS, place.dp_size, scenario.max_tokens)[place.dp_rank]
    loss = losses.build("sft", ALGORITHM, {"mask": float(batch.fields["mask"].sum())})
    weights, found = [], []
    for step in range(NUM_DRIFT_STEPS + 1):
        if step in (0, NUM_DRIFT_STEPS):
            weights.append({name: w.detach().float().clone() for name, w in engine.export_weights() if w is not None})
        if step < NUM_DRIFT_STEPS:
            total, count = engine.update([batch.select(indices) for indices in plan], loss).metrics["lm_loss"]
            found.append(total / count)
    return {"before": weights[0], "after": weights[1], "losses": found}


def run_resharded(scenario: Scenario, models: Path, single: Path, place: topologies.Topology) -> dict[str, Any]:
    """Continue in this layout from the checkpoint that one process wrote."""
    results = {}
    for role in ("policy", "critic"):
        trial = Trial(scenario, role, models, place)
        trial.engine = trial.new_engine(scenario, models, Init.random)
        trial.engine.load_state(single / f"checkpoint-{role}-resume")
        results[role] = {"resumed": [dataclasses.asdict(trial.update()) for _ in range(2)], "weights": trial.weights()}
    return results


def run_poisoned(scenario: Scenario, models: Path, place: topologies.Topology) -> dict[str, Any]:
    """A step on a NaN loss of one rank between two good ones, beside a run without it."""
    disturbed, calm = (Trial(scenario, "policy", models, place) for _ in range(2))

    def poisoned(outputs: Any, batch: PackedBatch) -> Any:
        factor = torch.nan if place.dp_rank == place.dp_size - 1 else 1.0
        return outputs["logprobs"].sum() * factor, {}

    first = disturbed.update()
    calm.update()
    before = disturbed.weights()
    skipped = disturbed.engine.update(disturbed.microbatches(), poisoned)
    after = disturbed.weights()
    return {
        "first": dataclasses.asdict(first),
        "skipped": dataclasses.asdict(skipped),
        "weights before": before,
        "weights after": after,
        "disturbed": dataclasses.asdict(disturbed.update()),
        "calm": dataclasses.asdict(calm.update()),
        "disturbed weights": disturbed.weights(),
        "calm weights": calm.weights(),
    }


def main() -> None:
    from tests.integration import two_layouts  # which needs the names above

    models, out = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    single = out.parent / "ranks1"
    runs: list[tuple[str, Scenario, Callable[[topologies.Topology], Any]]] = []
    for scenario in SCENARIOS[world_size]:
        for objective in scenario.objectives:
            runs.append((objective, scenario, partial(run_invariance, scenario, objective, models)))
    runs += [("resumed", scenario, partial(run_resumed, scenario, models, out)) for scenario in RESUMED[world_size]]
    for scenario in RESHARDED[world_size]:
        runs.append(("resharded", scenario, partial(run_resharded, scenario, models, single)))
    runs += [("poisoned", scenario, partial(run_poisoned, scenario, models)) for scenario in POISONED[world_size]]
    runs += [("drift", scenario, partial(run_drift, scenario, models)) for scenario in DRIFTS[world_size]]
    results: dict[str, Any] = {}
    # The plan says all shapes: stages that tell each other would fail here.
    P2PCommunicator._communicate_shapes = None
    for kind, scenario, run in runs:
        set_overlap(scenario.overlaps)
        place = topologies.initialize(parallel_of(scenario), seed=1)
        results[f"{scenario.name}/{kind}"] = run(place)
        topologies.destroy()
    if world_size in (1, 4):
        results["two layouts"] = two_layouts.run_cases(models, out, num_ranks=world_size)
    if place.rank == 0:
        torch.save(results, out / "results.pt")


if __name__ == "__main__":
    main()
