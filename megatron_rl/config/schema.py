"""The configuration schema: one dataclass a section, a docstring under each field, units in the names.

A recipe is a YAML file over this schema; ``key=value`` on the command line overrides it (``load.py``). What one
field cannot say alone is checked across fields in ``checks.py``. No value is ever rewritten silently.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Mode(Enum):
    sync = "sync"
    """Full responses; nothing overlaps (the PPO baseline)."""
    tppo = "tppo"
    """One window a step; the critic update runs while the next window is generated."""


class Dtype(Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"


class Init(Enum):
    checkpoint = "checkpoint"
    """Load safetensors from the model folder."""
    random = "random"
    """Fresh weights; the folder needs config.json and a tokenizer only."""


class Recompute(Enum):
    none = "none"
    selective = "selective"
    full = "full"


class DecayStyle(Enum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class LambdaKind(Enum):
    constant = "constant"
    length_adaptive = "length_adaptive"


class Bootstrap(Enum):
    copy_last = "copy_last"
    """V(s_l) = V(s_{l-1}) at a window edge: the paper's assumption."""
    critic = "critic"
    """V(s_l) read from the critic."""


class WeightSync(Enum):
    broadcast = "broadcast"
    """Over a process group of the trainer and the servers' workers (NCCL or gloo)."""
    disk = "disk"
    """Through safetensors under output_dir/weights, which the servers must see under the same path."""


class Normalization(Enum):
    none = "none"
    scale = "scale"
    """Divide by the standard deviation; zero stays zero."""
    whiten = "whiten"
    """Subtract the mean, divide by the standard deviation."""


@dataclass
class RunConfig:
    output_dir: str = "outputs/run"
    """Everything the run writes lies under this folder."""
    num_steps: int = 100
    """Steps of the training loop in all (a resumed run continues up to this number)."""
    seed: int = 1
    resume: bool = False
    """Continue from the newest checkpoint under output_dir."""
    overwrite: bool = False
    """Allow a run to start over in a folder that already holds one."""
    save_every_steps: int = 0
    """Write a checkpoint every so many steps; 0 means only at the end."""


@dataclass
class OptimizerConfig:
    lr: float = 1.0e-6
    min_lr: float = 0.0
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up."""
    decay_style: DecayStyle = DecayStyle.constant
    decay_steps: int = 0
    """Optimizer steps until min_lr is reached; required by linear and cosine."""
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1.0e-8
    max_grad_norm: float = 1.0


@dataclass
class PolicyConfig:
    path: str = ""
    """A Hugging Face model folder: config.json, tokenizer and, for init=checkpoint, safetensors."""
    init: Init = Init.checkpoint
    dtype: Dtype = Dtype.float32
    recompute: Recompute = Recompute.none
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


@dataclass
class CriticConfig:
    path: str = ""
    """A critic written by critic-pretrain; empty: the policy's weights with a fresh value head."""
    dtype: Dtype = Dtype.float32
    recompute: Recompute = Recompute.none
    warmup_steps: int = 0
    """First steps in which only the critic learns."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=2.0e-6))


@dataclass
class ParallelConfig:
    num_ranks: int = 0
    """Trainer ranks (processes). 0: as many as the launcher started; without a launcher, more than 1 starts torchrun."""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    sequence_parallel: bool = False
    """Shard activations outside attention and MLP over the tensor-parallel group."""
    collective_timeout_s: float = 600.0
    """A collective that waits longer fails and says so."""


@dataclass
class BatchConfig:
    num_prompts_per_step: int = 512
    num_samples_per_prompt: int = 16
    max_prompt_tokens: int = 2048
    max_response_tokens: int = 24576
    """Budget of a response over all its windows (L_max)."""
    window_tokens: int = 0
    """New tokens a response may grow by in one step (W); 0 means max_response_tokens."""
    policy_minibatch_size: int = 512
    """Responses in one policy optimizer step, over all ranks."""
    critic_minibatch_size: int = 512
    """Finished responses in one critic optimizer step, over all ranks."""
    max_tokens_per_microbatch: int = 32768
    """Tokens packed into one forward pass of one rank; a longer single sequence gets a micro-batch of its own."""


@dataclass
class AlgorithmConfig:
    gamma: float = 1.0
    lambda_policy: LambdaKind = LambdaKind.length_adaptive
    lambda_value: float = 0.95
    """The constant lambda, or the floor of the length-adaptive one."""
    lambda_alpha: float = 0.05
    """Length-adaptive lambda is 1 - 1 / (lambda_alpha * length)."""
    bootstrap: Bootstrap = Bootstrap.copy_last
    ignore_boundary_tokens: int = 8
    """Last tokens of an unfinished window that the policy loss leaves out."""
    normalization: Normalization = Normalization.scale
    advantage_clamp: float = 10.0
    """Advantages are clamped to +-this after normalisation; 0 means no clamp."""
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 10.0
    """Lower bound c * A for negative advantages; 0 means none."""
    value_clip_low: float = 0.5
    value_clip_high: float = 0.6
    """Value clip range around the old value; both 0 mean none."""
    entropy_coef: float = 0.0
    positive_lm_coef: float = 0.0
    """Weight of the language-model loss on finished responses with the full reward (VAPO)."""
    positive_lm_threshold: float = 1.0
    """A reward of at least this counts as positive."""


@dataclass
class ScheduleConfig:
    mode: Mode = Mode.tppo


@dataclass
class DataConfig:
    train_files: list[str] = field(default_factory=list)
    """JSONL files of prompts."""
    eval_files: list[str] = field(default_factory=list)
    id_field: str = "id"
    """Optional in the file; the place file:line stands in for it."""
    prompt_field: str = "prompt"
    answer_field: str = "answer"
    response_field: str = "response"
    """The reference solution that sft trains on."""
    shuffle: bool = True
    use_chat_template: bool = False
    """Wrap the prompt as a user message in the tokenizer's chat template."""


@dataclass
class RewardConfig:
    name: str = "math"
    """An entry of the reward registry."""
    num_workers: int = 2
    timeout_s: float = 5.0
    """A response that takes longer to score is killed, masked and counted."""
    max_error_rate: float = 0.1
    """More unscored responses than this share of a step stop the run."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the reward."""


@dataclass
class RolloutConfig:
    urls: list[str] = field(default_factory=list)
    """Running SGLang servers to attach to; empty: start num_servers here."""
    num_servers: int = 1
    tensor_parallel_size: int = 1
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


@dataclass
class EvalConfig:
    every_steps: int = 0
    """Evaluate on eval_files every so many steps; 0 means only before and after."""
    num_prompts: int = 0
    """0 means all of them."""
    temperature: float = 0.0
    stop_at_accuracy: float = 0.0
    """End the run once the accuracy reaches this; 0 means never."""


@dataclass
class TrackingConfig:
    mlflow: bool = True
    mlflow_uri: str = ""
    """Empty: a SQLite store in the output folder."""
    experiment: str = "megatron_rl"
    report_every_steps: int = 20
    """Rewrite report.html every so many steps (and at the end)."""


@dataclass
class SftConfig:
    """`megatron-rl sft`: supervised warm start on data.response_field."""

    output_path: str = ""
    """Folder that receives the Hugging Face checkpoint."""
    train_files: list[str] = field(default_factory=list)
    """Files with a reference response in every row; empty: data.train_files."""
    num_steps: int = 150
    stop_at_loss: float = 0.0
    """End early once the mean loss of the last 10 steps is at most this; 0 means never."""
    batch_size: int = 256
    """Sequences in one optimizer step, over all ranks."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1.0e-3))


@dataclass
class CriticPretrainConfig:
    """`megatron-rl critic-pretrain`: regress the critic onto returns of the frozen policy."""

    output_path: str = ""
    """Folder that receives the critic."""
    num_steps: int = 20
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1.0e-3))


@dataclass
class Config:
    preset: str = ""
    """Name of a preset whose values lie under this file's."""
    run: RunConfig = field(default_factory=RunConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    critic_pretrain: CriticPretrainConfig = field(default_factory=CriticPretrainConfig)
