"""Laws of the mismatch corrections and of off-policy sequence masking, against Python loops."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithms import mismatch_correction, mismatch_metrics, off_policy_sequence_mask, policy_loss
from tests.unit.algorithms.ragged import Ragged, assert_close, ragged

WEIGHTS = ["none", "token", "sequence", "icepop"]
REJECTIONS = {
    "none": {},
    "token": {"rejection_low": 0.5, "rejection_high": 2.0},
    "sequence": {"rejection_low": 0.5, "rejection_high": 2.0},
    "geometric": {"rejection_low": 0.9, "rejection_high": 1.1},
    "k2": {"rejection_high": 0.2},
    "k3": {"rejection_high": 0.15},
}
BOUNDS = torch.tensor([0, 2, 2, 5])


def pair(batch: Ragged, scale: float = 0.5) -> tuple[torch.Tensor, torch.Tensor]:
    """(rollout, old) log-probs of different policies."""
    rollout = batch.logprobs()
    return rollout, rollout + batch.normal(scale)


def clamped(number: float) -> float:
    return max(-20.0, min(20.0, number))


def brute_force(
    batch: Ragged, rollout: torch.Tensor, old: torch.Tensor, weight: str, rejection: str, veto: float, normalize: bool
) -> tuple[list[float], list[bool]]:
    """Weights and mask by the definitions of the rules, one token at a time, with the options of the tests' calls."""
    low, high = REJECTIONS[rejection].get("rejection_low"), REJECTIONS[rejection].get("rejection_high")
    weights, mask = [0.0] * batch.num_tokens, [False] * batch.num_tokens
    kept_sequences = []
    for tokens in batch.counted():
        logs = {t: clamped(float(old[t] - rollout[t])) for t in tokens}
        rho = {t: math.exp(x) for t, x in logs.items()}
        if not tokens or any(r < veto for r in rho.values()):
            continue
        product = math.exp(clamped(sum(logs.values())))
        drop_sequence = {
            "none": False,
            "token": False,
            "sequence": rejection == "sequence" and not low <= product <= high,
            "geometric": rejection == "geometric" and not low <= math.exp(sum(logs.values()) / len(tokens)) <= high,
            "k2": rejection == "k2" and sum(x * x / 2 for x in logs.values()) / len(tokens) > high,
            "k3": rejection == "k3" and sum(rho[t] - 1 - logs[t] for t in tokens) / len(tokens) > high,
        }[rejection]
        if drop_sequence:
            continue
        kept = [t for t in tokens if rejection != "token" or low <= rho[t] <= high]
        for t in kept:
            mask[t] = True
            weights[t] = {
                "none": 1.0,
                "token": min(rho[t], 1.5),
                "sequence": min(product, 1.5),
                "icepop": rho[t] if 0.6 <= rho[t] <= 1.8 else 0.0,
            }[weight]
        if kept:
            kept_sequences.append(kept)
    if normalize and kept_sequences:
        mean = (
            sum(weights[kept[0]] for kept in kept_sequences) / len(kept_sequences)
            if weight == "sequence"
            else sum(weights) / sum(mask)
        )
        if mean > 0:
            weights = [w / mean for w in weights]
    return weights, mask


@pytest.mark.parametrize("rejection", REJECTIONS)
@pytest.mark.parametrize("weight", WEIGHTS)
@settings(max_examples=15)
@given(batch=ragged(), veto=st.sampled_from([0.0, 0.4]), normalize=st.booleans())
def test_correction_equals_its_definition_for_every_rule(weight: str, rejection: str, batch: Ragged, veto: float, normalize: bool):
    rollout, old = pair(batch)
    found = mismatch_correction(
        rollout,
        old,
        batch.mask,
        batch.cu_seqlens,
        weight=weight,
        max_weight=1.5,
        icepop_low=0.6,
        icepop_high=1.8,
        rejection=rejection,
        veto_below=veto,
        normalize=normalize,
        **REJECTIONS[rejection],
    )
    weights, mask = brute_force(batch, rollout, old, weight, rejection, veto, normalize)
    assert found.mask.tolist() == mask
    assert_close(found.weights, weights)


@pytest.mark.parametrize("rejection", REJECTIONS)
@pytest.mark.parametrize("weight", WEIGHTS)
@settings(max_examples=15)
@given(batch=ragged(), normalize=st.booleans())
def test_equal_policies_need_no_correction_bit_for_bit(weight: str, rejection: str, batch: Ragged, normalize: bool):
    for dtype in (torch.float32, torch.float64):
        logprobs = batch.logprobs().to(dtype)
        found = mismatch_correction(
            logprobs,
            logprobs.clone(),
            batch.mask,
            batch.cu_seqlens,
            weight=weight,
            rejection=rejection,
            veto_below=1e-4,
            normalize=normalize,
            **REJECTIONS[rejection],
        )
        assert torch.equal(found.mask, batch.mask)
        assert torch.equal(found.weights, batch.mask.to(dtype))
        assert found.metrics["masked_share"] == found.metrics["rejected_share"] == 0.0
        assert found.metrics["weight_mean"] == found.metrics["weight_ess"] == 1.0


@pytest.mark.parametrize("weight", WEIGHTS)
def test_corrected_loss_of_equal_policies_is_the_plain_loss(weight: str):
    logprobs, ones = -torch.rand(5), torch.ones(5)
    found = mismatch_correction(logprobs, logprobs, ones, BOUNDS, weight=weight, rejection="geometric")
    plain = policy_loss(logprobs, logprobs, logprobs, ones, clip_low=0.2, clip_high=0.2)
    corrected = policy_loss(
        logprobs, logprobs, logprobs, found.mask, clip_low=0.2, clip_high=0.2, weights=found.weights
    )
    assert torch.equal(plain.sum, corrected.sum) and plain.denominator == corrected.denominator


@given(ragged())
def test_no_correction_gives_weights_of_one_and_all_metrics(batch: Ragged):
    rollout, old = pair(batch, scale=3.0)
    found = mismatch_correction(rollout, old, batch.mask, batch.cu_seqlens)
    assert torch.equal(found.mask, batch.mask) and torch.equal(found.weights, batch.mask.double())
    diagnostics = mismatch_metrics(old, rollout, batch.mask, batch.cu_seqlens)
    assert diagnostics.items() <= found.metrics.items()
    assert {"kl", "k3", "max_abs_log_ratio", "ppl_ratio", "ess", "chi2_token", "chi2_sequence"} <= diagnostics.keys()


def test_icepop_keeps_the_denominator_unlike_rejection():
    rollout, old = torch.zeros(5), torch.tensor([0.0, 3.0, 0.0, 0.0, 0.0])
    arguments = (rollout, old, torch.ones(5), BOUNDS)
    icepop = mismatch_correction(*arguments, weight="icepop")
    rejected = mismatch_correction(*arguments, rejection="token")
    assert icepop.mask.all() and icepop.weights.tolist() == [1, 0, 1, 1, 1]
    assert rejected.mask.tolist() == [True, False, True, True, True]
    for found, denominator in ((icepop, 5), (rejected, 4)):
        loss = policy_loss(old, old, torch.ones(5), found.mask, weights=found.weights, clip_low=0.2, clip_high=0.2)
        assert loss.denominator == denominator and loss.sum == -4.0
        assert found.metrics["masked_share"] == 0.2


def test_token_vetoes_only_its_own_sequence():
    rollout, old = torch.zeros(5), torch.tensor([0.0, 0.0, -10.0, 0.0, 0.0])
    found = mismatch_correction(rollout, old, torch.ones(5), BOUNDS, veto_below=1e-4)
    assert found.mask.tolist() == [True, True, False, False, False]
    assert found.weights.tolist() == [1, 1, 0, 0, 0]
    assert found.metrics["vetoed_sequence_share"] == 0.5 and found.metrics["rejected_share"] == 0.6
    uncounted = mismatch_correction(rollout, old, torch.tensor([1, 1, 0, 1, 1]), BOUNDS, veto_below=1e-4)
    assert uncounted.metrics["vetoed_sequence_share"] == 0.0


def test_sequence_weight_is_over_counted_tokens_only():
    rollout, old = torch.zeros(5), torch.tensor([0.1, 0.2, 0.3, 9.0, -0.1])
    found = mismatch_correction(rollout, old, torch.tensor([1, 1, 1, 0, 1]), BOUNDS, weight="sequence", max_weight=10.0)
    assert_close(found.weights, [math.exp(0.3)] * 2 + [math.exp(0.2), 0.0, math.exp(0.2)], 1e-6)


def test_correction_metrics_match_hand_computed_values():
    rollout, old = torch.zeros(4).double(), torch.tensor([0.0, 1.0, 2.0, -3.0], dtype=torch.float64)
    metrics = mismatch_correction(
        rollout, old, torch.ones(4), torch.tensor([0, 2, 4]), weight="token", rejection="token", rejection_high=3.0
    ).metrics
    assert metrics["rejected_share"] == metrics["masked_share"] == 0.5
    assert metrics["truncated_share"] == 0.5 and metrics["weight_mean"] == 1.5
    assert metrics["weight_ess"] == pytest.approx(1.5**2 / ((1 + 4) / 2))


def test_correction_clamps_log_ratios_to_twenty():
    rollout, old = torch.tensor([0.0, 0.0, -1000.0]), torch.tensor([-1000.0, 0.0, 0.0])
    found = mismatch_correction(rollout, old, torch.ones(3), torch.tensor([0, 2, 3]), weight="token", max_weight=1e30)
    assert_close(found.weights, [math.exp(-20), 1.0, math.exp(20)], 1e-6)
    assert all(math.isfinite(number) for number in found.metrics.values())


@given(ragged())
def test_padding_has_weight_zero_and_enters_no_statistic(batch: Ragged):
    rollout, old = pair(batch)
    options = {"weight": "sequence", "rejection": "k3", "rejection_high": 0.2, "normalize": True}
    first = mismatch_correction(rollout, old, batch.mask, batch.cu_seqlens, **options)
    clean = [torch.where(batch.mask, x, -1.0) for x in (rollout, old)]
    second = mismatch_correction(*clean, batch.mask, batch.cu_seqlens, **options)
    assert torch.equal(first.weights, second.weights) and first.metrics == second.metrics
    assert (first.weights[~first.mask] == 0).all()


def test_correction_weights_have_no_gradient():
    rollout, old = torch.zeros(2), torch.ones(2, requires_grad=True)
    assert not mismatch_correction(
        rollout, old, torch.ones(2), torch.tensor([0, 2]), weight="token"
    ).weights.requires_grad


@pytest.mark.parametrize("weight", WEIGHTS)
def test_correction_accepts_empty_batches(weight: str):
    for bounds in (torch.tensor([0]), torch.tensor([0, 0])):
        nothing = torch.zeros(0)
        found = mismatch_correction(
            nothing, nothing, nothing, bounds, weight=weight, rejection="geometric", normalize=True
        )
        assert found.weights.shape == found.mask.shape == (0,)
        assert found.metrics["weight_mean"] == found.metrics["weight_ess"] == 1.0
        assert off_policy_sequence_mask(nothing, nothing, nothing, nothing, bounds, 0.1).shape == (0,)


@given(batch=ragged(), delta=st.floats(0, 1))
def test_off_policy_sequence_mask_equals_its_definition(batch: Ragged, delta: float):
    old, new = pair(batch, scale=1.0)
    advantages = batch.normal()
    expected = [False] * batch.num_tokens
    for tokens in batch.counted():
        drift = sum(float(old[t] - new[t]) for t in tokens) / max(len(tokens), 1)
        for t in tokens:
            expected[t] = not (float(advantages[t]) < 0 and drift > delta)
    found = off_policy_sequence_mask(old, new, advantages, batch.mask, batch.cu_seqlens, delta)
    assert found.tolist() == expected
    same = off_policy_sequence_mask(old, old, advantages, batch.mask, batch.cu_seqlens, delta)
    assert torch.equal(same, batch.mask)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"weight": "tis"},
            "unknown correction weight 'tis': expected one of none, token, sequence, icepop, or an import path",
        ),
        (
            {"rejection": "mis"},
            "unknown rejection 'mis': expected one of none, token, sequence, geometric, k2, k3, or an import path",
        ),
        ({"weight": "token", "max_weight": 0.0}, "max_weight: expected a number above 0, got 0.0"),
        ({"weight": "icepop", "icepop_low": 6.0}, "icepop_low, icepop_high: expected 0 <= low <= high"),
        ({"rejection": "token", "rejection_low": 3.0}, "rejection_low, rejection_high: expected 0 <= low <= high"),
        ({"rejection": "k3", "rejection_high": -1.0}, "rejection_high: expected a finite number of at least 0"),
        ({"veto_below": -1.0}, "veto_below: expected a finite number of at least 0"),
        ({"old_logprobs": torch.zeros(4)}, "old_logprobs: expected the same form as rollout_logprobs"),
        ({"cu_seqlens": torch.tensor([0, 4])}, "number of tokens 5, got 4"),
        ({"mask": torch.ones(4)}, r"mask: expected.*\[5\]"),
    ],
)
def test_mismatch_correction_rejects_bad_arguments_by_name(change: dict, message: str):
    fitting = {"rollout_logprobs": torch.zeros(5), "old_logprobs": torch.zeros(5), "mask": torch.ones(5)}
    fitting |= {"cu_seqlens": BOUNDS}
    mismatch_correction(**fitting)
    with pytest.raises(ValueError, match=message):
        mismatch_correction(**(fitting | change))


@pytest.mark.parametrize("pair_of_logprobs", [(torch.nan, -1.0), (-1.0, torch.nan), (-torch.inf, -torch.inf)])
def test_correction_reports_the_index_of_a_nan_log_prob(pair_of_logprobs: tuple[float, float]):
    rollout, old = torch.zeros(2, 5)
    rollout[3], old[3] = pair_of_logprobs
    with pytest.raises(ValueError, match="expected numbers everywhere in the mask, got .* at token 3"):
        mismatch_correction(rollout, old, torch.ones(5), BOUNDS, weight="token")
    mismatch_correction(rollout, old, torch.tensor([1, 1, 1, 0, 1]), BOUNDS, weight="token")


def test_off_policy_sequence_mask_as_weights_keeps_the_denominator():
    old, new = torch.tensor([-1.0, -1.0]), torch.tensor([-3.0, -3.0])
    advantages, mask, bounds = torch.tensor([-1.0, -1.0]), torch.ones(2), torch.tensor([0, 2])
    left = off_policy_sequence_mask(old, new, advantages, mask, bounds, 0.5)
    loss = policy_loss(new, old, advantages, mask, weights=left.float(), clip_low=0.2, clip_high=0.28)
    assert loss.sum == 0.0 and loss.denominator == 2.0
