"""The least GPU time of a response, against sums over its tokens: megatron_rl/desk/plan/plan_ranking.py."""

from pathlib import Path

import numpy as np
import pytest

from megatron_rl.config.schema import ParallelConfig
from megatron_rl.desk.costs.gpus import gpu
from megatron_rl.desk.costs.serving_time import decode_curve, kv_tokens, prefill_seconds
from megatron_rl.desk.costs.training_time import REINFORCEMENT, training_seconds
from megatron_rl.desk.plan.plan_ranking import decode_rate, response_gpu_seconds
from megatron_rl.families.model_facts import as_config, read_model_json

MODELS, H100 = Path(__file__).parents[4] / "tools" / "published" / "models", gpu("H100-80G")


def test_the_limit_is_the_sum_of_decode_prefill_and_passes():
    facts = as_config(read_model_json(MODELS / "qwen2.5-32b"))
    responses, prompts = np.array([10.0, 700.0, 3000.0]), np.array([50.0, 50.0, 400.0])
    contexts = [prompt + i + 1 for prompt, new in zip(prompts, responses, strict=True) for i in range(int(new))]
    rate, mean = 0.0, float(np.mean(contexts))
    for size in (2, 4, 8):
        running = kv_tokens(facts, H100, num_gpus=size, memory_fraction=0.86) / mean
        rate = max(rate, running / decode_curve(facts, H100, num_gpus=size)(running, mean) / size)
    assert decode_rate(facts, H100, mean) == pytest.approx(rate)
    lengths = (prompts + responses).tolist()
    trained = training_seconds(facts, ParallelConfig(), H100, lengths, num_ranks=1, passes=7, efficiency=REINFORCEMENT)
    expected = responses.sum() / rate + prefill_seconds(facts, H100, num_gpus=1, lengths=prompts.tolist()) + trained
    assert response_gpu_seconds(facts, H100, responses=responses, prompts=prompts, passes=7) == pytest.approx(expected / 3)
