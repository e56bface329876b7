"""The loss on positive examples takes tokens that train the policy, and no others (VAPO, arXiv 2504.05118)."""

import random

import pytest
import torch

from megatron_rl.config.schema import AlgorithmConfig, CorrectionConfig, Overlong
from megatron_rl.data.trajectory import Score, Segment, Trajectory
from megatron_rl.step.loss_batches import policy_batch, store_untrained
from megatron_rl.step.window_advantages import ResponseRules
from tests.unit.step.test_window_advantages import RAW, advantages, dialogue, trajectory


def test_the_positive_lm_mask_covers_all_windows_of_positive_finished_responses_only():
    algorithm = AlgorithmConfig(**{**RAW.__dict__, "positive_lm_coef": 0.1})
    group = [
        trajectory([4, 2], stopped=True, score=Score(1.0)),
        trajectory([4, 2], stopped=True, score=Score(0.0)),
        trajectory([4, 4], stopped=False),
    ]
    batch, found = advantages(group, 1, [0.0] * 8, algorithm)
    trained, _ = policy_batch(group, batch, torch.zeros(len(batch.tokens)), found, algorithm)
    assert trained.fields["lm_mask"].tolist() == [False] * 3 + [True] * 6 + [False] * (9 + 11)


def _random_positive_case(rng: random.Random):
    """Responses and dialogues in their last window, half of them with scores of 1, under random rules."""
    algorithm = AlgorithmConfig(
        **{
            **RAW.__dict__,
            "positive_lm_coef": 0.1,
            "overlong": rng.choice([Overlong.none, Overlong.filter]),
            "ignore_boundary_tokens": rng.choice([0, 1]),
            "correction": CorrectionConfig(
                rejection=rng.choice(["none", "token", "sequence"]), veto_below=rng.choice([0.0, 0.01])
            ),
        }
    )
    rules = ResponseRules(independent_turns=rng.random() < 0.5, masks_hot_tokens=rng.random() < 0.5)
    group = []
    for id in range(6):
        if rules.independent_turns:
            scores = [rng.choice([0.0, 1.0, 2.0]) for _ in range(rng.randint(1, 3))]
            talk = dialogue([rng.randint(1, 3) for _ in scores], rewards=scores, id=id, done=rng.random() < 0.8)
            if rng.random() < 0.3:
                talk.turn_scores[0] = Score(None, error="died")
            group.append(talk)
        else:
            stopped = rng.random() < 0.6
            score = Score(rng.choice([0.0, 1.0, None])) if stopped or rng.random() < 0.5 else None
            response = trajectory([rng.randint(2, 4)], stopped=stopped, score=score, id=id)
            if score is not None and not stopped:
                response.max_response_tokens = response.num_response_tokens
            first = response.segments[0]
            hot = Segment(first.token_ids[:1], (-0.5,), 0, "length", 0, hot=rng.random() < 0.5)
            rest = Segment(first.token_ids[1:], first.rollout_logprobs[1:], 0, first.finish_reason, 0)
            response.segments = [hot, rest]
            group.append(response)
    return group, algorithm, rules


@pytest.mark.parametrize("seed", range(60))
def test_untrained_tokens_are_excluded_from_the_positive_example_loss(seed):
    """The tokens of the loss on positive examples are among those of the policy loss: hot, cut, rejected ones are not."""
    rng = random.Random(seed)
    group, algorithm, rules = _random_positive_case(rng)
    num_new = sum(t.window_tokens(0) for t in group)
    batch, found = advantages(group, 0, [0.0] * num_new, algorithm, rules=rules)
    ratios = torch.tensor([rng.choice([0.0, 0.0, -1.5, -9.0]) for _ in range(len(batch.tokens))])
    old = torch.where(batch.fields["mask"], -0.5 + ratios, 0.0)
    trained, _ = policy_batch(group, batch, old, found, algorithm, rules=rules)
    imitated, mask = trained.fields["lm_mask"], trained.fields["mask"]
    assert not (imitated & ~mask).any()
    for t, start in zip(group, batch.cu_seqlens.tolist()):
        for turn in t.turns():
            score = t.turn_scores.get(turn.index) if rules.independent_turns else t.score
            is_positive = t.finished and score is not None and score.value is not None and score.value >= 1.0
            first = start + len(t.prompt.token_ids) + turn.start
            span = slice(first, first + len(turn.token_ids))
            expected = mask[span] if is_positive else torch.zeros_like(mask[span])
            assert torch.equal(imitated[span], expected)


def test_tokens_masked_in_an_earlier_window_are_not_positive_examples():
    algorithm = AlgorithmConfig(
        **{
            **RAW.__dict__,
            "positive_lm_coef": 0.1,
            "ignore_boundary_tokens": 1,
            "correction": CorrectionConfig(rejection="token"),
        }
    )
    early = trajectory([4], stopped=False)
    batch, found = advantages([early], 0, [0.0] * 4, algorithm)
    old = torch.where(batch.fields["mask"], -0.5, 0.0)
    old[4] = -5.0
    trained, _ = policy_batch([early], batch, old, found, algorithm)
    store_untrained([early], batch, trained.fields["mask"])
    assert [part.tolist() for part in early.left_out] == [[1, 3]]
    late = Trajectory.from_dict(early.to_dict())
    late.segments.append(Segment((7, 7), (-0.5, -0.5), 1, "stop", 1))
    late.score = Score(1.0)
    batch, found = advantages([late], 1, [0.0] * 2, algorithm)
    trained, _ = policy_batch([late], batch, torch.where(batch.fields["mask"], -0.5, 0.0), found, algorithm)
    assert trained.fields["lm_mask"].int().tolist() == [0] * 3 + [1, 0, 1, 0, 1, 1]
