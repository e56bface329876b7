"""The least GPU time of a response: every token decoded at a full KV cache and trained once, and no GPU ever waits. Pure.

    GPU-seconds = tokens / (tokens per second and GPU of the best server) + prefill + passes * forward pass

No schedule and no layout is faster by the rates of ``serving_time`` and ``training_time``. Not included: a pass for old log-probs,
recomputation, a pipeline's bubble, publishes.
"""

import numpy as np

from megatron_rl.config.schema import ParallelConfig
from megatron_rl.desk.costs.gpus import Gpu
from megatron_rl.desk.costs.serving_time import decode_curve, kv_tokens, prefill_seconds
from megatron_rl.desk.costs.training_time import REINFORCEMENT, training_seconds
from megatron_rl.families.family import ModelConfig
from megatron_rl.families.sglang_limits import split_problems

_MEMORY_FRACTION = 0.86
_MOST_MACHINES = 8


def response_gpu_seconds(
    config: ModelConfig, gpu: Gpu, *, responses: np.ndarray, prompts: np.ndarray, passes: float
) -> float:
    """Return GPU-seconds per response; 0 if no server of up to eight nodes holds the model.

    ``responses``, ``prompts``: [samples] tokens. ``passes``: forward passes per token, with 3 for an update.
    """
    lengths = (prompts + responses).tolist()
    # A token decoded at position i reads the prompt and i response tokens.
    contexts = responses * prompts + responses * (responses + 1) / 2
    rate = decode_rate(config, gpu, float(contexts.sum() / responses.sum()))
    if not rate:
        return 0.0
    prefill = prefill_seconds(config, gpu, num_gpus=1, lengths=prompts.tolist())
    trained = training_seconds(
        config, ParallelConfig(), gpu, lengths, num_ranks=1, passes=passes, efficiency=REINFORCEMENT
    )
    return (float(responses.sum()) / rate + prefill + trained) / len(lengths)


def decode_rate(config: ModelConfig, gpu: Gpu, context_tokens: float) -> float:
    """Return the tokens per second and GPU of the best server with a full KV cache; 0 if none holds the model."""
    rates = [0.0]
    sizes = [size for size in range(1, gpu.per_machine + 1) if gpu.per_machine % size == 0]
    for size in (*sizes, *(gpu.per_machine * 2**power for power in range(1, _MOST_MACHINES.bit_length()))):
        held = kv_tokens(config, gpu, num_gpus=size, memory_fraction=_MEMORY_FRACTION)
        if held > context_tokens and not any(split_problems(vars(config), size, "")):
            running = held / context_tokens
            rates.append(running / decode_curve(config, gpu, num_gpus=size)(running, context_tokens) / size)
    return max(rates)
