"""The SGLang servers: placement, sampling, weight synchronization, time limits."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from megatron_rl.config.schema.bounds import (
    above,
    at_least,
    between,
    bounded,
    items_at_least,
    num_likeliest,
    positive_share,
)

_MAX_HOT_TOP_K = 4096
"""SGLang's limit for exact log-probs after top-k."""


class Placement(Enum):
    """Devices of the SGLang servers."""

    disaggregated = "disaggregated"
    """Separate devices: generation and training may overlap."""
    colocated = "colocated"
    """The trainer's devices: servers and trainer alternate, and weights are passed through device memory (CUDA IPC)."""


class WeightSync(Enum):
    """Transport of new weights to servers on separate devices."""

    broadcast = "broadcast"
    """A process group of the trainer and the server workers (NCCL or gloo)."""
    disk = "disk"
    """Safetensors under output_dir/weights, which the servers must see under the same path."""


class FireLoss(Enum):
    """Treatment of the hot token in the loss."""

    mask = "mask"
    """The hot token is masked."""
    keep = "keep"
    """The hot token trains like any other token; use it with a correction."""


@dataclass
class FireConfig:
    """FIRE: sample the first token of a response at a high temperature, the others as usual."""

    temperature: float = between(0.01, 100, default=0.0, zero="off")
    """Temperature of the hot token. 0: no hot token."""
    top_k: int = bounded(
        f"-1 (off) or 1 to {_MAX_HOT_TOP_K}", lambda value: value == -1 or 1 <= value <= _MAX_HOT_TOP_K, default=16
    )
    """Sample the hot token from this many most likely tokens. -1: from all tokens."""
    after: str = ""
    """The hot token is the first token after this text. Empty: the first token of the response."""
    banned_token_ids: list[int] = field(default_factory=list, metadata=items_at_least(0))
    """Tokens that are never sampled hot, in addition to the tokenizer's special tokens."""
    loss: FireLoss = FireLoss.mask
    """Treatment of the hot token in the loss."""


@dataclass
class ParityBoundsConfig:
    """Additional bounds of the parity check between trainer and servers (docs/agreement.md). null: by dtype, and by
    whether the model has experts."""

    mean: float | None = above(0, default=None)
    """Largest absolute value of the mean difference, in nats."""
    k3: float | None = above(0, default=None)
    """Largest mean of ratio - 1 - log ratio (k3 estimate of the KL divergence), in nats."""
    outliers: float | None = positive_share(default=None)
    """Largest fraction of tokens whose probabilities in trainer and server differ by more than a factor of two."""


@dataclass
class RolloutConfig:
    """The SGLang servers: placement, sampling, weight synchronization, time limits."""

    placement: Placement = Placement.disaggregated
    """Devices of the servers. colocated: server i uses the devices of the trainer ranks i * T to i * T + T - 1, with
    T = tensor_parallel_size."""
    urls: list[str] = field(default_factory=list)
    """Running SGLang servers to attach to, or one router (sglang-router) that lists the servers behind it; the list is read
    again during the run, as with urls_file. Empty: start num_servers on this node."""
    urls_file: str = ""
    """Alternative to urls: a file with one URL per line, a folder of files *.urls (megatron-rl serve --url-file), or an
    address that returns the URLs. The list is read again during the run: new servers get the current weights and join;
    removed servers return their requests with the tokens generated so far, and leave. See docs/servers.md."""
    num_servers: int = at_least(1, default=1)
    """Number of servers that the run starts."""
    tensor_parallel_size: int = at_least(1, default=1)
    """Devices (on a CPU: processes) that share one server's model."""
    host: str = bounded("a host name or an IP address", bool, default="127.0.0.1")
    """Address that managed servers listen on."""
    port: int = at_least(0, default=0)
    """Port of the first server; each further server uses the next port. 0: any free port."""
    temperature: float = between(0.01, 100, default=1.0)
    """Sampling temperature of training responses; the trainer computes its log-probs at the same temperature."""
    top_p: float = positive_share(default=1.0)
    """Sample from the smallest set of most likely tokens with this probability. 1: from all tokens, as training requires."""
    top_k: int = num_likeliest(default=-1)
    """Sample from this many most likely tokens. -1: from all tokens, as training requires."""
    deterministic: bool | None = None
    """Sample every response with its own seed, and compute it bit for bit the same for any other load, so that a resumed
    run samples the tokens that the interrupted run would have sampled. On GPUs this costs a third of the generation
    speed (SGLang's own figure). Without it a resumed run continues with the same weights, optimizer and unfinished
    responses, but samples other tokens. null: true for managed servers on a CPU, false on GPUs; attached servers keep
    the setting that they were started with."""
    stop_token_ids: list[int] = field(default_factory=list, metadata=items_at_least(0))
    """Tokens that end a response, in addition to the tokenizer's end-of-text token."""
    over_sampling: float = between(1, 100, default=1.0)
    """Start this many times the responses of a step; stop when enough are complete."""
    fire: FireConfig = field(default_factory=FireConfig)
    num_workers: int | None = at_least(0, default=None)
    """Rollout workers: processes that call the servers for the driver. Every further node of the trainer runs as many,
    for its part of the servers. 0: the driver makes the calls. null: one for every 16 million tokens that a step may
    generate, at most one per server and limited by the cores; none below a million tokens."""
    max_inflight_requests: int = at_least(1, default=512)
    """Requests in progress per server; further requests wait, and so do requests that exceed the free tokens of its KV cache."""
    request_timeout_s: float = at_least(0, default=0.0)
    """Longest wait for the reply to a request while its server makes no progress with any request; then the request fails
    and is resent. Progress of any length of window is waited for. 0: 300 s, plus 0.25 s per token that the request may
    generate if the server does not report its load (/v1/loads). hang_timeout_s detects a server that hangs."""
    max_retries: int = at_least(0, default=3)
    """Retries per request after a server failed or sent an invalid reply."""
    hang_timeout_s: float = at_least(0, default=120.0)
    """Time after which a server counts as lost if it has requests in progress, sends no reply and, when probed, generates
    no token, regardless of its /health. 0: never."""
    start_timeout_s: float = above(0, default=300.0)
    """Longest wait for the first reply of a managed server, in seconds."""
    max_restarts: int = at_least(0, default=3)
    """Restarts per server and run after the server exited."""
    weight_sync: WeightSync = WeightSync.broadcast
    """Transport of new weights to servers on separate devices. disk is for servers that cannot join a process group."""
    weight_sync_timeout_s: float = above(0, default=300.0)
    """Longest wait for one reply of a server or one bucket during a publish, in seconds."""
    bucket_bytes: int = bounded("0 or at least 1024", lambda value: value == 0 or value >= 1024, default=0)
    """Largest flat bucket of weights, in bytes; a source rank has two buckets in memory, a server worker one. 0: 1 GiB on
    GPUs, 64 MiB on a CPU."""
    max_logprob_difference: float | None = at_least(0, default=None)
    """Largest difference between Megatron's and SGLang's log-probs of one sampled token at which a run starts. 0 skips
    the check. null: 1e-4 in float32 on a CPU, otherwise no separate bound."""
    parity_bounds: ParityBoundsConfig = field(default_factory=ParityBoundsConfig)
    num_parity_prompts: int = at_least(1, default=16)
    """Number of prompts whose responses the parity check compares."""
    parity_every_steps: int = at_least(0, default=100)
    """Steps between two parity checks (health.parity is the action on a difference). 0: only before the first step."""
    api_key_env: str = ""
    """Name of the environment variable with the servers' API key. Empty: managed servers get a random key, attached
    servers are called without one."""
    server_args: dict[str, Any] = field(default_factory=dict)
    """Additional SGLang server options, as flag name without dashes: value (true for a flag without value)."""
