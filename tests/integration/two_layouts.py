"""A policy and a critic of different layouts take turns: part of the launches of tests/integration/test_engine.py.

For each case the ranks do what a T-PPO step does (values, log-probs, an update of each model) on sequences that they hold
through it, save both models and do it once more from the files, in another pair of layouts. One rank alone simply goes on.
"""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from megatron_rl.config.layout import parse_layout
from megatron_rl.config.schema import (
    BatchConfig,
    Config,
    CriticConfig,
    MoeConfig,
    Offload,
    ParallelConfig,
    PolicyConfig,
    RoutingReplay,
    RunConfig,
)
from megatron_rl.data.batch import PackedBatch
from megatron_rl.parallel import topology as topologies
from megatron_rl.training import losses
from megatron_rl.training.sequence_cache import SequenceCache
from megatron_rl.training.trainer_group import TrainerGroup
from megatron_rl.training.trainer_rank import TrainerRank
from megatron_rl.training.trainer_ranks import rl_engines
from tests.integration.collective_order import recorded
from tests.integration.engine_worker import ALGORITHM, LENGTHS, OPTIMIZER, make_batch


@dataclasses.dataclass(frozen=True)
class Case:
    model: str
    first: tuple[str, str]
    """Layouts of policy and critic on 4 ranks."""
    then: tuple[str, str]
    """Layouts of policy and critic that resume from the files."""
    replay: RoutingReplay = RoutingReplay.none
    """R2: the update follows experts that the ranks recorded, and has noise on the old log-probs; without it, it reads
    log-probs that the ranks have."""


CASES = {
    "dense": Case("qwen2", ("tp2+sp+pp2", "pp2"), ("tp1", "cp2")),
    "experts": Case("experts", ("ep2", "tp2+sp"), ("tp2+sp", "pp2+vpp2+ep2"), RoutingReplay.R2),
}
ONE_RANK = ("tp1", "tp1")
TIMEOUT_S = 120.0


def config_of(case: Case, models: Path, layouts: tuple[str, str], seed: int) -> Config:
    base = ParallelConfig(collective_timeout_s=TIMEOUT_S)
    policy, critic = (parse_layout(layout, base)[0] for layout in layouts)
    # One rank alone, which the others are compared with, keeps both models on its device.
    offload = Offload.never if layouts == ONE_RANK else Offload.always
    return Config(
        run=RunConfig(seed=seed),
        policy=PolicyConfig(
            path=str(models / case.model), optimizer=OPTIMIZER, offload=offload, moe=MoeConfig(routing_replay=case.replay)
        ),
        critic=CriticConfig(optimizer=OPTIMIZER, parallel=critic, offload=offload),
        parallel=policy,
        algorithm=ALGORITHM,
        batch=BatchConfig(max_tokens_per_microbatch=64),
    )


def _half_step(group: TrainerGroup, case: Case) -> dict[str, Any]:
    """Values and log-probs of the batch, then an update of each model on them."""
    batch = dataclasses.replace(make_batch(), ids=tuple(range(100, 100 + len(LENGTHS))))
    replays = case.replay is RoutingReplay.R2
    counts = losses.policy_denominators(batch, ALGORITHM)
    with group.stage(0, "step"):
        group.share_out(batch, {"policy": [batch.ids], "critic": [batch.ids]})
        values, final_values = group.values(batch)
        logprobs = group.logprobs(batch, temperature=1.0, keeps_routes=replays)
        batch.fields["old_logprobs"] = logprobs + batch.fields["noise"] if replays else logprobs
        policy = group.update("policy", batch, objective="policy", denominators=counts)
        critic = group.update("critic", batch, objective="critic", denominators={"mask": counts["mask"]})
    group.release(0)
    return {
        "values": values,
        "final values": final_values,
        "logprobs": logprobs,
        "policy": vars(policy),
        "critic": vars(critic),
    }


def step(group: TrainerGroup, case: Case) -> dict[str, Any]:
    seen = _half_step(group, case)
    for engine in group.engine_names:
        seen[f"weights of {engine}"] = {name: tensor.clone() for name, tensor in group.export_weights(engine)}
    return seen


def run_cases(models: Path, out: Path, *, num_ranks: int) -> dict[str, dict[str, Any]]:
    """Case -> "begun" and "resumed" -> what rank 0 saw; nothing on the others."""
    found = {}
    for name, case in CASES.items():
        if num_ranks == 1:
            found[name] = _run(case, models, ONE_RANK, lambda group, case=case: {"begun": step(group, case), "resumed": step(group, case)})
            continue

        def begin(group: TrainerGroup, folder: Path = out / name, case: Case = case) -> dict[str, Any]:
            seen = {"begun": step(group, case)}
            for engine in group.engine_names:
                group.save_state(engine, str(folder / engine))
            return seen

        def go_on(group: TrainerGroup, folder: Path = out / name, case: Case = case) -> dict[str, Any]:
            for engine in group.engine_names:
                group.load_state(engine, str(folder / engine))
            return {"resumed": step(group, case)}

        # Fresh value heads come from the seed: the resumed ones must get theirs from the file.
        begun = _recorded_run(out, name, "begun", case, models, case.first, begin)
        found[name] = begun | _recorded_run(out, name, "resumed", case, models, case.then, go_on, seed=2)
    return found


def received_file(out: Path, name: str, part: str, rank: int) -> Path:
    """The numbers of the sequences that a rank got in one part of a case, by layout."""
    return out / f"received-{name}-{part}-{rank}.pt"


def calls_file(out: Path, name: str, part: str, rank: int) -> Path:
    """The collectives of a rank in one part of a case."""
    return out / f"calls-{name}-{part}-{rank}.pt"


def _recorded_run(out: Path, name: str, part: str, *args: Any, **options: Any) -> dict[str, Any]:
    received: dict[int, list[int]] = {}
    take = SequenceCache.take

    def noting(held: SequenceCache, payload: dict[str, Any], fields: dict[str, int]) -> list[PackedBatch]:
        received.setdefault(id(held), []).extend(payload["new"].tolist() if "new" in payload else [])
        return take(held, payload, fields)

    with recorded() as calls, patch.object(SequenceCache, "take", noting):
        seen = _run(*args, **options)
    rank = int(os.environ["RANK"])
    torch.save([tuple(call) for call in calls], calls_file(out, name, part, rank))
    torch.save(list(received.values()), received_file(out, name, part, rank))
    return seen


def _run(
    case: Case,
    models: Path,
    layouts: tuple[str, str],
    drive: Callable[[TrainerGroup], dict[str, Any]],
    *,
    seed: int = 1,
) -> dict[str, Any]:
    config = config_of(case, models, layouts, seed=seed)
    place = topologies.initialize(config.parallel, seed=1)
    try:
        worker = TrainerRank(config, place, rl_engines(config)(place))
        if place.rank != 0:
            worker.serve()
            return {}
        group = TrainerGroup(worker)
        seen = drive(group)
        group.stop()
        return seen
    finally:
        topologies.destroy()
