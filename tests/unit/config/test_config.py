"""The configuration says what is wrong, where, and how to fix it, before anything starts."""

import json
import re

import pytest
from omegaconf import OmegaConf

from megatron_rl.config.checks import check_config
from megatron_rl.config.derived import (
    EvalSet,
    answer_timeout_s,
    bucket_bytes,
    eval_sets,
    saves_in_background,
    servers_are_deterministic,
)
from megatron_rl.config.describe import batch_arithmetic
from megatron_rl.config.keys import sections
from megatron_rl.config.load import REMOVED, config_to_yaml, load_config, preset_names
from megatron_rl.config.schema import Config, Mode, RolloutConfig, RunConfig
from megatron_rl.desk.plan.dry_run import print_plan
from megatron_rl.errors import ConfigError

MODEL = {
    "model_type": "qwen2",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "vocab_size": 32,
    "max_position_embeddings": 256,
}


@pytest.fixture
def recipe(tmp_path):
    """A writable recipe that passes every check, as overrides on an empty file."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL))
    (model / "model.safetensors").write_bytes(b"")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    file = tmp_path / "recipe.yaml"
    file.write_text(
        f"""
preset: tppo
policy: {{path: {model}}}
data: {{train_files: [{tmp_path}/train.jsonl]}}
batch: {{max_prompt_tokens: 64, max_response_tokens: 96, window_tokens: 32}}
"""
    )
    return file


def problems(recipe, *overrides, command="train", world_size=None):
    with pytest.raises(ConfigError) as error:
        check_config(load_config(recipe, overrides), command=command, world_size=world_size)
    return str(error.value)


def test_a_good_recipe_passes_and_overrides_win_over_the_file_and_the_file_over_the_preset(recipe):
    config = load_config(recipe, ["batch.window_tokens=16"])
    check_config(config, command="train")
    assert config.batch.window_tokens == 16
    assert config.batch.max_response_tokens == 96
    assert config.schedule.mode is Mode.tppo
    assert config.algorithm.clip_high == 0.28


def test_the_resolved_configuration_reads_back_equal(recipe, tmp_path):
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
        ("preset: tpo", ["preset", "'tpo'", "tppo"]),
    ],
)
def test_a_broken_recipe_is_an_error_with_file_key_and_remedy(tmp_path, text, expected):
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(file)
    for part in expected:
        assert part in str(error.value)


@pytest.mark.parametrize("key", sorted(REMOVED))
def test_removed_key_is_refused_with_its_remedy(tmp_path, key):
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


def test_a_missing_recipe_and_a_malformed_override_are_errors(tmp_path, recipe):
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="expected key=value"):
        load_config(recipe, ["batch.window_tokens"])


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
def test_impossible_combinations_name_the_key(recipe, overrides, expected):
    message = problems(recipe, *overrides)
    for part in expected:
        assert part in message


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["critic.parallel.tensor_parallel_size=3"],
            ["4 ranks do not divide by critic.parallel.tensor_parallel_size 3"],
        ),
        (
            ["critic.parallel.virtual_pipeline_size=2"],
            ["critic.parallel.virtual_pipeline_size", "critic.parallel.pipeline"],
        ),
        (
            ["critic.parallel.tensor_parallel_size=4"],
            ["critic.parallel.tensor_parallel_size: 4 does not divide num_key"],
        ),
        (["critic.parallel.pipeline_layers=[3]"], ["critic.parallel.pipeline_parallel_size: num_hidden_layers 2"]),
        (
            ["critic.parallel.expert_parallel_size=2"],
            ["critic.parallel: the layers have no experts", "critic.parallel.exp"],
        ),
        (["critic.parallel.num_ranks=2"], ["critic.parallel.num_ranks", "parallel.num_ranks=4"]),
        (["critic.parallel.collective_timeout_s=0"], ["critic.parallel.collective_timeout_s"]),
        (["preset=grpo", "critic.parallel.sequence_parallel=false"], ["critic.parallel: ", "no critic"]),
    ],
)
def test_problems_of_the_critics_own_layout_name_its_keys(recipe, overrides, expected):
    message = problems(recipe, "parallel.num_ranks=4", *overrides)
    for part in expected:
        assert part in message
    assert "\nparallel." not in f"\n{message}"


def test_a_critic_with_a_layout_of_its_own_is_described_beside_the_policy(recipe, capsys):
    overrides = ["parallel.tensor_parallel_size=2", "critic.parallel.pipeline_parallel_size=2", "parallel.num_ranks=4"]
    config = load_config(recipe, [*overrides, "batch.critic_minibatch_size=64", "batch.policy_minibatch_size=32"])
    check_config(config, command="train")
    rows = {row.name: row for row in batch_arithmetic(config, world_size=8)}
    assert (
        rows["samples per policy update"].per_rank == "8" and rows["samples per critic update"].per_rank == "up to 16"
    )
    print_plan(config, command="train", world_size=8)
    shown = capsys.readouterr().out
    assert "policy: 8 ranks = tensor 2 x pipeline 1 x data 4" in shown
    assert "critic: 8 ranks = tensor 1 x pipeline 2 x data 4" in shown


def test_all_problems_are_told_at_once(recipe):
    message = problems(recipe, "run.num_steps=0", "rollout.temperature=0", "batch.window_tokens=999")
    assert len(message.splitlines()) == 3


def test_an_unknown_model_type_lists_the_supported_ones(recipe, tmp_path):
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL | {"model_type": "mamba"}))
    message = problems(recipe)
    assert "'mamba'" in message and "qwen2" in message


@pytest.mark.parametrize("vocab", [{"a": 0, "b": 31}, {"a": 0, "b": 32}])
def test_a_tokenizer_larger_than_the_model_is_refused(recipe, tmp_path, vocab):
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": []}))
    if max(vocab.values()) < MODEL["vocab_size"]:
        check_config(load_config(recipe), command="train")
    else:
        assert "vocabulary mismatch" in problems(recipe) and "vocab_size=32" in problems(recipe)


def test_broken_json_in_the_model_folder_names_the_file(recipe, tmp_path):
    (tmp_path / "model" / "config.json").write_text("{")
    assert "config.json is not a JSON object" in problems(recipe)


def test_the_number_of_ranks_must_be_the_launchers(recipe):
    assert "parallel.num_ranks" in problems(recipe, "parallel.num_ranks=2", world_size=4)


def test_random_weights_need_no_safetensors_and_missing_ones_are_told(recipe, tmp_path):
    (tmp_path / "model" / "model.safetensors").unlink()
    assert "policy.init=random" in problems(recipe)
    check_config(load_config(recipe, ["policy.init=random"]), command="train")


def test_batch_arithmetic_counts_prompts_samples_and_tokens(recipe):
    config = load_config(recipe, ["batch.num_prompts_per_step=8", "batch.num_samples_per_prompt=4"])
    rows = {row.name: row for row in batch_arithmetic(config, world_size=2)}
    assert rows["samples (slots)"].per_step == "32"
    assert rows["samples (slots)"].per_rank == "16"
    assert rows["new tokens (window)"].per_step == "up to 1,088"  # a window of 32, and a rest of 2
    assert rows["windows of the longest response"].per_step == "4"  # its first window may have one token
    full = load_config(recipe, ["batch.window_jitter_tokens=0"])
    rows = {row.name: row for row in batch_arithmetic(full, world_size=2)}
    assert rows["windows of the longest response"].per_step == "3"


def test_a_later_recipe_overrides_an_earlier_one_and_may_choose_the_preset(recipe, tmp_path):
    second = tmp_path / "second.yaml"
    second.write_text("preset: dapo\nrun: {num_steps: 3}\n")
    config = load_config([recipe, second], ["run.seed=9"])
    assert (config.preset, config.run.num_steps, config.run.seed) == ("dapo", 3, 9)
    assert config.policy.path == load_config(recipe).policy.path


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["preset=tppo", "algorithm.advantage=group"], "policy_trains_on: .*older policies.*old_policy=rollout"),
        (["preset=remax", "schedule.mode=tppo", "batch.window_tokens=32"], "schedule.mode: .*greedy.*schedule.mode=sync"),
        (["preset=grpo", "batch.num_samples_per_prompt=1"], "num_samples_per_prompt.*at least 2"),
        (["preset=tppo", "schedule.policy_trains_on=responses"], "policy_trains_on: .*old_policy=rollout"),
        (
            ["preset=tppo", "schedule.policy_trains_on=responses", "schedule.critic_trains_on=windows"],
            "schedule.critic_trains_on: .*set responses",
        ),
        (["preset=tppo", "algorithm.dynamic_sampling.enabled=true"], "dynamic_sampling.enabled.*schedule.mode=sync"),
        (["schedule.mode=async", "algorithm.correction.weight=none"], "correction.weight: .*set token"),
        (["schedule.mode=async", "rollout.placement=colocated"], "schedule.mode: .*take turns.*disaggregated"),
        (["schedule.mode=async", "policy.moe.routing_replay=R3"], "routing_replay: .*checkpoints.*set R2"),
        (["schedule.mode=async", "schedule.max_staleness=-1"], "max_staleness: expected at least 0"),
        (["schedule.mode=async", "schedule.max_staleness=2"], "max_staleness: expected 0 or 1, got 2.*older; set 1"),
        (["schedule.max_staleness=2"], "max_staleness: expected 0 or 1, got 2"),
        (
            ["schedule.mode=async", "schedule.max_staleness=0", "schedule.weight_update=in_flight"],
            "weight_update: in_flight.*schedule.max_staleness=0 there is none.*with max_staleness=1",
        ),
        (["rollout.urls=[http://a:1, http://b:1, http://a:1/]"], "rollout.urls: http://a:1 is listed 2 times; list each server once"),
        (["eval.urls=[http://a:1, http://a:1]"], "eval.urls: http://a:1 is listed 2 times"),
        (["rollout.urls=[http://a:99999]"], "rollout.urls: 'http://a:99999' is not an address; expected http://host:port"),
        (["rollout.urls_file=http://"], "rollout.urls_file: 'http://' is not an address"),
        (["schedule.weight_update=in_flight"], "weight_update: in_flight.*mode=tppo.*set schedule.mode=async.*=between"),
        (["preset=ppo", "algorithm.overlong=soft", "algorithm.overlong_buffer_tokens=99999"], "overlong_buffer_tokens"),
        (
            ["algorithm.correction.old_policy=rollout", "algorithm.correction.weight=token"],
            "old_policy.*nothing to correct",
        ),
        (["algorithm.correction.rejection=token", "algorithm.correction.rejection_low=3"], "rejection_low.*low <= 1"),
        (["algorithm.correction.weight=sequence", "algorithm.correction.max_weight=0.5"], "max_weight.*at least 1"),
        (["algorithm.kl.place=loss", "algorithm.kl.estimator=k1"], "kl.estimator=k3 or k2"),
        (["algorithm.kl.place=reward", "algorithm.kl.coef=0.1"], "k3 in the reward.*set algorithm.kl.estimator=k1"),
        (["algorithm.kl.place=reward", "algorithm.kl.estimator=k2"], "k2 in the reward.*kl.place=loss"),
        (["preset=gspo", "algorithm.dual_clip=3"], "algorithm.dual_clip.*gspo.*would ignore.*dual_clip=0"),
        (["preset=cispo", "algorithm.dual_clip=3"], "algorithm.dual_clip.*cispo"),
        (["rollout.fire.temperature=30", "rollout.fire.loss=keep"], "fire.loss.*correction.weight=token"),
        (["data.system_prompt=hello"], "data.system_prompt.*use_chat_template"),
        (["algorithm.kl.target=0.1"], "algorithm.kl.target.*place"),
        (["preset=grpo", "critic.warmup_steps=5"], "critic.warmup_steps.*no critic"),
        (["algorithm.normalize_by_role=true"], "normalize_by_role.*environment"),
        (["rollout.over_sampling=0.5"], "over_sampling"),
        (["rollout.top_p=0.7"], r"rollout.top_p.*set 1, got 0.7.*log-probs are over all tokens.*eval.top_p"),
        (["rollout.top_k=50"], r"rollout.top_k.*set -1, got 50.*eval.top_k"),
        (['rollout.server_args={preferred_sampling_params: \'{"min_p": 0.1}\'}'], "preferred_sampling_params.*sampled from"),
        (["rollout.server_args={--speculative-accept-threshold-acc: 0.9}"], "threshold-acc.*sampled from"),
    ],
)
def test_pieces_that_exclude_each_other_are_refused_with_the_reason(recipe, overrides, words):
    config = load_config(recipe, overrides)
    with pytest.raises(ConfigError) as error:
        check_config(config, command="train")
    assert re.search(words, str(error.value))


def test_tokens_of_an_older_policy_train_with_the_decoupled_loss_unless_something_else_is_chosen(recipe):
    def weight(*overrides):
        config = load_config(recipe, ["schedule.mode=async", *overrides])
        check_config(config, command="train")
        assert load_config(None, [f"algorithm.correction={{weight: {config.algorithm.correction.weight}}}"])
        return config.algorithm.correction.weight

    assert weight() == "token" and weight("algorithm.correction.weight=icepop") == "icepop"
    assert weight("algorithm.correction.old_policy=rollout") == "none"
    assert weight("schedule.max_staleness=0") == weight("schedule.mode=tppo") == "none"
    assert weight("schedule.policy_trains_on=responses") == "token"


@pytest.mark.parametrize("preset", ["grpo", "dapo", "gspo", "rloo", "reinforce_pp"])
def test_presets_without_a_critic_run_in_windows(recipe, preset):
    words = [f"preset={preset}", "batch.num_samples_per_prompt=4", "algorithm.overlong_buffer_tokens=8", "batch.window_tokens=32"]
    check_config(load_config(recipe, [*words, "schedule.mode=async"]), command="train")
    check_config(load_config(recipe, [*words, "schedule.mode=tppo", "algorithm.correction.weight=token"]), command="train")


@pytest.mark.parametrize("preset", ["vapo", "vc_ppo", "tppo", "ppo", "pag", "seed_vl_hybrid", ""])
def test_a_random_value_head_never_steers_the_policy(recipe, preset):
    """A critic comes from somewhere, or learns alone first; critic-pretrain is where it may start from nothing."""
    overrides = ["batch.window_tokens=0", f"preset={preset}", "schedule.mode=sync", "critic.warmup_steps=0"]
    if preset == "seed_vl_hybrid":
        overrides += ["batch.max_prompt_tokens=64", "batch.max_response_tokens=96"]
    message = problems(recipe, *overrides)
    assert "critic.path" in message and "megatron-rl critic-pretrain" in message and "critic.warmup_steps" in message
    check_config(load_config(recipe, [*overrides, "critic.warmup_steps=10"]), command="train")
    pretrain = [*overrides, "critic_pretrain.output_path=somewhere"]
    check_config(load_config(recipe, pretrain), command="critic-pretrain")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["eval.num_samples=32"], "eval.num_samples: 32 samples at temperature 0 are 32 times the same.*set eval.temperature"),
        (["eval.top_p=0.7"], "eval.top_p, top_k: temperature 0 always takes the most likely token.*got 0.7 and -1"),
        (["eval.top_k=5"], "eval.top_p, top_k: temperature 0.*got 1.0 and 5"),
        (["eval.sets={}", "eval.temperature=1", "eval.top_p=0"], "eval.top_p: expected more than 0 and up to 1, got 0"),
        (["eval.num_samples=0"], "eval.num_samples: expected at least 1, got 0"),
        (["eval.sets.a.files=[FILE]"], "eval.sets: data.eval_files is already a set"),
        (["data.eval_files=[]", "eval.sets.a.num_samples=2", "eval.sets.a.files=[FILE]"], "eval.sets.a.num_samples: 2 samples"),
        (["data.eval_files=[]", "eval.sets.a={}"], "eval.sets.a.files: expected at least one file, got none"),
        (["data.eval_files=[]", "eval.sets.a.files=[/nowhere]"], "eval.sets.a.files: /nowhere does not exist"),
        (["data.eval_files=[]", "eval.sets={'a/b': {files: [FILE]}}"], "eval.sets: 'a/b' becomes part of metrics"),
        (["data.eval_files=[]", "eval.sets.reward.files=[FILE]"], "eval.sets: 'reward'.*none of reward, dialogue"),
        (["data.eval_files=[]", "eval.sets.a={files: [FILE], num_samples: -1}"], "eval.sets.a.num_samples: expected at least 1"),
        (["data.eval_files=[]", "eval.every_steps=2"], "data.eval_files.*or eval.sets"),
    ],
)
def test_an_evaluation_that_cannot_be_sampled_or_named_is_refused(recipe, tmp_path, overrides, words):
    file = str(tmp_path / "train.jsonl")
    overrides = [f"data.eval_files=[{file}]", *(item.replace("FILE", file) for item in overrides)]
    assert re.search(words, problems(recipe, *overrides))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["batch.num_samples_by_type={a: 3}"], "num_samples_by_type.a: 3 does not divide 16, the largest number"),
        (["batch.num_samples_by_type={a: 24}"], "batch.num_samples_per_prompt: 16 does not divide 24"),
        (["batch.num_samples_by_type={a: 32}", "batch.num_prompts_per_step=3"], "num_prompts_per_step: 48 slots.*by 32"),
        (["batch.num_samples_by_type={a: 0}"], "batch.num_samples_by_type.a: expected at least 1, got 0"),
        (["preset=grpo", "batch.num_samples_by_type={a: 1}"], "num_samples_by_type.a: algorithm.advantage=group compares"),
        (["preset=remax", "batch.num_samples_by_type={a: 1}"], "num_samples_by_type: algorithm.advantage=remax adds a greedy"),
        (["preset=dapo", "batch.num_samples_by_type={a: 1}"], "num_samples_by_type.a: algorithm.dynamic_sampling needs"),
        (["batch.num_samples_per_prompt=0", "batch.num_samples_by_type={a: 2}"], "num_samples_per_prompt: expected at least 1"),
    ],
)
def test_numbers_of_samples_that_cannot_fill_a_step_with_whole_groups_are_refused(recipe, overrides, words):
    assert re.search(words, problems(recipe, "batch.window_tokens=0", *overrides))


def test_numbers_of_samples_by_type_leave_the_slots_of_a_step_as_they_are(recipe):
    config = load_config(recipe, ["batch.num_prompts_per_step=8", "batch.num_samples_by_type={judged: 1, hard: 32}"])
    check_config(config, command="train")
    rows = {row.name: row for row in batch_arithmetic(config, world_size=2)}
    assert rows["samples (slots)"].per_step == "128" and rows["prompts"].per_step == "up to 128"


def test_what_a_set_does_not_say_is_as_in_eval(recipe, tmp_path):
    file = str(tmp_path / "train.jsonl")
    sets = f"eval.sets={{a: {{files: [{file}], num_samples: 8, top_p: 0.9}}, b: {{files: [{file}], temperature: 0, num_samples: 1}}}}"
    config = load_config(recipe, ["eval.temperature=0.6", "eval.num_samples=32", "eval.num_prompts=5", sets])
    check_config(config, command="train")
    assert eval_sets(config) == {
        "a": EvalSet([file], 5, 8, 0.6, 0.9, -1),
        "b": EvalSet([file], 5, 1, 0.0, 1.0, -1),
    }
    config = load_config(recipe, [f"data.eval_files=[{file}]", "eval.temperature=1"])
    assert eval_sets(config) == {"": EvalSet([file], 0, 1, 1.0, 1.0, -1)} and eval_sets(load_config(recipe)) == {}


COLOCATED = "rollout.placement=colocated"


@pytest.mark.parametrize(
    ("overrides", "world_size", "message"),
    [
        (
            ["rollout.num_servers=2"],
            4,
            r"2 x rollout.tensor_parallel_size 1 = 2 is not the 4 trainer ranks.*num_servers=4",
        ),
        (["rollout.tensor_parallel_size=3"], 4, "a rollout.tensor_parallel_size that divides 4"),
        (["rollout.urls=[http://a:1]"], 2, "the rollout.urls 1 x .*list 2 servers"),
        (["rollout.tensor_parallel_size=0"], 2, "rollout.tensor_parallel_size: expected at least 1"),
        (["rollout.weight_sync=disk"], 1, "rollout.weight_sync=disk"),
        (["rollout.host=0.0.0.0"], 1, "rollout.host"),
    ],
)
def test_colocated_servers_and_trainer_ranks_are_counted_before_a_run(recipe, overrides, world_size, message):
    assert re.search(message, problems(recipe, COLOCATED, *overrides, world_size=world_size))


def test_a_colocated_layout_that_adds_up_is_taken(recipe):
    for overrides, world_size in ((["rollout.num_servers=2", "rollout.tensor_parallel_size=2"], 4), ([], None)):
        check_config(load_config(recipe, [COLOCATED, *overrides]), command="train", world_size=world_size)


def test_what_a_device_decides_where_the_recipe_says_nothing():
    default = RolloutConfig()
    assert servers_are_deterministic(default, "cpu") and not servers_are_deterministic(default, "cuda")
    assert bucket_bytes(default, "cpu") == 2**26 and bucket_bytes(default, "cuda") == 2**30
    assert saves_in_background(RunConfig(), "cuda") and not saves_in_background(RunConfig(), "cpu")
    assert saves_in_background(RunConfig(async_save=True), "cpu")
    told = RolloutConfig(deterministic=True, bucket_bytes=1000)
    assert servers_are_deterministic(told, "cuda") and not servers_are_deterministic(RolloutConfig(deterministic=False), "cpu")
    assert bucket_bytes(told, "cpu") == bucket_bytes(told, "cuda") == 1000


def test_a_request_has_time_for_its_tokens():
    assert answer_timeout_s(0.0, 16) == 304.0
    assert answer_timeout_s(0.0, 8192) > 30 * 60  # a window of 8K at 512 sequences on one GPU takes ten minutes and more
    assert answer_timeout_s(7.0, 8192) == 7.0
