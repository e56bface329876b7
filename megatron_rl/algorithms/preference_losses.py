"""Preferences: scores of a pairwise judge, and the Bradley-Terry loss of a scalar reward model.

A pairwise judge returns p = P(the response shown first is better). Judges favor one position, so every pair is shown in
both orders: ``p_first_ab`` with a first, ``p_first_ba`` with b first.
"""

import torch
from torch import Tensor

from megatron_rl.algorithms.loss import Loss
from megatron_rl.algorithms.shapes import check_float_vector, check_same_kind, describe


def pairwise_score(p_first_ab: float | Tensor, p_first_ba: float | Tensor) -> float | Tensor:
    """Score of a against b, ``(p_ab + 1 - p_ba) / 2`` within [0, 1]; 0.5 is a tie (Pairwise-RL, arXiv 2504.04950).

    The score is antisymmetric for any position bias: score(a, b) + score(b, a) = 1, so score(a, a) = 0.5.

    Args:
        p_first_ab, p_first_ba: probabilities, two floats or two tensors of one shape.
    """
    _check_probabilities(p_first_ab, p_first_ba)
    return 0.5 * (p_first_ab + (1.0 - p_first_ba))


@torch.no_grad()
def swap_consistency(p_first_ab: Tensor, p_first_ba: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Metrics of a judge's position bias.

    Args:
        p_first_ab, p_first_ba: [P] float32 or float64, one per pair.

    Returns:
        (sum, count) of each metric, to be merged by addition:
        swap_consistency: pairs whose orders do not name different winners; 0.5, a tie, contradicts nothing.
        position_gap: ``|p_ab - (1 - p_ba)|``, 0 for a judge without bias.
        first_bias: ``p_ab + p_ba - 1``, above 0 if the first position is favored.
    """
    check_float_vector("p_first_ab", p_first_ab)
    check_same_kind("p_first_ba", p_first_ba, "p_first_ab", p_first_ab)
    _check_probabilities(p_first_ab, p_first_ba)
    forward, backward = p_first_ab.double(), 1.0 - p_first_ba.double()
    agrees = torch.sign(forward - 0.5) * torch.sign(backward - 0.5) >= 0
    columns = {
        "swap_consistency": agrees.double(),
        "position_gap": (forward - backward).abs(),
        "first_bias": forward - backward,
    }
    count = forward.new_tensor(float(len(forward)))
    return {name: (column.sum(), count) for name, column in columns.items()}


def bradley_terry_loss(chosen: Tensor, rejected: Tensor) -> Loss:
    """``-log sigmoid(chosen - rejected)`` of preference pairs (Bradley-Terry).

    Args:
        chosen, rejected: [P] float32 or float64, same dtype and device, with gradient: scores of the two responses.

    Returns:
        Loss per pair. Metrics: ``accuracy`` (chosen above rejected; a tie counts half), ``margin``.
    """
    check_float_vector("chosen", chosen)
    check_same_kind("rejected", rejected, "chosen", chosen)
    margin = chosen - rejected
    with torch.no_grad():
        count = margin.new_tensor(float(len(margin)))
        accuracy = 0.5 * (torch.sign(margin) + 1.0)
        metrics = {"accuracy": (accuracy.sum(), count), "margin": (margin.sum(), count)}
    return Loss(-torch.nn.functional.logsigmoid(margin).sum(), count, metrics)


@torch.no_grad()
def bradley_terry_coefficients(chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Tensor]:
    """Derivatives of ``bradley_terry_loss(...).sum`` by the scores, as constants.

    ``sum(c * s)`` over all scores s with these coefficients c has the gradient of the loss, and each term needs one score
    only: the two responses of a pair need not share a micro-batch or a rank.

    Args:
        chosen, rejected: [P] float32 or float64, scores of a first pass without gradient.

    Returns:
        ([P] for chosen, [P] for rejected): -sigmoid(-margin) and +sigmoid(-margin). The caller divides by the number of
        pairs.
    """
    check_float_vector("chosen", chosen)
    check_same_kind("rejected", rejected, "chosen", chosen)
    error = torch.sigmoid(rejected - chosen)
    return -error, error


def _check_probabilities(*probabilities: float | Tensor) -> None:
    for name, value in zip(("p_first_ab", "p_first_ba"), probabilities, strict=True):
        inside = (value >= 0.0) & (value <= 1.0)
        if not (bool(inside.all()) if isinstance(inside, Tensor) else inside):
            raise ValueError(f"{name}: expected probabilities within [0, 1], got {describe(value)} with others")
