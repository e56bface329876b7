"""Stored responses on disk: each step once, within a bound, and never in training's way."""

import itertools

import numpy as np
import pytest

from megatron_rl.run import recorder
from megatron_rl.run.recorder import SampleStore, steps_to_drop
from megatron_rl.tracking.samples_file import read_samples, sample_files
from tests.unit.desk.watch.stored_samples import columns_of


class Spelled:
    def spelled(self, ids):
        return "x" * len(ids), np.arange(1, len(ids) + 1, dtype=np.int32)


def books(folder, first_step=0, max_gib=1.0):
    warnings = []
    return SampleStore(folder, Spelled(), first_step=first_step, max_gib=max_gib, warn=warnings.append), warnings


def test_what_is_added_is_on_disk_once_it_is_settled_with_its_texts(tmp_path):
    kept, warnings = books(tmp_path)
    columns = columns_of(1)
    kept.add(1, columns)
    kept.finish_background_save()
    table = read_samples(sample_files(tmp_path).values())
    assert [len(text) for text in table["response"].to_pylist()] == columns["length"] and not warnings
    assert table["id"].to_pylist() == columns["id"]


def test_a_run_that_goes_on_has_every_step_once(tmp_path):
    kept, _ = books(tmp_path)
    for step in (1, 2, 3, 4):
        kept.add(step, columns_of(step))
    kept.close()
    (tmp_path / "samples" / ".step_000005.parquet.x.partial").write_text("torn")
    again, _ = books(tmp_path, first_step=2)
    assert list(sample_files(tmp_path)) == [1, 2] and len(list((tmp_path / "samples").iterdir())) == 2
    for step in (3, 4, 5):
        again.add(step, columns_of(step, seed=7))
    again.close()
    table = read_samples(sample_files(tmp_path).values())
    pairs = list(zip(table["step"].to_pylist(), table["id"].to_pylist(), strict=True))
    assert len(set(pairs)) == len(pairs) == 5 * 12
    books(tmp_path)  # a run that starts over
    assert not sample_files(tmp_path)


def test_a_disk_that_takes_nothing_is_warned_of_once_and_stops_nobody(tmp_path, monkeypatch):
    def full(*args):
        raise OSError("No space left on device")

    monkeypatch.setattr(recorder, "write_samples", full)
    kept, warnings = books(tmp_path)
    for step in (1, 2, 3):
        kept.add(step, columns_of(step))
    kept.close()
    assert len(warnings) == 1 and "No space left" in warnings[0] and "training goes on" in warnings[0]


def test_the_bound_holds_after_every_step(tmp_path):
    kept, _ = books(tmp_path, max_gib=60_000 / 2**30)
    for step in range(1, 40):
        kept.add(step, columns_of(step, 4))
        kept.finish_background_save()
        assert sum(path.stat().st_size for path in sample_files(tmp_path).values()) <= 60_000
    assert len(sample_files(tmp_path)) > 2 and max(sample_files(tmp_path)) == 39


@pytest.mark.parametrize("room", [0, 1, 5, 20, 40])
def test_a_long_run_keeps_its_newest_steps_and_even_distances_before(room):
    sizes = {}
    for step in range(1, 200):
        sizes[step] = 10
        for old in steps_to_drop(sizes, room * 10):
            del sizes[old]
        assert sum(sizes.values()) <= room * 10
    left = sorted(sizes)
    assert len(left) == room
    if room > 20:
        newest, past = left[-16:], left[:-15]
        assert newest == list(range(184, 200)) and past[0] == 1
        gaps = [two - one for one, two in itertools.pairwise(past)]
        assert max(gaps) <= 2 * min(gaps) + 1


def test_nothing_is_removed_where_all_fits():
    assert not steps_to_drop({1: 10, 2: 10}, 20)
