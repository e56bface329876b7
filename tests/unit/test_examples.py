"""Every recipe that is shipped loads, is complete and describes itself."""

from pathlib import Path

import pytest

from megatron_rl.config.checks import check_config
from megatron_rl.config.describe import batch_arithmetic
from megatron_rl.config.load import load_config
from megatron_rl.errors import ConfigError
from megatron_rl.schedule.stages import check_graph, graph_of

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted(ROOT.glob("examples/*/*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_shipped_recipe_lacks_nothing_but_the_users_files(recipe):
    config = load_config(recipe)
    ranks = config.parallel.num_ranks or 8
    assert batch_arithmetic(config, ranks)
    check_graph(graph_of(config))
    with pytest.raises(ConfigError) as error:
        check_config(load_config(recipe, ["policy.path=/nowhere"]), command="train", world_size=ranks)
    for problem in str(error.value).splitlines():
        assert "does not exist" in problem or "config.json" in problem, problem


def test_there_are_recipes():
    assert len(RECIPES) >= 3


def test_the_ppo_baseline_differs_from_tppo_in_the_mode_alone():
    from megatron_rl.config.load import flat_params

    one, two = (flat_params(load_config(ROOT / "examples" / "arithmetic" / f"{mode}.yaml")) for mode in ("tppo", "ppo"))
    differing = {key for key in one if one[key] != two[key] and not key.startswith(("sft.", "critic_pretrain."))}
    assert differing == {
        "preset", "run.output_dir", "schedule.mode", "batch.window_tokens", "algorithm.ignore_boundary_tokens",
    }  # fmt: skip
