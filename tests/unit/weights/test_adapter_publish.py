"""Laws of publishing adapters alone: the order of the calls, what a server gets, and the refusal of requests without one."""

import base64
import hashlib
import pickle

import pytest
import torch

from megatron_rl.families.adapters import served_name
from megatron_rl.rollout.requests import GenerationRequest, RequestRejected
from megatron_rl.rollout.sglang.wire.protocol import generate_body, validate
from megatron_rl.weights.bucket_plan import ServerAddress
from megatron_rl.weights.publish import publish_adapters
from megatron_rl.weights.server_calls import ServerCallError
from tests.unit.local_service import local_service

TENSORS = {"x.lora_A.weight": torch.randn(4, 8), "x.lora_B.weight": torch.randn(6, 4, dtype=torch.bfloat16)}
SETTINGS = {"r": 4, "lora_alpha": 8, "use_rslora": True, "target_modules": ["x"]}


class Server:
    """Adapters of a server, by name."""

    def __init__(self, *, refuses: str = "") -> None:
        self.loaded, self.version, self.refuses = {"policy-2": {}}, "2", refuses

    def __call__(self, path, body):
        if path == self.refuses:
            return {"success": False, "error_message": "LoRA is not enabled"}
        if path == "/load_lora_adapter_from_tensors":
            assert body["lora_name"] not in self.loaded
            self.loaded[body["lora_name"]] = body
        elif path == "/unload_lora_adapter" and self.loaded.pop(body["lora_name"], None) is None:
            return {"success": False, "error_message": "no such adapter"}
        elif path == "/update_weight_version":
            self.version = body["new_version"]
        return {
            "success": True,
            "weight_version": self.version,
            "loaded_adapters": dict.fromkeys(self.loaded, "__tensor__"),
        }


def test_a_publish_loads_the_new_adapter_stamps_its_version_and_then_unloads_the_old_one():
    server = Server()
    with local_service(server) as service:
        result = publish_adapters(TENSORS, SETTINGS, [ServerAddress(service.url, 2, 1)], 3, 5.0)
    assert [path for path, _ in service.requests] == [
        "/unload_lora_adapter", "/load_lora_adapter_from_tensors", "/update_weight_version", "/model_info",
        "/unload_lora_adapter", "/flush_cache",
    ]  # fmt: skip
    assert set(server.loaded) == {served_name(3)} and server.version == "3"
    assert result.num_bytes == sum(tensor.nbytes for tensor in TENSORS.values())


def test_every_worker_gets_the_same_bytes_with_their_checksums_and_sglangs_factor():
    server = Server()
    with local_service(server) as service:
        publish_adapters(TENSORS, SETTINGS, [ServerAddress(service.url, 2, 1)], 3, 5.0)
    body = server.loaded[served_name(3)]
    first, second = (pickle.loads(base64.b64decode(data)) for data in body["serialized_named_tensors"])
    assert all(torch.equal(first[name], value) and torch.equal(second[name], value) for name, value in TENSORS.items())
    raw = {name: value.view(-1).view(torch.uint8).numpy().tobytes() for name, value in TENSORS.items()}
    assert body["expected_checksums"] == {name: hashlib.sha256(value).hexdigest() for name, value in raw.items()}
    assert body["config_dict"]["lora_alpha"] / body["config_dict"]["r"] == 8 / 4**0.5


def test_a_restarted_server_has_the_adapter_under_the_version_of_running_requests_too():
    server = Server()
    with local_service(server) as service:
        publish_adapters(TENSORS, SETTINGS, [ServerAddress(service.url, 1, 2)], 4, 5.0, further_versions=[3])
    assert set(server.loaded) == {served_name(3), served_name(4)}


def test_a_server_without_adapters_fails_the_publish_with_the_remedy():
    remedy = r"LoRA is not enabled.*megatron-rl serve --config.*policy.lora.sync=merged"
    with (
        local_service(Server(refuses="/load_lora_adapter_from_tensors")) as service,
        pytest.raises(ServerCallError, match=remedy),
    ):
        publish_adapters(TENSORS, SETTINGS, [ServerAddress(service.url, 1, 1)], 3, 5.0)


def test_requests_name_their_adapter_and_one_that_would_run_the_model_alone_is_refused():
    with_adapter, without = (GenerationRequest("r", [1], 4, adapter=name) for name in (served_name(3), ""))
    assert generate_body([with_adapter], ["r;"])["lora_path"] == ["policy-3"]
    assert "lora_path" not in generate_body([without], ["r;"])
    validate(with_adapter, 10, needs_adapter=True)
    validate(without, 10)
    with pytest.raises(RequestRejected, match="names no adapter"):
        validate(without, 10, needs_adapter=True)
