"""Folders of adapters: what adapter_config.json says to peft, and which folders of peft are refused."""

import json

import pytest

from megatron_rl.config.schema import LoraConfig
from megatron_rl.families.adapters import adapted_linears
from megatron_rl.models.hf.adapter_folder import CONFIG_FILE, adapter_config, read_adapter_config, targets_of
from megatron_rl.models.hf.tensor_sources import WeightsError
from tests.tiny_families import LINEAR_SHAPES, SHAPES, family_config


def modules(config, targets) -> list[str]:
    return [module for linear in adapted_linears(config, targets, 4) for module in linear.modules]


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape not in LINEAR_SHAPES])
def test_the_targets_of_a_written_configuration_are_the_adapted_modules(shape):
    config = family_config(shape)
    for targets in (["all-linear"], ["o_proj"], ["*.layers.1.*_proj"]):
        settings = adapter_config(config, LoraConfig(rank=4, targets=targets), "base")
        assert modules(config, targets_of(settings)) == modules(config, targets)


def test_dense_mlps_beside_routed_experts_are_named_as_weights_because_peft_takes_their_names_for_those_of_experts():
    lora = LoraConfig(rank=4, dropout=0.5)
    settings = adapter_config(family_config("glm4_moe_partial_rotary"), lora, "base")
    assert settings["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"] and settings["lora_dropout"] == 0
    assert {name.rpartition(".mlp.")[2] for name in settings["target_parameters"]} == {
        f"{of}{end}_proj.weight" for of in ("", "shared_experts.") for end in ("gate", "up", "down")
    }
    dense = adapter_config(family_config("llama3_scaled"), lora, "base")
    assert "target_parameters" not in dense and dense["lora_dropout"] == 0.5


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"peft_type": "LOHA"}, "does not describe LoRA"),
        ({"target_modules": ".*_proj"}, "target_modules is not a list"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters is not supported"),
        ({"use_dora": True}, "use_dora is not supported"),
        ({"bias": "all"}, "trained biases are not supported"),
    ],
)
def test_adapters_that_are_not_implemented_are_refused_by_name(tmp_path, changes, problem):
    settings = adapter_config(family_config("glm4_moe_partial_rotary"), LoraConfig(rank=4), "base")
    (tmp_path / CONFIG_FILE).write_text(json.dumps(settings))
    assert read_adapter_config(tmp_path) == settings
    (tmp_path / CONFIG_FILE).write_text(json.dumps(settings | changes))
    with pytest.raises(WeightsError, match=problem):
        read_adapter_config(tmp_path)
