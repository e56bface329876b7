"""Each sequence is assigned to one replica, with every group balanced, and plans keep sequences there."""

import itertools
import random

import numpy as np
import pytest
import torch

from megatron_rl.config.schema import ParallelConfig
from megatron_rl.data.batch import Images, PackedBatch, cu_seqlens_of
from megatron_rl.data.images import ImageFile, ImageRef
from megatron_rl.data.rows import Rows
from megatron_rl.system.files.shared_file import NODE, ArrayRange, MappedFile, SharedArrays
from megatron_rl.training import replica_assignment
from megatron_rl.training.batching import plan_microbatches, plan_on_replicas, plan_statistics
from megatron_rl.training.replica_assignment import (
    PlacementPreferences,
    ReplicaPlanner,
    assign_replicas,
    swap_for_locality,
)


def long_tailed(rng: random.Random, count: int) -> list[int]:
    return [min(32768, max(32, int(rng.lognormvariate(8.7, 0.9)))) for _ in range(count)]


def cost(length: int) -> float:
    """Cost whose attention is half of a token's cost at 32k."""
    return length * (1 + length / 32768)


@pytest.mark.parametrize("num_replicas", [1, 2, 8])
def test_one_assignment_balances_policy_and_critic_updates(num_replicas: int) -> None:
    rng = random.Random(num_replicas)
    lengths = dict(enumerate(long_tailed(rng, 1024)))
    order = rng.sample(range(1024), 1024)
    ended = rng.sample(range(1024), 600)
    policy = [order[start : start + 256] for start in range(0, 1024, 256)]
    critic = [ended[start : start + 200] for start in range(0, 600, 200)]
    homes = assign_replicas({key: cost(length) for key, length in lengths.items()}, [*policy, *critic], num_replicas)
    assert homes.keys() == lengths.keys() and set(homes.values()) <= set(range(num_replicas))
    for group in [list(lengths), *policy, *critic]:
        loads = [sum(cost(lengths[key]) for key in group if homes[key] == home) for home in range(num_replicas)]
        assert 1 - sum(loads) / (num_replicas * max(loads)) < 0.01


def time_of(costs, groups, homes, num_replicas: int) -> float:
    """Time of replicas that wait for each other after each group."""
    return sum(
        max(sum(costs[key] for key in group if homes[key] == home) for home in range(num_replicas)) for group in [list(costs), *groups]
    )


def drawn(kind: str, rng: random.Random, count: int) -> list[int]:
    if kind == "long tail":
        return long_tailed(rng, count)
    if kind == "pareto":
        return [min(32768, int(500 * rng.paretovariate(1.1))) for _ in range(count)]
    return [rng.choice([800] * 19 + [32000]) if kind == "two lengths" else 4000 for _ in range(count)]


@pytest.mark.parametrize("num_replicas", [2, 8])
@pytest.mark.parametrize("kind", ["long tail", "pareto", "two lengths", "equal"])
def test_sequences_are_assigned_near_their_routes_and_images_if_updates_stay_balanced(kind: str, num_replicas: int) -> None:
    rng = random.Random(num_replicas)
    lengths = drawn(kind, rng, 1024)
    costs = {key: cost(length) for key, length in enumerate(lengths)}
    groups = [rng.sample(range(1024), 256) for _ in range(6)]
    nodes = [replica * 2 // num_replicas for replica in range(num_replicas)]
    lie = [rng.randrange(2) for _ in range(64)]
    routes, images = {key: lie[key // 16] for key in costs}, {key: key // 16 for key in costs}
    even = assign_replicas(costs, groups, num_replicas)
    near = assign_replicas(costs, groups, num_replicas, PlacementPreferences(nodes, routes))
    together = assign_replicas(costs, groups, num_replicas, PlacementPreferences(images=images))
    for homes in (near, together):
        assert time_of(costs, groups, homes, num_replicas) <= 1.0011 * time_of(costs, groups, even, num_replicas)

    def share_near(homes) -> float:
        return sum(lengths[key] for key in costs if nodes[homes[key]] == routes[key]) / sum(lengths)

    def num_cut(homes) -> int:
        return len({(images[key], homes[key]) for key in costs})

    assert 0.4 < share_near(even) < 0.6
    assert share_near(near) >= share_near(even) and num_cut(together) <= num_cut(even)
    if kind == "long tail" and num_replicas == 8:
        assert share_near(near) > 0.8 and num_cut(together) < 0.75 * num_cut(even)
    # The same again, and whatever sequences are called.
    assert near == assign_replicas(costs, groups, num_replicas, PlacementPreferences(nodes, routes))
    named, of_named = {str(key): number for key, number in costs.items()}, {str(key): node for key, node in routes.items()}
    again = assign_replicas(named, [[str(key) for key in group] for group in groups], num_replicas, PlacementPreferences(nodes, of_named))
    assert again == {str(key): home for key, home in near.items()}


@pytest.mark.parametrize("seed", range(10))
def test_preferences_never_cost_more_balance_than_the_noise(seed: int) -> None:
    """Brute force over eight sequences on two replicas: preferences keep the time near the optimum."""
    rng = random.Random(seed)
    costs = {key: rng.uniform(1.0, 9.0) for key in range(8)}
    groups = [list(range(0, 8, 2)), list(range(1, 8, 2))]
    best = min(time_of(costs, groups, dict(enumerate(homes)), 2) for homes in itertools.product(range(2), repeat=8))
    pulls = PlacementPreferences([0, 1], {key: rng.randrange(2) for key in costs}, {key: key // 2 for key in costs})
    plain, pulled = (time_of(costs, groups, assign_replicas(costs, groups, 2, own), 2) for own in (None, pulls))
    assert best - 1e-9 <= pulled <= 1.0011 * plain <= 1.5 * best


def test_swapped_pairs_cost_the_same_and_both_get_nearer_to_their_routes() -> None:
    rng = random.Random(7)
    costs = {key: cost(length) for key, length in enumerate(long_tailed(rng, 600))}
    homes = {key: rng.randrange(6) for key in costs}
    nodes, routes = [0, 0, 1, 1, 2, 2], {key: rng.randrange(3) for key in costs if key % 10}
    found = swap_for_locality(homes, costs, PlacementPreferences(nodes, routes))
    moved = [key for key in costs if found[key] != homes[key]]
    assert len(moved) > 80 and all(nodes[found[key]] == routes[key] != nodes[homes[key]] for key in moved)
    for home in range(6):
        before, after = (sorted(costs[key] for key in costs if of[key] == home) for of in (homes, found))
        assert len(before) == len(after) and after == pytest.approx(before, rel=0.0101)


def test_preferences_follow_from_the_nodes_of_routes_and_the_images_of_prompts() -> None:
    own, far = SharedArrays(), MappedFile.remote(2 * NODE + 7, 3)

    def rows(where: SharedArrays | MappedFile | None) -> np.ndarray:
        if isinstance(where, MappedFile):
            return where.at(ArrayRange(64, 8)).reshape(2, 2, 2)
        array = np.ones((2, 2, 2), np.uint8)
        return array if where is None else where.put(array)

    files = [ImageFile(ImageRef(name, name, (1, 2, 2)), np.zeros(3, np.uint8)) for name in "ab"]
    images = Images([files[0], files[1], files[0], files[0]], torch.ones((4, 3), dtype=torch.int64), torch.tensor([0, 0, 1, 3]))
    routes = Rows.of([[rows(far)], [rows(own)], [], [rows(None)]])
    batch = PackedBatch(torch.zeros(8, dtype=torch.int64), cu_seqlens_of(torch.tensor([2, 2, 2, 2])), images=images)
    with_routes = PlacementPreferences.of(PackedBatch(batch.tokens, batch.cu_seqlens, parts={"routes": routes}), "abcd", lambda: [0, 2])
    assert (with_routes.nodes, with_routes.routes, with_routes.images) == ([0, 2], {"a": 2, "b": 0, "d": 0}, {})
    shown = PlacementPreferences.of(batch, "abcd", lambda: pytest.fail("no routes: no matter where they lie"))
    assert shown.images["b"] == shown.images["d"] != shown.images["a"] and "c" not in shown.images
    on_one = Rows.of([[rows(own)], [rows(None)], [], [rows(own)]])
    batch = PackedBatch(batch.tokens, batch.cu_seqlens, parts={"routes": on_one})
    assert PlacementPreferences.of(batch, "abcd", lambda: pytest.fail("all on one node: it makes no difference")) == PlacementPreferences()


@pytest.mark.parametrize("seed", range(20))
def test_plans_on_assigned_replicas_move_no_sequence_and_keep_the_laws_of_plans(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(1, 40) for _ in range(rng.randint(0, 30))]
    num_replicas, budget, multiple = rng.randint(1, 4), rng.randint(20, 60), rng.choice([1, 2])
    homes = [rng.randrange(num_replicas) for _ in lengths]
    plan = plan_on_replicas(lengths, homes, num_replicas, budget, multiple_of=multiple)
    assert sorted(index for rank in plan for m in rank for index in m) == list(range(len(lengths)))
    assert all(homes[index] == home for home, rank in enumerate(plan) for m in rank for index in m)
    assert len({len(rank) for rank in plan}) == 1 and len(plan[0]) % multiple == 0
    assert all(sum(lengths[i] for i in m) <= budget or len(m) == 1 for rank in plan for m in rank)


def test_on_one_replica_a_plan_on_assigned_replicas_is_the_free_plan() -> None:
    lengths = long_tailed(random.Random(0), 200)
    sharing = ReplicaPlanner(ParallelConfig(), 1, 32768, cost)
    assert sharing.plan(lengths, [0] * 200, may_move=True) == plan_microbatches(lengths, 1, 32768, cost=cost)


def test_sequences_move_only_where_ranks_would_wait_for_each_other() -> None:
    lengths = long_tailed(random.Random(0), 400)
    sharing = ReplicaPlanner(ParallelConfig(), 4, 32768, cost)
    even = sharing.homes(dict(enumerate(lengths)), [])
    at_home = sharing.plan(lengths, [even[i] for i in range(400)])
    assert sharing.plan(lengths, [even[i] for i in range(400)], may_move=True) == at_home
    uneven = [0] * 200 + [index % 4 for index in range(200)]
    assert sharing.plan(lengths, uneven, may_move=True) == plan_microbatches(lengths, 4, 32768, cost=cost)
    stays = sharing.plan(lengths, uneven)
    assert all(uneven[index] == home for home, rank in enumerate(stays) for m in rank for index in m)


@pytest.mark.parametrize("may_move", [False, True])
def test_a_balanced_assignment_needs_no_free_plan(may_move: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(lengths, **options):
        raise AssertionError("a free plan takes longer than the plan on the assigned replicas")

    monkeypatch.setattr(replica_assignment, "plan_microbatches", fails)
    lengths = long_tailed(random.Random(1), 400)
    sharing = ReplicaPlanner(ParallelConfig(), 4, 32768, cost)
    homes = sharing.homes(dict(enumerate(lengths)), [])
    assert sharing.plan(lengths, [homes[index] for index in range(400)], may_move=may_move)


def test_with_expert_parallelism_assignments_follow_from_balanced_microbatches() -> None:
    """With expert parallelism the policy's updates run exactly as a plan for each update alone."""
    lengths = long_tailed(random.Random(3), 256)
    sharing = ReplicaPlanner(ParallelConfig(expert_parallel_size=4), 4, 32768, cost)
    groups = [list(range(0, 128)), list(range(128, 256))]
    homes = sharing.homes(dict(enumerate(lengths)), groups)
    for group in groups:
        own = [lengths[index] for index in group]
        alone = plan_microbatches(own, 4, 32768, cost=cost)
        assert {home: {i for m in rank for i in m} for home, rank in enumerate(alone)} == {
            home: {place for place, index in enumerate(group) if homes[index] == home} for home in range(4)
        }
        stays = sharing.plan(own, [homes[index] for index in group])
        assert plan_statistics(stays, own, cost)["rank_imbalance"] == pytest.approx(
            plan_statistics(alone, own, cost)["rank_imbalance"]
        )
