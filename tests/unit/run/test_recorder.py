"""A run's records: reports on one thread, and stored responses on disk, each step once and within the size limit."""

import itertools
import threading

import numpy as np
import pytest

from megatron_rl.config.schema import Config, RunConfig, TrackingConfig
from megatron_rl.run import recorder
from megatron_rl.run.recorder import Recorder, SampleStore, steps_to_drop
from megatron_rl.tracking.samples_file import read_samples, sample_files
from tests.unit.desk.watch.stored_samples import columns_of


class Spelled:
    def spelled(self, ids):
        return "x" * len(ids), np.arange(1, len(ids) + 1, dtype=np.int32)


def make_store(folder, first_step=0, max_gib=1.0):
    warnings = []
    return SampleStore(folder, Spelled(), first_step=first_step, max_gib=max_gib, warn=warnings.append), warnings


def test_settle_waits_until_added_rows_are_on_disk_with_texts(tmp_path):
    kept, warnings = make_store(tmp_path)
    columns = columns_of(1)
    kept.add(1, columns)
    kept.finish_background_save()
    table = read_samples(sample_files(tmp_path).values())
    assert [len(text) for text in table["response"].to_pylist()] == columns["length"] and not warnings
    assert table["id"].to_pylist() == columns["id"]


def test_resumed_run_has_every_step_once(tmp_path):
    kept, _ = make_store(tmp_path)
    for step in (1, 2, 3, 4):
        kept.add(step, columns_of(step))
    kept.close()
    (tmp_path / "samples" / ".step_000005.parquet.x.partial").write_text("torn")
    again, _ = make_store(tmp_path, first_step=2)
    assert list(sample_files(tmp_path)) == [1, 2] and len(list((tmp_path / "samples").iterdir())) == 2
    for step in (3, 4, 5):
        again.add(step, columns_of(step, seed=7))
    again.close()
    table = read_samples(sample_files(tmp_path).values())
    pairs = list(zip(table["step"].to_pylist(), table["id"].to_pylist(), strict=True))
    assert len(set(pairs)) == len(pairs) == 5 * 12
    make_store(tmp_path)  # a run that starts over
    assert not sample_files(tmp_path)


def test_full_disk_is_one_warning_and_training_continues(tmp_path, monkeypatch):
    def full(*args):
        raise OSError("No space left on device")

    monkeypatch.setattr(recorder, "write_samples", full)
    kept, warnings = make_store(tmp_path)
    for step in (1, 2, 3):
        kept.add(step, columns_of(step))
    kept.close()
    assert len(warnings) == 1 and "No space left" in warnings[0] and "training continues" in warnings[0]


def test_size_limit_holds_after_every_step(tmp_path):
    kept, _ = make_store(tmp_path, max_gib=60_000 / 2**30)
    for step in range(1, 40):
        kept.add(step, columns_of(step, 4))
        kept.finish_background_save()
        assert sum(path.stat().st_size for path in sample_files(tmp_path).values()) <= 60_000
    assert len(sample_files(tmp_path)) > 2 and max(sample_files(tmp_path)) == 39


@pytest.mark.parametrize("capacity", [0, 1, 5, 20, 40])
def test_long_run_keeps_newest_steps_and_evenly_spaced_older_ones(capacity):
    sizes = {}
    for step in range(1, 200):
        sizes[step] = 10
        for old in steps_to_drop(sizes, capacity * 10):
            del sizes[old]
        assert sum(sizes.values()) <= capacity * 10
    left = sorted(sizes)
    assert len(left) == capacity
    if capacity > 20:
        newest, past = left[-16:], left[:-15]
        assert newest == list(range(184, 200)) and past[0] == 1
        gaps = [two - one for one, two in itertools.pairwise(past)]
        assert max(gaps) <= 2 * min(gaps) + 1


def test_thinning_removes_no_step_if_everything_fits():
    assert not steps_to_drop({1: 10, 2: 10}, 20)


def test_all_reports_are_written_on_one_thread_and_one_at_a_time(tmp_path):
    """matplotlib opens its fonts again in each new thread, and keeps them open."""
    threads, is_free = [], threading.Event()

    def write(folder):
        threads.append(threading.get_ident())
        assert is_free.wait(60)

    config = Config(run=RunConfig(output_dir=str(tmp_path)), tracking=TrackingConfig(report_every_steps=1, mlflow=False))
    with Recorder(config, restored=None, title="", write_report=write) as records:
        for step in range(3):
            records.end(step, {"step/tokens_generated": 1.0}, num_server_restarts=0)
        is_free.set()
    assert len(threads) == 2 and len(set(threads)) == 1 and threads[0] != threading.get_ident()
