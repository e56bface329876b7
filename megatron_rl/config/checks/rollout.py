"""Addresses and sampling of the servers."""

from collections.abc import Iterator

from megatron_rl.config.schema import RolloutConfig

_MAX_HOT_TOP_K = 4096
"""SGLang's limit for exact log-probs after top-k."""


def problems(rollout: RolloutConfig) -> Iterator[str]:
    yield from (
        f"rollout.urls: {url!r} is not an address; expected http://host:port"
        for url in rollout.urls
        if not url.startswith(("http://", "https://"))
    )
    if not 0 <= rollout.port <= 65535 - rollout.num_servers:
        yield f"rollout.port: expected 0 (any free port) or a port up to {65535 - rollout.num_servers}, got {rollout.port}"
    if rollout.fire.top_k != -1 and not 1 <= rollout.fire.top_k <= _MAX_HOT_TOP_K:
        yield f"rollout.fire.top_k: expected -1 (off) or 1 to {_MAX_HOT_TOP_K}, got {rollout.fire.top_k}"
    if rollout.top_k != -1 and rollout.top_k < 1:
        yield f"rollout.top_k: expected -1 (off) or at least 1, got {rollout.top_k}"
