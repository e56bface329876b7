"""Ranks of ``doctor --invariance``: one update of a model on fixed data, measured in each layout.

Every rank of a launch runs ``python -m megatron_rl.desk.doctor.layout_ranks JOB``. For each layout of the job, the
ranks load the model and take one optimizer step on the same packed batch; rank 0 writes loss, gradient norm and
the difference of weights. The first layout of the first job is the reference. Its weights are saved to files,
tensor by tensor; all other layouts are compared with these files while they stream by, so no rank ever stores two
models.

The step is linear in the gradient (Adam's epsilon is far above any gradient), so a weight's difference is its
gradient's difference, not rounding amplified to a full step. In bfloat16 the learning rate is higher, because the
update must exceed the last of the 8 bits that are compared.
"""

import gc
import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PretrainedConfig

from megatron_rl.config.layout import parse_layout
from megatron_rl.config.schema import AlgorithmConfig, Dtype, OptimizerConfig, ParallelConfig
from megatron_rl.data.batch import Images, PackedBatch, cu_seqlens_of
from megatron_rl.families.model_facts import takes_images, text_config, vision_token_ids
from megatron_rl.parallel import topology as topologies
from megatron_rl.training import losses
from megatron_rl.training.batching import plan_microbatches
from megatron_rl.training.engine import Engine

OPTIMIZER = OptimizerConfig(lr=100.0, eps=100.0, weight_decay=0.0, max_grad_norm=0.0, warmup_steps=0)
_BFLOAT16_LR = 100.0 * OPTIMIZER.lr
PROMPT_TOKENS = 3
"""Leading tokens of each sequence that are excluded from the loss."""
_IMAGE_SIZES = ((3, 5), (4, 2), (1, 2))
"""Sizes of the images given to a vision-language model, in rows and columns of tokens; the largest that fits is used."""


@dataclass(frozen=True)
class InvarianceJob:
    """Arguments of a launch: the model, its layouts and the files to exchange."""

    model: str
    role: str
    layouts: list[str]
    """Short names of layouts (``config.layout``); each fits the ranks of the launch."""
    reference_folder: str
    """Folder that the reference's weights are written to or read from."""
    out: str
    """File that rank 0 writes the measurements to."""
    is_reference: bool
    """True if the first layout is the reference."""
    lengths: list[int] = field(default_factory=list)
    max_tokens_per_microbatch: int = 64
    dtype: str = "float32"
    seed: int = 1
    collective_timeout_s: float = 600.0


def main(job_file: str) -> None:
    job = InvarianceJob(**json.loads(Path(job_file).read_text()))
    measurements = []
    for index, layout in enumerate(job.layouts):
        parallel, _ = parse_layout(layout, ParallelConfig(collective_timeout_s=job.collective_timeout_s))
        topology = topologies.initialize(parallel, seed=job.seed)
        measured = measure(job, parallel, topology, is_reference=job.is_reference and index == 0)
        measurements.append({"layout": layout, **measured})
        if topology.rank == 0:
            # Write after each layout, so that results survive if a later layout fails.
            Path(job.out).write_text(json.dumps(measurements))
        topologies.destroy()
        # Break reference cycles, so that this model is freed before the next one is built.
        gc.collect()


def make_batch(lengths: list[int], vocab_size: int, role: str, seed: int, pad_token_id: int | None) -> PackedBatch:
    """Random tokens and the fields that the loss of ``role`` reads.

    The padding token is excluded: its embedding may be zero, and the gradient of a norm at zero swamps all others.
    """
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    positions = torch.cat([torch.arange(length) for length in lengths])
    fields: dict[str, Tensor] = {"mask": positions >= PROMPT_TOKENS}
    if role == "critic":
        fields["returns"] = torch.randn(total, generator=generator)
        fields["old_values"] = torch.zeros(total)
    tokens = torch.randint(0, vocab_size, (total,), generator=generator)
    if pad_token_id is not None:
        tokens[tokens == pad_token_id] = (pad_token_id + 1) % vocab_size
    return PackedBatch(tokens, cu_seqlens_of(torch.tensor(lengths)), fields)


def with_images(batch: PackedBatch, hf_config: PretrainedConfig, seed: int) -> PackedBatch:
    """The batch with an image after the first token of two sequences out of three, if one fits; the loss excludes its tokens."""
    vision, special = hf_config.vision_config, vision_token_ids(hf_config)
    merge_size, tokens, mask = vision.spatial_merge_size, batch.tokens.clone(), batch.fields["mask"].clone()
    # Random text must not contain image tokens.
    for token in special:
        tokens[tokens == token] = next(i for i in range(text_config(hf_config).vocab_size) if i not in special)
    grids, owners = [], []
    for index, (start, length) in enumerate(zip(batch.cu_seqlens[:-1].tolist(), batch.lengths.tolist(), strict=True)):
        size = next((size for size in _IMAGE_SIZES if size[0] * size[1] + 4 <= length), None)
        if size is None or index % 3 == 2:
            continue
        end = start + 2 + size[0] * size[1]
        tokens[start + 1], tokens[end] = hf_config.vision_start_token_id, hf_config.vision_end_token_id
        tokens[start + 2 : end] = hf_config.image_token_id
        mask[start : end + 1] = False
        grids.append([1, size[0] * merge_size, size[1] * merge_size])
        owners.append(index)
    grid = torch.tensor(grids, dtype=torch.int64).view(-1, 3)
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    patches = torch.randn(int(grid.prod(-1).sum()), values, generator=torch.Generator().manual_seed(seed))
    images = Images.of_patches(patches, grid, torch.tensor(owners, dtype=torch.int64))
    return replace(batch.with_fields(mask=mask), tokens=tokens, images=images)


def measure(
    job: InvarianceJob, parallel: ParallelConfig, topology: topologies.Topology, *, is_reference: bool
) -> dict[str, float]:
    """The figures of ``layout_comparison.Measurement`` on rank 0, an empty dict on the others."""
    dtype = Dtype(job.dtype)
    optimizer = OPTIMIZER if dtype is Dtype.float32 else replace(OPTIMIZER, lr=_BFLOAT16_LR)
    engine = Engine(
        job.role, job.model, parallel=parallel, topology=topology, optimizer=optimizer, dtype=dtype, seed=job.seed
    )
    folder = Path(job.reference_folder)
    if is_reference:
        _compare(engine, None, folder / "before")
    text = text_config(engine.hf_config)
    batch = make_batch(job.lengths, text.vocab_size, job.role, job.seed, text.pad_token_id)
    if takes_images(engine.hf_config):
        batch = with_images(batch, engine.hf_config, job.seed)
    plan = plan_microbatches(job.lengths, topology.dp_size, job.max_tokens_per_microbatch)[topology.dp_rank]
    denominators = {"mask": float(batch.fields["mask"].sum())}
    objective = losses.build("sft" if job.role == "policy" else "critic", AlgorithmConfig(), denominators)
    result = engine.update([batch.select(indices) for indices in plan], objective)
    total, count = result.metrics["lm_loss" if job.role == "policy" else "value_loss"]
    moved = _compare(engine, folder / "before", folder / "after") if is_reference else 0.0
    difference = 0.0 if is_reference else _compare(engine, folder / "after", None)
    if topology.rank != 0:
        return {}
    return {"loss": total / count, "grad_norm": result.grad_norm, "moved": moved, "difference": difference}


def _compare(engine: Engine, with_folder: Path | None, write_folder: Path | None) -> float:
    """Stream the engine's weights, compare them with files in ``with_folder``, write them to ``write_folder``. Rank 0 does both.

    Returns the largest difference, relative to the largest weight of its tensor; infinity if a difference is not a
    number.
    """
    largest = 0.0
    if write_folder is not None:
        write_folder.mkdir(parents=True, exist_ok=True)
    for index, (_, weight) in enumerate(engine.export_weights()):
        if weight is None:
            continue
        weight = weight.detach().float().cpu()
        if with_folder is not None:
            other = torch.load(with_folder / f"{index}.pt", weights_only=True)
            scale = other.abs().max().item() or 1.0
            difference = (weight - other).abs().max().item() / scale
            largest = max(largest, difference) if difference == difference else float("inf")
        if write_folder is not None:
            torch.save(weight.clone(), write_folder / f"{index}.pt")
    return largest


if __name__ == "__main__":
    main(sys.argv[1])
