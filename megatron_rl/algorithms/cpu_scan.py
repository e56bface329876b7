"""GAE of packed sequences on the CPU: a compiled loop over sequences, each from its last token backwards.

Invariants: sums are float64 for any input dtype and are rounded once, into the result; a sequence's result depends on
nothing outside it, down to the last bit; memory is read once.

Threads: the sequences of a large batch are divided among as many threads as torch may use; the caller waits for all of
them. The loop releases the interpreter lock. It is compiled at the first call of a process, which takes about a second,
and is not cached on disk: a cache may be read-only, stale or written by several ranks at the same time.
"""

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from torch import Tensor

MIN_TOKENS_PER_THREAD = 1 << 18
"""Tokens per thread: about half a millisecond of work, several times the cost of starting a thread."""


def gae_loop(
    rewards: Tensor, values: Tensor, bounds: Tensor, after_end: Tensor, gamma: float, decay: Tensor
) -> Tensor:
    """``A_t = delta_t + decay A_{t+1}`` with ``delta_t = r_t + gamma V(s_{t+1}) - V(s_t)``.

    Args:
        rewards, values: [T] float32 or float64 on the CPU, same dtype, any stride.
        bounds: [N+1] int64 on the CPU, checked ``cu_seqlens``.
        after_end: [N] V of the state after each sequence's last token; not read for empty sequences.
        decay: [N] float64, gamma times lambda of each sequence.

    Returns:
        [T] of the dtype of ``rewards``.
    """
    loop = compiled_loop()
    reward_array, value_array = rewards.detach().numpy(), values.detach().numpy()
    bound_array, after_array, decay_array = bounds.numpy(), after_end.detach().double().numpy(), decay.numpy()
    # np.empty instead of torch.empty, because numpy requests huge pages; faults on small pages take longer than the loop.
    result = np.empty(len(reward_array), dtype=reward_array.dtype)

    def run(span: tuple[int, int]) -> None:
        loop(reward_array, value_array, bound_array, after_array, gamma, decay_array, span, result)

    spans = thread_spans(bounds, torch.get_num_threads())
    if len(spans) == 1:
        run(spans[0])
    else:
        with ThreadPoolExecutor(len(spans), thread_name_prefix="gae") as pool:
            list(pool.map(run, spans))
    return torch.from_numpy(result)


def thread_spans(bounds: Tensor, num_threads: int) -> list[tuple[int, int]]:
    """Ranges of sequences with about equally many tokens, one per thread; a small batch is a single range."""
    num_tokens, num_sequences = int(bounds[-1]), len(bounds) - 1
    num_threads = max(1, min(num_threads, num_tokens // MIN_TOKENS_PER_THREAD))
    shares = torch.tensor([num_tokens * thread // num_threads for thread in range(1, num_threads)], dtype=torch.int64)
    cuts = torch.searchsorted(bounds, shares).tolist()
    corners = sorted({0, *cuts, num_sequences})
    return list(itertools.pairwise(corners)) or [(0, 0)]


@cache
def compiled_loop() -> Callable[..., None]:
    """``_advantage_loop``, compiled at the first call with each combination of dtypes and strides."""
    import numba  # takes a third of a second, which importing the algorithms need not

    # "contract" fuses a multiplication and an addition into one instruction with one rounding.
    return numba.njit(nogil=True, fastmath={"contract"})(_advantage_loop)


def _advantage_loop(
    rewards: np.ndarray,
    values: np.ndarray,
    bounds: np.ndarray,
    after_end: np.ndarray,
    gamma: float,
    decay: np.ndarray,
    span: tuple[int, int],
    result: np.ndarray,
) -> None:
    """Write the advantages of the sequences in [span[0], span[1]) to ``result`` [T]; see ``gae_loop``."""
    for sequence in range(span[0], span[1]):
        factor = decay[sequence]
        next_value = after_end[sequence]
        advantage = 0.0
        for token in range(bounds[sequence + 1] - 1, bounds[sequence] - 1, -1):
            value = np.float64(values[token])
            delta = rewards[token] + gamma * next_value - value
            advantage = delta + factor * advantage
            result[token] = advantage
            next_value = value
