"""What follows from a configuration and the model folder it names."""

import math
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any

from megatron_rl.config.schema import (
    BatchConfig,
    Config,
    Dtype,
    EvalSetConfig,
    KlPlace,
    Placement,
    RolloutConfig,
    RunConfig,
)
from megatron_rl.errors import ConfigError, ModelError
from megatron_rl.families.model_facts import has_vision, read_model_json

_ANSWER_S, _ANSWER_S_PER_TOKEN = 300.0, 0.25
"""A slow server: 4 tokens per second and sequence, its queue included."""
_FEW_TOKENS = 1_000_000
"""Of a step: the driver reads them in half a second, which is what a worker takes to start."""
_TOKENS_PER_WORKER = 16_000_000
"""Of a step: a worker reads them in 8 s, should they all come at once."""


def policy_model(config: Config) -> dict[str, Any]:
    """config.json of the policy's folder (``facts.read_model_json``); ConfigError when it is not a JSON object."""
    try:
        return read_model_json(config.policy.path)
    except ModelError as error:
        raise ConfigError(f"policy.path: {error}") from error


def model_vocab_size(config: Config) -> int:
    """Of the policy's folder; a vision-language model's is that of its language model."""
    return policy_model(config)["vocab_size"]


def model_has_vision(config: Config) -> bool | None:
    """Whether the policy's folder is that of a vision-language model; None where there is no config.json."""
    return has_vision(policy_model(config)) if (Path(config.policy.path) / "config.json").is_file() else None


def needs_critic(config: Config) -> bool:
    """Whether the run has a critic: its advantage reads values."""
    from megatron_rl.algorithms import register  # brings torch, which what only reads a configuration need not wait for

    return register.needs_critic(config.algorithm.advantage)


def critic_dtype(config: Config) -> Dtype:
    """Of the critic and the process reward model."""
    return config.critic.dtype or config.policy.dtype


def needs_greedy(config: Config) -> bool:
    """Whether each prompt gets one more response, the likeliest token each time: the baseline of its advantages."""
    from megatron_rl.algorithms import register  # as above

    return register.needs_greedy(config.algorithm.advantage)


def needs_reference(config: Config) -> bool:
    """Whether the run has a reference policy: KL acts somewhere."""
    return config.algorithm.kl.place is not KlPlace.none


def block_size(batch: BatchConfig) -> int:
    """Responses that go together so that groups of all sizes fill a step exactly: those of the largest group."""
    return max(batch.num_samples_per_prompt, *batch.num_samples_by_type.values(), 1)


def num_responses_per_step(config: Config) -> int:
    """Responses that a step trains on, all samples of all prompts."""
    return config.batch.num_prompts_per_step * config.batch.num_samples_per_prompt


@dataclass(frozen=True)
class EvalSet:
    """``EvalSetConfig`` with every setting filled in."""

    files: list[str]
    num_prompts: int
    num_samples: int
    temperature: float
    top_p: float
    top_k: int


def eval_sets(config: Config) -> dict[str, EvalSet]:
    """The sets of an evaluation by name; data.eval_files is the one whose name is empty."""
    named = {"": EvalSetConfig(files=config.data.eval_files)} if config.data.eval_files else config.eval.sets

    def setting(one: EvalSetConfig, name: str) -> Any:
        own = getattr(one, name)
        return getattr(config.eval, name) if own is None else own

    return {
        name: EvalSet(**{item.name: setting(one, item.name) for item in fields(EvalSet)}) for name, one in named.items()
    }


def responses_per_group(config: Config) -> int:
    """Responses to one prompt: those that train, and the greedy one where there is one."""
    return config.batch.num_samples_per_prompt + needs_greedy(config)


def effective_window_tokens(config: Config) -> int:
    """New tokens a response may grow by in one step."""
    return config.batch.window_tokens or config.batch.max_response_tokens


def max_new_tokens(config: Config) -> int:
    """New tokens that a response may at most grow by in one step: a window and the rest of its budget, where that is small."""
    window = effective_window_tokens(config)
    return min(window + max_remainder_tokens(window), config.batch.max_response_tokens)


def max_remainder_tokens(window_tokens: int) -> int:
    """The largest rest of a response's budget that goes along with the window before it.

    One of its own would cost a step, and passes over all that came before it, for next to nothing.
    """
    return window_tokens // 16


def uses_attached_servers(rollout: RolloutConfig) -> bool:
    """Whether others run the servers."""
    return bool(rollout.urls or rollout.urls_file)


def servers_are_deterministic(rollout: RolloutConfig, device: str) -> bool:
    """Whether the servers that a run starts on ``device``, cpu or cuda, heed the samples' seeds."""
    return device == "cpu" if rollout.deterministic is None else rollout.deterministic


def bucket_bytes(rollout: RolloutConfig, device: str) -> int:
    """Largest flat bucket of a publish from ``device``, cpu or cuda."""
    # A bucket costs one HTTP round and one turn of the servers' scheduler, tens of milliseconds whatever its size.
    return rollout.bucket_bytes or (2**30 if device == "cuda" else 2**26)


def saves_in_background(run: RunConfig, device: str) -> bool:
    """Whether checkpoints of a trainer on ``device``, cpu or cuda, are written while it trains on."""
    return device == "cuda" if run.async_save is None else run.async_save


def answer_timeout_s(request_timeout_s: float, num_new_tokens: int) -> float:
    """Longest silence of a server at a request that may generate so many tokens (``rollout.request_timeout_s``)."""
    return request_timeout_s or _ANSWER_S + _ANSWER_S_PER_TOKEN * num_new_tokens


def num_rollout_workers(config: Config, num_servers: int, num_cores: int) -> int:
    """Processes that make the calls to the servers (``rollout.num_workers``), on a machine of so many cores; 0: the driver."""
    if config.rollout.num_workers is not None:
        return config.rollout.num_workers
    num_tokens = num_responses_per_step(config) * effective_window_tokens(config)
    if num_tokens < _FEW_TOKENS:
        return 0
    return min(num_servers, math.ceil(num_tokens / _TOKENS_PER_WORKER), max(1, num_cores // 4))


def is_due(num_steps: int, every_steps: int) -> bool:
    """After so many steps, of what happens after every ``every_steps``; 0: never."""
    return every_steps > 0 and num_steps % every_steps == 0


class WeightMethod(Enum):
    """How weights reach the servers."""

    broadcast = "broadcast"
    """Over process groups of the trainer's source ranks and the servers' workers."""
    disk = "disk"
    """Through safetensors in a folder that trainer and servers see under the same path."""
    colocated = "colocated"
    """Through memory of the devices that trainer and servers share."""


@dataclass(frozen=True)
class ServerPlacement:
    """What rollout.placement and rollout.weight_sync come to; nothing else reads the two."""

    shares_devices: bool
    """The servers have the trainer ranks' devices: they sleep while it works, and start from its first GPU."""
    weight_method: WeightMethod


def server_placement(rollout: RolloutConfig) -> ServerPlacement:
    if rollout.placement is Placement.colocated:
        return ServerPlacement(shares_devices=True, weight_method=WeightMethod.colocated)
    return ServerPlacement(shares_devices=False, weight_method=WeightMethod(rollout.weight_sync.value))
