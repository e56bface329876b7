"""One rank of tests/integration/test_freeze.py: trains critics with frozen tensors in every layout of its world.

Usage: freeze_worker.py MODELS OUT; rank 0 writes OUT/results.pt, a dict by case.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_rl.config.layout import parse_layout
from megatron_rl.config.schema import Dtype, Init, OptimizerConfig, ParallelConfig, Recompute
from megatron_rl.data.batch import PackedBatch
from megatron_rl.parallel.topology import Topology
from megatron_rl.training import losses
from megatron_rl.training.batching import plan_microbatches
from megatron_rl.training.engine import Engine
from tests.integration.engine_worker import ALGORITHM, LENGTHS, make_batch, run_cases

NUM_STEPS = 7
ATTENTION = ("*.self_attn.*",)
FIRST_LAYERS = ("*.embed_tokens.*", "*.layers.0.*", "*.layers.1.*")
"""In a pipeline of two stages all of the first stage of four layers."""
# Weight decay would move a frozen weight that the optimizer knows.
OPTIMIZER = OptimizerConfig(lr=1e-3, weight_decay=0.1, eps=1e-3, max_grad_norm=0.5)


@dataclass(frozen=True)
class Case:
    name: str
    layout: str = "tp1"
    model: str = "qwen3"
    frozen: tuple[str, ...] = ATTENTION
    recompute: Recompute = Recompute.none
    dtype: Dtype = Dtype.float32
    overlaps: bool = False


CASES: dict[int, list[Case]] = {
    1: [
        Case("attention"),
        Case("attention-experts", model="experts"),
        Case("attention-sinks", model="sinks"),
        Case("first-layers", frozen=FIRST_LAYERS),
        Case("first-layers-recompute", frozen=FIRST_LAYERS, recompute=Recompute.full),
    ],
    2: [
        Case("attention-dp2"),
        Case("attention-dp2-overlap", overlaps=True),
        Case("attention-dp2-bfloat16", dtype=Dtype.bfloat16),
        Case("attention-tp2", "tp2"),
        Case("attention-tp2-sp", "tp2+sp"),
        Case("attention-pp2", "pp2"),
        Case("attention-experts-ep2", "ep2", model="experts"),
        Case("attention-sinks-tp2-sp-ep2-etp1", "tp2+sp+ep2+etp1", model="sinks"),
        Case("attention-sinks-pp2-vpp2", "pp2+vpp2", model="sinks"),
        Case("first-layers-pp2", "pp2", frozen=FIRST_LAYERS),
        Case("first-layers-pp2-recompute", "pp2", frozen=FIRST_LAYERS, recompute=Recompute.full),
    ],
}


class Run:
    """A critic, and this rank's share of the batch."""

    def __init__(self, case: Case, models: Path, place: Topology) -> None:
        self.case, self.models, self.place = case, models, place
        self.batch = make_batch()
        self.plan = plan_microbatches(LENGTHS, place.dp_size, 64)[place.dp_rank]
        self.engine = self.new_engine(Init.checkpoint)

    def new_engine(self, init: Init) -> Engine:
        return Engine(
            "critic",
            self.models / self.case.model,
            parallel=parse_layout(self.case.layout, ParallelConfig(collective_timeout_s=120.0))[0],
            topology=self.place,
            optimizer=OPTIMIZER,
            init=init,
            dtype=self.case.dtype,
            recompute=self.case.recompute,
            frozen=self.case.frozen,
            seed=1 if init is Init.checkpoint else 2,
        )

    def update(self, engine: Engine) -> float:
        """One update; the norm of its gradient."""
        microbatches: list[PackedBatch] = [self.batch.select(indices) for indices in self.plan]
        loss = losses.build("critic", ALGORITHM, {"mask": float(self.batch.fields["mask"].sum()), "value": 1.0})
        return engine.update(microbatches, loss).grad_norm

    def weights(self, engine: Engine) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in engine.export_weights() if value is not None}


def run_case(case: Case, models: Path, out: Path, place: Topology) -> dict[str, Any]:
    run, folder = Run(case, models, place), out / case.name
    results: dict[str, Any] = {"before": run.weights(run.engine)}
    norms = [run.update(run.engine) for _ in range(3)]
    results["after 3"] = run.weights(run.engine)
    run.engine.save_state(folder)
    resumed = run.new_engine(Init.random)
    resumed.load_state(folder)
    results["resumed norms"] = [run.update(resumed) for _ in range(3)]
    results["resumed"] = run.weights(resumed)
    norms += [run.update(run.engine) for _ in range(3)]
    results["kept"] = run.weights(run.engine)
    norms += [run.update(run.engine) for _ in range(NUM_STEPS - 6)]
    return {**results, "norms": norms, "after": run.weights(run.engine)}


if __name__ == "__main__":
    run_cases(CASES, run_case)
