"""A configuration is checked before anything starts: all problems are reported together, by key."""


import pytest

from tests.unit.config.recipes import problems


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["batch.window_tokens=200"], ["batch.window_tokens", "longer than the response budget"]),
        (["schedule.mode=sync"], ["batch.window_tokens", "sync"]),
        (["algorithm.ignore_boundary_tokens=40"], ["algorithm.ignore_boundary_tokens"]),
        (["batch.window_jitter_tokens=8"], ["batch.window_jitter_tokens", "never train", "ignore_boundary_tokens=8"]),
        (["policy.path=/nowhere"], ["policy.path", "config.json"]),
        (["data.train_files=[/nowhere.jsonl]"], ["data.train_files", "/nowhere.jsonl"]),
        (["data.train_files=[]"], ["data.train_files", "got none"]),
        (
            ["parallel.tensor_parallel_size=4", "parallel.num_ranks=4"],
            ["parallel.tensor_parallel_size", "num_key_value_heads=2"],
        ),
        (
            ["parallel.tensor_parallel_size=2", "parallel.num_ranks=3"],
            ["3 ranks do not divide by parallel.tensor_parallel_size 2"],
        ),
        (["parallel.pipeline_parallel_size=3", "parallel.num_ranks=3"], ["num_hidden_layers 2"]),
        (
            ["parallel.expert_parallel_size=2", "parallel.num_ranks=2"],
            ["no experts", "parallel.expert_parallel_size 2"],
        ),
        (["parallel.context_parallel_size=2", "parallel.num_ranks=3"], ["parallel.context_parallel_size 2"]),
        (["parallel.sequence_parallel=true"], ["parallel.sequence_parallel"]),
        (["batch.max_response_tokens=300"], ["max_position_embeddings", "256"]),
        (["policy.optimizer.lr=0"], ["policy.optimizer.lr"]),
        (["policy.optimizer.decay_style=cosine"], ["policy.optimizer.decay_steps"]),
        (["rollout.temperature=0"], ["rollout.temperature"]),
        (["rollout.urls=[localhost:3]"], ["rollout.urls"]),
        (["algorithm.dual_clip=0.5"], ["algorithm.dual_clip"]),
        (["eval.every_steps=5"], ["data.eval_files"]),
        (["run.num_steps=0"], ["run.num_steps"]),
        (["reward.max_error_rate=2"], ["reward.max_error_rate"]),
        (["policy.optimizer.moments=bfloat16"], ["policy.optimizer.moments=bfloat16: needs parameters in bfloat16"]),
        (
            ["policy.dtype=bfloat16", "critic.dtype=float32", "critic.optimizer.moments=bfloat16"],
            ["critic.optimizer.moments=bfloat16", "got critic.dtype=float32"],
        ),
    ],
)
def test_impossible_settings_are_reported_by_key(recipe, overrides, expected):
    message = problems(recipe, *overrides)
    for part in expected:
        assert part in message


def test_all_problems_are_reported_together(recipe):
    message = problems(recipe, "run.num_steps=0", "rollout.temperature=0", "batch.window_tokens=999")
    assert len(message.splitlines()) == 3
