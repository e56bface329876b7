"""Sends a policy's adapters to running SGLang servers, which have the base model.

An adapter is loaded under a name that contains its version (``served_name``), and every request names its adapter. So a
server that lacks it refuses the request instead of running the base model, and a cached prefix belongs to one version,
because SGLang's prefix cache is keyed by adapter too. The server compares every tensor's SHA-256 with the trainer's.
The version is stamped once the adapter is loaded; adapters of older versions are unloaded after that, which waits for
their requests. The driver waits for the servers, at most ``timeout_s`` at each call.
"""

import base64
import hashlib
import pickle
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_rl.families.adapters import served_name
from megatron_rl.weights.bucket_plan import ServerAddress, unique_addresses
from megatron_rl.weights.publish import PublishResult
from megatron_rl.weights.server_calls import ServerCalls, wait_for_all
from megatron_rl.weights.transfer import PublishTransfer

_LOAD, _UNLOAD = "/load_lora_adapter_from_tensors", "/unload_lora_adapter"


def publish_adapters(
    tensors: Mapping[str, Tensor],
    settings: Mapping[str, Any],
    servers: Sequence[ServerAddress],
    version: int,
    timeout_s: float,
    *,
    further_versions: Sequence[int] = (),
) -> PublishResult:
    """Load the adapter ``tensors`` (peft's names) on all ``servers`` as ``version``, and unload all others.

    ``settings``: adapter_config.json. ``further_versions``: versions under which running requests ask for the same adapter.
    Raises ServerCallError.
    """
    started_s = time.perf_counter()
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    data = base64.b64encode(pickle.dumps(copies)).decode()
    body = {
        "config_dict": {**settings, "lora_alpha": served_alpha(settings), "use_rslora": False},
        "expected_checksums": {name: _checksum(tensor) for name, tensor in copies.items()},
    }
    names = [served_name(own) for own in (*further_versions, version)]
    with ServerCalls(unique_addresses(servers), timeout_s) as calls:
        loaded: list[set[str]] = []
        for name in names:
            # Left by a publish that failed after this call.
            calls.accepts(_UNLOAD, [{"lora_name": name}] * len(calls.servers))
            bodies = [
                {**body, "lora_name": name, "serialized_named_tensors": [data] * server.tp_size}
                for server in calls.servers
            ]
            replies = wait_for_all(calls.submit(_LOAD, bodies), timeout_s, f"the servers to load {name}")
            loaded = [set(reply["loaded_adapters"]) for reply in replies]
        PublishTransfer(calls, version, started=started_s).stamp_version()
        for old in sorted(set().union(*loaded) - set(names)):
            calls.accepts(_UNLOAD, [{"lora_name": old}] * len(calls.servers))
        # Frees the prefixes of older versions, which no request can use; a busy server refuses, and evicts them when it must.
        calls.accepts("/flush_cache")
    num_bytes = sum(tensor.nbytes for tensor in copies.values())
    return PublishResult(time.perf_counter() - started_s, num_bytes, num_buckets=1, buffer_bytes=len(data))


def served_alpha(settings: Mapping[str, Any]) -> float:
    """The alpha with which SGLang, whose factor is always alpha / rank, computes the adapters' factor."""
    return settings["lora_alpha"] * (settings["r"] ** 0.5 if settings["use_rslora"] else 1)


def _checksum(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.view(-1).view(torch.uint8).numpy().data).hexdigest()
