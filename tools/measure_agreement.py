"""Measure the difference between Megatron and SGLang on this CPU, by dtype and kind of model, and with injected faults.

    python tools/measure_agreement.py --dtypes bfloat16 --models dense,moe,yarn --out agreement.json

Each model has random weights, an SGLang server samples from it, and the trainer's engine computes its own log-probs of the same
tokens: with the same weights, with one small fault at a time, and with its matrix products rounded as a GPU's
(fp8 and TF32 are imitated: inputs and weights of every linear layer are rounded, sums are exact). No GPU kernel runs.
"""

import argparse
import asyncio
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_rl.algorithms.mismatch import mismatch_figures
from megatron_rl.config.schema import Dtype, ParallelConfig
from megatron_rl.data.batch import PackedBatch
from megatron_rl.data.trajectory import Prompt, Trajectory
from megatron_rl.parallel import topology as topologies
from megatron_rl.rollout.generation import GenerationPlan, Sampling
from megatron_rl.rollout.sglang.balance.client import SglangClient
from megatron_rl.rollout.sglang.process.options import ServerOptions
from megatron_rl.rollout.sglang.process.server import SglangServer
from megatron_rl.rollout.windows import WindowGenerator
from megatron_rl.step.packing import window_batch
from megatron_rl.system.gpu.torchvision_ops import declare_torchvision_ops
from megatron_rl.training.engine import Engine

SIZES: dict[str, Any] = dict(
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=1024,
    tie_word_embeddings=False,
    eos_token_id=None,
    bos_token_id=None,
    pad_token_id=0,
)
MODELS: dict[str, dict[str, Any]] = {
    "dense": dict(model_type="qwen3"),
    "yarn": dict(
        model_type="qwen3",
        rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=32),
    ),
    "moe": dict(
        model_type="qwen3_moe", num_experts=16, num_experts_per_tok=4, moe_intermediate_size=128, norm_topk_prob=True
    ),
}
MATRIX_SCALE, HEAD_SCALE, VECTOR_NOISE = 4.0, 1.0, 0.1
"""Factor over the usual initialization (0.02): signals keep their size over the layers, and the head prefers some tokens."""
LAYER = 3
"""The layer that something is wrong in."""


def write_model(folder: Path, fields: dict[str, Any], dtype: str, seed: int) -> Path:
    declare_torchvision_ops()
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**SIZES, **fields}))
        for name, tensor in model.named_parameters():
            if tensor.dim() > 1:
                tensor.mul_(MATRIX_SCALE * (HEAD_SCALE if name.startswith("lm_head") else 1.0))
            else:
                tensor.add_(torch.randn_like(tensor) * VECTOR_NOISE)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def sampled(url: str, num_prompts: int, num_tokens: int) -> PackedBatch:
    """Responses of the server to random prompts of 16 to 47 tokens, with its log-probs."""
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, SIZES["vocab_size"], (16 + i % 32,), generator=generator) for i in range(num_prompts)]
    trajectories = [
        Trajectory(id=i, prompt=Prompt(str(i), tuple(p.tolist())), group_id=i, sample_index=0, max_response_tokens=num_tokens)
        for i, p in enumerate(prompts)
    ]
    plan = GenerationPlan(Sampling(temperature=1.0, top_p=1.0, top_k=-1, stop_token_ids=(), seed=1), decode=str)

    async def generate() -> None:
        async with SglangClient([url], vocab_size=SIZES["vocab_size"]) as client:
            window = WindowGenerator(client, None, plan, step=0, num_tokens=num_tokens, weight_version="default", kind="train")
            await window.generate(trajectories)

    asyncio.run(generate())
    return window_batch(trajectories, 0).joined()


def parameters(engine: Engine) -> dict[str, Tensor]:
    return {name.split("module.")[-1]: tensor for chunk in engine.chunks for name, tensor in chunk.named_parameters()}


@contextmanager
def changed(engine: Engine, name: str, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """The parameters whose names end so, for as long as the block runs."""
    found = [tensor for own, tensor in parameters(engine).items() if own.endswith(name)]
    assert found, f"no parameter {name} among {sorted(parameters(engine))}"
    before = [tensor.detach().clone() for tensor in found]
    with torch.no_grad():
        for tensor in found:
            tensor.copy_(change(tensor.detach()))
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, old in zip(found, before, strict=True):
                tensor.copy_(old)


def halves_swapped(tensor: Tensor) -> Tensor:
    """Gate and up in the wrong order."""
    return torch.cat(tensor.chunk(2)[::-1])


WRONG: dict[str, dict[str, tuple[str, Callable[[Tensor], Tensor]]]] = {
    "dense": {
        "one norm is all ones": (f"layers.{LAYER}.pre_mlp_layernorm.weight", torch.ones_like),
        "one layer's gate and up swapped": (f"layers.{LAYER}.mlp.linear_fc1.weight", halves_swapped),
        "one key norm is all ones": (f"layers.{LAYER}.self_attention.k_layernorm.weight", torch.ones_like),
    },
    "moe": {
        "one norm is all ones": (f"layers.{LAYER}.pre_mlp_layernorm.weight", torch.ones_like),
        "one expert's gate and up swapped": (f"layers.{LAYER}.mlp.experts.local_experts.5.linear_fc1.weight", halves_swapped),
        "one expert is zero": (f"layers.{LAYER}.mlp.experts.local_experts.5.linear_fc2.weight", torch.zeros_like),
        "one router rolled by one expert": (f"layers.{LAYER}.mlp.router.weight", lambda tensor: tensor.roll(1, 0)),
    },
}
WRONG["yarn"] = WRONG["dense"]


def as_e4m3(tensor: Tensor) -> Tensor:
    """``tensor`` rounded to 8 bits with one scale."""
    scale = tensor.float().abs().amax().clamp(min=1e-12) / 448.0
    return ((tensor.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(tensor.dtype)


def as_tf32(tensor: Tensor) -> Tensor:
    """float32 with 10 bits of mantissa."""
    return ((tensor.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


@contextmanager
def rounded(engine: Engine, rounding: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Inputs and weights of the decoder's linear layers, rounded."""

    def round_input(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (rounding(inputs[0]), *inputs[1:])

    linears = [m for chunk in engine.chunks for name, m in chunk.named_modules() if "linear_" in name.rsplit(".", 1)[-1]]
    handles = [linear.register_forward_pre_hook(round_input) for linear in linears]
    before = [linear.weight.detach().clone() for linear in linears]
    with torch.no_grad():
        for linear in linears:
            linear.weight.copy_(rounding(linear.weight.detach()))
    try:
        yield
    finally:
        for handle, linear, old in zip(handles, linears, before, strict=True):
            handle.remove()
            with torch.no_grad():
                linear.weight.copy_(old)


def measure(name: str, dtype: str, seed: int, arguments: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    folder = write_model(scratch / f"{name}-{dtype}-{seed}", MODELS[name], dtype, seed)
    server_args = {} if arguments.fp32_logits else {"enable-fp32-lm-head": False}
    options = ServerOptions(str(folder), dtype=dtype, deterministic=True, server_args=server_args)
    with SglangServer(options, scratch / "sglang.log", start_timeout_s=280.0) as server:
        batch = sampled(server.url, arguments.num_prompts, arguments.num_tokens)
    place = topologies.initialize(ParallelConfig(), seed=1)
    engine = Engine("policy", folder, parallel=ParallelConfig(), topology=place, optimizer=None, dtype=Dtype(dtype))
    mask, rows = batch.fields["mask"], []

    def row(what: str) -> None:
        (ours,) = engine.logprobs([batch])
        figures = mismatch_figures((ours - batch.fields["rollout_logprobs"])[mask])
        rows.append(dict(model=name, dtype=dtype, seed=seed, what=what, tokens=int(mask.sum()), **vars(figures)))
        columns = "{model} | {dtype} | {seed} | {what} | {tokens} | {mean:.2e} | {k3:.2e} | {outliers:.2%} | {max:.2e}"
        print(f"| {columns.format(**rows[-1])} |", flush=True)

    row("the same weights")
    for what, (parameter, change) in WRONG[name].items():
        with changed(engine, parameter, change):
            row(what)
    roundings = {"bfloat16": {"the trainer in fp8 (imitated)": as_e4m3}, "float32": {"the trainer in TF32 (imitated)": as_tf32}}
    for what, rounding in roundings[dtype].items():
        with rounded(engine, rounding):
            row(what)
    topologies.destroy()
    return rows


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--models", default="dense,moe,yarn")
    options.add_argument("--dtypes", default="float32,bfloat16")
    options.add_argument("--seeds", default="0")
    options.add_argument("--num-prompts", type=int, default=32)
    options.add_argument("--num-tokens", type=int, default=64)
    options.add_argument("--rounded-logits", dest="fp32_logits", action="store_false", help="let bfloat16 servers round logits")
    options.add_argument("--out", type=Path)
    arguments = options.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    print("| model | dtype | seed | what | tokens | mean | k3 | beyond ln 2 | largest |\n|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        rows = [
            row
            for dtype in arguments.dtypes.split(",")
            for name in arguments.models.split(",")
            for seed in arguments.seeds.split(",")
            for row in measure(name, dtype, int(seed), arguments, Path(scratch))
        ]
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
