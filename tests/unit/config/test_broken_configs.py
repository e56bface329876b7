"""A broken configuration is taken or refused in words that name its key, before anything starts."""

import json
import math
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config.checks import check_config
from megatron_rl.config.keys import sections
from megatron_rl.config.load import load_config
from megatron_rl.desk.plan.dry_run import print_plan
from megatron_rl.errors import ConfigError, UserError
from megatron_rl.step.input_checks import check_rl_inputs
from tests.fuzz import ODD_VALUES, mutated, mutated_bytes, mutations, taken_or_refused

MODEL = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "vocab_size": 32,
    "max_position_embeddings": 256,
}
KEYS = {key.name: key for section in sections() for key in section.keys if "." in key.name}
CONTAINERS = {name: key for name, key in KEYS.items() if key.type.startswith(("list", "dict", "section"))}
FLOATS = [name for name, key in KEYS.items() if key.type == "float" and ".N." not in name and ".TYPE." not in name]
INTS = [name for name, key in KEYS.items() if key.type == "int" and ".N." not in name and ".TYPE." not in name]
SECTIONS = sorted({name.split(".")[0] for name in KEYS} | {"preset"})
FULL = {
    "run": {"num_steps": 3, "output_dir": "out", "resume": False},
    "parallel": {"num_ranks": 2, "tensor_parallel_size": 2, "pipeline_layers": [], "sequence_parallel": True},
    "critic": {"parallel": {"pipeline_parallel_size": 2, "pipeline_layers": [1, 1]}, "optimizer": {"lr": 1e-4}},
    "algorithm": {"kl": {"coef_by_type": {"math": 0.1}}, "policy_loss_options": {}, "clip_high": 0.3},
    "data": {"mixture": {"math": 1.0}, "curriculum": [{"until_step": 2, "mixture": {"math": 1.0}}]},
    "reward": {"by_type": {"math": {"name": "math", "options": {}, "rescale_to": [0, 1]}}, "timeout_s": 5},
    "rollout": {"urls": ["http://a:1"], "stop_token_ids": [1], "server_args": {"log-level": "error"}},
    "policy": {"megatron": {}, "dtype": "float32", "moe": {"load_balancing": "none"}},
}
"""A key of every kind."""
COMMANDS = ["train", "sft", "critic-pretrain", "reward-train", "select-prompts", "label-lines"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipe")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(MODEL))
    (folder / "model" / "model.safetensors").write_bytes(b"")
    (folder / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    file = folder / "recipe.yaml"
    file.write_text(
        f"preset: tppo\npolicy: {{path: {folder}/model}}\ndata: {{train_files: [{folder}/train.jsonl]}}\n"
        "batch: {max_prompt_tokens: 64, max_response_tokens: 96, window_tokens: 32}\n"
        + "".join(f"{name}: {{output_path: {folder}/out}}\n" for name in ("sft", "critic_pretrain", "select_prompts"))
        + f"reward_train: {{output_path: {folder}/out, train_files: [{folder}/train.jsonl]}}\n"
        + f"label_lines: {{input_path: {folder}/train.jsonl, output_path: {folder}/out.jsonl}}\n"
    )
    return file


def dry_run(paths, overrides=(), command="train"):
    config = load_config(paths, overrides)
    check_config(config, command=command)
    if command == "train":
        check_rl_inputs(config)
        print_plan(config, command=command, world_size=config.parallel.num_ranks or 1)


def refusal(*arguments, **options) -> str:
    with pytest.raises(UserError) as error:
        dry_run(*arguments, **options)
    return str(error.value)


@pytest.mark.parametrize("key", FLOATS)
def test_every_number_refuses_nan_infinity_and_text(recipe, key):
    for value in (".nan", ".inf", "-.inf", "many", "[1]", "{a: 1}", "null", "1e300"):
        message = refusal(recipe, [f"{key}={value}"])
        assert key in message, (value, message)


@pytest.mark.parametrize("key", INTS)
def test_every_whole_number_refuses_fractions_infinity_and_text(recipe, key):
    for value in ("1.5", ".nan", ".inf", "many", "[1]", "{a: 1}", "null", "1" + "0" * 30):
        message = refusal(recipe, [f"{key}={value}"])
        assert key in message, (value, message)


@pytest.mark.parametrize("key", [name for name in CONTAINERS if ".N" not in name and ".TYPE" not in name])
def test_every_list_and_mapping_refuses_another_container_and_a_single_value(recipe, key):
    kind = CONTAINERS[key].type
    wrong = ["5", "word", "{a: 1}", "{a: {b: 1}}"] if kind.startswith("list") else ["5", "word", "[1]", "[[1]]"]
    for value in wrong:
        message = refusal(recipe, [f"{key}={value}"])
        assert (key in message and "expected" in message) or "unknown key" in message, (value, message)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.urls={a: 1}", "rollout.urls: expected a list"),
        ("rollout.server_args=[1]", "rollout.server_args: expected a mapping"),
        ("rollout.stop_token_ids=[[1]]", "rollout.stop_token_ids.0: expected a single value"),
        ("data.video_frame_tokens=[{}]", "data.video_frame_tokens.0: expected a single value"),
        ("rollout.stop_token_ids=[1,32]", "rollout.stop_token_ids: 32 is not in the vocabulary of 32"),
        ("rollout.fire.banned_token_ids=[99]", "rollout.fire.banned_token_ids: 99 is not in the vocabulary of 32"),
        ("policy.optimizer.eps=-.inf", "policy.optimizer.eps: expected"),
        ("reward.options={limit: .nan}", "reward.options.limit: expected a finite number"),
        ("rollout.request_timeout_s=1e12", "rollout.request_timeout_s: expected at most 10000000 seconds"),
        ('run.output_dir="a\\0b"', "run.output_dir: expected text that can be written as UTF-8"),
        ("run.output_dir=a\udcff", "'run.output_dir=a\\udcff': expected text that can be written as UTF-8"),
    ],
)
def test_what_cannot_be_is_refused_with_its_key(recipe, override, words):
    assert words in refusal(recipe, [override])


@pytest.mark.parametrize("name", ["recipe.yaml", "recipe.yaml/below"])
def test_an_output_folder_that_is_a_file_or_lies_in_one_is_refused(recipe, name):
    assert "run.output_dir: " in refusal(recipe, [f"run.output_dir={recipe.parent / name}"])


def test_an_empty_mapping_takes_away_what_earlier_layers_gave(recipe, tmp_path):
    later = tmp_path / "later.yaml"
    later.write_text("reward: {options: {extract: last, limit: 3}}\n")
    files = [recipe, later]
    assert load_config(files, ["reward.options.limit=4"]).reward.options == {"extract": "last", "limit": 4}
    assert load_config(files, ["reward.options={}"]).reward.options == {}
    assert load_config(files, ["reward.options={}", "reward.options.other=1"]).reward.options == {"other": 1}


@mutations(400)
@given(data=st.data())
def test_broken_overrides_are_taken_or_refused(recipe, data):
    key = data.draw(st.sampled_from(sorted(KEYS)))
    value = data.draw(ODD_VALUES)
    text = (
        json.dumps(value) if not isinstance(value, float) or math.isfinite(value) else f".{value}".replace(".-", "-.")
    )
    key = key.replace(".N.", ".0.").replace(".TYPE.", ".math.")
    with taken_or_refused(*SECTIONS):
        dry_run(recipe, [f"{key}={text}"], command=data.draw(st.sampled_from(COMMANDS)))


@mutations(300)
@given(data=st.data())
def test_broken_recipes_are_taken_or_refused(recipe, tmp_path_factory, data):
    whole = yaml.safe_load(recipe.read_text())
    for section, values in FULL.items():
        whole[section] = {**whole.get(section, {}), **values}
    broken = data.draw(mutated(whole, at_most=3))
    file = Path(tmp_path_factory.getbasetemp()) / "broken.yaml"
    file.write_text(yaml.safe_dump(broken))
    with taken_or_refused("broken.yaml", *SECTIONS):
        dry_run(file, command=data.draw(st.sampled_from(COMMANDS)))


@mutations(200)
@given(data=st.data())
def test_damaged_recipe_files_are_taken_or_refused(recipe, tmp_path_factory, data):
    file = Path(tmp_path_factory.getbasetemp()) / "damaged.yaml"
    file.write_bytes(data.draw(mutated_bytes(recipe.read_bytes())))
    with taken_or_refused("damaged.yaml", *SECTIONS):
        load_config(file)


def test_errors_of_values_that_python_gave_name_the_key(recipe):
    config = load_config(recipe)
    config.rollout.urls = {"a": 1}  # type: ignore[assignment]
    config.policy.optimizer.lr = "fast"  # type: ignore[assignment]
    config.run.seed = True
    with pytest.raises(ConfigError) as error:
        check_config(config, command="train")
    for words in (
        "rollout.urls: expected a list",
        "policy.optimizer.lr: expected a number",
        "run.seed: expected a whole",
    ):
        assert words in str(error.value)
