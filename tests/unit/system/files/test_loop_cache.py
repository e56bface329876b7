"""Compiled loops come from the disk in a later process, and only if nothing that they were compiled from has changed."""

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from megatron_rl.system.files.loop_cache import compiled_with_cache

SOURCE = "def total(values):\n    sum = values[0] - values[0]\n    for value in values:\n        sum += value\n    return sum\n"


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("loops", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "loops.py"
    path.write_text(SOURCE)
    return path


def num_loaded(loop, *dtypes: type) -> int:
    """Number of the dtypes whose loop came from the cache."""
    for dtype in dtypes:
        assert loop(np.arange(4, dtype=dtype)) == 6
    return sum(loop.stats.cache_hits.values())


def test_loops_for_two_dtypes_that_are_compiled_at_the_same_time_are_both_kept(path: Path) -> None:
    total = loaded(path).total
    one, other = (compiled_with_cache(total, (path,)) for _ in range(2))
    assert num_loaded(one, np.float32) == num_loaded(other, np.float64) == 0
    assert num_loaded(compiled_with_cache(total, (path,)), np.float32, np.float64) == 2


def test_a_stale_count_of_entries_mixes_nothing_up(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both processes see an empty index when they save, and the first one's index is lost."""
    total = loaded(path).total
    one, other = (compiled_with_cache(total, (path,)) for _ in range(2))
    for loop, dtype in ((one, np.float32), (other, np.float64)):
        monkeypatch.setattr(loop._cache._cache_file, "_load_index", dict)
        assert num_loaded(loop, dtype) == 0
    assert num_loaded(compiled_with_cache(total, (path,)), np.float64, np.float32) == 1


def test_a_change_in_any_source_file_makes_the_cache_stale(path: Path, tmp_path: Path) -> None:
    total = loaded(path).total
    for folder, content, expected in (("a", "x = 1", 0), ("b", "x = 1", 1), ("c", "x = 2", 0)):
        sources = (path, tmp_path / folder / "inlined.py")  # another folder each time, as files are read once per process
        sources[1].parent.mkdir()
        sources[1].write_text(content)
        assert num_loaded(compiled_with_cache(total, sources), np.float64) == expected
