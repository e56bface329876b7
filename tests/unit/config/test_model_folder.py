"""Checks of the model folder, and of expert settings against the model, without importing Megatron."""

import json

import pytest

from megatron_rl.config.checks import check_config
from megatron_rl.config.load import load_config
from megatron_rl.config.schema import RoutingReplay
from megatron_rl.errors import ConfigError
from tests.unit.config.recipes import BIASED, DENSE, MODEL, SPARSE, load, problems


@pytest.mark.parametrize(
    "model,overrides",
    [
        (DENSE, []),
        (DENSE, ["router_dtype=fp64", "dispatcher=alltoall"]),
        (SPARSE, ["routing_replay=R2"]),
        (SPARSE, ["routing_replay=R3", "load_balancing=aux_loss", "aux_loss_coef=0.001"]),
        (SPARSE, ["routing_replay=R3", "algorithm.correction.old_policy=rollout"]),
        (BIASED, ["load_balancing=bias", "bias_update_rate=0.001"]),
        (BIASED, ["load_balancing=bias"]),
    ],
)
def test_moe_settings_that_fit_the_model_pass(tmp_path, model, overrides):
    check_config(load(tmp_path, model, *overrides), command="train")


@pytest.mark.parametrize(
    "model,overrides,expected",
    [
        (DENSE, ["routing_replay=R3"], ["policy.moe.routing_replay=R3", "needs a mixture-of-experts model", "config.json"]),
        (DENSE, ["load_balancing=bias"], ["policy.moe.load_balancing=bias", "needs a mixture-of-experts model"]),
        (SPARSE, ["load_balancing=bias"], ["policy.moe.load_balancing=bias", "qwen3_moe have no expert bias"]),
        (SPARSE, ["load_balancing=aux_loss"], ["policy.moe.aux_loss_coef", "needs a coefficient above 0"]),
        (SPARSE, ["aux_loss_coef=0.1"], ["policy.moe.aux_loss_coef: got 0.1 with load_balancing=none"]),
        (SPARSE, ["aux_loss_coef=-1"], ["policy.moe.aux_loss_coef: expected at least 0"]),
        (BIASED, ["bias_update_rate=0.1"], ["policy.moe.bias_update_rate", "only load_balancing=bias"]),
        (
            SPARSE,
            ["routing_replay=R2", "algorithm.correction.old_policy=rollout"],
            ["policy.moe.routing_replay=R2", "algorithm.correction.old_policy=rollout", "R3"],
        ),
    ],
)
def test_moe_settings_that_do_not_fit_are_rejected_with_key_and_remedy(tmp_path, model, overrides, expected):
    with pytest.raises(ConfigError) as error:
        check_config(load(tmp_path, model, *overrides), command="train")
    for text in expected:
        assert text in str(error.value)


def test_unknown_kind_of_replay_lists_the_known_kinds(tmp_path):
    with pytest.raises(ConfigError) as error:
        load(tmp_path, SPARSE, "routing_replay=R4")
    assert all(kind.value in str(error.value) for kind in RoutingReplay)


def test_unknown_model_type_lists_the_supported_types(recipe, tmp_path):
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL | {"model_type": "mamba"}))
    message = problems(recipe)
    assert "'mamba'" in message and "qwen2" in message


@pytest.mark.parametrize("vocab", [{"a": 0, "b": 31}, {"a": 0, "b": 32}])
def test_tokenizer_larger_than_the_model_is_rejected(recipe, tmp_path, vocab):
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": []}))
    if max(vocab.values()) < MODEL["vocab_size"]:
        check_config(load_config(recipe), command="train")
    else:
        assert "vocabulary mismatch" in problems(recipe) and "vocab_size=32" in problems(recipe)


def test_teacher_with_another_tokenizer_is_rejected_by_its_key_and_the_first_token_that_differs(recipe, tmp_path):
    def write(name: str, vocab: dict[str, int]) -> None:
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "config.json").write_text(json.dumps(MODEL))
        (tmp_path / name / "model.safetensors").write_bytes(b"")
        (tmp_path / name / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": []}))

    write("model", {"a": 0, "b": 1, "c": 2})
    write("same", {"b": 1, "a": 0, "c": 2, "padding": 3})
    write("other", {"a": 0, "c": 1, "b": 2})
    words = ["preset=distillation", "batch.window_tokens=32", "batch.max_response_tokens=96", "batch.max_prompt_tokens=64"]
    teacher = f"reference.path={tmp_path}/same"
    check_config(load_config(recipe, [*words, teacher]), command="train")
    message = problems(recipe, *words, teacher, f"reference.path_by_type.code={tmp_path}/other")
    assert "reference.path_by_type.code: the tokenizer of " in message and "token 1 is 'c' there and 'b' in" in message
    assert "one of 2 that differ" in message


def test_broken_json_in_a_model_folder_is_reported_with_its_file(recipe, tmp_path):
    (tmp_path / "model" / "config.json").write_text("{")
    assert "config.json is not a JSON object" in problems(recipe)
