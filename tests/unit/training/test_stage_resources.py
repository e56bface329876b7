"""Memory and CPU time by stage, of one rank and of all ranks."""

import pytest

from megatron_rl.training.stage_resources import ResourceUse, StageMeter, of_all_ranks, seconds_by_rank

VALUES, UPDATE = (3, "values"), (3, "update_policy")


@pytest.fixture
def used(monkeypatch):
    """Fake readings of the process's resources since the last reading."""
    answers: list[float] = []
    monkeypatch.setattr(StageMeter, "_take_use", lambda account: ResourceUse(host_gib=(size := answers.pop(0)), cpu_s=size))
    return answers


def test_resources_are_attributed_to_a_stage_until_the_next_one(used):
    account = StageMeter()
    used += [9.0, 1.0, 2.0, 3.0]
    account.start_stage(VALUES)  # 9 were used before it
    account.start_stage(VALUES)  # a second command of the same stage asks nobody
    account.start_stage(UPDATE)
    account.start_stage(None)
    assert account.take() == {VALUES: ResourceUse(1.0, 0.0, 1.0), UPDATE: ResourceUse(2.0, 0.0, 2.0)}
    assert used == [3.0]
    assert account.take() == {}


def test_a_stage_in_two_parts_has_the_larger_memory_and_the_sum_of_cpu_time(used):
    account = StageMeter()
    used += [0.0, 5.0, 0.0, 4.0]
    for stage in (VALUES, UPDATE, VALUES):
        account.start_stage(stage)
    assert account.take() == {VALUES: ResourceUse(5.0, 0.0, 9.0), UPDATE: ResourceUse(0.0, 0.0, 0.0)}


def test_all_ranks_together_have_the_largest_memory_and_the_sum_of_cpu_time():
    first = {VALUES: ResourceUse(1.0, 8.0, 0.5)}
    second = {VALUES: ResourceUse(2.0, 3.0, 0.25), UPDATE: ResourceUse(1.0, 1.0, 1.0)}
    assert of_all_ranks([first, second]) == {VALUES: ResourceUse(2.0, 8.0, 0.75), UPDATE: ResourceUse(1.0, 1.0, 1.0)}
    assert of_all_ranks([]) == {}


def test_the_meter_measures_this_process():
    account = StageMeter()
    account.start_stage(VALUES)
    sum(range(2_000_000))
    use = account.take()[VALUES]
    assert 0.01 < use.cpu_s < 60 and 0.01 < use.host_gib < 100


def test_work_is_the_time_inside_calls_by_rank(monkeypatch):
    clock = iter([10.0, 12.0, 20.0, 23.0, 30.0, 31.0])
    monkeypatch.setattr("megatron_rl.training.stage_resources.time.monotonic", lambda: next(clock))
    account = StageMeter()
    for stage in (VALUES, VALUES, UPDATE):
        account.start_stage(stage)
        with account.working():
            pass
    of_first = account.take()
    assert {stage: use.busy_s for stage, use in of_first.items()} == {VALUES: 5.0, UPDATE: 1.0}
    of_second = {VALUES: ResourceUse(busy_s=0.5)}
    assert of_all_ranks([of_first, of_second])[VALUES].busy_s == 5.0
    assert seconds_by_rank([of_first, of_second]) == {VALUES: "0:5 1:0.5", UPDATE: "0:1"}


def test_of_many_ranks_the_slowest_and_the_fastest_are_recorded():
    seconds = [float((37 * rank) % 1000) for rank in range(1000)]
    words = seconds_by_rank([{VALUES: ResourceUse(busy_s=one)} for one in seconds])[VALUES].split()
    kept = {int(rank): float(one) for rank, one in (word.split(":") for word in words)}
    assert sorted(kept.values()) == [*map(float, range(32)), *map(float, range(968, 1000))]
    assert all(seconds[rank] == one for rank, one in kept.items())
