"""Laws of the selection rules: shares per type, ties by id, independence of the row order, unscored is not 0."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config.schema import SelectionRule, SelectPromptsConfig
from megatron_rl.selection.selection_rules import (
    ABOVE_SHARE,
    NEVER_SOLVED,
    NO_ROW,
    NO_SCORE,
    NO_SPREAD,
    SOLVED_TOO_OFTEN,
    PromptScores,
    select,
    summarize,
    z_scores,
)


def reasons(prompts, **fields):
    rule = SelectPromptsConfig(**fields)
    return {verdict.id: verdict.reason for verdict in select(prompts, rule, correct_from=1.0)}


scores = st.lists(st.sampled_from([0.0, 0.1, 0.2, 0.3, 0.7, 1.0, -3.25]), max_size=5).map(tuple)
prompt_lists = st.lists(st.tuples(st.sampled_from("abc"), scores, st.integers(0, 2)), max_size=40).map(
    lambda rows: [PromptScores(f"p{i:02d}", *row) for i, row in enumerate(rows)]
)
rules = st.builds(
    SelectPromptsConfig,
    rule=st.sampled_from(SelectionRule),
    keep_share=st.sampled_from([0.01, 0.1, 0.2, 0.3, 0.5, 1.0]),
    max_pass_rate=st.sampled_from([0.25, 0.5, 0.75, 1.0]),
    min_spread=st.sampled_from([0.05, 0.1, 0.4]),
)


@given(prompt_lists, rules, st.randoms(use_true_random=False))
def test_selection_does_not_depend_on_the_order_of_prompts_or_scores(prompts, rule, rng):
    shuffled = [replace(p, scores=tuple(rng.sample(p.scores, len(p.scores)))) for p in prompts]
    rng.shuffle(shuffled)
    verdicts = {v.id: v for v in select(prompts, rule, correct_from=1.0)}
    for verdict in select(shuffled, rule, correct_from=1.0):
        expected = verdicts[verdict.id]
        assert (verdict.reason, verdict.mean, verdict.best) == (expected.reason, expected.mean, expected.best)


@given(prompt_lists, rules)
def test_types_are_selected_independently(prompts, rule):
    verdicts = {v.id: v for v in select(prompts, rule, correct_from=1.0)}
    for name in "abc":
        alone = [p for p in prompts if p.type == name]
        assert select(alone, rule, correct_from=1.0) == [verdicts[p.id] for p in alone]


@given(prompt_lists, st.sampled_from([0.1, 0.3, 0.5, 1.0]))
def test_lowest_keeps_the_lowest_means_of_each_type(prompts, share):
    """Equals the paper's rule: sort by z-score and id."""
    z_by_id = dict(zip([p.id for p in prompts], z_scores(prompts), strict=True))
    kept = {prompt_id for prompt_id, reason in reasons(prompts, keep_share=share).items() if not reason}
    for name in "abc":
        scored = [p for p in prompts if p.type == name and p.scores]
        number = max(1, int(len(scored) * share + 1e-9)) if scored else 0
        in_order = sorted(scored, key=lambda p: (round(z_by_id[p.id], 9), p.id))
        assert [p.id for p in in_order[:number]] == sorted(
            (p.id for p in scored if p.id in kept), key=lambda i: (round(z_by_id[i], 9), i)
        )


@pytest.mark.parametrize(
    ("share", "number", "kept"), [(0.1, 100, 10), (0.1, 30, 3), (0.1, 5, 1), (0.29, 100, 29), (1, 7, 7)]
)
def test_kept_share_is_computed_exactly(share, number, kept):
    prompts = [PromptScores(f"{i:03d}", "", (1.0,)) for i in range(number)]
    verdicts = select(prompts, SelectPromptsConfig(keep_share=share), correct_from=1.0)
    assert [v.id for v in verdicts if v.kept] == [p.id for p in prompts[:kept]], "ties go by id"


def test_hard_type_does_not_displace_other_types():
    """A share over all prompts would keep the hard type only (arXiv 2503.22230)."""
    prompts = [PromptScores(f"h{i}", "hard", (0.01 * i,)) for i in range(10)]
    prompts += [PromptScores(f"e{i}", "easy", (0.9 + 0.01 * i,)) for i in range(10)]
    assert {i for i, reason in reasons(prompts, keep_share=0.2).items() if not reason} == {"h0", "h1", "e0", "e1"}


def test_z_scores_have_mean_zero_and_deviation_one_per_type():
    rng = random.Random(0)
    prompts = [PromptScores(str(i), "ab"[i % 2], (rng.gauss(5 * (i % 2), 1 + i % 2),)) for i in range(200)]
    z = z_scores(prompts)
    for parity in (0, 1):
        mine = z[parity::2]
        assert math.isclose(math.fsum(mine), 0, abs_tol=1e-9)
        assert math.isclose(math.fsum(x * x for x in mine) / len(mine), 1)
    assert z_scores([PromptScores("a", "", (0.3,)), PromptScores("b", "", (0.1, 0.5))]) == [0.0, 0.0]


def test_pass_rate_keeps_rates_above_zero_up_to_the_limit():
    prompts = [PromptScores(f"{k}/16", "", (1.0,) * k + (0.0,) * (16 - k)) for k in range(17)]
    found = reasons(prompts, rule=SelectionRule.pass_rate, max_pass_rate=0.75)
    assert [i for i, reason in found.items() if not reason] == [f"{k}/16" for k in range(1, 13)]
    assert found["0/16"] == NEVER_SOLVED and found["13/16"] == found["16/16"] == SOLVED_TOO_OFTEN


def test_unscored_responses_do_not_change_the_pass_rate():
    prompts = [PromptScores("a", "", (1.0, 0.0), num_unscored=14), PromptScores("b", "", (1.0,), num_unscored=3)]
    assert reasons(prompts, rule=SelectionRule.pass_rate) == {"a": "", "b": SOLVED_TOO_OFTEN}


def test_spread_is_best_minus_mean():
    prompts = [
        PromptScores("wide", "", (0.0, 1.0)),
        PromptScores("at", "", (0.1, 0.3)),
        PromptScores("near", "", (0.5, 0.6, 0.55)),
        PromptScores("one", "", (1.0,)),
    ]
    found = reasons(prompts, rule=SelectionRule.spread, min_spread=0.1)
    assert found == {"wide": "", "at": "", "near": NO_SPREAD, "one": NO_SPREAD}


@pytest.mark.parametrize("rule", SelectionRule)
def test_prompts_without_scores_are_dropped_with_the_reason(rule):
    prompts = [PromptScores("a", "", (), num_unscored=2), PromptScores("b", "", ()), PromptScores("c", "", (0.2, 1.0))]
    assert reasons(prompts, rule=rule) == {"a": NO_SCORE, "b": NO_ROW, "c": ""}
    first, *_ = select(prompts, SelectPromptsConfig(rule=rule), correct_from=1.0)
    assert (first.mean, first.best, first.z, first.num_unscored) == (None, None, None, 2)


def test_summary_counts_add_up():
    prompts = [PromptScores(f"a{i}", "a", (0.0, 0.1 * i), num_unscored=i % 2) for i in range(10)]
    prompts.append(PromptScores("b", "b", ()))
    a, b = summarize(select(prompts, SelectPromptsConfig(keep_share=0.2), correct_from=1.0))
    assert (a.num_prompts, a.num_kept, a.dropped) == (10, 2, {ABOVE_SHARE: 8})
    assert (a.num_responses, a.num_unscored, a.num_kept_all_zero) == (25, 5, 1)
    assert a.highest_kept == 0.05 and math.isclose(a.mean_score, 0.225) and a.mean_score_kept == 0.025
    assert (b.num_kept, b.dropped, b.mean_score, b.highest_kept) == (0, {NO_ROW: 1}, None, None)
