"""The recipes in docs/data.md load as they stand."""

import re
from pathlib import Path

import pytest

from megatron_rl.config.load import load_config
from megatron_rl.data.sampler import weight_problems

DOCS = Path(__file__).parents[3] / "docs" / "data.md"
RECIPES = re.findall(r"```yaml\n(.*?)```", DOCS.read_text(), re.DOTALL)


@pytest.mark.parametrize("text", RECIPES)
def test_recipes_in_the_documentation_load(tmp_path, text):
    (tmp_path / "recipe.yaml").write_text(text)
    data = load_config(tmp_path / "recipe.yaml").data
    assert list(weight_problems(data.mixture, data.curriculum)) == []


def test_there_are_recipes():
    assert len(RECIPES) == 3
