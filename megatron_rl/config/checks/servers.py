"""Where servers are: their addresses, and which rank shares its device with which server."""

import os
from collections.abc import Iterator

from megatron_rl.config.derived import server_placement
from megatron_rl.config.schema import RolloutConfig, WeightSync

_KEY_FLAGS = ("api-key", "admin-api-key")
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def address_problems(rollout: RolloutConfig) -> Iterator[str]:
    yield from (
        f"rollout.urls: {url!r} is not an address; expected http://host:port"
        for url in rollout.urls
        if not url.startswith(("http://", "https://"))
    )
    yield from key_problems(rollout)
    if rollout.port > 65535 - rollout.num_servers:
        yield f"rollout.port: expected 0 (any free port) or a port up to {65535 - rollout.num_servers}, got {rollout.port}"


def key_problems(rollout: RolloutConfig) -> Iterator[str]:
    key = os.environ.get(rollout.api_key_env, "").strip() if rollout.api_key_env else ""
    if rollout.api_key_env and not key:
        yield f"rollout.api_key_env: the environment variable {rollout.api_key_env} is not set; export it with the servers' key"
    elif key.startswith("-") or not (key.isascii() and key.isprintable()) or " " in key:
        yield (
            f"rollout.api_key_env: the key in {rollout.api_key_env} must be ASCII without spaces, and not begin with a dash: "
            "it travels in a header and on SGLang's command line"
        )
    if named := [name for name in rollout.server_args if name.lstrip("-").replace("_", "-") in _KEY_FLAGS]:
        yield (
            f"rollout.server_args: {named[0]} would stand in recipes and process lists; export the key in an environment "
            "variable and name that in rollout.api_key_env"
        )


def placement_problems(rollout: RolloutConfig, num_ranks: int) -> Iterator[str]:
    """Why the servers cannot share the devices of ``num_ranks`` trainer ranks (0: not known yet); nothing if apart."""
    if not server_placement(rollout).shares_devices:
        return
    num_servers, size = len(rollout.urls) or rollout.num_servers, rollout.tensor_parallel_size
    if num_ranks and size >= 1 and num_servers * size != num_ranks:
        counted = "the rollout.urls" if rollout.urls else "rollout.num_servers"
        remedy = f"list {num_ranks // size} of them" if rollout.urls else f"set rollout.num_servers={num_ranks // size}"
        if num_ranks % size:
            remedy = f"set a rollout.tensor_parallel_size that divides {num_ranks}"
        yield (
            f"rollout.placement=colocated: every trainer rank shares its device with one server worker, but {counted} "
            f"{num_servers} x rollout.tensor_parallel_size {size} = {num_servers * size} is not the {num_ranks} trainer "
            f"ranks; {remedy}"
        )
    if not rollout.urls and rollout.host not in LOOPBACK:
        yield (
            f"rollout.host={rollout.host}: colocated servers read pickles that anyone who reaches their port could send; "
            "leave it at 127.0.0.1"
        )
    if rollout.weight_sync is WeightSync.disk:
        yield (
            "rollout.weight_sync=disk: colocated servers get their weights from the trainer's memory; leave it at broadcast, "
            "or set rollout.placement=disaggregated"
        )
