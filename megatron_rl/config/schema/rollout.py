"""The SGLang servers: where they run, how they sample, how weights reach them."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Placement(Enum):
    """Where the SGLang servers run."""

    disaggregated = "disaggregated"
    """On devices of their own."""
    colocated = "colocated"
    """On the trainer's devices: servers and trainer take turns, and weights go from memory to memory (CUDA IPC)."""


class WeightSync(Enum):
    broadcast = "broadcast"
    """Over a process group of the trainer and the servers' workers (NCCL or gloo)."""
    disk = "disk"
    """Through safetensors under output_dir/weights, which the servers must see under the same path."""


class FireLoss(Enum):
    mask = "mask"
    """The hot token trains nothing."""
    keep = "keep"
    """The hot token counts like any other; use it with a correction."""


@dataclass
class FireConfig:
    """FIRE: the first token of a response is sampled hot, the others as usual."""

    temperature: float = 0.0
    """Of the hot token; 0 means no hot token."""
    top_k: int = 16
    after: str = ""
    """The hot token is the first one after this text; empty: the first of the response."""
    banned_token_ids: list[int] = field(default_factory=list)
    """Never sampled hot, besides the tokenizer's special tokens."""
    loss: FireLoss = FireLoss.mask


@dataclass
class RolloutConfig:
    placement: Placement = Placement.disaggregated
    """colocated: server i takes the devices of the trainer ranks i * T to i * T + T - 1, with T = tensor_parallel_size."""
    urls: list[str] = field(default_factory=list)
    """Running SGLang servers to attach to; empty: start num_servers here."""
    num_servers: int = 1
    tensor_parallel_size: int = 1
    """Devices (on a CPU: processes) that share one server's model."""
    host: str = "127.0.0.1"
    port: int = 0
    """Port of the first server, the next one up for each further server; 0 means any free port."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    deterministic: bool = True
    """Seed every sample on its own, so that a resumed run samples the same tokens."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Besides the tokenizer's end-of-text token."""
    over_sampling: float = 1.0
    """Start this many times the responses of a step, stop when enough are complete."""
    fire: FireConfig = field(default_factory=FireConfig)
    max_inflight_requests: int = 512
    """Requests under way at one server; further ones wait."""
    request_timeout_s: float = 300.0
    max_retries: int = 3
    """Times one request is sent again after a server failed."""
    start_timeout_s: float = 300.0
    max_restarts: int = 3
    """Times a server that died is started again in one run."""
    weight_sync: WeightSync = WeightSync.broadcast
    weight_sync_timeout_s: float = 300.0
    """Longest wait for one answer of a server or one bucket."""
    bucket_bytes: int = 67108864
    """Weights travel in flat buckets of at most this size."""
    max_logprob_difference: float = 1.0e-4
    """Largest difference between Megatron's and SGLang's log-probs that lets a run start; 0 skips the check."""
    num_parity_prompts: int = 16
    server_args: dict[str, Any] = field(default_factory=dict)
    """More SGLang server options, as flag name without dashes: value (true for a bare flag)."""
