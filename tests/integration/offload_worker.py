"""One rank of tests/integration/test_offload.py: the same steps with models that wait in host memory and with such that stay.

Usage: offload_worker.py MODELS OUT, by torchrun. Rank 0 writes OUT/results.pt: case -> offload -> what was seen.
"""

import itertools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron_rl.config.layout import parse_layout
from megatron_rl.config.schema import (
    AlgorithmConfig,
    BatchConfig,
    Config,
    CriticConfig,
    Dtype,
    KlConfig,
    KlPlace,
    LoraConfig,
    Offload,
    ParallelConfig,
    PolicyConfig,
    RunConfig,
)
from megatron_rl.parallel import topology as topologies
from megatron_rl.training import losses, trainer_rank
from megatron_rl.training.engine import Engine
from megatron_rl.training.optimizer import state_tensors
from megatron_rl.training.trainer_group import TrainerGroup
from megatron_rl.training.trainer_rank import TrainerRank
from megatron_rl.training.trainer_ranks import rl_engines
from tests.integration.engine_worker import OPTIMIZER, make_batch

ALGORITHM = AlgorithmConfig(advantage="egae", kl=KlConfig(place=KlPlace.loss, coef=0.1))


@dataclass(frozen=True)
class Case:
    layout: str
    model: str = "qwen2"
    dtype: Dtype = Dtype.float32
    lora: LoraConfig = field(default_factory=LoraConfig)


CASES = {
    "tp2": Case("tp2+sp"),
    "pp2": Case("pp2", model="tied", dtype=Dtype.bfloat16),
    "ep2": Case("ep2", model="experts", dtype=Dtype.bfloat16),
    "adapters": Case("tp2+sp", lora=LoraConfig(rank=4)),
}
"""On 2 ranks."""


def config_of(case: Case, models: Path, offload: Offload, seed: int) -> Config:
    return Config(
        run=RunConfig(seed=seed),
        policy=PolicyConfig(path=str(models / case.model), optimizer=OPTIMIZER, dtype=case.dtype, offload=offload, lora=case.lora),
        critic=CriticConfig(optimizer=OPTIMIZER, dtype=case.dtype, offload=offload, lora=case.lora),
        parallel=parse_layout(case.layout, ParallelConfig(collective_timeout_s=120.0))[0],
        algorithm=ALGORITHM,
        batch=BatchConfig(max_tokens_per_microbatch=64),
    )


class Watch:
    """Device memory of this rank's engines: in every pass of a model, and when the servers get the device."""

    def __init__(self) -> None:
        self.engines: dict[str, Engine] = {}
        self.seen: list[tuple[str, dict[str, dict[str, int]]]] = []
        """(what went on, engine -> component -> bytes)"""

    @contextmanager
    def looking(self) -> Iterator[None]:
        schedule, free = Engine._schedule, trainer_rank.free_cached_memory

        def watched_schedule(engine: Engine, *arguments: Any, **options: Any) -> Any:
            name = next(name for name, other in self.engines.items() if other is engine)
            self.look(f"{name} {'answers' if options['forward_only'] else 'trains'}")
            return schedule(engine, *arguments, **options)

        def watched_free() -> None:
            self.look("servers generate")
            free()

        with (
            mock.patch.object(Engine, "_schedule", watched_schedule),
            mock.patch.object(trainer_rank, "free_cached_memory", watched_free),
        ):
            yield

    def look(self, what: str) -> None:
        self.seen.append((what, {name: device_bytes(engine) for name, engine in self.engines.items()}))


def device_bytes(engine: Engine) -> dict[str, int]:
    """Bytes in an engine's storages, by component, without weights that belong to another engine."""
    replicas = engine._replicas if engine._optimizer else []
    base = engine.memory.base
    buffers = [buffer for replica in replicas for buffer in (*replica.buffers, *replica.expert_parallel_buffers)]
    components = {
        "weights": [parameter.data for chunk in engine.chunks for parameter in chunk.parameters()],
        "gradients": [buffer.grad_data for buffer in buffers],
        "optimizer": list(state_tensors(engine._optimizer)) if engine._optimizer else [],
    }
    storages = {
        name: {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
        for name, tensors in components.items()
    }
    others = base._weights._storages() if base else {}
    storages["weights"] = {key: size for key, size in storages["weights"].items() if key not in others}
    # Main parameters of a float32 model are its weights.
    storages["optimizer"] = {key: size for key, size in storages["optimizer"].items() if key not in storages["weights"]}
    return {name: sum(sizes.values()) for name, sizes in storages.items()}


def step(group: TrainerGroup) -> dict[str, Any]:
    """All passes of a step."""
    batch = make_batch()
    seen: dict[str, Any] = {}
    seen["values"], seen["final values"] = group.values(batch)
    seen["logprobs"] = group.logprobs(batch, temperature=1.0)
    seen["reference"] = group.logprobs(batch, temperature=1.0, engine="reference")
    batch.fields["old_logprobs"] = seen["logprobs"] + batch.fields["noise"]
    batch.fields["reference_logprobs"] = seen["reference"]
    batch.fields["kl_coefs"] = torch.full_like(seen["reference"], 0.1)
    counts = losses.policy_denominators(batch, ALGORITHM)
    for _ in range(2):
        seen["critic"] = vars(group.update("critic", batch, objective="critic", denominators={"mask": counts["mask"]}))
    seen["policy"] = vars(group.update("policy", batch, objective="policy", denominators=counts))
    group.free_memory()
    # A publish of a model that is out; this rank is asked for room in its middle.
    weights = group.export_weights("policy")
    seen["weights"] = {name: tensor.clone() for name, tensor in itertools.islice(weights, 1)}
    group.driver.offload_others("")
    seen["weights"] |= {name: tensor.clone() for name, tensor in weights}
    group.free_memory()
    seen["critic weights"] = {name: tensor.clone() for name, tensor in group.export_weights("critic")}
    return seen


def run_case(case: Case, models: Path, offload: Offload, folder: Path) -> dict[str, Any]:
    """Two steps; with offload, also the second step repeated by new engines from the files."""

    def begin(group: TrainerGroup) -> dict[str, Any]:
        seen = {"first": step(group)}
        for name in ("policy", "critic") if offload is Offload.always else ():
            group.save_state(name, str(folder / name))
        return seen | {"second": step(group)}

    def go_on(group: TrainerGroup) -> dict[str, Any]:
        for name in ("policy", "critic"):
            group.load_state(name, str(folder / name))
        return {"resumed": step(group)}

    found = _run(case, models, offload, begin, seed=1)
    if offload is Offload.always:
        # Fresh value heads come from the seed: the resumed ones must get theirs from the file.
        found |= _run(case, models, offload, go_on, seed=2)
    return found


def _run(case: Case, models: Path, offload: Offload, drive: Any, *, seed: int) -> dict[str, Any]:
    config = config_of(case, models, offload, seed)
    place = topologies.initialize(config.parallel, seed=1)
    watch, seen = Watch(), {}
    try:
        worker = TrainerRank(config, place, rl_engines(config)(place))
        watch.engines = dict(worker.engines)
        watch.look("all are built")
        with watch.looking():
            if place.rank == 0:
                group = TrainerGroup(worker)
                seen = drive(group)
                group.stop()
            else:
                worker.serve()
        watches: list[Any] = [None] * place.world_size
        dist.all_gather_object(watches, watch.seen)
        return seen | {"held": watches}
    finally:
        topologies.destroy()


def main() -> None:
    models, out = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    results = {
        name: {
            offload.value: run_case(case, models, offload, out / f"{name}-{offload.value}")
            for offload in (Offload.always, Offload.never)
        }
        for name, case in CASES.items()
    }
    if os.environ["RANK"] == "0":
        torch.save(results, out / "results.pt")


if __name__ == "__main__":
    main()
