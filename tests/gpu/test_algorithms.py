"""The same numbers on a GPU as on the CPU; skipped where there is none."""

import pytest
import torch

from megatron_rl.algorithms import (
    boundary_mask,
    egae,
    group_advantages,
    mismatch_metrics,
    monte_carlo_returns,
    normalize_advantages,
    policy_loss,
    value_loss,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gpu_gives_the_numbers_of_the_cpu(dtype: torch.dtype):
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
        ]
    tolerance = 1e-4 if dtype == torch.float32 else 1e-10
    for on_cpu, on_gpu in zip(results["cpu"], results["cuda"]):
        torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=tolerance, atol=tolerance)
