"""Recipes are layered, typed and checked when they are read; errors name file, key and remedy."""

import pytest
from omegaconf import OmegaConf

from megatron_rl.config.checks import check_config
from megatron_rl.config.keys import sections
from megatron_rl.config.load import REMOVED, config_to_yaml, load_config, preset_names
from megatron_rl.config.schema import Config, Mode
from megatron_rl.errors import ConfigError


def test_overrides_win_over_the_file_and_the_file_over_the_preset(recipe):
    config = load_config(recipe, ["batch.window_tokens=16"])
    check_config(config, command="train")
    assert config.batch.window_tokens == 16
    assert config.batch.max_response_tokens == 96
    assert config.schedule.mode is Mode.tppo
    assert config.algorithm.clip_high == 0.28


def test_resolved_configuration_reads_back_equal(recipe, tmp_path):
    config = load_config(recipe)
    copy = tmp_path / "copy.yaml"
    copy.write_text(config_to_yaml(config))
    assert load_config(copy) == config


def test_every_preset_loads_and_names_its_source():
    for name in preset_names():
        assert isinstance(load_config(None, [f"preset={name}"]), Config)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("batch: {window_token: 3}", ["recipe.yaml", "batch.window_token", "did you mean 'batch.window_tokens'"]),
        ("batches: {window_tokens: 3}", ["recipe.yaml", "'batches'", "batch"]),
        ("batch: {window_tokens: many}", ["recipe.yaml", "batch.window_tokens", "many"]),
        ("batch: 5", ["recipe.yaml", "batch"]),
        ("schedule: {mode: fast}", ["recipe.yaml", "schedule.mode", "fast"]),
        ("batch: [1", ["recipe.yaml", "not valid YAML", "line"]),
        ("- a\n- b", ["recipe.yaml", "mapping"]),
        ("'0'", ["recipe.yaml", "mapping"]),
        ("preset: tpo", ["preset", "'tpo'", "tppo"]),
        ("preset: false", ["preset", "False", "tppo"]),
        ("preset: []", ["preset", "[]", "tppo"]),
    ],
)
def test_broken_recipe_raises_with_file_key_and_remedy(tmp_path, text, expected):
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(file)
    for part in expected:
        assert part in str(error.value)


@pytest.mark.parametrize("key", sorted(REMOVED))
def test_removed_key_is_rejected_with_its_remedy(tmp_path, key):
    section, name = key.rsplit(".", 1)
    file = tmp_path / "recipe.yaml"
    file.write_text(OmegaConf.to_yaml(OmegaConf.from_dotlist([f"{section}.{name}=7"])))
    with pytest.raises(ConfigError) as error:
        load_config(file)
    assert str(error.value) == f"{file}: unknown key '{key}', which was removed: {REMOVED[key][1]}"


def test_removed_key_with_its_constant_loads_as_in_config_yaml_of_earlier_runs(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(OmegaConf.to_yaml(OmegaConf.from_dotlist([f"{key}={value}" for key, (value, _) in REMOVED.items()])))
    assert load_config(file) == Config()


def test_removed_keys_are_not_in_the_schema():
    assert not {key.name for section in sections() for key in section.keys} & set(REMOVED)


def test_missing_recipes_and_malformed_overrides_raise(tmp_path, recipe):
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="expected key=value"):
        load_config(recipe, ["batch.window_tokens"])


def test_later_recipe_overrides_earlier_recipes_and_their_preset(recipe, tmp_path):
    second = tmp_path / "second.yaml"
    second.write_text("preset: dapo\nrun: {num_steps: 3}\n")
    config = load_config([recipe, second], ["run.seed=9"])
    assert (config.preset, config.run.num_steps, config.run.seed) == ("dapo", 3, 9)
    assert config.policy.path == load_config(recipe).policy.path


def test_tokens_of_an_older_policy_use_the_decoupled_loss_by_default(recipe):
    def weight(*overrides):
        config = load_config(recipe, ["schedule.mode=async", *overrides])
        check_config(config, command="train")
        assert load_config(None, [f"algorithm.correction={{weight: {config.algorithm.correction.weight}}}"])
        return config.algorithm.correction.weight

    assert weight() == "token" and weight("algorithm.correction.weight=icepop") == "icepop"
    assert weight("algorithm.correction.old_policy=rollout") == "none"
    assert weight("schedule.max_staleness=0") == weight("schedule.mode=tppo") == "none"
    assert weight("schedule.training_window_tokens=0") == "token"
