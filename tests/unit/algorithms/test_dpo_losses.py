"""DPO's losses: equal to TRL's, and their laws."""

import json
import math
from pathlib import Path

import pytest
import torch

from megatron_rl.algorithms import dpo_coefficients, dpo_loss

BATCHES = json.loads(Path(__file__).with_name("dpo_trl.json").read_text())
OPTIONS = {
    "sigmoid": {},
    "conservative": {},
    "ipo": {"kind": "ipo", "length_normalized": True},
    "sigmoid_norm": {"length_normalized": True},
}
"""Our options for each of TRL's losses."""


def sides(values, *, grad=False):
    chosen, rejected = torch.tensor(values, dtype=torch.float64).chunk(2)
    return (chosen.requires_grad_(), rejected.requires_grad_()) if grad else (chosen, rejected)


def random_pairs(num_pairs=5, seed=0):
    torch.manual_seed(seed)
    logprobs, reference = (tuple(-20 * torch.rand(num_pairs, dtype=torch.float64) for _ in range(2)) for _ in range(2))
    return tuple(side.requires_grad_() for side in logprobs), reference, tuple(torch.full((num_pairs,), 4) for _ in range(2))


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: f"{batch['loss_type']}-{batch['beta']}")
def test_loss_and_gradient_equal_those_of_trl(batch):
    logprobs = sides(batch["logprobs"], grad=True)
    settings = {"beta": batch["beta"], "label_smoothing": batch["label_smoothing"], **OPTIONS[batch["loss_type"]]}
    loss = dpo_loss(logprobs, sides(batch["reference"]), sides(batch["lengths"]), **settings)
    assert (loss.sum / loss.denominator).item() == pytest.approx(batch["loss"], rel=1e-12)
    gradient = torch.cat(dpo_coefficients(loss, logprobs)) / loss.denominator
    torch.testing.assert_close(gradient, torch.tensor(batch["gradient"], dtype=torch.float64), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_label_smoothing_of_one_half_makes_the_loss_symmetric(kind):
    (chosen, rejected), reference, lengths = random_pairs()
    settings = {"kind": kind, "beta": 0.3, "label_smoothing": 0.5}
    one = dpo_loss((chosen, rejected), reference, lengths, **settings)
    other = dpo_loss((rejected, chosen), reference[::-1], lengths, **settings)
    torch.testing.assert_close(one.sum, other.sum)


def test_policy_that_is_its_reference_has_loss_log_2_and_ties():
    logprobs, _, lengths = random_pairs()
    reference = tuple(side.detach() for side in logprobs)
    loss = dpo_loss(logprobs, reference, lengths, beta=0.1)
    assert float(loss.sum / loss.denominator) == pytest.approx(math.log(2))
    assert {name: float(total / count) for name, (total, count) in loss.metrics.items()} == {
        "accuracy": 0.5, "margin": 0.0, "reward_chosen": 0.0, "reward_rejected": 0.0,
    }  # fmt: skip


def test_coefficients_give_the_gradient_of_the_loss():
    logprobs, reference, lengths = random_pairs()
    loss = dpo_loss(logprobs, reference, lengths, kind="ipo", beta=0.2, label_smoothing=0.1)
    coefs = dpo_coefficients(loss, logprobs)
    finite = []
    for side in range(2):
        for pair in range(5):
            moved = [part.detach().clone() for part in logprobs]
            moved[side][pair] += 1e-6
            above = dpo_loss(tuple(moved), reference, lengths, kind="ipo", beta=0.2, label_smoothing=0.1).sum
            finite.append(float(above - loss.sum) / 1e-6)
    torch.testing.assert_close(torch.cat(coefs), torch.tensor(finite, dtype=torch.float64), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"beta": 0.0}, "beta: expected a number above 0"),
        ({"beta": 0.1, "label_smoothing": 1.5}, "label_smoothing"),
        ({"beta": 0.1, "kind": "hinge"}, "kind: expected 'sigmoid' or 'ipo'"),
    ],
)
def test_bad_settings_are_refused(settings, reason):
    logprobs, reference, lengths = random_pairs()
    with pytest.raises(ValueError, match=reason):
        dpo_loss(logprobs, reference, lengths, **settings)


def test_references_of_other_pairs_are_refused():
    logprobs, reference, lengths = random_pairs()
    with pytest.raises(ValueError, match="reference_logprobs"):
        dpo_loss(logprobs, tuple(side[:3] for side in reference), lengths, beta=0.1)
