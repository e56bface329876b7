"""Run on two ranks by ``test_vision.py``: updates on images that lie unevenly, with frozen parts, and a checkpoint.

argv: a model folder and a folder that receives ``results.pt``: names of runs and their weights after one update.
"""

import sys
from typing import Any

import torch
from torch import Tensor

from megatron_rl.config.schema import AlgorithmConfig, OptimizerConfig, ParallelConfig, VisionConfig
from megatron_rl.parallel import topology as topologies
from megatron_rl.training import losses
from megatron_rl.training.engine import Engine
from tests.vision_batches import make_vision_batch

OPTIMIZER = OptimizerConfig(lr=100.0, eps=100.0, weight_decay=0.0, max_grad_norm=0.0, warmup_steps=0)
"""A step that is linear in the gradient."""
PLANS: dict[str, list[list[list[int]]]] = {
    # rank -> micro-batches -> sequences; sequences 1 and 4 have no image
    "images on one rank": [[[0, 2], [3]], [[1, 4], []]],
    "images on both ranks": [[[0], [3, 4]], [[1], [2]]],
}
TP = ParallelConfig(tensor_parallel_size=2, sequence_parallel=True, collective_timeout_s=120.0)
DP = ParallelConfig(collective_timeout_s=120.0)


def build(path: str, parallel: ParallelConfig, place: Any, **settings: Any) -> Engine:
    return Engine("policy", path, parallel=parallel, topology=place, optimizer=OPTIMIZER, **settings)


def update(engine: Engine, plan: list[list[int]]) -> float:
    batch = make_vision_batch(engine.hf_config.vision_config)
    objective = losses.build("sft", AlgorithmConfig(), {"mask": float(batch.fields["mask"].sum())})
    return engine.update([batch.select(indices) for indices in plan], objective).grad_norm


def weights(engine: Engine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.export_weights() if tensor is not None}


def main(path: str, folder: str) -> None:
    results: dict[str, Any] = {}
    place = topologies.initialize(DP, seed=1)
    for name, plan in PLANS.items():
        engine = build(path, DP, place)
        results[name] = {"norm": update(engine, plan[place.rank]), "weights": weights(engine)}
    engine.save_state(f"{folder}/state")
    for name, vision in (
        ("frozen encoder", VisionConfig(train_encoder=False)),
        ("frozen vision", VisionConfig(train_encoder=False, train_adapter=False)),
    ):
        frozen = build(path, DP, place, vision=vision)
        update(frozen, PLANS["images on one rank"][place.rank])
        results[name] = {"weights": weights(frozen)}
    topologies.destroy()
    place = topologies.initialize(TP, seed=1)
    engine = build(path, TP, place)
    engine.load_state(f"{folder}/state")
    results["resumed"] = {"weights": weights(engine)}
    if place.rank == 0:
        torch.save(results, f"{folder}/results.pt")
    topologies.destroy()


if __name__ == "__main__":
    main(*sys.argv[1:])
