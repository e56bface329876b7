"""The batch arithmetic that a dry run prints."""

from pathlib import Path

import pytest

from megatron_rl.config.checks import check_config
from megatron_rl.config.load import load_config
from megatron_rl.desk.plan.dry_run import batch_arithmetic, print_plan
from tests.unit.config.recipes import MODEL, write_recipe


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_recipe(tmp_path, MODEL)


def test_separate_layout_of_the_critic_is_described_next_to_the_policys(recipe, capsys):
    overrides = ["parallel.tensor_parallel_size=2", "critic.parallel.pipeline_parallel_size=2", "parallel.num_ranks=4"]
    config = load_config(recipe, [*overrides, "batch.critic_minibatch_size=64", "batch.policy_minibatch_size=32"])
    check_config(config, command="train")
    rows = batch_arithmetic(config, world_size=8)
    assert rows["samples per policy update"][1] == "8" and rows["samples per critic update"][1] == "up to 16"
    print_plan(config, command="train", world_size=8)
    shown = capsys.readouterr().out
    assert "policy: 8 ranks = tensor 2 x pipeline 1 x data 4" in shown
    assert "critic: 8 ranks = tensor 1 x pipeline 2 x data 4" in shown


def test_batch_arithmetic_counts_prompts_samples_and_tokens(recipe):
    config = load_config(recipe, ["batch.num_prompts_per_step=8", "batch.num_samples_per_prompt=4"])
    rows = batch_arithmetic(config, world_size=2)
    assert rows["samples (slots)"][0] == "32"
    assert rows["samples (slots)"][1] == "16"
    assert rows["new tokens (window)"][0] == "up to 1,088"  # a window of 32, and a rest of 2
    assert rows["windows of the longest response"][0] == "4"  # its first window may have one token
    full = load_config(recipe, ["batch.window_jitter_tokens=0"])
    rows = batch_arithmetic(full, world_size=2)
    assert rows["windows of the longest response"][0] == "3"


def test_samples_by_type_do_not_change_the_slots_of_a_step(recipe):
    config = load_config(recipe, ["batch.num_prompts_per_step=8", "batch.num_samples_by_type={judged: 1, hard: 32}"])
    check_config(config, command="train")
    rows = batch_arithmetic(config, world_size=2)
    assert rows["samples (slots)"][0] == "128" and rows["prompts"][0] == "up to 128"


@pytest.mark.parametrize(
    ("overrides", "note"),
    [
        (
            ["preset=grpo", "batch.window_tokens=0", "critic.optimizer.lr=0.5", "algorithm.lambda_critic=0.3"],
            "critic.optimizer.lr, algorithm.lambda_critic: not read by this run, because algorithm.advantage=group has no critic",
        ),
        (["reference.path=/nowhere", "algorithm.kl.coef=9"], "algorithm.kl.coef, reference.path: not read by this run, because algorithm.kl.place=none"),
        (["environment.max_turn_tokens=7"], "environment.max_turn_tokens: not read by this run, because environment.name is empty"),
        (["rollout.fire.after=x"], "rollout.fire.after: not read by this run, because rollout.fire.temperature=0"),
        (["schedule.max_staleness=5"], "schedule.max_staleness: not read by this run, because schedule.mode=tppo"),
        (["rollout.urls=[http://a:1]", "rollout.num_servers=9"], "rollout.num_servers: not read by this run, because its servers are attached"),
        (["algorithm.correction.max_weight=9"], "algorithm.correction.max_weight: not read by this run, because algorithm.correction.weight=none"),
        (["policy.lora.alpha=3"], "policy.lora.alpha: not read by this run, because policy.lora.rank=0"),
        (["sft.train_files=[nowhere]", "dpo.beta=3"], "sft, dpo: read by other commands than `megatron-rl train`, which check them"),
    ],
)
def test_keys_that_a_run_never_reads_are_named_with_the_reason(recipe, capsys, overrides, note):
    print_plan(load_config(recipe, overrides), command="train", world_size=2)
    assert f"note: {note}" in capsys.readouterr().out


def test_a_recipe_whose_keys_are_all_read_has_no_note_on_them(recipe, capsys):
    print_plan(load_config(recipe, ["critic.optimizer.lr=1e-4"]), command="train", world_size=2)
    assert "read by" not in capsys.readouterr().out
