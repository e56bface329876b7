"""Laws of the prompt order: epochs, shares, phases, resumption."""

import json
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config.schema import CurriculumPhase
from megatron_rl.data.sampler import PromptSampler, next_type
from megatron_rl.data.trajectory import Prompt
from megatron_rl.errors import DataError


def prompts_of(**num_by_type):
    return [Prompt(f"{name}{i}", (1,), type=name) for name, number in num_by_type.items() for i in range(number)]


def draw(sampler, number, step=0):
    return [sampler.draw(step) for _ in range(number)]


weights = st.dictionaries(
    st.sampled_from("abcdefgh"), st.sampled_from([0.001, 0.1, 0.3, 0.333, 1.0, 2.0, 7.5, 1e-9, 1e6]), min_size=1
)


@given(weights, st.integers(1, 400))
def test_shares_stay_within_one_draw_of_the_weights(mixture, num_draws):
    total = sum(Fraction(repr(weight)) for weight in mixture.values())
    shares = {name: Fraction(repr(weight)) / total for name, weight in mixture.items()}
    sampler = PromptSampler(prompts_of(**dict.fromkeys(mixture, 3)), seed=1, mixture=mixture)
    counts = Counter()
    for n in range(1, num_draws + 1):
        counts[sampler.draw().type] += 1
        assert all(abs(counts[name] - share * n) < 1 for name, share in shares.items())


@given(st.lists(st.fractions(Fraction(1, 500), Fraction(1)), min_size=1, max_size=12))
def test_no_type_is_a_whole_draw_away_from_any_share(raw):
    shares = {str(i): share / sum(raw) for i, share in enumerate(raw)}
    counts = Counter()
    for n in range(1, 301):
        counts[next_type(shares, counts)] += 1
        assert all(abs(counts[name] - share * n) < 1 for name, share in shares.items())


@given(weights, st.integers(1, 7), st.integers(0, 1000))
def test_every_prompt_of_a_type_is_shown_once_before_any_repeats(mixture, num_each, seed):
    sampler = PromptSampler(prompts_of(**dict.fromkeys(mixture, num_each)), seed=seed, mixture=mixture)
    by_type = {name: [] for name in mixture}
    for prompt in draw(sampler, 120):
        by_type[prompt.type].append(prompt.id)
    for name, ids in by_type.items():
        for start in range(0, len(ids), num_each):
            epoch = ids[start : start + num_each]
            assert len(set(epoch)) == len(epoch)
            assert len(epoch) < num_each or set(epoch) == {f"{name}{i}" for i in range(num_each)}


CURRICULUM = [
    CurriculumPhase(4, {"math": 1, "code": 1, "general": 0}),
    CurriculumPhase(9, {"math": 1, "code": 1, "general": 1}),
]


def curriculum_sampler(seed=5, **mixture):
    return PromptSampler(prompts_of(math=7, code=4, general=9), seed=seed, mixture=mixture, curriculum=CURRICULUM)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=16), st.integers(0, 16), st.integers(0, 9))
def test_sampler_state_determines_all_later_draws(draws_by_step, stop_at, extra):
    """Holds for any portions of draws, and for a state taken at any point, also in the middle of a step."""
    whole, resumed = curriculum_sampler(), curriculum_sampler()
    expected = [prompt for step, number in enumerate(draws_by_step) for prompt in draw(whole, number, step)]
    got = []
    for step, number in enumerate(draws_by_step):
        first = min(extra, number) if step == stop_at else number
        got += draw(resumed, first, step)
        if step == stop_at:
            state = json.loads(json.dumps(resumed.state()))
            resumed = curriculum_sampler()
            resumed.load_state(state)
            got += draw(resumed, number - first, step)
    assert got == expected and resumed.state() == whole.state()


def test_a_curriculum_changes_the_mixture_at_its_steps():
    sampler = curriculum_sampler(math=0, code=0, general=1)
    shares = [Counter(prompt.type for prompt in draw(sampler, 6, step)) for step in range(11)]
    assert shares[:4] == [{"math": 3, "code": 3}] * 4
    assert shares[4:9] == [{"math": 2, "code": 2, "general": 2}] * 5
    assert shares[9:] == [{"general": 6}] * 2


def test_types_are_drawn_by_their_number_after_a_curriculum():
    sampler = curriculum_sampler()
    draw(sampler, 6, step=0)
    assert Counter(prompt.type for prompt in draw(sampler, 20, step=9)) == {"math": 7, "code": 4, "general": 9}


def test_without_weights_types_do_not_matter_and_seeds_do():
    prompts = prompts_of(math=30, general=5)
    orders = [[p.id for p in draw(PromptSampler(prompts, seed=seed), 35)] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(p.id for p in prompts)


@pytest.mark.parametrize(
    ("mixture", "curriculum", "message"),
    [
        (
            {"math": 1, "general": 1, "maths": 1},
            [],
            r"data.mixture: no prompt has the type 'maths'; .*'general', 'math'",
        ),
        ({"math": 1}, [], "data.mixture: no weight for the 2 prompts of type 'general'"),
        ({"math": -1, "general": 1}, [], "data.mixture.math: expected a weight of 0 or more, got -1"),
        ({"math": float("nan"), "general": 1}, [], "data.mixture.math: expected a weight"),
        ({"math": 0, "general": 0}, [], "data.mixture: expected at least one weight above 0"),
        ({}, [CurriculumPhase(3, {})], "data.curriculum.0.mixture: expected at least one weight above 0"),
        ({}, [CurriculumPhase(0, {"math": 1, "general": 0})], "data.curriculum.0.until_step: expected more than 0"),
    ],
)
def test_invalid_weights_are_rejected_with_their_key(mixture, curriculum, message):
    with pytest.raises(DataError, match=message):
        PromptSampler(prompts_of(math=3, general=2), seed=0, mixture=mixture, curriculum=curriculum)


def test_sampler_state_of_other_data_is_rejected():
    state = PromptSampler(prompts_of(math=3, general=2), seed=0).state()
    for prompts, mixture in (
        (prompts_of(math=3, general=3), None),
        (prompts_of(math=3, general=2), {"math": 1, "general": 1}),
    ):
        with pytest.raises(DataError, match="over 5 \\* prompts.*same data"):
            PromptSampler(prompts, seed=0, mixture=mixture).load_state(state)
