"""Addresses of the servers."""

from collections.abc import Iterator

from megatron_rl.config.schema import RolloutConfig


def problems(rollout: RolloutConfig) -> Iterator[str]:
    yield from (
        f"rollout.urls: {url!r} is not an address; expected http://host:port"
        for url in rollout.urls
        if not url.startswith(("http://", "https://"))
    )
    if rollout.port > 65535 - rollout.num_servers:
        yield f"rollout.port: expected 0 (any free port) or a port up to {65535 - rollout.num_servers}, got {rollout.port}"
