"""Only the chosen steps, ranks and stages have traces, and no failure of the profiler ends training."""

import gzip
import json
from dataclasses import replace

import torch

from megatron_rl.config.checks.tracking_keys import profile_problems
from megatron_rl.config.schema import Config, ProfileConfig, RunConfig
from megatron_rl.training.profiling import memory_note, stage_profiler


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
