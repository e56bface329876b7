"""The SGLang servers: where they run, how they sample, how weights reach them."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from megatron_rl.config.schema.bounds import above, at_least, bounded, items_at_least, num_likeliest, positive_share

_MAX_HOT_TOP_K = 4096
"""SGLang's limit for exact log-probs after top-k."""


class Placement(Enum):
    """Where the SGLang servers run."""

    disaggregated = "disaggregated"
    """On devices of their own: generation and training may overlap."""
    colocated = "colocated"
    """On the trainer's devices: servers and trainer take turns, and weights go from memory to memory (CUDA IPC)."""


class WeightSync(Enum):
    """How new weights reach servers on devices of their own."""

    broadcast = "broadcast"
    """Over a process group of the trainer and the servers' workers (NCCL or gloo)."""
    disk = "disk"
    """Through safetensors under output_dir/weights, which the servers must see under the same path."""


class FireLoss(Enum):
    """Whether the hot token is trained."""

    mask = "mask"
    """The hot token trains nothing."""
    keep = "keep"
    """The hot token counts like any other; use it with a correction."""


@dataclass
class FireConfig:
    """FIRE: the first token of a response is sampled hot, the others as usual."""

    temperature: float = at_least(0, default=0.0)
    """Of the hot token; 0 means no hot token."""
    top_k: int = bounded(
        f"-1 (off) or 1 to {_MAX_HOT_TOP_K}", lambda value: value == -1 or 1 <= value <= _MAX_HOT_TOP_K, default=16
    )
    """The hot token is one of this many likeliest ones; -1 means of all."""
    after: str = ""
    """The hot token is the first one after this text; empty: the first of the response."""
    banned_token_ids: list[int] = field(default_factory=list, metadata=items_at_least(0))
    """Never sampled hot, in addition to the tokenizer's special tokens."""
    loss: FireLoss = FireLoss.mask
    """Whether the hot token is trained."""


@dataclass
class ParityBoundsConfig:
    """Further bounds of the comparison of both engines' log-probs (docs/agreement.md); null: by dtype and by whether the
    model has experts."""

    mean: float | None = above(0, default=None)
    """Mean difference, as a size, in nats."""
    k3: float | None = above(0, default=None)
    """Mean of ratio - 1 - log ratio (k3 estimate of the KL divergence), in nats."""
    outliers: float | None = positive_share(default=None)
    """Share of tokens that one engine calls more than twice as likely as the other."""


@dataclass
class RolloutConfig:
    """The SGLang servers: where they run, how they sample, how weights reach them."""

    placement: Placement = Placement.disaggregated
    """Where the servers run. colocated: server i takes the devices of the trainer ranks i * T to i * T + T - 1, with
    T = tensor_parallel_size."""
    urls: list[str] = field(default_factory=list)
    """Running SGLang servers to attach to, or one router (sglang-router) that is asked for the servers behind it, again and again as
    urls_file is; empty: start num_servers here."""
    urls_file: str = ""
    """In the place of urls: a file with a URL per line, a folder of files *.urls (megatron-rl serve --url-file), or an address
    that says the URLs. It is read again while the run goes on: servers that are new in it get the present weights and join,
    those that it no longer names give their requests back with the tokens they have, and leave. docs/servers.md"""
    num_servers: int = at_least(1, default=1)
    """Servers that the run starts."""
    tensor_parallel_size: int = at_least(1, default=1)
    """Devices (on a CPU: processes) that share one server's model."""
    host: str = "127.0.0.1"
    """Address that the started servers listen on."""
    port: int = at_least(0, default=0)
    """Port of the first server, the next one up for each further server; 0 means any free port."""
    temperature: float = above(0, default=1.0)
    """Sampling temperature of training responses; the trainer's log-probs are taken at the same one."""
    top_p: float = positive_share(default=1.0)
    """Sample among the likeliest tokens that together have this probability; 1 means among all, as training needs it."""
    top_k: int = num_likeliest(default=-1)
    """Sample among this many likeliest tokens; -1 means among all, as training needs it."""
    deterministic: bool | None = None
    """Servers sample every response by a seed of its own and compute it bit for bit the same whatever else they serve, so that
    a resumed run samples the tokens that it would have sampled. On GPUs this costs a third of the speed of generation
    (SGLang's own figure). null: on where the run's servers are on a CPU, off on GPUs; attached ones are what they were started as.
    Without it a resumed run goes on from the same weights, optimizer and unfinished responses, and samples anew from there."""
    stop_token_ids: list[int] = field(default_factory=list, metadata=items_at_least(0))
    """Tokens that end a response, in addition to the tokenizer's end-of-text token."""
    over_sampling: float = at_least(1, default=1.0)
    """Start this many times the responses of a step, stop when enough are complete."""
    fire: FireConfig = field(default_factory=FireConfig)
    num_workers: int | None = at_least(0, default=None)
    """Processes beside the driver that own the connections to the servers and read their answers; 0: the driver does it. null:
    one for about every 16 million tokens that a step may generate, at most one per server and as the cores allow; none below a
    million. As many run on each further node of the trainer, which takes its share of the servers."""
    max_inflight_requests: int = at_least(1, default=512)
    """Requests in progress at one server; further ones wait, also those that its KV cache would not hold besides."""
    request_timeout_s: float = at_least(0, default=0.0)
    """Longest wait for the answer to one request while its server makes no progress with any; then it counts as failed and is sent
    again. However long a window takes, it is waited for while tokens come. 0: 300 s; for a server that does not say what it
    holds (/v1/loads), 0.25 s more for each token that the request may generate. (An engine that hangs is noticed by hang_timeout_s.)"""
    max_retries: int = at_least(0, default=3)
    """Times one request is sent again after a server failed or gave a bad answer."""
    hang_timeout_s: float = at_least(0, default=120.0)
    """A server with requests in progress that gives no answer and, when asked, no token for so long is lost, whatever its
    /health says; 0: never."""
    start_timeout_s: float = above(0, default=300.0)
    """Longest wait for a server that was started to answer."""
    max_restarts: int = at_least(0, default=3)
    """Times a server that died is started again in one run."""
    weight_sync: WeightSync = WeightSync.broadcast
    """How new weights reach servers on devices of their own. disk is for servers that no process group reaches."""
    weight_sync_timeout_s: float = above(0, default=300.0)
    """Longest wait for one answer of a server or one bucket."""
    bucket_bytes: int = at_least(0, default=0)
    """Weights travel in flat buckets of at most this size; a source rank holds two, a server worker one. 0: 1 GiB on GPUs, 64
    MiB on a CPU."""
    max_logprob_difference: float | None = at_least(0, default=None)
    """Largest difference between Megatron's and SGLang's log-probs of one sampled token that lets a run start; null: 1e-4 in
    float32 on a CPU, else no bound of its own; 0 skips the check."""
    parity_bounds: ParityBoundsConfig = field(default_factory=ParityBoundsConfig)
    num_parity_prompts: int = at_least(1, default=16)
    """Prompts whose responses are compared in that check."""
    parity_every_steps: int = at_least(0, default=100)
    """Compare again after every so many steps (health.parity says what a difference does); 0 means only before the first."""
    api_key_env: str = ""
    """Name of the environment variable that holds the servers' API key; empty: servers that the run starts get a random
    one, attached ones are asked without."""
    server_args: dict[str, Any] = field(default_factory=dict)
    """More SGLang server options, as flag name without dashes: value (true for a bare flag)."""
