"""Values derived from a configuration: workers, timeouts, evaluation sets, defaults by device."""


import pytest

from megatron_rl.config.checks import check_config
from megatron_rl.config.derived import (
    EvalSet,
    answer_timeout_s,
    bucket_bytes,
    eval_sets,
    num_rollout_workers,
    saves_in_background,
    servers_are_deterministic,
)
from megatron_rl.config.load import load_config
from megatron_rl.config.schema import BatchConfig, Config, RolloutConfig, RunConfig
from megatron_rl.errors import ConfigError


@pytest.mark.parametrize(
    ("slots", "window", "servers", "cores", "expected"),
    [
        (256, 80, 4, 64, 0),  # a quickstart
        (256, 8192, 1, 2, 1),
        (8192, 8192, 32, 64, 5),
        (8192, 8192, 2, 64, 2),
        (8192, 8192, 32, 8, 2),
    ],
)
def test_workers_follow_from_tokens_servers_and_cores(slots: int, window: int, servers: int, cores: int, expected: int) -> None:
    batch = BatchConfig(num_prompts_per_step=slots, num_samples_per_prompt=1, window_tokens=window, max_response_tokens=32768)
    assert num_rollout_workers(Config(batch=batch), servers, cores) == expected
    for given in (0, 3):
        assert num_rollout_workers(Config(batch=batch, rollout=RolloutConfig(num_workers=given)), servers, cores) == given


def test_null_in_an_evaluation_set_takes_the_value_of_eval(recipe, tmp_path):
    file = str(tmp_path / "train.jsonl")
    sets = f"eval.sets={{a: {{files: [{file}], num_samples: 8, top_p: 0.9}}, b: {{files: [{file}], temperature: 0, num_samples: 1}}}}"
    config = load_config(recipe, ["eval.temperature=0.6", "eval.num_samples=32", "eval.num_prompts=5", sets])
    check_config(config, command="train")
    assert eval_sets(config) == {
        "a": EvalSet([file], 5, 8, 0.6, 0.9, -1, "prompt", "answer", ""),
        "b": EvalSet([file], 5, 1, 0.0, 1.0, -1, "prompt", "answer", ""),
    }
    config = load_config(recipe, [f"data.eval_files=[{file}]", "eval.temperature=1"])
    assert eval_sets(config) == {"": EvalSet([file], 0, 1, 1.0, 1.0, -1, "prompt", "answer", "")} and eval_sets(load_config(recipe)) == {}


def test_a_set_has_its_own_columns_and_instruction_and_takes_the_others_from_data(recipe):
    own = "eval.sets={aime: {files: [a], prompt_field: problem, instruction: 'Think. {prompt}'}, plain: {files: [b]}}"
    config = load_config(recipe, ["data.answer_field=solution", "data.instruction=<{prompt}>", own])
    aime, plain = (one.data_of(config.data) for one in eval_sets(config).values())
    assert (aime.prompt_field, aime.answer_field, aime.instruction) == ("problem", "solution", "Think. {prompt}")
    assert plain == config.data
    for wrong in ("no place", "{prompt} {prompt}"):
        with pytest.raises(ConfigError, match=r"eval.sets.aime.instruction: expected text with \{prompt\} in it once"):
            check_config(load_config(recipe, [f"eval.sets={{aime: {{files: [a], instruction: '{wrong}'}}}}"]), command="train")


def test_device_decides_the_values_that_a_recipe_leaves_open():
    default = RolloutConfig()
    assert servers_are_deterministic(default, "cpu") and not servers_are_deterministic(default, "cuda")
    assert bucket_bytes(default, "cpu") == 2**26 and bucket_bytes(default, "cuda") == 2**30
    assert saves_in_background(RunConfig(), "cuda") and not saves_in_background(RunConfig(), "cpu")
    assert saves_in_background(RunConfig(async_save=True), "cpu")
    told = RolloutConfig(deterministic=True, bucket_bytes=1000)
    assert servers_are_deterministic(told, "cuda") and not servers_are_deterministic(RolloutConfig(deterministic=False), "cpu")
    assert bucket_bytes(told, "cpu") == bucket_bytes(told, "cuda") == 1000


def test_answer_timeout_grows_with_new_tokens():
    assert answer_timeout_s(0.0, 16) == 304.0
    assert answer_timeout_s(0.0, 8192) > 30 * 60  # a window of 8K at 512 sequences on one GPU takes ten minutes and more
    assert answer_timeout_s(7.0, 8192) == 7.0
