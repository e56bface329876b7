"""Preferences: scores of a pairwise judge, the Bradley-Terry loss of a scalar reward model, and the losses of DPO.

A pairwise judge returns p = P(the response shown first is better). Judges favor one position, so every pair is shown in
both orders: ``p_first_ab`` with a first, ``p_first_ba`` with b first.

DPO compares log-probs with those of a reference. With the log-ratio h = log pi(y|x) - log pi_ref(y|x) of a response and
the margin m = h_chosen - h_rejected:

    sigmoid (DPO, arXiv 2305.18290 eq. 7):    f(m) = -log sigmoid(beta * m)
    ipo (arXiv 2310.12036 eq. 17):            f(m) = (m - 1 / (2 * beta))^2

A pair's label is wrong with probability ``label_smoothing`` e (conservative DPO): loss (1 - e) * f(m) + e * f(-m). With
``length_normalized`` each h is divided by its response's number of tokens.
"""

import torch
from torch import Tensor
from torch.nn.functional import softplus

from megatron_rl.algorithms.loss import Loss
from megatron_rl.algorithms.shapes import check_float_vector, check_fraction, check_positive, check_same_kind, describe

LogProbs = tuple[Tensor, Tensor]
"""([P] of the chosen responses, [P] of the rejected ones)."""


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


def dpo_loss(
    logprobs: LogProbs,
    reference_logprobs: LogProbs,
    lengths: LogProbs,
    *,
    kind: str = "sigmoid",
    beta: float,
    label_smoothing: float = 0.0,
    length_normalized: bool = False,
) -> Loss:
    """Loss per pair; ``kind`` is "sigmoid" or "ipo".

    Args:
        logprobs: float32 or float64 with gradient, each response's log-probability, summed over its tokens.
        reference_logprobs: the same of the reference, without gradient.
        lengths: number of tokens of each response, read with ``length_normalized`` alone.

    Returns:
        Metrics: ``accuracy`` (the policy prefers chosen more than the reference does; a tie counts half), and in nats
        ``margin`` (beta * m), ``reward_chosen`` and ``reward_rejected`` (beta * h).
    """
    beta, smoothing = check_positive("beta", beta), check_fraction("label_smoothing", label_smoothing)
    chosen, rejected = (
        _log_ratio(name, *of, length_normalized=length_normalized)
        for name, *of in zip(("chosen", "rejected"), logprobs, reference_logprobs, lengths, strict=True)
    )
    check_same_kind("rejected", rejected, "chosen", chosen)
    margin = chosen - rejected
    if kind == "sigmoid":
        right, wrong = softplus(-beta * margin), softplus(beta * margin)
    elif kind == "ipo":
        right, wrong = (margin - 0.5 / beta).square(), (margin + 0.5 / beta).square()
    else:
        raise ValueError(f"kind: expected 'sigmoid' or 'ipo', got {kind!r}")
    with torch.no_grad():
        count = margin.new_tensor(float(len(margin)))
        columns = {
            "accuracy": 0.5 * (torch.sign(margin) + 1.0),
            "margin": beta * margin,
            "reward_chosen": beta * chosen,
            "reward_rejected": beta * rejected,
        }
        metrics = {name: (column.sum(), count) for name, column in columns.items()}
    return Loss(((1.0 - smoothing) * right + smoothing * wrong).sum(), count, metrics)


def dpo_coefficients(loss: Loss, logprobs: LogProbs) -> LogProbs:
    """Derivatives of ``loss.sum``, a ``dpo_loss`` of these ``logprobs`` (which require a gradient), by the log-probs.

    ``sum(c * log pi)`` with these constants has the gradient of the loss, and each term needs one response only: the two
    responses of a pair need not share a micro-batch or a rank.
    """
    chosen, rejected = torch.autograd.grad(loss.sum, logprobs)
    return chosen, rejected


def _log_ratio(name: str, logprobs: Tensor, reference: Tensor, lengths: Tensor, *, length_normalized: bool) -> Tensor:
    """[P] h of one side of the pairs."""
    check_float_vector(f"logprobs ({name})", logprobs)
    check_same_kind(f"reference_logprobs ({name})", reference, "logprobs", logprobs)
    ratio = logprobs - reference.detach()
    return ratio / lengths.to(ratio).clamp(min=1.0) if length_normalized else ratio


def _check_probabilities(*probabilities: float | Tensor) -> None:
    for name, value in zip(("p_first_ab", "p_first_ba"), probabilities, strict=True):
        inside = (value >= 0.0) & (value <= 1.0)
        if not (bool(inside.all()) if isinstance(inside, Tensor) else inside):
            raise ValueError(f"{name}: expected probabilities within [0, 1], got {describe(value)} with others")
