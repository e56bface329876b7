"""One rank of tests/integration/test_two_layouts.py: a policy and a critic of different layouts take turns.

Usage: two_layouts_worker.py MODELS OUT, by torchrun or alone. For each case, the ranks do what a T-PPO step does
(values, log-probs, an update of each model); where the case says so they save both models and do it once more from the
files, in another pair of layouts. One rank alone simply goes on. Rank 0 writes OUT/results.pt, by case.
"""

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import torch

from megatron_rl.config.layout import parse_layout
from megatron_rl.config.schema import BatchConfig, Config, CriticConfig, ParallelConfig, PolicyConfig, RunConfig
from megatron_rl.parallel import topology as topologies
from megatron_rl.schedule.run import rl_engines
from megatron_rl.training import losses
from megatron_rl.training.group import TrainerGroup, Worker
from tests.integration.engine_worker import ALGORITHM, OPTIMIZER, make_batch


@dataclasses.dataclass(frozen=True)
class Case:
    model: str
    first: tuple[str, str]
    """Layouts of policy and critic on 4 ranks."""
    then: tuple[str, str] | None = None
    """Those that go on from the files."""


CASES = {
    "dense": Case("dense", ("tp2", "pp2")),
    "experts": Case("experts", ("ep2", "tp2+sp"), ("tp2+sp+ep2", "pp2+vpp2")),
}
TIMEOUT_S = 120.0


def config_of(case: Case, models: Path, layouts: tuple[str, str], seed: int) -> Config:
    base = ParallelConfig(collective_timeout_s=TIMEOUT_S)
    policy, critic = (parse_layout(layout, base)[0] for layout in layouts)
    return Config(
        run=RunConfig(seed=seed),
        policy=PolicyConfig(path=str(models / case.model), optimizer=OPTIMIZER),
        critic=CriticConfig(optimizer=OPTIMIZER, parallel=critic),
        parallel=policy,
        algorithm=ALGORITHM,
        batch=BatchConfig(max_tokens_per_microbatch=64),
    )


def half_step(group: TrainerGroup) -> dict[str, Any]:
    """Values and log-probs of the batch, then an update of each model on them."""
    batch = make_batch()
    values, final_values = group.values(batch)
    logprobs = group.logprobs(batch, temperature=1.0)
    batch.fields["old_logprobs"] = logprobs + batch.fields["noise"]
    counts = losses.policy_denominators(batch, ALGORITHM)
    policy = group.update("policy", batch, objective="policy", denominators=counts)
    critic = group.update("critic", batch, objective="critic", denominators={"mask": counts["mask"]})
    return {
        "values": values,
        "final values": final_values,
        "logprobs": logprobs,
        "policy": (policy.grad_norm, policy.metrics),
        "critic": (critic.grad_norm, critic.metrics),
    }


def step(group: TrainerGroup) -> dict[str, Any]:
    seen = half_step(group)
    for engine in group.engine_names:
        seen[f"weights of {engine}"] = {name: tensor.clone() for name, tensor in group.export_weights(engine)}
    return seen


def drive(group: TrainerGroup, case: Case, folder: Path, *, resumes: bool) -> dict[str, Any]:
    if resumes:
        for engine in group.engine_names:
            group.load_state(engine, str(folder / engine))
    name = "resumed" if resumes else "begun"
    seen = {name: step(group)}
    if case.then and not resumes:
        if is_alone():
            seen["resumed"] = step(group)
        else:
            for engine in group.engine_names:
                group.save_state(engine, str(folder / engine))
    group.stop()
    return seen


def run(case: Case, models: Path, folder: Path, *, resumes: bool = False) -> dict[str, Any]:
    layouts = ("tp1", "tp1") if is_alone() else case.then if resumes else case.first
    # Weights that are not the saved ones: everything has to come from the files.
    config = config_of(case, models, layouts, seed=2 if resumes else 1)
    place = topologies.initialize(config.parallel, seed=1)
    try:
        worker = Worker(config, place, rl_engines(config)(place))
        if place.rank == 0:
            return drive(TrainerGroup(worker), case, folder, resumes=resumes)
        worker.serve()
        return {}
    finally:
        topologies.destroy()


def is_alone() -> bool:
    return os.environ.get("WORLD_SIZE", "1") == "1"


def main() -> None:
    models, out = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    results = {}
    for name, case in CASES.items():
        results[name] = run(case, models, out / name)
        if case.then and not is_alone():
            results[name] |= run(case, models, out / name, resumes=True)
    if os.environ.get("RANK", "0") == "0":
        torch.save(results, out / "results.pt")


if __name__ == "__main__":
    main()
