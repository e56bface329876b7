"""Every recipe that is shipped loads, is complete and describes itself."""

import re
from pathlib import Path

import pytest

from megatron_rl.config.checks import check_config
from megatron_rl.config.load import flat_params, load_config, preset_names
from megatron_rl.config.schedule_facts import facts_of
from megatron_rl.config.schema.commands import RL_COMMANDS
from megatron_rl.desk.plan.dry_run import batch_arithmetic
from megatron_rl.errors import ConfigError
from megatron_rl.schedule.graph import check_graph
from megatron_rl.schedule.table import make_graph

ROOT = Path(__file__).resolve().parents[3]
BASE = ROOT / "examples" / "recipes" / "arithmetic.yaml"
RECIPES = sorted(set(ROOT.glob("examples/*/*.yaml")) - {BASE})


def layers(recipe):
    """The files that a recipe is run with."""
    return [BASE, recipe] if recipe.parent == BASE.parent else [recipe]


def command_of(recipe):
    """The command that its comment names; train without one."""
    found = re.search(r"^# Run by:.*megatron-rl (\S+) --config", recipe.read_text(), flags=re.MULTILINE)
    return found[1] if found else "train"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_shipped_recipe_lacks_nothing_but_the_users_files(recipe):
    config, command = load_config(layers(recipe)), command_of(recipe)
    ranks = config.parallel.num_ranks or 8
    if command in RL_COMMANDS:
        assert batch_arithmetic(config, ranks)
        check_graph(make_graph(facts_of(config)))
    with pytest.raises(ConfigError) as error:
        check_config(load_config(layers(recipe), ["policy.path=/nowhere"]), command=command, world_size=ranks)
    for problem in str(error.value).splitlines():
        assert "does not exist" in problem or "config.json" in problem, problem


def test_every_preset_has_an_example():
    assert {load_config(layers(recipe)).preset for recipe in RECIPES} >= set(preset_names())


def test_partial_rollouts_differ_from_tppo_in_what_trains_together_alone():
    one, two = (flat_params(load_config(None, [f"preset={name}"])) for name in ("tppo", "partial_rollout_ppo"))
    assert {key for key in one if one[key] != two[key]} == {
        "preset", "schedule.training_window_tokens", "algorithm.correction.old_policy", "algorithm.ignore_boundary_tokens",
    }  # fmt: skip


def test_there_are_recipes():
    assert len(RECIPES) >= 3


def test_the_ppo_baseline_differs_from_tppo_in_the_mode_alone():
    one, two = (flat_params(load_config(ROOT / "examples" / "arithmetic" / f"{mode}.yaml")) for mode in ("tppo", "ppo"))
    differing = {key for key in one if one[key] != two[key] and not key.startswith(("sft.", "critic_pretrain."))}
    assert differing == {
        "preset", "run.output_dir", "schedule.mode", "batch.window_tokens", "batch.window_jitter_tokens",
        "algorithm.ignore_boundary_tokens",
    }  # fmt: skip
