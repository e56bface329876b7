"""Time the packed advantage functions against loops over time steps on a padded batch, and the scoring of answers.

All functions compute the same values, which is checked. They alternate in one process, so that ratios are meaningful on a
busy machine. Each runs twice in a row, so that no function pays for pages that another one returned to the system.
Wall time is the best of all repeats; CPU time covers all threads of the process and is also the best.
The reference is another framework's loop if it can be imported (pip install verl==0.9.1), and always the same loop
written here. The floor is the memory bandwidth: read two arrays, write a new one.

    python tools/bench_algorithms.py --sequences 8192 --tokens 8192 --repeats 3
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from bench_grading import measure_grading
from rich.console import Console
from rich.table import Table
from torch import Tensor

from megatron_rl.algorithms import egae, gae, length_adaptive_lambda, monte_carlo_returns
from megatron_rl.data.batch import cu_seqlens_of

GAMMA, LAM = 1.0, 0.95
REFERENCE = "loop"
"""Loop over time steps, as other frameworks write it."""
FLOOR = "floor: read two arrays, write a third"


@dataclass(frozen=True)
class Timing:
    wall_s: float
    cpu_s: float


@dataclass(frozen=True)
class Batch:
    """The same tokens padded, which costs nothing at equal lengths, and packed, in equal and in ragged sequences."""

    rewards: Tensor
    """[N, W] rewards of padded sequences."""
    values: Tensor
    equal: Tensor
    """[N+1] cu_seqlens of sequences of equal length."""
    ragged: Tensor
    finished: Tensor
    """[N] True for finished responses."""


def make_batch(count: int, width: int, dtype: torch.dtype) -> Batch:
    generator = torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(count, width, generator=generator, dtype=dtype) for _ in range(2))
    equal = torch.arange(count + 1) * width
    cuts = torch.randint(0, count * width + 1, (max(count - 1, 0),), generator=generator).sort().values
    ragged = cu_seqlens_of(torch.diff(cuts, prepend=equal[:1], append=equal[-1:]))
    return Batch(rewards, values, equal, ragged, torch.rand(count, generator=generator) < 0.5)


# ------------------------------------------------------------------------------------------------------ the references


def gae_by_time_steps(rewards: Tensor, values: Tensor) -> Tensor:
    """GAE of a padded batch [N, W], one column after the other, as PPO trainers commonly have it."""
    following = torch.zeros(len(rewards), dtype=rewards.dtype)
    next_values = torch.zeros(len(rewards), dtype=rewards.dtype)
    columns = []
    for step in reversed(range(rewards.shape[1])):
        delta = rewards[:, step] + GAMMA * next_values - values[:, step]
        following = delta + GAMMA * LAM * following
        next_values = values[:, step]
        columns.append(following)
    return torch.stack(columns[::-1], dim=1)


def gae_from_deltas_by_time_steps(rewards: Tensor, values: Tensor) -> Tensor:
    """The same with all TD errors computed ahead: a faster loop."""
    deltas = rewards - values
    deltas[:, :-1] += GAMMA * values[:, 1:]
    following = torch.zeros(len(rewards), dtype=rewards.dtype)
    columns = []
    for step in reversed(range(rewards.shape[1])):
        following = deltas[:, step] + GAMMA * LAM * following
        columns.append(following)
    return torch.stack(columns[::-1], dim=1)


def verl_advantages() -> Callable[[Tensor, Tensor], Tensor] | None:
    """verl's GAE, which also masks and whitens; None where verl cannot be imported."""
    try:
        from verl.trainer.ppo.core_algos import compute_gae_advantage_return
    except Exception:  # a foreign stack, with versions of its own: anything may be wrong with it
        return None

    def compute(rewards: Tensor, values: Tensor) -> Tensor:
        _, returns = compute_gae_advantage_return(rewards, values, torch.ones_like(rewards), GAMMA, LAM)
        return returns

    return compute


# ------------------------------------------------------------------------------------------------------- what is timed


def computations(batch: Batch) -> dict[str, Callable[[], Tensor]]:
    """Each returns what it computed, at most [T] numbers, in its own layout."""
    rewards, values = batch.rewards.view(-1), batch.values.view(-1)
    count = len(batch.finished)
    lambdas = torch.full((count,), LAM, dtype=torch.float64)
    adaptive = length_adaptive_lambda(batch.ragged.diff())

    def floor() -> Tensor:
        # numpy's large arrays lie in huge pages, as those of gae do.
        fresh = torch.from_numpy(np.empty(len(rewards), dtype=rewards.numpy().dtype))
        return torch.add(rewards, values, out=fresh)

    found = {
        REFERENCE: lambda: gae_by_time_steps(batch.rewards, batch.values),
        "loop, TD errors first": lambda: gae_from_deltas_by_time_steps(batch.rewards, batch.values),
        "gae, equal lengths": lambda: gae(rewards, values, batch.equal, lam=LAM),
        "gae, equal lengths, one lambda per sequence": lambda: gae(rewards, values, batch.equal, lam=lambdas),
        "egae, ragged": lambda: egae(rewards, values, batch.ragged, batch.finished, lam=LAM),
        "egae, ragged, length-adaptive lambda": lambda: egae(
            rewards, values, batch.ragged, batch.finished, lam=adaptive
        ),
        "monte_carlo_returns, ragged": lambda: monte_carlo_returns(rewards, batch.ragged),
        FLOOR: floor,
    }
    verl = verl_advantages()
    if verl is not None:
        found = {"verl: loop, mask and whitening": lambda: verl(batch.rewards, batch.values)} | found
    return found


def check_equal_results(batch: Batch, found: dict[str, Callable[[], Tensor]]) -> None:
    """Refuse to time what does not give the reference's advantages, where both see the same sequences."""
    expected = found[REFERENCE]().view(-1)
    for name, compute in found.items():
        if "equal lengths" in name or "loop" in name:
            actual = compute().view(-1)
            if name.startswith("verl"):
                actual = actual - batch.values.view(-1)
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def timed(compute: Callable[[], Tensor]) -> Timing:
    wall_start, cpu_start = time.perf_counter(), time.process_time()
    compute()
    return Timing(time.perf_counter() - wall_start, time.process_time() - cpu_start)


def better(best: Timing | None, last: Timing) -> Timing:
    if best is None:
        return last
    return Timing(min(best.wall_s, last.wall_s), min(best.cpu_s, last.cpu_s))


def measure_advantages(console: Console, count: int, width: int, repeats: int, dtype: torch.dtype) -> Table:
    batch = make_batch(count, width, dtype)
    found = computations(batch)
    with console.status("checking that all give the same advantages"):
        check_equal_results(batch, found)
    timings: dict[str, Timing] = {}
    for turn in range(repeats):
        for name, compute in found.items():
            with console.status(f"{name}, turn {turn + 1} of {repeats}"):
                for _ in range(2):
                    timings[name] = better(timings.get(name), timed(compute))
    title = f"{count} x {width} tokens, {dtype}, {torch.get_num_threads()} threads, best of {repeats} x 2"
    table = Table("computation", title=title)
    references = [name for name in timings if "loop" in name]
    for column in ("wall s", "CPU s", *(f"x {name.partition(':')[0]}" for name in references)):
        table.add_column(column, justify="right")
    for name, timing in timings.items():
        ratios = (f"{timings[reference].wall_s / timing.wall_s:.1f}" for reference in references)
        table.add_row(name, f"{timing.wall_s:.3f}", f"{timing.cpu_s:.3f}", *ratios)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=8192, help="number of sequences N")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens per sequence W; ragged sequences have the same mean")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--answers", type=int, default=20_000, help="answers to score; 0: none")
    parser.add_argument("--workers", type=int, default=2, help="number of reward workers")
    arguments = parser.parse_args()
    console = Console()
    if arguments.sequences * arguments.tokens > 0:
        dtype = getattr(torch, arguments.dtype)
        console.print(measure_advantages(console, arguments.sequences, arguments.tokens, arguments.repeats, dtype))
    if arguments.answers > 0:
        with console.status("grading"):
            table = measure_grading(arguments.answers, arguments.workers, arguments.repeats)
        console.print(table)


if __name__ == "__main__":
    main()
