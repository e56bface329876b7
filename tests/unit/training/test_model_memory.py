"""Storages that are offloaded and reloaded, without a model."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megatron_rl.errors import UserError
from megatron_rl.system.processes import host_memory
from megatron_rl.training import model_memory
from megatron_rl.training.model_memory import _host_memory, _HostBuffer


def stash_of(*tensors, besides=None):
    return _HostBuffer(lambda: tensors, besides=besides)


def test_views_of_offloaded_storages_are_unchanged_after_the_reload():
    buffer = torch.arange(10.0)
    views, alone = [buffer[:4], buffer[4:].view(2, 3)], torch.ones(3, dtype=torch.int16)
    addresses = [view.untyped_storage()._cdata for view in views]
    stash = stash_of(*views, alone)
    for _ in range(2):
        stash.out()
        assert buffer.untyped_storage().nbytes() == alone.untyped_storage().nbytes() == 0
        stash.out()
        stash.back()
        stash.back()
        assert torch.equal(buffer, torch.arange(10.0)) and torch.equal(alone, torch.ones(3, dtype=torch.int16))
        assert [view.untyped_storage()._cdata for view in views] == addresses


def test_only_changed_storages_are_copied_again():
    tensor = torch.zeros(5)
    stash = stash_of(tensor)
    stash.out()
    stash.back()
    tensor += 1
    stash.out()  # nobody said that it changed
    stash.back()
    assert torch.equal(tensor, torch.zeros(5))
    tensor += 1
    stash.is_copied = False
    stash.out()
    stash.back()
    assert torch.equal(tensor, torch.ones(5))


def test_storages_shared_by_two_buffers_belong_to_the_first():
    weights, moments = torch.zeros(8), torch.ones(4)
    first = stash_of(weights)
    second = stash_of(weights[2:6], moments, besides=first)
    second.out()
    assert weights.untyped_storage().nbytes() == 32 and moments.untyped_storage().nbytes() == 0


def test_host_memory_is_allocated_once():
    stash = stash_of(torch.zeros(100))
    with mock.patch.object(model_memory, "_host_memory", side_effect=_host_memory) as taken:
        for _ in range(3):
            stash.out()
            stash.back()
    assert taken.call_count == 1


def test_too_little_host_memory_for_all_ranks_is_an_error(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 7 * 2**20)
    with pytest.raises(UserError, match="8 ranks .* policy.offload=never"):
        _host_memory(2**20)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "7")
    assert len(_host_memory(2**20)) == 2**20


@pytest.mark.parametrize("status", [0, 2])
def test_on_gpus_exactly_these_bytes_are_pinned(monkeypatch, status):
    pinned = []
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: pinned.append((address, size, flags)) or status
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    if status:
        with pytest.raises(UserError, match="could not be pinned"):
            _host_memory(3000)
    else:
        host = _host_memory(3000)
        assert pinned == [(host.data_ptr(), 3000, 0)]
