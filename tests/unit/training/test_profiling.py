"""Only the chosen steps, ranks and stages have traces, and no failure of the profiler ends training; memory and CPU time by stage."""

import gzip
import json
from dataclasses import replace

import pytest
import torch

from megatron_rl.config.checks import profile_problems
from megatron_rl.config.schema import Config, ProfileConfig, RunConfig
from megatron_rl.training.profiling import (
    ResourceUse,
    StageMeter,
    memory_note,
    of_all_ranks,
    seconds_by_rank,
    stage_profiler,
)

VALUES, UPDATE = (3, "values"), (3, "update_policy")


def config(folder, **profile):
    return replace(Config(), run=RunConfig(output_dir=str(folder), num_steps=5), profile=ProfileConfig(**profile))


def walk(profiler):
    """Run two stages of each of three steps, counted from 0, with work in each stage."""
    for step in range(3):
        for name, size in (("values", 3), ("update_policy", 5)):
            profiler.start_stage((step, name))
            torch.ones(size, size) @ torch.ones(size, size)
            profiler.start_stage(None)


def test_each_chosen_stage_of_each_chosen_step_has_a_chrome_trace(tmp_path):
    walk(stage_profiler(config(tmp_path, steps=[2], ranks=[0, 3], stages=["update_policy"]), 3))
    files = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()]
    assert files == ["profile/step-2/rank-3/update_policy.json.gz"]
    trace = json.loads(gzip.decompress((tmp_path / files[0]).read_bytes()))
    products = [event for event in trace["traceEvents"] if event.get("name") == "aten::mm"]
    assert len(products) == 1 and products[0]["args"]["Input Dims"][:2] == [[5, 5], [5, 5]]


def test_a_stage_that_starts_twice_has_two_traces(tmp_path):
    profiler = stage_profiler(config(tmp_path, steps=[1]), 0)
    walk(profiler)
    profiler.start_stage((0, "values"))
    profiler.start_stage(None)
    folder = tmp_path / "profile" / "step-1" / "rank-0"
    assert sorted(path.name for path in folder.iterdir()) == ["update_policy.json.gz", "values-2.json.gz", "values.json.gz"]


def test_a_rank_that_profiles_nothing_has_no_profiler(tmp_path):
    assert stage_profiler(config(tmp_path), 0) is None
    assert stage_profiler(config(tmp_path, steps=[1], ranks=[1]), 0) is None


def test_a_trace_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    (tmp_path / "profile").write_text("in the way")
    walk(stage_profiler(config(tmp_path, steps=[1]), 0))
    assert "no profile of" in caplog.text


def test_memory_snapshots_on_a_cpu_are_declined_with_a_note(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "GPU" in memory_note(config(tmp_path, steps=[1], memory=True))
    assert memory_note(config(tmp_path, steps=[1])) == "" == memory_note(config(tmp_path, memory=True))


def test_settings_that_could_never_profile_anything_are_refused(tmp_path):
    assert list(profile_problems(config(tmp_path, steps=[1, 5], ranks=[0, 1]), 2)) == []
    (late,) = profile_problems(config(tmp_path, steps=[6]), 2)
    assert "run.num_steps=5" in late and "[6]" in late
    (missing,) = profile_problems(config(tmp_path, steps=[1], ranks=[2]), 2)
    assert "[2]" in missing
    assert list(profile_problems(config(tmp_path, steps=[1], ranks=[7]), 0)) == []
    assert len(list(profile_problems(config(tmp_path, memory=True), 1))) == 1


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
    monkeypatch.setattr("megatron_rl.training.profiling.time.monotonic", lambda: next(clock))
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
