"""Every key has a meaning and a bound, and a value out of its bound is rejected with key and expectation."""

import pytest

from megatron_rl.config.keys import near_misses, sections
from megatron_rl.config.load import flat_params
from megatron_rl.config.schema import Config, CurriculumPhase, ParallelConfig, RewardRouteConfig
from megatron_rl.config.schema.bounds import bound_problems

KEYS = {key.name: key for section in sections() for key in section.keys}
UNBOUNDED = {
    "algorithm.positive_lm_threshold",  # a score, which may be negative
    "algorithm.dynamic_sampling.correct_from",
    "data.curriculum.N.until_step",  # checked against the phase before
}


def test_every_key_has_a_meaning():
    assert [name for name, key in KEYS.items() if not key.meaning] == []


def test_every_choice_has_a_meaning():
    assert [f"{name}={value}" for name, key in KEYS.items() for value, text in key.choices.items() if not text] == []


def test_every_section_has_a_docstring():
    # A dataclass without a docstring gets one from its signature.
    assert [section.name for section in sections() if not section.meaning or "(" in section.meaning.split()[0]] == []


def test_every_number_has_a_bound_or_a_stated_reason():
    assert {name for name, key in KEYS.items() if key.type in ("int", "float") and not key.bound} == UNBOUNDED


def test_keys_cover_every_key_of_a_configuration():
    assert set(flat_params(Config())) <= set(KEYS)


def test_defaults_are_within_their_bounds():
    assert list(bound_problems("", Config())) == []
    for section in sections():
        assert list(bound_problems(section.name, section.schema())) == []


def changed(key: str, value: object) -> Config:
    """Config() with one value that is not checked when it is set."""
    config = Config()
    *path, last = key.split(".")
    node = config
    for name in path:
        node = getattr(node, name)
    setattr(node, last, value)
    return config


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("run.num_steps", 0, "run.num_steps: expected at least 1, got 0"),
        ("run.output_dir", "", "run.output_dir: expected a folder, got nothing"),
        ("batch.window_tokens", -1, "batch.window_tokens: expected at least 0, got -1"),
        ("rollout.start_timeout_s", 0.0, "rollout.start_timeout_s: expected more than 0, got 0.0"),
        ("algorithm.gamma", 1.5, "algorithm.gamma: expected a number from 0 to 1, got 1.5"),
        ("algorithm.gamma", float("nan"), "algorithm.gamma: expected a number from 0 to 1, got nan"),
        ("algorithm.entropy_coef", float("nan"), "algorithm.entropy_coef: expected at least 0, got nan"),
        (
            "critic.optimizer.beta2",
            1.0,
            "critic.optimizer.beta2: expected a number from 0 up to but not including 1, got 1.0",
        ),
        ("rollout.top_p", 0.0, "rollout.top_p: expected more than 0 and up to 1, got 0.0"),
        ("rollout.top_k", 0, "rollout.top_k: expected -1 (off) or at least 1, got 0"),
        ("rollout.fire.top_k", 5000, "rollout.fire.top_k: expected -1 (off) or 1 to 4096, got 5000"),
        (
            "algorithm.dual_clip",
            0.5,
            "algorithm.dual_clip: expected more than 1 (3 and 10 are in use), or 0 for none, got 0.5",
        ),
        ("rollout.stop_token_ids", [3, -1], "rollout.stop_token_ids.1: expected at least 0, got -1"),
        ("algorithm.kl.coef_by_type", {"math": -1.0}, "algorithm.kl.coef_by_type.math: expected at least 0, got -1.0"),
        (
            "data.curriculum",
            [CurriculumPhase(5, {"math": -1.0})],
            "data.curriculum.0.mixture.math: expected at least 0, got -1.0",
        ),
        (
            "reward.by_type",
            {"math": RewardRouteConfig(timeout_s=-1.0)},
            "reward.by_type.math.timeout_s: expected at least 0, got -1.0",
        ),
        (
            "critic.parallel",
            ParallelConfig(tensor_parallel_size=0),
            "critic.parallel.tensor_parallel_size: expected at least 1, got 0",
        ),
    ],
)
def test_value_out_of_bounds_is_reported_with_key_and_expectation(key, value, message):
    assert list(bound_problems("", changed(key, value))) == [message]


def test_values_at_the_edge_of_their_bounds_pass():
    for key, value in {"rollout.top_k": -1, "algorithm.dual_clip": 0.0, "run.num_steps": 1, "algorithm.gamma": 0.0}.items():
        assert list(bound_problems("", changed(key, value))) == []


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("batch.window_token", "batch.window_tokens"),
        ("window_tokens", "batch.window_tokens"),
        ("rollout.fyre", "rollout.fire"),
        ("batches", "batch"),
    ],
)
def test_misspelled_name_finds_the_intended_key_or_section(name, meant):
    assert near_misses(name) == [meant]
