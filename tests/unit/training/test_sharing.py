"""Homes of sequences: one each, even in every group at once, and plans that leave sequences there."""

import random

import pytest

from megatron_rl.config.schema import ParallelConfig
from megatron_rl.training.batching import plan_at_home, plan_microbatches, plan_statistics
from megatron_rl.training.sharing import Sharing, share_out


def long_tailed(rng: random.Random, count: int) -> list[int]:
    return [min(32768, max(32, int(rng.lognormvariate(8.7, 0.9)))) for _ in range(count)]


def cost(length: int) -> float:
    """Half of a token's cost is attention at 32k."""
    return length * (1 + length / 32768)


@pytest.mark.parametrize("num_replicas", [1, 2, 8])
def test_policy_and_critic_updates_are_even_at_the_same_homes(num_replicas: int) -> None:
    rng = random.Random(num_replicas)
    lengths = dict(enumerate(long_tailed(rng, 1024)))
    order = rng.sample(range(1024), 1024)
    ended = rng.sample(range(1024), 600)
    policy = [order[start : start + 256] for start in range(0, 1024, 256)]
    critic = [ended[start : start + 200] for start in range(0, 600, 200)]
    homes = share_out({key: cost(length) for key, length in lengths.items()}, [*policy, *critic], num_replicas)
    assert homes.keys() == lengths.keys() and set(homes.values()) <= set(range(num_replicas))
    for group in [list(lengths), *policy, *critic]:
        loads = [sum(cost(lengths[key]) for key in group if homes[key] == home) for home in range(num_replicas)]
        assert 1 - sum(loads) / (num_replicas * max(loads)) < 0.01


@pytest.mark.parametrize("seed", range(20))
def test_plans_at_home_move_nothing_and_keep_the_laws_of_plans(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(1, 40) for _ in range(rng.randint(0, 30))]
    num_replicas, budget, multiple = rng.randint(1, 4), rng.randint(20, 60), rng.choice([1, 2])
    homes = [rng.randrange(num_replicas) for _ in lengths]
    plan = plan_at_home(lengths, homes, num_replicas, budget, multiple_of=multiple)
    assert sorted(index for rank in plan for m in rank for index in m) == list(range(len(lengths)))
    assert all(homes[index] == home for home, rank in enumerate(plan) for m in rank for index in m)
    assert len({len(rank) for rank in plan}) == 1 and len(plan[0]) % multiple == 0
    assert all(sum(lengths[i] for i in m) <= budget or len(m) == 1 for rank in plan for m in rank)


def test_on_one_replica_staying_is_the_plan_as_ever() -> None:
    lengths = long_tailed(random.Random(0), 200)
    sharing = Sharing(ParallelConfig(), 1, 32768, cost)
    assert sharing.plan(lengths, [0] * 200, may_move=True) == plan_microbatches(lengths, 1, 32768, cost=cost)


def test_sequences_move_only_where_ranks_would_wait_for_each_other() -> None:
    lengths = long_tailed(random.Random(0), 400)
    sharing = Sharing(ParallelConfig(), 4, 32768, cost)
    even = sharing.homes(dict(enumerate(lengths)), [])
    at_home = sharing.plan(lengths, [even[i] for i in range(400)])
    assert sharing.plan(lengths, [even[i] for i in range(400)], may_move=True) == at_home
    uneven = [0] * 200 + [index % 4 for index in range(200)]
    assert sharing.plan(lengths, uneven, may_move=True) == plan_microbatches(lengths, 4, 32768, cost=cost)
    stays = sharing.plan(lengths, uneven)
    assert all(uneven[index] == home for home, rank in enumerate(stays) for m in rank for index in m)


@pytest.mark.parametrize("may_move", [False, True])
def test_even_homes_are_not_planned_anew(may_move: bool) -> None:
    lengths = long_tailed(random.Random(1), 400)
    sharing = Sharing(ParallelConfig(), 4, 32768, cost)
    homes = sharing.homes(dict(enumerate(lengths)), [])

    def fails(lengths):
        raise AssertionError("it takes longer than the plan that stays")

    sharing._plan_anew = fails
    assert sharing.plan(lengths, [homes[index] for index in range(400)], may_move=may_move)


def test_where_ranks_meet_in_every_layer_homes_come_from_even_microbatches() -> None:
    """Experts spread over replicas: the policy's optimizer steps run exactly as planned for themselves."""
    lengths = long_tailed(random.Random(3), 256)
    sharing = Sharing(ParallelConfig(expert_parallel_size=4), 4, 32768, cost)
    groups = [list(range(0, 128)), list(range(128, 256))]
    homes = sharing.homes(dict(enumerate(lengths)), groups)
    for group in groups:
        own = [lengths[index] for index in group]
        alone = plan_microbatches(own, 4, 32768, cost=cost)
        assert {home: {i for m in rank for i in m} for home, rank in enumerate(alone)} == {
            home: {place for place, index in enumerate(group) if homes[index] == home} for home in range(4)
        }
        stays = sharing.plan(own, [homes[index] for index in group])
        assert plan_statistics(stays, own, cost).rank_imbalance == pytest.approx(
            plan_statistics(alone, own, cost).rank_imbalance
        )
