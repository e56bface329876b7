"""Run by torchrun from ``test_models.py``: every layout of four ranks, one after the other, in one launch.

argv: a folder that holds ``jobs.pt`` (models, sequences, loss weights) and receives ``results.pt``: for each model and
layout what the models computed, gathered to full Hugging Face tensors on rank 0.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.config.schema import ParallelConfig
from megatron_rl.data.batch import PackedBatch, cu_seqlens_of
from megatron_rl.models import critic, policy
from megatron_rl.models.hf.model_config import load_hf_config
from megatron_rl.models.hf.weights import export_weights, load_weights, save_hf
from megatron_rl.models.packed_gpt import unwrap
from megatron_rl.parallel import collectives, topology

LAYOUTS: dict[str, ParallelConfig] = {
    "dp4": ParallelConfig(),
    "tp2_dp2": ParallelConfig(tensor_parallel_size=2),
    "tp2_sp_dp2": ParallelConfig(tensor_parallel_size=2, sequence_parallel=True),
    "pp2_dp2": ParallelConfig(pipeline_parallel_size=2),
    "tp2_sp_pp2": ParallelConfig(tensor_parallel_size=2, sequence_parallel=True, pipeline_parallel_size=2),
}
INIT_SEED = 11
NUM_MICROBATCHES = 2


def pack(sequences: list[Tensor]) -> PackedBatch:
    return PackedBatch(torch.cat(sequences), cu_seqlens_of(torch.tensor([len(s) for s in sequences])))


def run_role(role: str, job: dict[str, Any], parallel: ParallelConfig, ranks: topology.Topology) -> dict[str, Any]:
    """Outputs and gradients of one model on this layout, on rank 0; the others return nothing of use."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    hf_config = load_hf_config(job["path"])
    build = policy.build_policy if role == "policy" else critic.build_critic
    chunks = build(hf_config, parallel, dtype=torch.float32, seed=INIT_SEED)
    result: dict[str, Any] = {"init": collect(chunks, hf_config, role)}
    load_weights(chunks, hf_config, job["path"], role=role)
    result["loaded"] = collect(chunks, hf_config, role)
    if role == "policy":
        save_hf(chunks, hf_config, job["path"], job["save_to"], max_shard_bytes=50_000)

    config = unwrap(chunks[0]).config
    config.finalize_model_grads_func = finalize_model_grads
    wrapped = [
        DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=False), chunk)
        for chunk in chunks
    ]
    sequences, weights = job["sequences"], job["weights"]
    mine = deal(len(sequences), ranks)[ranks.dp_rank]
    microbatches = split(mine)
    outputs: list[Tensor] = []

    def forward_step(iterator: Any, chunk: Any) -> Any:
        indices = next(iterator)
        batch = pack([sequences[i] for i in indices])
        weight = torch.cat([weights[i] for i in indices])

        def loss(output: Tensor) -> Any:
            if role == "policy":
                logprobs, entropy = policy.token_logprobs(chunk, output, batch, temperature=0.7, chunk_size=7)
                total = (weight * logprobs).sum() + 0.1 * entropy.sum()
                outputs.append(torch.cat([logprobs.detach(), entropy.detach()]))
            else:
                values, final = critic.token_values(chunk, output, batch), critic.final_values(chunk, output, batch)
                total = (weight * values).sum() + final.square().sum()
                outputs.append(torch.cat([values.detach(), final.detach()]))
            return total, torch.tensor(len(batch.tokens)), {}

        return policy.forward(chunk, batch), loss

    for chunk in wrapped:
        chunk.zero_grad_buffer()
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(microbatches),
        model=wrapped[0],
        num_microbatches=len(microbatches),
        seq_length=1,
        micro_batch_size=1,
        forward_only=False,
    )
    gathered = collectives.gather_tensors(torch.cat(outputs) if ranks.is_output_rank else None)
    replies = [outputs for outputs in gathered if outputs is not None]
    result["outputs"] = [
        (split(dealt), outputs)
        for dealt, outputs in zip(deal(len(sequences), ranks), replies, strict=ranks.rank == 0)
    ]
    with torch.no_grad():
        # The exporter puts parameters together again; handed gradients instead, it does the same for them.
        for parameter in unwrap(chunks[0]).parameters():
            parameter.copy_(parameter.main_grad)
    result["gradients"] = collect(wrapped, hf_config, role)
    return result


def deal(num_sequences: int, ranks: topology.Topology) -> list[list[int]]:
    """The sequences of each data-parallel rank, in the order in which rank 0 hears from them."""
    return [list(range(num_sequences))[dp_rank :: ranks.dp_size] for dp_rank in range(ranks.dp_size)]


def split(indices: list[int]) -> list[list[int]]:
    """The sequences of each micro-batch."""
    return [indices[i::NUM_MICROBATCHES] for i in range(NUM_MICROBATCHES)]


def collect(chunks: list[Any], hf_config: Any, role: str) -> dict[str, Tensor]:
    return {
        name: tensor.clone() for name, tensor in export_weights(chunks, hf_config, role=role) if tensor is not None
    }


def main() -> None:
    folder = Path(sys.argv[1])
    jobs = torch.load(folder / "jobs.pt")
    results: dict[str, Any] = {}
    for name, parallel in LAYOUTS.items():
        ranks = topology.initialize(ParallelConfig(**{**vars(parallel), "collective_timeout_s": 120.0}), seed=1)
        for model, job in jobs.items():
            job = {**job, "save_to": folder / "saved" / f"{model}_{name}"}
            results[name, model] = {role: run_role(role, job, parallel, ranks) for role in ("policy", "critic")}
        if ranks.rank == 0:
            torch.save(results, folder / "results.pt")
        topology.destroy()


if __name__ == "__main__":
    main()
