"""Conclusions over trials: the factor that removes a mismatch is the cause."""

import math

import pytest

from megatron_rl.algorithms.mismatch import MismatchStats
from megatron_rl.desk.doctor.mismatch_factors import (
    AS_IT_IS,
    BATCH_SHAPE,
    CHAT_TEMPLATE,
    DTYPE,
    HELD_HERE,
    SAMPLING,
    WEIGHTS,
    Trial,
    culprits,
    is_settled,
    verdict,
)

BOUNDS = MismatchStats(mean=math.inf, k3=math.inf, outliers=math.inf, max=1e-4)


def trial(factor, difference, **options):
    return Trial(factor, "", MismatchStats(difference, difference, 0.0, difference), BOUNDS, 10, **options)


@pytest.mark.parametrize("cause", [*HELD_HERE, DTYPE])
def test_first_factor_whose_trial_agrees_is_the_cause(cause):
    order = [*HELD_HERE, DTYPE]
    before = order[: order.index(cause)]
    trials = [trial(AS_IT_IS, 0.3), *(trial(factor, 0.28) for factor in before), trial(cause, 1e-6)]
    assert culprits(trials) == [cause] and is_settled(trials)
    assert verdict(trials)[0].startswith(f"{cause}: ") and len(verdict(trials)) == 1


def test_several_factors_can_share_a_mismatch():
    trials = [trial(AS_IT_IS, 1.0), trial(SAMPLING, 0.1), trial(BATCH_SHAPE, 0.09), trial(WEIGHTS, 1e-6)]
    assert culprits(trials) == [SAMPLING, WEIGHTS]
    hidden = [trial(AS_IT_IS, 1.0), trial(SAMPLING, 0.9), trial(WEIGHTS, 1e-6), Trial(SAMPLING, "released again", is_at_fault=True)]
    assert culprits(hidden) == [SAMPLING, WEIGHTS] and is_settled(hidden)


def test_verdict_reports_unexplained_mismatch_and_agreement():
    trials = [trial(AS_IT_IS, 0.3), *(trial(factor, 0.29) for factor in HELD_HERE), Trial(DTYPE, "not tried: both are float32")]
    assert not culprits(trials) and not is_settled(trials)
    assert "the mismatch is not caused by sampling mask, batch shape" in verdict(trials)[0]
    partly = [trial(AS_IT_IS, 1.0), trial(SAMPLING, 0.1), trial(DTYPE, 0.1)]
    assert culprits(partly) == [SAMPLING] and "the remaining mismatch is not caused by" in verdict(partly)[1]
    assert verdict([trial(AS_IT_IS, 1e-6)]) == ["trainer and servers agree on the tokens that these servers sample now"]
    assert culprits([trial(AS_IT_IS, 1e-6), trial(SAMPLING, 1e-9)]) == []


def test_non_finite_figures_disagree_and_differing_tokens_are_a_cause():
    assert culprits([trial(AS_IT_IS, math.inf), trial(WEIGHTS, 0.1)]) == [WEIGHTS]
    assert culprits([trial(AS_IT_IS, math.inf), trial(WEIGHTS, math.inf)]) == []
    assert not trial(AS_IT_IS, math.nan).agrees
    template = Trial(CHAT_TEMPLATE, "compared", evidence="1 of 8 prompts differ", is_at_fault=True)
    assert culprits([template, trial(AS_IT_IS, 1e-6)]) == [CHAT_TEMPLATE]
    again = Trial.from_json(trial(WEIGHTS, 0.5).as_json())
    assert again == trial(WEIGHTS, 0.5) and Trial.from_json(template.as_json()) == template
