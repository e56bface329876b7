"""The folder of checkpoints: which one a run resumes from, which are kept, and how damage is reported."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config.schema import Config, RunConfig
from megatron_rl.errors import UserError
from megatron_rl.run import checkpoint_folder as folders
from megatron_rl.run.checkpoint_folder import DamagedCheckpoint, candidates, flatten_state, unflatten_state
from megatron_rl.run.checkpoints import Checkpointer
from megatron_rl.run.output import check_output_dir
from megatron_rl.system.files.atomic_files import checksums
from megatron_rl.training.model_checkpoint import CheckpointError, CheckpointSaveError


class Ranks:
    """Replaces the trainer ranks: a model is a text file."""

    def __init__(self):
        self.loaded, self.full_disk = [], False
        self.begun, self.written = [], False

    def save_state(self, engine, folder):
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if self.full_disk:
            raise CheckpointSaveError("No space left on device")
        (folder / "weights").write_text(f"{engine} of {folder.parent.name}")
        (folder / "metadata.json").write_text("{}")
        (folder / "checksums.json").write_text(json.dumps(checksums(folder, ["weights", "metadata.json"])))

    def start_save(self, engine, folder):
        self.begun.append((engine, folder))
        self.written = False

    def saves_are_written(self):
        return self.written

    def finish_saves(self):
        begun, self.begun = self.begun, []
        for engine, folder in begun:
            self.save_state(engine, folder)

    def load_state(self, engine, folder):
        if (Path(folder) / "weights").read_text() != f"{engine} of {Path(folder).parent.name}":
            raise CheckpointError(f"{folder}/weights has another content")
        self.loaded.append(Path(folder).parent.name)


def make_saver(path, accuracies=dict, *, ranks=None, **keys):
    config = Config(run=RunConfig(output_dir=str(path), num_steps=100, **keys))
    return Checkpointer(config, ranks or Ranks(), engines=["policy"], accuracies=accuracies)


def save_steps(saver, *steps, **options):
    for num_steps in steps:
        pool = {"slots": [np.full(3, num_steps, np.int32)]}
        assert not saver.save(num_steps - 1, {"pool": pool}, weight_version=num_steps, **options)


def names(path):
    return sorted(folder.name for folder in folders.saved_folders(path / "checkpoints"))


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def replace_first(path):
    path.write_bytes(b"?" + path.read_bytes()[1:])


def point_outside(path):
    path.write_text(json.dumps({"folder": "../../../etc"}))


DAMAGE = {
    "policy/weights": (truncate, replace_first, Path.unlink),
    "policy/checksums.json": (truncate, replace_first, Path.unlink),
    "driver.json": (truncate, replace_first, Path.unlink),
    "driver.int32.npy": (truncate, replace_first, Path.unlink),
    "manifest.json": (truncate, replace_first, Path.unlink),
}


@pytest.mark.parametrize(("name", "damage"), [(name, d) for name, kinds in DAMAGE.items() for d in kinds])
def test_damaged_checkpoint_is_reported_and_auto_loads_the_older_one(tmp_path, name, damage):
    save_steps(make_saver(tmp_path), 3, 6)
    damage(tmp_path / "checkpoints" / "step-6" / name)
    saver = make_saver(tmp_path, resume="auto")
    assert saver.load(lambda state: None)["num_steps_done"] == 3
    assert len(saver.skipped) == 1 and "step-6" in saver.skipped[0] and Path(name).name in saver.skipped[0]
    with pytest.raises(UserError, match=rf"(?s){Path(name).name}.*step-3 is complete: run.resume=auto"):
        make_saver(tmp_path, resume=True).load(lambda state: None)


@pytest.mark.parametrize("damage", [truncate, point_outside, lambda path: path.write_text("[1]"), lambda p: p.write_text("")])
def test_damaged_latest_json_is_a_one_line_error_and_auto_ignores_it(tmp_path, damage):
    save_steps(make_saver(tmp_path), 3, 6)
    (tmp_path / "metrics.jsonl").touch()
    damage(tmp_path / "checkpoints" / "latest.json")
    with pytest.raises(UserError, match=r"latest\.json") as refused:
        check_output_dir(Config(run=RunConfig(output_dir=str(tmp_path), resume=True)))
    assert "\n" not in str(refused.value) or "run.resume=auto" in str(refused.value)
    assert make_saver(tmp_path, resume="auto").load(lambda state: None)["num_steps_done"] == 6


def test_load_skips_incomplete_checkpoints(tmp_path):
    save_steps(make_saver(tmp_path), 3, 6)
    (tmp_path / "checkpoints" / "latest.json").write_text(json.dumps({"folder": "step-3"}))
    saver = make_saver(tmp_path, resume="auto")
    assert saver.load(lambda state: None)["num_steps_done"] == 6  # complete, but the run was killed before it became the latest
    (tmp_path / "checkpoints" / "step-6" / "manifest.json").unlink()
    assert make_saver(tmp_path, resume="auto").load(lambda state: None)["num_steps_done"] == 3


def test_without_a_checkpoint_auto_starts_and_true_lists_remedies(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    check_output_dir(Config(run=RunConfig(output_dir=str(tmp_path), resume="auto")))
    assert make_saver(tmp_path, resume="auto").load(lambda state: None) is None
    with pytest.raises(UserError, match=r"run\.resume=auto starts.*run\.overwrite=true"):
        check_output_dir(Config(run=RunConfig(output_dir=str(tmp_path), resume=True)))


def test_driver_state_that_cannot_be_restored_counts_as_damage(tmp_path):
    save_steps(make_saver(tmp_path), 3, 6)

    def take(state):
        if state["num_steps_done"] == 6:
            state["pool"]["lost"]

    saver = make_saver(tmp_path, resume="auto")
    assert saver.load(take)["num_steps_done"] == 3 and "does not contain the state of a run" in saver.skipped[0]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["folder", "files", "healthy", "driver.json", "pool", "num_steps_done", "weight_version", "../x"]),
        inner,
        max_size=4,
    ),
    max_leaves=8,
)


FILES = ["manifest.json", "driver.json", "driver.int32.npy", "policy/checksums.json"]


@given(name=st.sampled_from(FILES), content=JSON | st.binary(max_size=40))
def test_any_file_content_gives_a_clear_error_or_the_older_checkpoint(tmp_path_factory, name, content):
    path = tmp_path_factory.mktemp("fuzz")
    save_steps(make_saver(path), 3, 6)
    written = content if isinstance(content, bytes) else json.dumps(content).encode()
    (path / "checkpoints" / "step-6" / name).write_bytes(written)
    saver = make_saver(path, resume="auto")
    assert saver.load(lambda state: None)["num_steps_done"] == 3 and len(saver.skipped) == 1
    (path / "checkpoints" / "latest.json").write_bytes(written)
    try:
        assert folders.latest_folder(path / "checkpoints").parent == path / "checkpoints"
    except DamagedCheckpoint as error:
        assert "latest.json" in str(error)
    shutil.rmtree(path)


@given(
    steps=st.sets(st.integers(1, 30), min_size=1, max_size=8).map(sorted),
    unhealthy=st.sets(st.integers(1, 30)),
    accuracies=st.dictionaries(st.integers(1, 30), st.floats(0, 1) | st.just(float("nan"))),
    keep_last=st.integers(1, 3),
    keep_every_steps=st.integers(0, 4),
    keep_best=st.integers(0, 2),
)
def test_keep_rules_match_brute_force(tmp_path_factory, steps, unhealthy, accuracies, keep_last, keep_every_steps, keep_best):
    path = tmp_path_factory.mktemp("kept")
    rules = dict(keep_last=keep_last, keep_every_steps=keep_every_steps, keep_best=keep_best)
    saver = make_saver(path, lambda: accuracies, **rules)
    on_disk = []
    for step in steps:
        save_steps(saver, step, healthy=step not in unhealthy)
        on_disk.append(step)
        healthy = [s for s in on_disk if s not in unhealthy]
        best = sorted((s for s in on_disk if accuracies.get(s, -1) >= 0), key=lambda s: (-accuracies[s], -s))[:keep_best]
        on_disk = [
            s
            for s in on_disk
            if s in on_disk[-keep_last:]
            or (keep_every_steps and s % keep_every_steps == 0)
            or s in best
            or s in healthy[-1:]
        ]
        assert names(path) == sorted(f"step-{s}" for s in on_disk)
    shutil.rmtree(path)


def test_next_checkpoint_removes_checkpoints_of_an_abandoned_future(tmp_path):
    save_steps(make_saver(tmp_path), 3, 6, 9)
    save_steps(make_saver(tmp_path), 4)
    assert "step-4" in names(tmp_path) and "step-9" not in names(tmp_path)


def test_failed_save_leaves_nothing_and_is_retried_next_step(tmp_path):
    ranks = Ranks()
    saver = make_saver(tmp_path, ranks=ranks, save_every_steps=3)
    save_steps(saver, 3)
    ranks.full_disk = True
    assert "No space left" in saver.save(5, {"pool": {}}, weight_version=1)
    assert names(tmp_path) == ["step-3"] and saver.num_failed == 1 and saver.due(6)
    with pytest.raises(UserError, match=r"no checkpoint after step 6: No space left.*complete: step-3.*run.resume=auto"):
        saver.check_saved()
    ranks.full_disk = False
    save_steps(saver, 7)
    saver.check_saved()
    assert not saver.due(7) and names(tmp_path) == ["step-3", "step-7"]


def test_background_save_counts_once_it_is_complete(tmp_path):
    ranks = Ranks()
    saver = make_saver(tmp_path, ranks=ranks, async_save=True)
    save_steps(saver, 3)
    assert not candidates(tmp_path / "checkpoints") and not saver.finish_background_save(wait=False)
    assert not candidates(tmp_path / "checkpoints")
    assert saver.newest_step == -1 and folders.latest_folder(tmp_path / "checkpoints") is None
    ranks.written = True
    assert not saver.finish_background_save(wait=False) and not saver.finish_background_save(wait=True)
    assert saver.newest_step == 2 and folders.latest_folder(tmp_path / "checkpoints").name == "step-3"
    save_steps(saver, 6, 9)  # the later save waits for the previous one
    assert folders.latest_folder(tmp_path / "checkpoints").name == "step-6"
    assert saver.newest_healthy.name == "step-9"  # newest_healthy also waits
    save_steps(saver, 12)
    assert saver.load(lambda state: None)["num_steps_done"] == 12


def test_driver_state_is_captured_at_the_moment_of_the_save(tmp_path):
    saver, state = make_saver(tmp_path, async_save=True), {"pool": {"slots": [1]}}
    assert not saver.save(2, state, weight_version=1)
    state["pool"]["slots"].append(2)
    saver.finish_background_save(wait=True)
    assert saver.load(lambda state: None)["pool"] == {"slots": [1]}


def test_failed_background_save_is_counted_and_retried(tmp_path):
    ranks = Ranks()
    saver = make_saver(tmp_path, ranks=ranks, save_every_steps=3, async_save=True)
    save_steps(saver, 3, 6)
    ranks.full_disk = True
    assert "No space left" in saver.finish_background_save(wait=True)
    assert names(tmp_path) == ["step-3"] and saver.num_failed == 1 and saver.due(6) and saver.newest_step == 2
    ranks.full_disk = False
    save_steps(saver, 7)
    assert not saver.finish_background_save(wait=True) and names(tmp_path) == ["step-3", "step-7"] and not saver.due(7)


def test_driver_arrays_round_trip_as_files_and_a_state_without_them_is_damaged(tmp_path):
    saver = make_saver(tmp_path)
    save_steps(saver, 3)
    folder = tmp_path / "checkpoints" / "step-3"
    (found,) = saver.load(lambda state: None)["pool"]["slots"]
    assert found.dtype == np.int32 and found.tolist() == [3, 3, 3]
    _, files = folders.read_manifest(folder)
    assert files.keys() >= {"driver.json", "driver.int32.npy"}
    state = json.loads((folder / "driver.json").read_text())
    del state["arrays"]
    (folder / "driver.json").write_text(json.dumps(state))
    with pytest.raises(DamagedCheckpoint, match="its arrays cannot be read"):
        folders.read_driver(folder)


def test_kill_while_overwriting_a_checkpoint_invalidates_it(tmp_path):
    """latest.json already names the folder, which has no manifest: neither old nor new files may count."""
    save_steps(make_saver(tmp_path), 3, 6)
    folder = tmp_path / "checkpoints" / "step-6"
    folders.begin(folder)
    saver = make_saver(tmp_path, resume="auto")
    assert saver.load(lambda state: None)["num_steps_done"] == 3 and "manifest.json cannot be read" in saver.skipped[0]


def test_write_driver_returns_the_checksums_of_its_files(tmp_path):
    every_second = np.arange(10, dtype=np.int32)[::2]
    parts = {"int32": [np.zeros(0, np.int32), every_second, np.full(70_000, 3, np.int32)], "float32": [np.zeros(0, np.float32)]}
    found = folders.write_driver_state(tmp_path, {"a": 1}, parts)
    assert found == checksums(tmp_path, list(found)) and json.loads((tmp_path / "driver.json").read_bytes())["a"] == 1
    for name, of_dtype in parts.items():
        read = np.load(tmp_path / f"driver.{name}.npy", allow_pickle=False)
        assert read.dtype.name == name and np.array_equal(read, np.concatenate(of_dtype))


ARRAYS = st.builds(
    lambda numbers, dtype: np.array(numbers, dtype),
    st.lists(st.integers(-100, 100), max_size=5),
    st.sampled_from([np.int32, np.float32]),
)
NESTS = st.recursive(
    ARRAYS | st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)


def same(one, two):
    if isinstance(one, np.ndarray):
        return isinstance(two, np.ndarray) and one.dtype == two.dtype and np.array_equal(one, two)
    if isinstance(one, dict):
        return isinstance(two, dict) and one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list):
        return isinstance(two, list) and len(one) == len(two) and all(map(same, one, two))
    return type(one) is type(two) and one == two


@given(NESTS)
def test_nested_arrays_round_trip(nest):
    plain, parts = flatten_state(nest)
    arrays = {name: np.concatenate(chunks) for name, chunks in parts.items()}
    assert all(array.dtype.name == name for name, array in arrays.items())
    assert same(unflatten_state(json.loads(json.dumps(plain)), arrays), nest)


@given(st.integers(-2, 6), st.integers(-2, 6), st.sampled_from(["int32", "float32"]))
def test_span_outside_the_flat_arrays_is_rejected(start, length, name):
    arrays = {"int32": np.arange(4, dtype=np.int32)}
    nest = {"x": [{"__array__": [name, start, length]}]}
    if name == "int32" and start >= 0 and length >= 0 and start + length <= 4:
        assert unflatten_state(nest, arrays)["x"][0].tolist() == list(range(start, start + length))
    else:
        with pytest.raises(ValueError, match="that were saved"):
            unflatten_state(nest, arrays)
