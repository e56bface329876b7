"""Time the packed advantage functions against a loop over time steps on a padded batch.

Both compute the same numbers, which is checked, in one process and in turns, so that the ratios mean something on a
busy machine too. Wall time is the best of the repeats; CPU time is this process's over all its threads, the best alike.

    python tools/bench_algorithms.py --sequences 8192 --tokens 8192 --repeats 3
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from megatron_rl.algorithms import egae, gae, length_adaptive_lambda, monte_carlo_returns
from megatron_rl.data.batch import cu_seqlens_of


@dataclass(frozen=True)
class Timing:
    wall_s: float
    cpu_s: float


def gae_by_time_steps(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> Tensor:
    """GAE of a padded batch [N, W], one column after the other, as PPO trainers commonly have it."""
    following = torch.zeros(len(rewards), dtype=rewards.dtype)
    next_values = torch.zeros(len(rewards), dtype=rewards.dtype)
    columns = []
    for step in reversed(range(rewards.shape[1])):
        delta = rewards[:, step] + gamma * next_values - values[:, step]
        following = delta + gamma * lam * following
        next_values = values[:, step]
        columns.append(following)
    return torch.stack(columns[::-1], dim=1)


def gae_from_deltas_by_time_steps(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> Tensor:
    """The same with all TD errors computed ahead: a faster loop."""
    deltas = rewards - values
    deltas[:, :-1] += gamma * values[:, 1:]
    following = torch.zeros(len(rewards), dtype=rewards.dtype)
    columns = []
    for step in reversed(range(rewards.shape[1])):
        following = deltas[:, step] + gamma * lam * following
        columns.append(following)
    return torch.stack(columns[::-1], dim=1)


def timed(compute: Callable[[], Tensor]) -> Timing:
    wall_start, cpu_start = time.perf_counter(), time.process_time()
    compute()
    return Timing(time.perf_counter() - wall_start, time.process_time() - cpu_start)


def better(best: Timing | None, last: Timing) -> Timing:
    if best is None:
        return last
    return Timing(min(best.wall_s, last.wall_s), min(best.cpu_s, last.cpu_s))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=8192, help="number of sequences N")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a sequence W; ragged ones average the same")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    arguments = parser.parse_args()
    count, width, repeats = arguments.sequences, arguments.tokens, arguments.repeats

    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, arguments.dtype)
    rewards, values = (torch.randn(count, width, generator=generator, dtype=dtype) for _ in range(2))
    flat_rewards, flat_values = rewards.view(-1), values.view(-1)
    equal = torch.arange(count + 1) * width
    cuts = torch.randint(0, count * width + 1, (max(count - 1, 0),), generator=generator).sort().values
    ragged = cu_seqlens_of(torch.diff(cuts, prepend=equal[:1], append=equal[-1:]))
    finished = torch.rand(count, generator=generator) < 0.5
    adaptive = length_adaptive_lambda(ragged.diff())

    loops = {
        "loop over time steps": lambda: gae_by_time_steps(rewards, values, 1.0, 0.95),
        "loop over time steps, TD errors ahead": lambda: gae_from_deltas_by_time_steps(rewards, values, 1.0, 0.95),
    }
    packed = {
        "gae, equal lengths, one lambda": lambda: gae(flat_rewards, flat_values, equal, lam=0.95),
        "gae, equal lengths, lambda a sequence": lambda: gae(
            flat_rewards, flat_values, equal, lam=torch.full((count,), 0.95, dtype=torch.float64)
        ),
        "egae, ragged, one lambda": lambda: egae(flat_rewards, flat_values, ragged, finished, lam=0.95),
        "egae, ragged, length-adaptive lambda": lambda: egae(flat_rewards, flat_values, ragged, finished, lam=adaptive),
        "returns, ragged": lambda: monte_carlo_returns(flat_rewards, ragged),
    }
    console = Console()
    with console.status("checking that all give the same advantages"):
        expected = loops["loop over time steps"]().view(-1)
        for name, compute in (loops | packed).items():
            if "equal lengths" in name or "loop" in name:
                torch.testing.assert_close(compute().view(-1), expected, rtol=1e-4, atol=1e-4)
        del expected
    timings: dict[str, Timing] = {}
    for turn in range(repeats):
        for name, compute in (loops | packed).items():
            with console.status(f"{name}, turn {turn + 1} of {repeats}"):
                timings[name] = better(timings.get(name), timed(compute))
    reference = timings["loop over time steps"]
    faster_loop = timings["loop over time steps, TD errors ahead"]
    threads = torch.get_num_threads()
    table = Table(title=f"{count} x {width} tokens, {arguments.dtype}, {threads} threads, best of {repeats}")
    for column in ("computation", "wall s", "CPU s", "times the loop", "times the faster loop"):
        table.add_column(column, justify="left" if column == "computation" else "right")
    for name, timing in timings.items():
        table.add_row(
            name,
            f"{timing.wall_s:.3f}",
            f"{timing.cpu_s:.3f}",
            f"{reference.wall_s / timing.wall_s:.1f}",
            f"{faster_loop.wall_s / timing.wall_s:.1f}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
