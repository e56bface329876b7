"""What is held against the data before a run starts."""

import json

import pytest

from megatron_rl.commands.recipe import check_rl_inputs
from megatron_rl.config.schema import Config, EvalSetConfig, RewardRouteConfig
from megatron_rl.errors import DataError


def recipe(tmp_path, by_type):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "p", "answer": "1", "type": name}) + "\n" for name in "ab"))
    config = Config()
    config.data.train_files, config.batch.num_samples_by_type = [str(path)], by_type
    return config


def test_numbers_of_samples_are_for_types_that_exist(tmp_path):
    check_rl_inputs(recipe(tmp_path, {"a": 1, "b": 2}))
    with pytest.raises(DataError, match=r"batch.num_samples_by_type: no prompt has the type 'c'; .*'a', 'b'"):
        check_rl_inputs(recipe(tmp_path, {"a": 1, "c": 1}))


def test_a_type_that_a_preset_has_a_reward_for_may_be_absent_from_the_data(tmp_path):
    config = recipe(tmp_path, {"general": 1})
    config.reward.by_type = {name: RewardRouteConfig(name="math") for name in ("a", "b", "general")}
    check_rl_inputs(config)


def test_the_rows_of_every_evaluation_set_are_checked(tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "p"}\n')
    config = recipe(tmp_path, {})
    config.eval.sets = {"good": EvalSetConfig(files=config.data.train_files), "bad": EvalSetConfig(files=[str(bad)])}
    with pytest.raises(DataError, match=r"bad.jsonl:1: field 'answer'"):
        check_rl_inputs(config)
