"""A broken configuration is accepted, or rejected with its key, before anything starts."""

import functools
import json
import math
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config.checks import check_config
from megatron_rl.config.checks.servers import address_problems, fleet_problems
from megatron_rl.config.keys import sections
from megatron_rl.config.layout import fewest_ranks
from megatron_rl.config.load import load_config
from megatron_rl.config.schema.bounds import bound_problems
from megatron_rl.config.schema.commands import RL_COMMANDS
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.desk.plan.dry_run import print_plan
from megatron_rl.errors import ConfigError, UserError
from megatron_rl.run.output import check_machine, check_output_dir, check_outputs, os_errors_with_keys
from megatron_rl.step import input_checks
from megatron_rl.step.input_checks import preview_rl_inputs
from tests.fuzz import ODD_VALUES, USUAL_VALUES, mutated, mutated_bytes, mutations, taken_or_refused
from tests.tiny_models import make_tokenizer

MODEL = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "vocab_size": 128,
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
BASES = [
    [],
    ["parallel.num_ranks=0", "parallel.tensor_parallel_size=2"],
    ["parallel.num_ranks=4", "parallel.pipeline_parallel_size=2", "critic.parallel={tensor_parallel_size: 2}"],
    ["preset=ppo", "batch.window_tokens=0", "schedule.mode=sync", "eval.every_steps=2"],
    ["preset=grpo", "critic.warmup_steps=0", "batch.window_tokens=0", "schedule.mode=sync"],
    ["schedule.mode=async", "rollout.num_workers=2", "run.resume=auto"],
    ["rollout.placement=colocated", "parallel.num_ranks=2", "rollout.num_servers=2"],
    ["rollout.urls=[http://127.0.0.1:1,http://localhost:2]", "eval.urls=[http://127.0.0.1:3]"],
    ["rollout.urls_file=servers.urls", "rollout.server_args={log-level: error, mem-fraction-static: 0.5}"],
    ["data.mixture={math: 1, code: 2}", "reward.by_type={math: {name: math}, code: {name: math}}", "batch.num_samples_by_type={math: 2}"],
    ["data.duplicate_ids=drop", "run.overwrite=true", "tracking.mlflow=false", "policy.init=random"],
    ["eval.sets={hard: {files: [train.jsonl], num_samples: 2, temperature: 1}}", "data.eval_files=[]"],
]
"""Recipes of different shapes; each broken value meets another one."""
COMMANDS = ["train", "sft", "critic-pretrain", "reward-train", "dpo", "select-prompts", "label-lines"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """A recipe that every check accepts, in the working folder, so that relative paths of broken values stay inside."""
    folder = tmp_path_factory.mktemp("recipe")
    make_tokenizer(folder / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        # The folder never changes, and loading its tokenizer takes longer than all checks.
        tokenizer = functools.cache(Tokenizer)
        patch.setattr(input_checks, "load_tokenizer", lambda config: tokenizer(config.policy.path))
        yield _write_recipe(folder)


def _write_recipe(folder):
    (folder / "model" / "config.json").write_text(json.dumps(MODEL))
    (folder / "model" / "model.safetensors").write_bytes(b"")
    rows = [{"prompt": "1+1=", "answer": "2", "type": name} for name in ("math", "code")]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "servers.urls").write_text("http://127.0.0.1:1\n")
    file = folder / "recipe.yaml"
    file.write_text(
        f"preset: tppo\npolicy: {{path: {folder}/model}}\n"
        f"data: {{train_files: [{folder}/train.jsonl], eval_files: [{folder}/train.jsonl]}}\n"
        "critic: {warmup_steps: 1}\n"
        "batch: {max_prompt_tokens: 64, max_response_tokens: 96, window_tokens: 32}\n"
        + "".join(f"{name}: {{output_path: {folder}/out}}\n" for name in ("sft", "critic_pretrain", "select_prompts"))
        + "".join(f"{name}: {{output_path: {folder}/out, train_files: [{folder}/train.jsonl]}}\n" for name in ("reward_train", "dpo"))
        + f"label_lines: {{input_path: {folder}/train.jsonl, output_path: {folder}/out.jsonl}}\n"
    )
    return file


def dry_run(paths, overrides=(), command="train"):
    """The checks of `--dry-run`, as ``run.launch`` calls them."""
    config = load_config(paths, overrides)
    with os_errors_with_keys(config):
        check_config(config, command=command)
        if command in RL_COMMANDS:
            check_output_dir(config)
        check_machine(config, command)
        check_outputs(config, command)
        if command in RL_COMMANDS:
            notes = preview_rl_inputs(config, all_rows=False)
            print_plan(config, command=command, world_size=config.parallel.num_ranks or fewest_ranks(config), inputs=notes)


def refusal(*arguments, **options) -> str:
    with pytest.raises(UserError) as error:
        dry_run(*arguments, **options)
    return str(error.value)


@pytest.mark.parametrize("key", FLOATS)
def test_every_number_rejects_nan_infinity_and_text(recipe, key):
    for value in (".nan", ".inf", "-.inf", "many", "[1]", "{a: 1}", "null", "1e300"):
        message = refusal(recipe, [f"{key}={value}"])
        assert key in message, (value, message)


@pytest.mark.parametrize("key", INTS)
def test_every_whole_number_rejects_fractions_infinity_and_text(recipe, key):
    for value in ("1.5", ".nan", ".inf", "many", "[1]", "{a: 1}", "null", "1" + "0" * 30):
        message = refusal(recipe, [f"{key}={value}"])
        assert key in message, (value, message)


@pytest.mark.parametrize("key", [name for name in CONTAINERS if ".N" not in name and ".TYPE" not in name])
def test_every_list_and_mapping_rejects_other_containers_and_single_values(recipe, key):
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
        ("rollout.stop_token_ids=[1,128]", "rollout.stop_token_ids: 128 is not in the vocabulary of 128"),
        ("rollout.fire.banned_token_ids=[199]", "rollout.fire.banned_token_ids: 199 is not in the vocabulary of 128"),
        ("data.train_files=['']", "data.train_files: '' does not exist"),
        ("rollout.server_args={a: 5}", "rollout.server_args.a: SGLang has no option --a"),
        ("policy.optimizer.eps=-.inf", "policy.optimizer.eps: expected"),
        ("reward.options={limit: .nan}", "reward.options.limit: expected a finite number"),
        ("rollout.weight_sync_timeout_s=0.001", "rollout.weight_sync_timeout_s: expected 0 or at least 1 seconds"),
        ("rollout.bucket_bytes=1", "rollout.bucket_bytes: expected 0 or at least 1024"),
        ("rollout.request_timeout_s=1e12", "rollout.request_timeout_s: expected at most 10000000 seconds"),
        ("parallel.context_parallel_size=81", "parallel.context_parallel_size: 81 ranks would split"),
        ("critic.parallel={context_parallel_size: 1000}", "critic.parallel.context_parallel_size: 1000 ranks would split"),
        ("algorithm.correction.veto_below=2", "algorithm.correction.veto_below: expected a number from 0 up to but not including 1"),
        ("reward.num_workers=1000", "reward.num_workers: expected at most"),
        ("rollout.num_workers=1000", "rollout.num_workers: expected at most"),
        ("reward.memory_limit_mb=1", "reward.memory_limit_mb: expected at least 64"),
        ("batch.num_samples_per_prompt=1000000", "batch.num_samples_per_prompt: 512,000,000 responses per step"),
        ("policy.lora.rank=65", "policy.lora.rank: expected at most hidden_size=64"),
        ("critic.lora.rank=1000000", "critic.lora.rank: expected at most hidden_size=64"),
        ("run.keep_best=3", "run.keep_best: the best checkpoints are chosen by eval/accuracy"),
        ("tracking.mlflow_uri='http://x y/'", "tracking.mlflow_uri: 'http://x y/' is not an address"),
        ("data.id_field=nr", "data.id_field: no row of"),
        ("data.type_field=kind", "fields there are ['answer', 'prompt', 'type']"),
        ("data.prompt_field=question", "set data.prompt_field to one of them"),
        ("data.answer_field=solution", "set data.answer_field, or data.answer_required=false"),
        ('run.output_dir="a\\0b"', "run.output_dir: expected text that can be written as UTF-8"),
        ("run.output_dir=a\udcff", "'run.output_dir=a\\udcff': expected text that can be written as UTF-8"),
    ],
)
def test_impossible_values_are_rejected_with_their_key(recipe, override, words):
    assert words in refusal(recipe, [override])


def test_a_convergence_that_no_step_can_reach_is_refused(recipe):
    for values, words in {
        ("settle_window=10", "num_steps=23"): "windows of 10 steps can converge after 24 steps",
        ("min_steps=24", "num_steps=23"): "min_steps: expected at most critic_pretrain.num_steps=23",
    }.items():
        assert words in refusal(recipe, [f"critic_pretrain.{value}" for value in values], command="critic-pretrain")
    dry_run(recipe, ["critic_pretrain.settle_window=10", "critic_pretrain.num_steps=24"], command="critic-pretrain")


@pytest.mark.parametrize("name", ["recipe.yaml", "recipe.yaml/below"])
def test_output_folder_that_is_a_file_or_below_a_file_is_rejected(recipe, name):
    assert "run.output_dir: " in refusal(recipe, [f"run.output_dir={recipe.parent / name}"])


def test_empty_mapping_removes_the_entries_of_earlier_layers(recipe, tmp_path):
    later = tmp_path / "later.yaml"
    later.write_text("reward: {options: {extract: last, limit: 3}}\n")
    files = [recipe, later]
    assert load_config(files, ["reward.options.limit=4"]).reward.options == {"extract": "last", "limit": 4}
    assert load_config(files, ["reward.options={}"]).reward.options == {}
    assert load_config(files, ["reward.options={}", "reward.options.other=1"]).reward.options == {"other": 1}


@mutations(60)
@given(data=st.data())
def test_broken_overrides_are_accepted_or_rejected(recipe, data):
    broken = []
    for key in data.draw(st.lists(st.sampled_from(sorted(KEYS)), min_size=1, max_size=2)):
        choices = [*KEYS[key].choices, KEYS[key].default]
        value = data.draw(st.one_of(ODD_VALUES, USUAL_VALUES, st.sampled_from(choices)))
        text = json.dumps(value) if not isinstance(value, float) or math.isfinite(value) else f".{value}".replace(".-", "-.")
        broken.append(f"{key.replace('.N.', '.0.').replace('.NAME.', '.math.')}={text}")
    base = data.draw(st.sampled_from(BASES))
    with taken_or_refused(*SECTIONS):
        dry_run(recipe, [*base, *broken], command=data.draw(st.sampled_from(COMMANDS)))


@mutations(60)
@given(data=st.data())
def test_broken_recipes_are_accepted_or_rejected(recipe, tmp_path_factory, data):
    whole = yaml.safe_load(recipe.read_text())
    for section, values in FULL.items():
        whole[section] = {**whole.get(section, {}), **values}
    broken = data.draw(mutated(whole, at_most=3))
    file = Path(tmp_path_factory.getbasetemp()) / "broken.yaml"
    file.write_text(yaml.safe_dump(broken))
    base = data.draw(st.sampled_from(BASES))
    with taken_or_refused("broken.yaml", *SECTIONS):
        dry_run(file, base, command=data.draw(st.sampled_from(COMMANDS)))


@mutations(200)
@given(data=st.data())
def test_damaged_recipe_files_are_accepted_or_rejected(recipe, tmp_path_factory, data):
    file = Path(tmp_path_factory.getbasetemp()) / "damaged.yaml"
    file.write_bytes(data.draw(mutated_bytes(recipe.read_bytes())))
    with taken_or_refused("damaged.yaml", *SECTIONS):
        load_config(file)


def test_a_response_budget_of_zero_is_refused_in_every_mode(recipe):
    for base in BASES:
        assert "batch.max_response_tokens: expected at least 1" in refusal(recipe, [*base, "batch.max_response_tokens=0"])


def test_every_base_is_accepted(recipe):
    for base in BASES:
        dry_run(recipe, base)


NONSENSE = {
    "int": ["1000000000000", "-2", "'1e9'"],
    "float": ["1e40", "1e-300", "-1e-300", ".nan"],
    "paths": ["~/x", "$HOME/x", "s3://b/x", "/proc/x", "/dev/zero", "../../../../../../../dev/sda", "' '", "' x'", '"a\\nb"', "x" * 300],
    "str": ["' '", "' x'", '"a\\nb"', '"a\\eb"', "'\u202ea'"],
    "names": ["{'': 1}", "{' ': 1}", '{"a\\nb": 1}'],
    "urls": ["http://u:p@h:1", "http://h:1/x", "http://h:1?a=1", "http://256.1.1.1:1", "h:1", "http://h:99999", "http://-h:1"],
}
"""Kind of a key -> values that no key of this kind can have."""
_ENDLESS = ("run.seed", "rollout.bucket_bytes", "rollout.top_k", "eval.top_k", "rollout.fire.top_k")
_TEXTS = ("data.system_prompt", "rollout.fire.after", "reward_train.yes_word", "reward_train.no_word")


def _kinds_of(key):
    """Kinds of a key's values, and how a recipe writes one of them."""
    last = key.name.rsplit(".", 1)[-1]
    if key.type.startswith("dict"):
        return ["names"], "{}"
    if last == "urls":
        return ["urls"], "[{}]"
    if last in ("path", "image_dir", "output_dir", "files") or last.endswith(("_path", "_files")):
        return ["paths"], "[{}]" if key.type.startswith("list") else "{}"
    word = next((word for word in ("int", "float", "str") if word in key.type.replace("| None", "")), "")
    return ([word] if word and key.name not in _ENDLESS + _TEXTS else []), "[{}]" if key.type.startswith("list") else "{}"


PLAIN = [key for key in KEYS.values() if ".N." not in key.name and ".NAME." not in key.name]


@pytest.mark.parametrize("key", PLAIN, ids=lambda key: key.name)
def test_every_key_refuses_the_nonsense_of_its_kind(key):
    kinds, form = _kinds_of(key)
    for value in (value for kind in kinds for value in NONSENSE[kind]):
        try:
            config = load_config(None, [f"{key.name}={form.format(value)}"])
        except ConfigError as error:
            assert key.name in str(error), value
            continue
        problems = [*bound_problems("", config), *address_problems(config.rollout), *fleet_problems(config)]
        assert any(key.name in problem for problem in problems), value


def test_values_set_in_python_are_rejected_with_their_key(recipe):
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
