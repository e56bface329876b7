"""The rollout service with fake servers and trainer: versions that a window may see, and pauses of the servers."""

from types import SimpleNamespace

import pytest

from megatron_rl.config.schema import Config
from megatron_rl.rollout import service as service_module
from megatron_rl.rollout.server_pool import ServerPool
from megatron_rl.rollout.service import RolloutService, TrainerHooks
from megatron_rl.weights.publish import PublishResult, WeightSyncError


class Server:
    url, incarnation, is_ours, num_restarts = "http://server:1", 1, True, 0

    def healthy(self, timeout_s=5.0):
        return True


def make_service(monkeypatch, publish):
    monkeypatch.setattr(service_module, "model_vocab_size", lambda config: 9)
    trainer = TrainerHooks(SimpleNamespace(publish=publish, sends_adapters=False), call_on_trainer=None, note=print, warn=print)
    return RolloutService(Config(), ServerPool([Server()]), None, None, trainer)


def test_window_started_during_a_publish_accepts_old_and_new_version(monkeypatch):
    """``weight_version`` is the oldest version that a server may still have."""
    seen = []

    def publish(publisher, addresses, version):
        seen.append((service.weight_version, service.trainer_version, version, service._live.client.is_publishing))
        return PublishResult(0.0, 0, 1)

    service = make_service(monkeypatch, publish)
    for version in (1, 2):
        if version == 2:
            service.weights_changed()
        service.publish()
        assert seen[-1] == (version - 1, version, version, True)
        assert (service.weight_version, service.trainer_version) == (version, version)
        assert not service._live.client.is_publishing


def test_failed_publish_keeps_the_old_version_and_ends_the_pause(monkeypatch):
    def publish(publisher, addresses, version):
        raise WeightSyncError("no")

    service = make_service(monkeypatch, publish)
    with pytest.raises(WeightSyncError):
        service.publish()
    assert service.weight_version == 0 and not service._live.client.is_publishing
