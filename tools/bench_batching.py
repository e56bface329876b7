"""Compare the balance of micro-batches and the planning time of this planner and of Karmarkar-Karp.

All plans distribute the same long-tailed lengths under the same token budget and are checked before they are compared.
"Karmarkar-Karp, ranks first" is the method of other frameworks: sequences are assigned to ranks by cost, then each rank's
sequences to its micro-batches by tokens; all ranks use the largest number of micro-batches. "Karmarkar-Karp, packs first"
assigns sequences directly to all micro-batches by cost and deals these as this planner does. "As they come" packs in order.

    python tools/bench_batching.py --sequences 8192 --ranks 32 --max-tokens 32768
"""

import argparse
import heapq
import math
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig

from megatron_rl.config.schema import ParallelConfig
from megatron_rl.families.flops import ForwardFlops, flops_cost
from megatron_rl.system.gpu.torchvision_ops import declare_torchvision_ops
from megatron_rl.training.batching import CostFunction, Plan, plan_microbatches, plan_statistics, split_minibatches
from megatron_rl.training.replica_assignment import ReplicaPlanner

SEVEN_BILLION = dict(
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    vocab_size=152064,
    tie_word_embeddings=False,
)
"""A dense model of 7.6 billion parameters (qwen2)."""
BACKWARD = 2.0
"""Time of a backward pass over that of its forward pass."""

Planner = Callable[[Sequence[int], int, int, CostFunction], Plan]


def seven_billion_cost() -> ForwardFlops:
    declare_torchvision_ops()
    return flops_cost(AutoConfig.for_model("qwen2", **SEVEN_BILLION))


def long_tailed_lengths(count: int, median: float, sigma: float, longest: int, seed: int = 0) -> list[int]:
    """Log-normal, cut at ``longest`` as a response's budget cuts it, and at 32."""
    drawn = np.random.default_rng(seed).lognormal(math.log(median), sigma, count)
    return drawn.clip(32, longest).astype(int).tolist()


# ------------------------------------------------------------------------------------------------------- the planners


def ours(lengths: Sequence[int], num_ranks: int, budget: int, cost: CostFunction) -> Plan:
    return plan_microbatches(lengths, num_ranks, budget, cost=cost)


def karmarkar_karp(weights: Sequence[float], num_parts: int) -> list[list[int]]:
    """Largest differencing: unite the two partial partitions of the largest spread, large parts with small ones."""

    def entry(parts: list[tuple[float, list[int]]], number: int) -> tuple[float, int, list[tuple[float, list[int]]]]:
        smallest = parts[-1][0] if len(parts) == num_parts else 0.0
        return (smallest - parts[0][0], number, parts)

    heap = [entry([(weight, [index])], index) for index, weight in enumerate(weights)]
    heapq.heapify(heap)
    for number in range(len(weights), 2 * len(weights) - 1):
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        # Largest first; parts that are not there are empty. The largest of one meets the smallest of the other.
        overlap = max(0, len(first) + len(second) - num_parts)
        united = first[: len(first) - overlap] + second[: len(second) - overlap]
        pairs = zip(first[len(first) - overlap :], reversed(second[len(second) - overlap :]), strict=True)
        united += [(weight + other, items + others) for (weight, items), (other, others) in pairs]
        united.sort(key=lambda part: -part[0])
        heapq.heappush(heap, entry(united, number))
    parts = [items for _, items in heap[0][2]] if heap else []
    return parts + [[] for _ in range(num_parts - len(parts))]


def karmarkar_karp_ranks_first(lengths: Sequence[int], num_ranks: int, budget: int, cost: CostFunction) -> Plan:
    costs = [cost(length) for length in lengths]
    ranks = karmarkar_karp(costs, num_ranks)
    number = max(math.ceil(sum(lengths[i] for i in rank) / budget) for rank in ranks)
    while True:
        plan = []
        for rank in ranks:
            parts = karmarkar_karp([lengths[i] for i in rank], number)
            plan.append(sorted(([rank[place] for place in part] for part in parts), key=lambda m: -_total(m, costs)))
        if all(_total(microbatch, lengths) <= budget for rank in plan for microbatch in rank):
            return plan
        number += 1


def karmarkar_karp_packs_first(lengths: Sequence[int], num_ranks: int, budget: int, cost: CostFunction) -> Plan:
    costs = [cost(length) for length in lengths]
    number = math.ceil(sum(lengths) / budget / num_ranks)
    while True:
        packed = karmarkar_karp(costs, number * num_ranks)
        if all(_total(microbatch, lengths) <= budget for microbatch in packed):
            packed.sort(key=lambda microbatch: -_total(microbatch, costs))
            return [packed[rank::num_ranks] for rank in range(num_ranks)]
        number += 1


def as_they_come(lengths: Sequence[int], num_ranks: int, budget: int, cost: CostFunction) -> Plan:
    packed: list[list[int]] = [[]]
    for index, length in enumerate(lengths):
        if _total(packed[-1], lengths) + length > budget:
            packed.append([])
        packed[-1].append(index)
    packed += [[] for _ in range(-len(packed) % num_ranks)]
    return [packed[rank::num_ranks] for rank in range(num_ranks)]


PLANNERS: dict[str, Planner] = {
    "this planner": ours,
    "Karmarkar-Karp, ranks first": karmarkar_karp_ranks_first,
    "Karmarkar-Karp, packs first": karmarkar_karp_packs_first,
    "as they come": as_they_come,
}


def _total(microbatch: Sequence[int], numbers: Sequence[float]) -> float:
    return sum(numbers[index] for index in microbatch)


# --------------------------------------------------------------------------------------------------------- judging


def check(plan: Plan, lengths: Sequence[int], budget: int) -> None:
    """Refuse to judge what is no plan. Raises RuntimeError."""
    if sorted(i for rank in plan for microbatch in rank for i in microbatch) != list(range(len(lengths))):
        raise RuntimeError("the plan does not hold every sequence exactly once")
    if max(_total(microbatch, lengths) for rank in plan for microbatch in rank) > budget:
        raise RuntimeError(f"the plan has a micro-batch beyond the budget of {budget} tokens")
    if len({len(rank) for rank in plan}) != 1:
        raise RuntimeError("the ranks have different numbers of micro-batches")


def pipeline_time(costs: Sequence[float], num_stages: int) -> float:
    """When a 1F1B pipeline of equal stages ends, which takes ``costs`` forward and BACKWARD times that backward.

    Stage s runs num_stages - 1 - s forward passes ahead, then one forward and one backward in turn; communication is
    free.
    """
    count, ended = len(costs), {}
    queues = []
    for stage in range(num_stages):
        ahead = min(num_stages - 1 - stage, count)
        turns = [("forward", i) for i in range(ahead)]
        for index in range(count):
            turns += [("forward", ahead + index)] if ahead + index < count else []
            turns += [("backward", index)]
        queues.append(turns[::-1])
    clock = [0.0] * num_stages
    while any(queues):
        for stage, turns in enumerate(queues):
            while turns:
                direction, index = turns[-1]
                neighbour = stage - 1 if direction == "forward" else stage + 1
                before = ended.get((direction, index, neighbour)) if 0 <= neighbour < num_stages else 0.0
                if before is None:
                    break
                turns.pop()
                duration = costs[index] * (BACKWARD if direction == "backward" else 1.0)
                clock[stage] = max(clock[stage], before) + duration
                ended[direction, index, stage] = clock[stage]
    return max(clock)


def pipeline_idle_share(plan: Plan, costs: Sequence[float], num_stages: int) -> float:
    """Share of all stages' time, over all ranks, in which they wait for the pipeline or for the last rank."""
    per_rank = [[_total(microbatch, costs) for microbatch in rank] for rank in plan]
    time_taken = max(pipeline_time(rank, num_stages) for rank in per_rank)
    return 1.0 - (1.0 + BACKWARD) * sum(map(sum, per_rank)) / (len(plan) * time_taken)


def best_time(plan: Callable[[], Plan], repeats: int) -> float:
    """CPU seconds, the best of ``repeats`` runs: planners take one thread, and cores may be shared."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        plan()
        times.append(time.process_time() - start)
    return min(times)


def measure(
    console: Console,
    lengths: Sequence[int],
    num_ranks: int,
    budget: int,
    *,
    cost: CostFunction,
    num_stages: int,
    repeats: int,
    names: Sequence[str] = tuple(PLANNERS),
) -> Table:
    costs = [cost(length) for length in lengths]
    tokens = sum(lengths)
    title = f"{len(lengths)} sequences, {tokens:,} tokens, {num_ranks} ranks, {budget:,} tokens per micro-batch"
    table = Table("plan", title=title)
    columns = [
        "micro-batches per rank",
        "idle %, ranks",
        "idle %, rounds",
        "padding %",
        "unused %",
        f"idle %, {num_stages} stages",
    ]
    for column in (*columns, "CPU s"):
        table.add_column(column, justify="right")
    for name in names:
        with console.status(name):
            run = partial(PLANNERS[name], lengths, num_ranks, budget, cost)
            plan = run()
            check(plan, lengths, budget)
            seconds = best_time(run, repeats)
        found = plan_statistics(plan, lengths, cost)
        unused = 1.0 - tokens / (num_ranks * found["num_microbatches"] * budget)
        shares = (found["rank_imbalance"], found["microbatch_imbalance"], found["padding_share"], unused)
        shares = (*shares, pipeline_idle_share(plan, costs, num_stages))
        table.add_row(name, f"{found['num_microbatches']:.0f}", *(f"{100 * s:.2f}" for s in shares), f"{seconds:.3f}")
    return table


def measure_step(
    lengths: Sequence[int], num_ranks: int, budget: int, *, parallel: ParallelConfig, cost: CostFunction, minibatch: int
) -> Table:
    """Updates of a step whose sequences stay at one replica, against updates that are planned each for itself.

    The policy learns from all sequences and the critic from 64 % of them, in shuffled mini-batches of ``minibatch``.
    """
    generator = torch.Generator().manual_seed(1)
    ended = np.flatnonzero(np.random.default_rng(1).random(len(lengths)) < 0.64).tolist()
    policy = split_minibatches(len(lengths), minibatch, generator)
    critic = [[ended[i] for i in part] for part in split_minibatches(len(ended), minibatch, generator)]
    sharing = ReplicaPlanner(parallel, num_ranks, budget, cost)
    started_s = time.process_time()
    homes = sharing.homes(dict(enumerate(lengths)), [*policy, *critic])
    settled_s = time.process_time() - started_s
    spread = "experts over the ranks" if parallel.expert_parallel_size > 1 else "dense"
    title = f"updates on {minibatch} of {len(lengths)} sequences, {num_ranks} ranks, {spread}; homes settled in {settled_s:.3f} s"
    table = Table("passes", "plan", title=title)
    for column in ("micro-batches per rank", "idle %, ranks", "idle %, rounds", "moved %", "CPU s"):
        table.add_column(column, justify="right")
    for name, groups in (("log-probs", [list(range(len(lengths)))]), ("policy", policy), ("critic", critic)):
        for plan_name in ("alone", "at home"):
            found, moved, started_s = [], 0, time.process_time()
            for group in groups:
                own = [lengths[i] for i in group]
                at = None if plan_name == "alone" else [homes[i] for i in group]
                plan = sharing.plan(own, at, may_move=name != "log-probs")
                found.append(plan_statistics(plan, own, cost))
                moved += sum(homes[group[i]] != home for home, rank in enumerate(plan) for m in rank for i in m)
            seconds = time.process_time() - started_s
            rounds = np.mean([plan["num_microbatches"] for plan in found])
            shares = (
                np.mean([plan["rank_imbalance"] for plan in found]),
                np.mean([plan["microbatch_imbalance"] for plan in found]),
                moved / sum(map(len, groups)),
            )
            table.add_row(name, plan_name, f"{rounds:.1f}", *(f"{100 * s:.2f}" for s in shares), f"{seconds:.3f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, nargs="+", default=[8192])
    parser.add_argument("--ranks", type=int, default=32, help="data-parallel ranks")
    parser.add_argument("--max-tokens", type=int, default=32_768, help="maximum tokens per micro-batch")
    parser.add_argument("--median", type=float, default=2000.0, help="median of the lengths")
    parser.add_argument("--sigma", type=float, default=1.0, help="standard deviation of the lengths' logarithm")
    parser.add_argument("--longest", type=int, default=24_576)
    parser.add_argument("--stages", type=int, default=4, help="pipeline stages of the simulated pipeline")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--minibatch", type=int, default=512, help="sequences per update")
    arguments = parser.parse_args()
    if arguments.longest > arguments.max_tokens:
        parser.error("--longest may be at most --max-tokens: Karmarkar-Karp knows no sequence beyond the budget")
    console = Console(width=140)
    cost = seven_billion_cost()
    for count in arguments.sequences:
        lengths = long_tailed_lengths(count, arguments.median, arguments.sigma, arguments.longest)
        table = measure(
            console,
            lengths,
            arguments.ranks,
            arguments.max_tokens,
            cost=cost,
            num_stages=arguments.stages,
            repeats=arguments.repeats,
        )
        console.print(table)
        for parallel in (ParallelConfig(), ParallelConfig(expert_parallel_size=arguments.ranks)):
            table = measure_step(
                lengths,
                arguments.ranks,
                arguments.max_tokens,
                parallel=parallel,
                cost=cost,
                minibatch=min(arguments.minibatch, count),
            )
            console.print(table)


if __name__ == "__main__":
    main()
