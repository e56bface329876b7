"""Laws of examples/effects: its arms are valid recipes, and an effect separates only if its interval does not hold 0."""

import importlib.util
import sys

import numpy as np
import pytest

from megatron_rl.config.load import load_config
from tests.unit.examples.test_examples import ROOT

FOLDER = ROOT / "examples" / "effects"


@pytest.fixture(scope="module")
def effects():
    before = list(sys.path)
    spec = importlib.util.spec_from_file_location("effects", FOLDER / "effects.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


def test_every_arm_is_a_configuration_with_its_own_folder(effects):
    for name, study in effects.claims().items():
        found = effects.commands(name, study, 3)
        assert len(found) == len(study["arms"]) >= 2
        for folder, words in found.items():
            assert folder.name.endswith("-3")
            if "recipe" in study:
                recipes = [ROOT / words[i + 1] for i, word in enumerate(words) if word == "--config"]
                config = load_config(recipes, [word for word in words[2:] if "=" in word])
                assert (config.run.seed, config.run.output_dir) == (3, str(folder)) and config.eval.every_steps
            else:
                assert (ROOT / words[-1]).is_file()


def test_an_effect_is_the_mean_of_the_second_half_at_equal_steps_or_tokens(effects):
    short = {"steps": [0, 10, 20], "tokens": [0.0, 50.0, 100.0], "metric": [0.0, 0.2, 0.4]}
    long = {"steps": [0, 10, 20], "tokens": [0.0, 100.0, 200.0], "metric": [0.0, 0.2, 0.4]}
    arms = {"one": {"1": short}, "two": {"1": long}}
    means = {axis: effects.second_halves(arms, axis, ["1"]) for axis in ("steps", "tokens")}
    assert means["steps"] == {"one": pytest.approx(0.3), "two": pytest.approx(0.3)}
    assert means["tokens"] == {"one": pytest.approx(0.3), "two": pytest.approx(0.15)}


@pytest.mark.parametrize(("shift", "noise", "word"), [(0.2, 0.01, "| more |"), (-0.2, 0.01, "| less |"), (0.0, 0.1, "does not separate")])
def test_an_interval_with_0_does_not_separate(effects, shift, noise, word):
    def curve(level):
        return {"steps": [0, 40], "tokens": [0.0, 1.0], "metric": [level, level]}

    draws = np.random.default_rng(0).normal(size=5) * noise
    shifted = {str(i): curve(0.5 + shift + draw) for i, draw in enumerate(draws)}
    arms = {"random": {str(i): curve(0.5) for i in range(5)}, "pretrained": shifted}
    line = next(line for line in effects.table({"value_pretraining": arms}).splitlines() if "pretrained" in line)
    assert word in line and "| 5 |" in line


def test_a_seed_that_one_arm_lacks_is_left_out_and_a_missing_arm_is_not_run(effects):
    curve = {"steps": [0, 40], "tokens": [0.0, 1.0], "metric": [0.1, 0.2]}
    arms = {"random": {"1": curve, "2": curve}, "pretrained": {"2": curve}}
    assert effects.table({"value_pretraining": arms}).count("| 1 | 17.5 [one seed: no interval] %") == 2
    assert "| value_pretraining | | 0 | not run | | |" in effects.table({"value_pretraining": {"random": {"1": curve}}})


def test_readme_shows_the_table_of_the_committed_results(effects):
    readme = (FOLDER / "README.md").read_text()
    assert effects.with_table(readme, effects.table(effects.stored())) == readme, "python examples/effects/effects.py table --write"
