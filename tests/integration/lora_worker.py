"""One rank of tests/integration/test_lora.py: trains adapters in every layout of its world.

Usage: lora_worker.py MODELS OUT; rank 0 writes OUT/results.pt, a dict by case. MODELS has a folder for each model of the cases.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from megatron_rl.config.layout import parse_layout
from megatron_rl.config.schema import Dtype, Init, LoraConfig, MoeConfig, OptimizerConfig, ParallelConfig, Recompute
from megatron_rl.families.parameters import Role
from megatron_rl.parallel.topology import Topology
from megatron_rl.training import losses
from megatron_rl.training.batching import plan_microbatches
from megatron_rl.training.engine import Engine
from tests.integration.engine_worker import ALGORITHM, LENGTHS, make_batch, run_cases

OPTIMIZER = OptimizerConfig(lr=1e-2, weight_decay=0.1, eps=1e-3, max_grad_norm=0.5)
LORA = LoraConfig(rank=4, alpha=8.0)
PARTIAL = replace(LORA, targets=["q_proj", "layers.1.mlp.up_proj", "o_proj"], rslora=True)
EXPERTS = replace(LORA, targets=["all-linear", "experts.*"])


@dataclass(frozen=True)
class Case:
    name: str
    layout: str = "tp1"
    model: str = "qwen3"
    lora: LoraConfig = field(default_factory=lambda: LORA)
    role: Role = "policy"
    shares: bool = False
    """A critic on the weights of a policy that trains beside it."""
    recompute: Recompute = Recompute.none
    dtype: Dtype = Dtype.float32
    overlaps: bool = False


CASES: dict[int, list[Case]] = {
    1: [
        Case("all"),
        Case("critic", role="critic"),
        Case("critic-shared", role="critic", shares=True),
        Case("partial", lora=PARTIAL, recompute=Recompute.full),
        Case("experts", model="experts", lora=EXPERTS),
        Case("latent", model="latent", lora=EXPERTS),
        Case("dropout", lora=replace(LORA, dropout=0.5)),
        Case("tied", model="tied"),
        Case("scaled", model="scaled"),
        Case("shared", model="latent"),
        Case("sinks", model="sinks"),
    ],
    2: [
        Case("all-dp2-overlap", overlaps=True),
        Case("all-tp2", "tp2"),
        Case("all-tp2-sp", "tp2+sp"),
        Case("all-pp2", "pp2"),
        Case("all-pp2-vpp2", "pp2+vpp2"),
        Case("all-cp2", "cp2"),
        Case("all-bfloat16", "tp2+sp", dtype=Dtype.bfloat16),
        Case("critic-tp2-sp", "tp2+sp", role="critic"),
        Case("critic-shared-tp2-sp", "tp2+sp", role="critic", shares=True),
        Case("partial-tp2", "tp2", lora=PARTIAL),
        Case("partial-pp2", "pp2", lora=PARTIAL, recompute=Recompute.full),
        Case("experts-ep2", "ep2", model="experts", lora=EXPERTS),
        Case("experts-tp2-sp-ep2-etp1", "tp2+sp+ep2+etp1", model="experts", lora=EXPERTS),
        Case("latent-tp2-sp-ep2-etp1", "tp2+sp+ep2+etp1", model="latent", lora=EXPERTS),
        Case("latent-pp2", "pp2", model="latent", lora=EXPERTS),
        Case("sinks-tp2-sp-ep2-etp1", "tp2+sp+ep2+etp1", model="sinks"),
        Case("sinks-pp2-vpp2", "pp2+vpp2", model="sinks"),
        Case("dropout-tp2-sp", "tp2+sp", lora=replace(LORA, dropout=0.5)),
    ],
}


class Run:
    """An engine with adapters, and this rank's share of the batch."""

    def __init__(self, case: Case, models: Path, place: Topology) -> None:
        self.case, self.models, self.place = case, models, place
        self.batch = make_batch()
        self.plan = plan_microbatches(LENGTHS, place.dp_size, 64)[place.dp_rank]
        self.base: Engine | None = None
        self.base = self.new_engine(seed=1, role="policy") if case.shares else None
        self.engine = self.new_engine(seed=1)

    def new_engine(self, seed: int, lora: LoraConfig | None = None, folder: Path | None = None, role: Role | None = None) -> Engine:
        return Engine(
            role or self.case.role,
            folder or self.models / self.case.model,
            parallel=parse_layout(self.case.layout, ParallelConfig(collective_timeout_s=120.0))[0],
            topology=self.place,
            optimizer=OPTIMIZER,
            init=Init.checkpoint,
            dtype=self.case.dtype,
            recompute=self.case.recompute,
            lora=lora or self.case.lora,
            base=self.base,
            seed=seed,
        )

    def microbatches(self) -> list:
        return [self.batch.select(indices) for indices in self.plan]

    def update(self, engine: Engine) -> float:
        """One update; the norm of its gradient."""
        denominators = {"mask": float(self.batch.fields["mask"].sum()), "value": 1.0}
        if self.base is not None:
            self.base.update(self.microbatches(), losses.build("sft", ALGORITHM, denominators))
        objective = "critic" if self.case.role == "critic" else "sft"
        return engine.update(self.microbatches(), losses.build(objective, ALGORITHM, denominators)).grad_norm

    def weights(self, engine: Engine) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in engine.export_weights() if value is not None}

    def adapters(self, engine: Engine) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in engine.export_adapters().items()}

    def logprobs(self, engine: Engine) -> list[torch.Tensor]:
        """Log-probs of this rank's sequences, in the order of the batch."""
        parts = []
        for indices, found in zip(self.plan, engine.logprobs(self.microbatches()), strict=False):
            parts += zip(indices, found.split([LENGTHS[index] for index in indices]), strict=True)
        return [part for _, part in sorted(parts, key=lambda pair: pair[0])]


def storages(engine: Engine) -> dict[int, int]:
    """Bytes of the storages of the weights."""
    found = (p.untyped_storage() for chunk in engine.chunks for p in chunk.parameters())
    return {one._cdata: one.nbytes() for one in found}


def run_case(case: Case, models: Path, out: Path, place: Topology) -> dict[str, Any]:
    run, folder = Run(case, models, place), out / case.name
    engine = run.engine
    results: dict[str, Any] = {"before": run.weights(engine), "start": run.adapters(engine)}
    results["norms"] = [run.update(engine) for _ in range(3)]
    results |= {"after 3": run.adapters(engine), "merged 3": run.weights(engine)}
    if case.role == "policy":
        results |= {"logprobs": run.logprobs(engine), "reference": run.logprobs(engine.as_base(MoeConfig()))}
    engine.save_state(folder)
    resumed = run.new_engine(seed=1 if case.lora.dropout else 2)
    # The base model comes from the model's folder, not from the checkpoint.
    resumed.load_state(folder)
    results["resumed norms"] = [run.update(resumed) for _ in range(2)]
    results["resumed"] = run.adapters(resumed)
    results["norms"] += [run.update(engine) for _ in range(2)]
    results["kept"] = run.adapters(engine)
    engine.save_hf(out / f"{case.name}-hf")
    if case.role == "policy":
        started = run.new_engine(seed=3, lora=replace(case.lora, path=str(out / f"{case.name}-hf" / "adapter")))
        results |= {"started": run.adapters(started), "final": run.weights(engine)}
    results["checkpoint bytes"] = sum(file.stat().st_size for file in folder.iterdir())
    own, shared = ({} if one is None else storages(one) for one in (engine, run.base))
    results["own bytes"] = sum(size for key, size in own.items() if key not in shared)
    results["state"] = sum(p.numel() for chunk in engine.chunks for p in chunk.parameters() if p.requires_grad)
    return results


if __name__ == "__main__":
    run_cases(CASES, run_case)
