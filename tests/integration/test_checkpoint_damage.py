"""Checkpoints that were damaged, cut, forged: each is refused in a line that names the file, and nothing of it is run."""

import enum
import io
import json
import os
import pickle
import random
import shutil
import threading
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from megatron_rl.config.schema import AlgorithmConfig, OptimizerConfig, ParallelConfig
from megatron_rl.data.batch import PackedBatch
from megatron_rl.models.hf.tensor_sources import WeightsError
from megatron_rl.models.torch_dist import MegatronCheckpoint
from megatron_rl.parallel import topology
from megatron_rl.system.files.atomic_files import checksums
from megatron_rl.system.processes import host_memory
from megatron_rl.training import losses, model_checkpoint
from megatron_rl.training.engine import Engine
from megatron_rl.training.model_checkpoint import CheckpointError, CheckpointSaveError
from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def place():
    yield topology.initialize(ParallelConfig(), seed=1)
    topology.destroy()


@pytest.fixture(scope="module")
def engine(place, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder, num_hidden_layers=1, hidden_size=32, intermediate_size=32, vocab_size=80)
    return Engine("policy", folder, parallel=ParallelConfig(), topology=place, optimizer=OptimizerConfig(lr=1e-2))


@pytest.fixture(scope="module")
def saved(engine, tmp_path_factory):
    update(engine)
    folder = tmp_path_factory.mktemp("checkpoint") / "policy"
    engine.save_state(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "policy"))


def update(engine):
    tokens = torch.arange(3, 19)
    batch = PackedBatch(tokens, torch.tensor([0, 16]), {"mask": tokens > 5})
    engine.update([batch], losses.build("sft", AlgorithmConfig(), {"mask": float(batch.fields["mask"].sum())}))


def weights(engine):
    return {name: tensor.clone() for name, tensor in engine.export_weights() if tensor is not None}


def flip_a_bit(path, rng):
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def zero_a_page(path, rng):
    content = bytearray(path.read_bytes())
    start = rng.randrange(max(1, len(content) - 4096))
    content[start : start + 4096] = bytes(len(content[start : start + 4096]))
    path.write_bytes(content)


def cut(path, rng):
    os.truncate(path, rng.randrange(path.stat().st_size))


DAMAGES = [flip_a_bit, zero_a_page, cut, lambda path, rng: path.write_bytes(b""), lambda path, rng: path.unlink()]


@pytest.mark.parametrize("name", ["__0_0.distcp", "__0_1.distcp", "common.pt", ".metadata", "metadata.json", "checksums.json"])
def test_a_damaged_file_is_named_and_nothing_is_loaded(engine, saved, folder, name):
    rng, before = random.Random(name), weights(engine)
    for damage in DAMAGES:
        shutil.copy(saved / name, folder / name)
        damage(folder / name, rng)
        if (folder / name).exists() and (folder / name).read_bytes() == (saved / name).read_bytes():
            continue  # zeros among zeros
        with pytest.raises(CheckpointError) as refused:
            engine.load_state(folder)
        first = str(refused.value).splitlines()[0]
        # A damaged list of checksums may name any file.
        assert str(folder) in first and (name in first or name in ("checksums.json", "metadata.json"))
    after = weights(engine)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_damaged_file_with_a_matching_checksum_is_refused(engine, folder):
    cut(folder / "__0_0.distcp", random.Random(0))
    write_checksums(folder)
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        engine.load_state(folder)


def write_checksums(folder):
    names = json.loads((folder / "checksums.json").read_text())
    (folder / "checksums.json").write_text(json.dumps(checksums(folder, list(names))))


class RunsACommand:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def metadata_with(folder, thing):
    """The checkpoint's own metadata, with ``thing`` in a place where torch keeps what it does not look at."""
    metadata = FileSystemReader(folder).read_metadata()
    metadata.planner_data = [metadata.planner_data, thing]
    return pickle.dumps(metadata)


@pytest.mark.parametrize("whole", [False, True])
def test_a_pickle_that_would_run_code_is_refused_by_name(engine, folder, tmp_path, whole):
    witness = tmp_path / "ran"
    thing = RunsACommand(witness)
    content = metadata_with(folder, thing) if whole else pickle.dumps(thing)
    (folder / ".metadata").write_bytes(content)
    write_checksums(folder)  # whoever forges the one forges the other
    with pytest.raises(CheckpointError, match=r"\.metadata wants to import posix\.system"):
        engine.load_state(folder)
    with pytest.raises(WeightsError, match=r"posix\.system"):
        MegatronCheckpoint(folder)
    assert not witness.exists()


def test_a_checkpoint_with_enum_members_pickled_by_name_loads(engine, folder, monkeypatch):
    metadata = FileSystemReader(folder).read_metadata()
    with monkeypatch.context() as patch:  # as Python 3.11.0 to 3.11.3 have it
        patch.setattr(enum.Enum, "__reduce_ex__", lambda member, protocol: (getattr, (type(member), member.name)))
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert b"getattr" in (folder / ".metadata").read_bytes()
    write_checksums(folder)
    engine.load_state(folder)
    assert MegatronCheckpoint(folder)


def test_pickled_objects_in_tensor_and_common_files_run_no_code(engine, folder, tmp_path):
    witness = tmp_path / "ran"
    stream = io.BytesIO()
    torch.save(RunsACommand(witness), stream)
    metadata = FileSystemReader(folder).read_metadata()
    objects = {i.fqn: info for i, info in metadata.storage_data.items() if "_extra_state" in i.fqn}
    for info in objects.values():
        content = bytearray((folder / info.relative_path).read_bytes())
        info.offset, info.length = len(content), len(stream.getvalue())
        (folder / info.relative_path).write_bytes(content + stream.getvalue())
    assert objects
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    write_checksums(folder)
    with pytest.raises(CheckpointError):
        engine.load_state(folder)
    (folder / "common.pt").write_bytes(stream.getvalue())
    write_checksums(folder)
    with pytest.raises(CheckpointError):
        engine.load_state(folder)
    assert not witness.exists()


def test_a_full_disk_leaves_nothing_behind_and_the_next_save_works(engine, saved, tmp_path, monkeypatch):
    def full(folder):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("megatron_rl.training.model_checkpoint._check_room", full)
        with pytest.raises(CheckpointSaveError, match="No space left"):
            engine.save_state(tmp_path / "state")
    assert not list(tmp_path.iterdir())
    engine.save_state(tmp_path / "state")
    engine.load_state(tmp_path / "state")


@pytest.fixture
def gate(monkeypatch):
    """Files of checkpoints are written once it is open."""
    opened, write_file = threading.Event(), model_checkpoint._write_file

    def when_open(*arguments):
        assert opened.wait(60)
        return write_file(*arguments)

    monkeypatch.setattr(model_checkpoint, "_write_file", when_open)
    return opened


def test_a_background_save_writes_the_state_at_its_start(engine, folder, gate):
    before = weights(engine)
    engine.start_save(folder, in_background=True)
    update(engine)
    assert not engine.save_is_complete
    after = weights(engine)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    gate.set()
    engine.finish_save()
    assert engine.save_is_complete and not folder.with_name(folder.name + ".partial").exists()
    engine.load_state(folder)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(engine).items())
    # Adam goes on from the moments of that moment, too: the same update again.
    update(engine)
    assert all(torch.equal(after[name], tensor) for name, tensor in weights(engine).items())


def test_the_previous_checkpoint_stays_until_the_new_one_is_complete(engine, folder, gate):
    engine.load_state(folder)
    before = weights(engine)
    update(engine)
    engine.start_save(folder, in_background=True)
    # As after a kill: what is there now can be gone on from.
    left = Path(shutil.copytree(folder, folder.with_name("left")))
    engine.load_state(left)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(engine).items())
    gate.set()
    engine.finish_save()


def test_a_failed_background_save_is_reported_at_the_end_and_keeps_the_previous_checkpoint(
    engine, folder, monkeypatch
):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model_checkpoint, "_write_file", full)
    engine.start_save(folder, in_background=True)
    with pytest.raises(CheckpointSaveError, match="could not be written: .*No space left on device"):
        engine.finish_save()
    assert not folder.with_name(folder.name + ".partial").exists()
    engine.load_state(folder)


def test_a_copy_that_does_not_fit_into_memory_is_not_made(engine, folder, monkeypatch, caplog):
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 1000)
    monkeypatch.setattr(model_checkpoint, "Thread", None)  # none is started
    engine.start_save(folder, in_background=True)
    assert engine.save_is_complete and "has no room" in caplog.text
    engine.finish_save()
    engine.load_state(folder)
