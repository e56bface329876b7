"""Values derived from a configuration and from the model folder that it names."""

import math
import os
from dataclasses import dataclass, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any

from megatron_rl.config.schema import (
    BatchConfig,
    Config,
    DataConfig,
    Dtype,
    EvalSetConfig,
    KlPlace,
    LoraSync,
    Placement,
    RolloutConfig,
    RunConfig,
)
from megatron_rl.errors import ConfigError, ModelError
from megatron_rl.families.model_facts import has_vision, read_model_json

_ANSWER_S, _ANSWER_S_PER_TOKEN = 300.0, 0.25
"""Time limit of a slow server: 4 tokens per second and sequence, time in its queue included."""
_FEW_TOKENS = 1_000_000
"""Tokens per step that the driver reads in half a second, about the time in which a worker starts."""
_TOKENS_PER_WORKER = 16_000_000
"""Tokens per step that one worker reads in 8 s, if all arrive at the same time."""
_PRETRAINING = "critic_pretrain_run"


def policy_model(config: Config) -> dict[str, Any]:
    """Read config.json of the policy's folder (``facts.read_model_json``). Raises ConfigError if the file is not a JSON object."""
    try:
        return read_model_json(config.policy.path)
    except ModelError as error:
        raise ConfigError(f"policy.path: {error}") from error


def model_vocab_size(config: Config) -> int:
    """Vocabulary size of the policy; for a vision-language model, the size of its language model's vocabulary."""
    return policy_model(config)["vocab_size"]


def model_has_vision(config: Config) -> bool | None:
    """True if the policy is a vision-language model; None if its folder has no config.json."""
    return has_vision(policy_model(config)) if (Path(config.policy.path) / "config.json").is_file() else None


def needs_critic(config: Config) -> bool:
    """True if the run has a critic, because its advantage reads values."""
    from megatron_rl.algorithms import register  # torch: not for commands that only read a configuration

    return register.needs_critic(config.algorithm.advantage)


def critic_dtype(config: Config) -> Dtype:
    """Dtype of the critic and the process reward model."""
    return config.critic.dtype or config.policy.dtype


def needs_greedy(config: Config) -> bool:
    """True if each prompt gets an additional greedy response, the baseline of its advantages."""
    from megatron_rl.algorithms import register  # as above

    return register.needs_greedy(config.algorithm.advantage)


def relates_tokens(config: Config) -> bool:
    """True if a token's advantage depends on other tokens or on an outcome."""
    from megatron_rl.algorithms import register  # as above

    return register.relates_tokens(config.algorithm.advantage)


def needs_reference(config: Config) -> bool:
    """True if the run has a reference policy, because a KL term is in the reward or in the loss."""
    return config.algorithm.kl.place is not KlPlace.none


def references(config: Config) -> dict[str, str]:
    """Map the names of the run's references to their folders or servers; ``reference.TYPE`` is that of a prompt type."""
    if not needs_reference(config):
        return {}
    own = {f"reference.{name}": path for name, path in config.reference.path_by_type.items()}
    return {"reference": config.reference.path or config.policy.path, **own}


def reference_folders(config: Config) -> dict[str, str]:
    """The part of ``references`` that the trainer loads."""
    found = references(config).items()
    return {name: path for name, path in found if not (is_served(path) or (name == "reference" and shares_base(config)))}


def shares_base(config: Config) -> bool:
    """True if the reference, which is the policy at its start, is the policy without its adapters, on the same weights."""
    lora = config.policy.lora
    return needs_reference(config) and lora.rank > 0 and not lora.path and config.reference.path in ("", config.policy.path)


def critic_shares_base(config: Config) -> bool:
    """True if the critic's adapters train on the policy's own frozen weights."""
    policy, critic = config.policy, config.critic
    is_same = not critic.path and critic.dtype in (None, policy.dtype) and critic.parallel in (None, config.parallel)
    return needs_critic(config) and policy.lora.rank > 0 and critic.lora.rank > 0 and is_same


def is_served(path: str) -> bool:
    """True if the reference at ``path`` is an SGLang server."""
    return path.startswith(("http://", "https://"))


def key_in(variable: str) -> str:
    """The API key in an environment variable; empty without a name or a value."""
    return os.environ.get(variable, "").strip() if variable else ""


def sends_adapters(config: Config) -> bool:
    """True if the servers have the policy's base model and its adapters, and a publish sends adapters alone."""
    return config.policy.lora.rank > 0 and config.policy.lora.sync is LoraSync.adapters


def block_size(batch: BatchConfig) -> int:
    """Number of responses in the largest group; groups of all sizes fill blocks of this many slots exactly."""
    return max(batch.num_samples_per_prompt, *batch.num_samples_by_type.values(), 1)


def num_responses_per_step(config: Config) -> int:
    """Number of responses per step, all samples of all prompts."""
    return config.batch.num_prompts_per_step * config.batch.num_samples_per_prompt


@dataclass(frozen=True)
class EvalSet:
    """``EvalSetConfig`` with every null replaced by the value of ``eval`` or ``data``."""

    files: list[str]
    num_prompts: int
    num_samples: int
    temperature: float
    top_p: float
    top_k: int
    prompt_field: str
    answer_field: str
    instruction: str

    def data_of(self, data: DataConfig) -> DataConfig:
        """``data`` with the set's own fields and instruction."""
        own = {name: getattr(self, name) for name in ("prompt_field", "answer_field", "instruction")}
        return replace(data, **own)


def eval_sets(config: Config) -> dict[str, EvalSet]:
    """Map names to the sets of an evaluation; data.eval_files is the set with the empty name."""
    named = {"": EvalSetConfig(files=config.data.eval_files)} if config.data.eval_files else config.eval.sets

    def setting(one: EvalSetConfig, name: str) -> Any:
        own = getattr(one, name)
        return own if own is not None else getattr(config.eval if hasattr(config.eval, name) else config.data, name)

    return {
        name: EvalSet(**{item.name: setting(one, item.name) for item in fields(EvalSet)}) for name, one in named.items()
    }


def responses_per_group(config: Config) -> int:
    """Number of responses per prompt: the trained samples, plus the greedy response if the advantage needs it."""
    return config.batch.num_samples_per_prompt + needs_greedy(config)


def effective_window_tokens(config: Config) -> int:
    """Size of a window in tokens."""
    return config.batch.window_tokens or config.batch.max_response_tokens


def max_new_tokens(config: Config) -> int:
    """Largest number of new tokens per response and step: a window, plus a small remainder of the budget."""
    window = effective_window_tokens(config)
    return min(window + max_remainder_tokens(window), config.batch.max_response_tokens)


def max_remainder_tokens(window_tokens: int) -> int:
    """Largest remainder of a response's budget that is generated with the window before it.

    A separate window would cost a step, and passes over the whole prefix, for very few tokens.
    """
    return window_tokens // 16


def uses_attached_servers(rollout: RolloutConfig) -> bool:
    """True if the servers are attached, not managed by this run."""
    return bool(rollout.urls or rollout.urls_file)


def servers_are_deterministic(rollout: RolloutConfig, device: str) -> bool:
    """True if managed servers on ``device``, cpu or cuda, honor per-sample seeds."""
    return device == "cpu" if rollout.deterministic is None else rollout.deterministic


def bucket_bytes(rollout: RolloutConfig, device: str) -> int:
    """Size of the largest flat bucket of a publish from ``device``, cpu or cuda."""
    # A bucket of any size costs an HTTP round trip and a pass of the servers' scheduler: tens of milliseconds.
    return rollout.bucket_bytes or (2**30 if device == "cuda" else 2**26)


def saves_in_background(run: RunConfig, device: str) -> bool:
    """True if training on ``device``, cpu or cuda, continues while a checkpoint is written."""
    return device == "cuda" if run.async_save is None else run.async_save


def answer_timeout_s(request_timeout_s: float, num_new_tokens: int) -> float:
    """Longest time without a reply to a request for ``num_new_tokens`` tokens (``rollout.request_timeout_s``)."""
    return request_timeout_s or _ANSWER_S + _ANSWER_S_PER_TOKEN * num_new_tokens


def num_rollout_workers(config: Config, num_servers: int, num_cores: int) -> int:
    """Number of rollout workers (``rollout.num_workers``) on a node with ``num_cores`` cores; 0: the driver makes the calls."""
    if config.rollout.num_workers is not None:
        return config.rollout.num_workers
    num_tokens = num_responses_per_step(config) * effective_window_tokens(config)
    if num_tokens < _FEW_TOKENS:
        return 0
    return min(num_servers, math.ceil(num_tokens / _TOKENS_PER_WORKER), max(1, num_cores // 4))


def pretraining_folder(output_dir: str) -> str:
    """Folder of a value pretraining's own run, so that `critic-pretrain` and `train` may share a recipe."""
    # The config.yaml in that folder names it already.
    return output_dir if Path(output_dir).name == _PRETRAINING else str(Path(output_dir) / _PRETRAINING)


def is_due(num_steps: int, every_steps: int) -> bool:
    """True if an action that repeats every ``every_steps`` steps (0: never) is due after ``num_steps`` steps."""
    return every_steps > 0 and num_steps % every_steps == 0


class WeightMethod(Enum):
    """Transport of weights to the servers."""

    broadcast = "broadcast"
    """Process groups of the trainer's source ranks and the server workers."""
    disk = "disk"
    """Safetensors in a folder that trainer and servers see under the same path."""
    colocated = "colocated"
    """Memory of the devices that trainer and servers share."""


def shares_devices(rollout: RolloutConfig) -> bool:
    """True if the servers run on the trainer ranks' devices, from the first one on, and sleep while the trainer works."""
    return rollout.placement is Placement.colocated


def weight_method(rollout: RolloutConfig) -> WeightMethod:
    return WeightMethod.colocated if shares_devices(rollout) else WeightMethod(rollout.weight_sync.value)
