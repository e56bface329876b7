"""Run on two ranks by ``test_image_files.py``: two steps on prompts with images, as files and as patches that every rank has.

argv: a folder with models and rows, and ``files`` or ``patches``. Rank 0 writes ``NAME-MODE.pt``, what it saw of each case, and each
rank ``NAME-MODE-RANK.json``, which images it cut in the first step.
"""

import json
import os
import sys
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from megatron_rl.config.layout import parse_layout
from megatron_rl.config.schema import (
    AlgorithmConfig,
    BatchConfig,
    Config,
    CriticConfig,
    DataConfig,
    KlConfig,
    KlPlace,
    OptimizerConfig,
    ParallelConfig,
    PolicyConfig,
)
from megatron_rl.data.batch import PackedBatch
from megatron_rl.data.prompts import load_prompts
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.data.trajectory import Segment, Trajectory
from megatron_rl.data.vision import ImageProcessor
from megatron_rl.parallel import topology as topologies
from megatron_rl.step.packing import window_batch
from megatron_rl.training.sequence_cache import ImagePatcher
from megatron_rl.training.trainer_group import TrainerGroup
from megatron_rl.training.trainer_rank import TrainerRank
from megatron_rl.training.trainer_ranks import rl_engines

OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-3, warmup_steps=0)
NUM_SAMPLES = 3


@dataclass(frozen=True)
class Case:
    model: str
    policy: str
    critic: str
    """Layouts."""
    fetched: bool = False
    """True simulates another node: no rank can map the driver's files."""


CASES = {
    "replicas and tensor ranks": Case("qwen3_vl", "tp1", "tp2+sp"),
    "stages and context ranks": Case("qwen3_vl", "pp2", "cp2", fetched=True),
    "tensor ranks alone and replicas": Case("qwen2_5_vl", "tp2", "tp1", fetched=True),
}


def responses(folder: Path, tokenizer: Tokenizer) -> list[Trajectory]:
    """A group of samples for each row, with windows of steps 0 and 1."""
    data = DataConfig(max_video_tokens=16, video_frame_tokens=[8, 4])
    prompts = load_prompts([str(folder / "rows.jsonl")], data, tokenizer, max_prompt_tokens=1000).prompts
    found: list[Trajectory] = []
    for index, prompt in enumerate(prompts):
        for sample in range(NUM_SAMPLES):
            ids = 4 + (7 * index + 3 * sample + np.arange(6 + sample, dtype=np.int32)) % 60
            logprobs = np.full(len(ids), -0.5, np.float32)
            segments = [Segment(ids[:3], logprobs[:3], 1, "length", 0), Segment(ids[3:], logprobs[3:], 2, "stop", 1)]
            found.append(Trajectory(len(found), prompt, index, sample, 20, segments=segments))
    return found


def one_step(group: TrainerGroup, batch: PackedBatch, step: int) -> dict[str, Any]:
    """The passes of a step: values, log-probs of policy and reference, an update of each model."""
    counts = {"mask": float(batch.fields["mask"].sum())}
    with group.stage(step, "step"):
        group.share_out(batch, {"policy": [batch.ids], "critic": [batch.ids]})
        values, final_values = group.values(batch)
        seen: dict[str, Any] = {"values": values, "final values": final_values}
        for engine in ("policy", "reference"):
            seen[f"log-probs of {engine}"] = group.logprobs(batch, temperature=1.0, engine=engine)
        seen["policy"] = vars(group.update("policy", batch, objective="sft", denominators=counts))
        numbers = batch.with_fields(returns=values.flip(0).contiguous(), old_values=values)
        seen["critic"] = vars(group.update("critic", numbers, objective="critic", denominators=counts))
    group.release(step)
    return seen


def drive(group: TrainerGroup, trajectories: list[Trajectory], vision: ImageProcessor) -> dict[str, Any]:
    seen: dict[str, Any] = {f"step {step}": one_step(group, window_batch(trajectories, step, vision), step) for step in (0, 1)}
    # Of no step: nothing is kept.
    seen["after"] = group.logprobs(replace(window_batch(trajectories, 1, vision), ids=()), temperature=1.0)
    for engine in ("policy", "critic"):
        seen[f"weights of {engine}"] = {name: tensor.clone() for name, tensor in group.export_weights(engine)}
    return seen


def run(folder: Path, case: Case) -> dict[str, Any]:
    base = ParallelConfig(collective_timeout_s=120.0)
    config = Config(
        policy=PolicyConfig(path=str(folder / case.model), optimizer=OPTIMIZER),
        critic=CriticConfig(optimizer=OPTIMIZER, parallel=parse_layout(case.critic, base)[0]),
        parallel=parse_layout(case.policy, base)[0],
        algorithm=AlgorithmConfig(kl=KlConfig(place=KlPlace.loss)),
        batch=BatchConfig(max_tokens_per_microbatch=150),
    )
    place = topologies.initialize(config.parallel, seed=1)
    try:
        worker = TrainerRank(config, place, rl_engines(config)(place))
        if place.rank != 0:
            worker.serve()
            return {}
        group = TrainerGroup(worker)
        if case.fetched:
            vars(group.transport)["near"] = ()
        tokenizer = Tokenizer(config.policy.path)
        assert tokenizer.vision is not None
        seen = drive(group, responses(folder, tokenizer), tokenizer.vision)
        group.stop()
        return seen
    finally:
        topologies.destroy()


def patches_everywhere(cutting: ImagePatcher, place: Any, parallel: Any) -> Any:
    """Replace the cutting of images, so that every rank has all patches."""

    def cut(number: int, file: Any) -> Any:
        future: Future = Future()
        future.set_result(cutting._vision.patchify(file))
        return future

    return cut


def main(folder: Path, mode: str) -> None:
    rank = os.environ["RANK"]
    for name, case in CASES.items():
        cuts: list[str] = []
        cut = ImageProcessor.patchify

        def noting(vision: ImageProcessor, file: Any, cut: Any = cut, cuts: list[str] = cuts) -> Any:
            cuts.append(file.ref.digest)
            return cut(vision, file)

        with patch.object(ImageProcessor, "patchify", noting):
            if mode == "patches":
                with patch.object(ImagePatcher, "share_of", patches_everywhere):
                    seen = run(folder, case)
            else:
                seen = run(folder, case)
        (folder / f"{name}-{mode}-{rank}.json").write_text(json.dumps(cuts))
        if rank == "0":
            torch.save(seen, folder / f"{name}-{mode}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
