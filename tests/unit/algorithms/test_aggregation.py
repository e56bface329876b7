"""Laws of the two aggregations of token losses."""

import pytest
import torch
from hypothesis import given

from megatron_rl.algorithms import loss_denominator, policy_loss, token_coefficients
from tests.unit.algorithms.ragged import Ragged, assert_close, ragged

CLIP = {"clip_low": 0.2, "clip_high": 0.28}


@given(ragged())
def test_token_mean_weights_tokens_equally(batch: Ragged):
    coefficients = token_coefficients(batch.mask, batch.cu_seqlens, "token_mean")
    assert coefficients.tolist() == batch.mask.float().tolist()
    assert loss_denominator(batch.mask, batch.cu_seqlens, "token_mean") == int(batch.mask.sum())


@given(ragged())
def test_sequence_mean_averages_tokens_then_sequences(batch: Ragged):
    losses = batch.normal()
    coefficients = token_coefficients(batch.mask, batch.cu_seqlens, "sequence_mean", dtype=torch.float64)
    means = [sum(float(losses[t]) for t in tokens) / len(tokens) for tokens in batch.counted() if tokens]
    assert loss_denominator(batch.mask, batch.cu_seqlens, "sequence_mean") == len(means)
    assert_close(torch.where(batch.mask, losses * coefficients, 0.0).sum(), sum(means))


@given(ragged())
def test_coefficients_sum_to_the_denominator(batch: Ragged):
    for kind in ("token_mean", "sequence_mean"):
        coefficients = token_coefficients(batch.mask, batch.cu_seqlens, kind, dtype=torch.float64)
        assert_close(coefficients.sum(), loss_denominator(batch.mask, batch.cu_seqlens, kind))
        new, old = batch.logprobs(), batch.logprobs()
        loss = policy_loss(new, old, batch.normal(), batch.mask, coefficients=coefficients, **CLIP)
        assert_close(loss.denominator, loss_denominator(batch.mask, batch.cu_seqlens, kind))


@pytest.mark.parametrize("kind", ["token_mean", "sequence_mean"])
@given(batch=ragged())
def test_sums_and_denominators_add_up_over_micro_batches(batch: Ragged, kind: str):
    new, old, advantages = batch.logprobs(), batch.logprobs(), batch.normal()
    corners = batch.cu_seqlens.tolist()

    def loss_of(first: int, last: int) -> tuple[float, float]:
        piece = slice(corners[first], corners[last])
        bounds = batch.cu_seqlens[first : last + 1] - corners[first]
        coefficients = token_coefficients(batch.mask[piece], bounds, kind, dtype=torch.float64)
        loss = policy_loss(
            new[piece], old[piece], advantages[piece], batch.mask[piece], coefficients=coefficients, **CLIP
        )
        return float(loss.sum), loss_denominator(batch.mask[piece], bounds, kind)

    whole = loss_of(0, batch.num_sequences)
    parts = [loss_of(n, n + 1) for n in range(batch.num_sequences)]
    assert whole[0] == pytest.approx(sum(part[0] for part in parts), abs=1e-9)
    assert whole[1] == sum(part[1] for part in parts)


def test_aggregation_accepts_masks_of_any_dtype():
    bounds = torch.tensor([0, 3, 3, 4])
    for dtype in (torch.bool, torch.int64, torch.float32, torch.float64):
        mask = torch.tensor([1, 0, 1, 1]).to(dtype)
        assert token_coefficients(mask, bounds, "sequence_mean").tolist() == [0.5, 0.0, 0.5, 1.0]
        assert loss_denominator(mask, bounds, "sequence_mean") == 2.0


def test_aggregation_accepts_empty_batches():
    for bounds in (torch.tensor([0]), torch.tensor([0, 0, 0], dtype=torch.int32)):
        assert token_coefficients(torch.zeros(0), bounds, "sequence_mean").shape == (0,)
        assert loss_denominator(torch.zeros(0), bounds, "sequence_mean") == 0.0


def test_aggregation_rejects_bad_arguments_by_name():
    mask, bounds = torch.ones(4), torch.tensor([0, 4])
    with pytest.raises(
        ValueError, match="unknown aggregation 'mean': expected one of token_mean, sequence_mean, or an import path"
    ):
        token_coefficients(mask, bounds, "mean")
    with pytest.raises(ValueError, match="mask: expected a 1-D"):
        loss_denominator(mask.view(2, 2), bounds, "token_mean")
    with pytest.raises(ValueError, match="number of tokens 4, got 3"):
        loss_denominator(mask, torch.tensor([0, 3]), "token_mean")
