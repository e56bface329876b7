"""Laws of exported policies: one per multiple of the interval, none of steps that a resumed run repeats."""

from pathlib import Path
from types import SimpleNamespace

from megatron_rl.config.schema import RunConfig
from megatron_rl.run.checkpoints import PolicyExporter, policy_exports


def make_keeper(folder, *, every_s=10.0, first_step=0):
    group = SimpleNamespace(save_hf=lambda engine, target: Path(target).mkdir(parents=True))
    return PolicyExporter(RunConfig(output_dir=str(folder), keep_policy_every_s=every_s), group, first_step=first_step)


def keep_at(keeper, times, first_step=0):
    for step, trained_s in enumerate(times, start=first_step):
        keeper.keep_if_due(step, trained_s)


def test_first_policy_at_or_after_each_multiple_is_exported(tmp_path):
    keep_at(make_keeper(tmp_path), [4.0, 9.0, 10.0, 14.0, 21.0, 29.9, 47.0, 49.0])
    kept = policy_exports(tmp_path)
    assert [(one.step, one.trained_s) for one in kept] == [(3, 10.0), (5, 21.0), (7, 47.0)]
    assert kept[0].folder == tmp_path / "policies" / "step-3"


def test_no_policy_is_exported_without_an_interval(tmp_path):
    keep_at(make_keeper(tmp_path, every_s=0.0), [4.0, 400.0])
    assert policy_exports(tmp_path) == []


def test_resumed_run_keeps_earlier_exports_and_repeats_later_ones(tmp_path):
    keep_at(make_keeper(tmp_path), [4.0, 11.0, 22.0, 33.0])
    resumed = make_keeper(tmp_path, first_step=2)
    assert [one.step for one in policy_exports(tmp_path)] == [2]
    keep_at(resumed, [19.0, 25.0], first_step=2)
    assert [(one.step, one.trained_s) for one in policy_exports(tmp_path)] == [(2, 11.0), (4, 25.0)]


def test_incomplete_export_does_not_count(tmp_path):
    (tmp_path / "policies" / "step-1").mkdir(parents=True)
    assert policy_exports(tmp_path) == []
