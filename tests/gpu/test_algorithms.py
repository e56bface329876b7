"""Algorithms give the same values on a GPU as on the CPU; skipped without a GPU."""

import pytest
import torch

from megatron_rl.algorithms import (
    boundary_mask,
    bradley_terry_loss,
    cispo_loss,
    egae,
    group_advantages,
    gspo_loss,
    kl_loss,
    kl_penalized_rewards,
    loss_denominator,
    mismatch_correction,
    mismatch_metrics,
    monte_carlo_returns,
    normalize_advantages,
    off_policy_sequence_mask,
    policy_loss,
    reinforce_pp_advantages,
    rloo_advantages,
    role_normalize,
    soft_overlong_penalty,
    swap_consistency,
    token_coefficients,
    value_by_position,
    value_loss,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gpu_equals_the_cpu(dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 300, (50,), generator=generator)
    bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    first, second, third = (torch.randn(int(bounds[-1]), generator=generator, dtype=dtype) for _ in range(3))
    mask = torch.rand(len(first), generator=generator) < 0.7
    finished = torch.rand(50, generator=generator) < 0.5
    lam = torch.rand(50, generator=generator)
    results = {}
    for device in ("cpu", "cuda"):
        one, two, three, inside = (tensor.to(device) for tensor in (first, second, third, mask))
        cu_seqlens, done, lambdas = (tensor.to(device) for tensor in (bounds, finished, lam))
        policy = policy_loss(one, two, three, inside, clip_low=0.2, clip_high=0.28, dual_clip=10.0)
        results[device] = [
            egae(one, two, cu_seqlens, done, gamma=0.99, lam=lambdas),
            egae(one, two, cu_seqlens, done, lam=0.95, bootstrap=lambdas),
            monte_carlo_returns(one, cu_seqlens),
            normalize_advantages(one, inside, kind="whiten", clamp=2.0),
            group_advantages(one[:50], (cu_seqlens[:-1] % 7)),
            boundary_mask(cu_seqlens, done, 8).to(dtype),
            policy.sum,
            value_loss(one, two, three, inside, clip_low=0.5, clip_high=0.6).sum,
            torch.tensor(list(mismatch_metrics(one, two, inside, cu_seqlens).values())),
            *newer_functions(one, two, three, inside, cu_seqlens, done),
        ]
    tolerance = 1e-4 if dtype == torch.float32 else 1e-10
    for on_cpu, on_gpu in zip(results["cpu"], results["cuda"]):
        torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=tolerance, atol=tolerance)


def newer_functions(
    one: torch.Tensor,
    two: torch.Tensor,
    three: torch.Tensor,
    inside: torch.Tensor,
    cu_seqlens: torch.Tensor,
    done: torch.Tensor,
) -> list[torch.Tensor]:
    """Results of losses without a critic, KL, corrections, dialogues and diagnostics."""
    clip = {"clip_low": 0.2, "clip_high": 0.28}
    coefficients = token_coefficients(inside, cu_seqlens, "sequence_mean", dtype=one.dtype)
    groups, rewards = cu_seqlens[:-1] % 7, one[: len(done)]
    correction = mismatch_correction(
        one, two, inside, cu_seqlens, weight="sequence", rejection="k3", rejection_high=2.0, normalize=True
    )
    roles = torch.arange(len(one), device=one.device) % 2
    positions = value_by_position(one, two, inside, cu_seqlens, 5)
    return [
        gspo_loss(one, two, three, inside, cu_seqlens, weights=correction.weights, **clip).sum,
        cispo_loss(one, two, three, inside, coefficients=coefficients, **clip).sum,
        torch.tensor(loss_denominator(inside, cu_seqlens, "sequence_mean")),
        kl_loss(one, two, inside, kind="k3", coefficients=three).sum,
        kl_penalized_rewards(one, two, three, inside, one.abs()),
        correction.weights,
        correction.mask.to(one.dtype),
        torch.tensor(list(correction.metrics.values())),
        off_policy_sequence_mask(one, two, three, inside, cu_seqlens, 0.1).to(one.dtype),
        rloo_advantages(rewards, groups, valid=done),
        reinforce_pp_advantages(one, inside, cu_seqlens, group_ids=groups),
        role_normalize(one, inside, roles),
        soft_overlong_penalty(cu_seqlens, max_length=1000, buffer=500),
        *(part for pair in positions.values() for part in pair),
        bradley_terry_loss(one, two).sum,
        swap_consistency(one.sigmoid(), two.sigmoid())["position_gap"][0],
    ]
