"""The models of a run, policy, critic and reference, with their optimizers and their layouts over the ranks."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from megatron_rl.config.schema.bounds import (
    above,
    at_least,
    below_one,
    between,
    folder_or_server,
    items_at_least,
    positive_share,
)


class Dtype(Enum):
    """Dtype of parameters and activations."""

    float32 = "float32"
    """For CPUs, and for small models whose log-probs must equal SGLang's to the last digits."""
    bfloat16 = "bfloat16"
    """For GPUs; the optimizer keeps a float32 copy of the parameters."""


class Init(Enum):
    """Source of the initial weights."""

    checkpoint = "checkpoint"
    """Load safetensors from the model folder."""
    random = "random"
    """Random weights; the folder needs only config.json and a tokenizer."""


class Recompute(Enum):
    """Activations that the backward pass recomputes to save memory."""

    none = "none"
    """No recomputation: fastest, most memory."""
    selective = "selective"
    """Dense MLPs, activations of grouped experts, norms, up-projections of latent attention: saves much memory for some time."""
    full = "full"
    """Every layer: least memory, about a third more time."""


class Offload(Enum):
    """Offloading of a model to host memory, pinned on GPUs, while another model or the server on its device works."""

    auto = "auto"
    """Offload on GPUs. Results are the same bit for bit; each direction transfers weights and optimizer state over PCIe."""
    always = "always"
    """Offload on GPUs and on a CPU."""
    never = "never"
    """Keep weights and optimizer state on the device. Gradients exist only during an update in any case."""


class Mtp(Enum):
    """Treatment of a checkpoint's multi-token-prediction layers, which are never trained."""

    drop = "drop"
    """The layers are not read, and saved folders lack them."""
    keep = "keep"
    """The layers are copied unchanged from policy.path into every model folder that is saved."""


class Fp8(Enum):
    """Matrix products in 8-bit floating point, by Transformer Engine on GPUs."""

    none = "none"
    """Matrix products in policy.dtype."""
    hybrid = "hybrid"
    """e4m3 forward, e5m2 for gradients."""
    e4m3 = "e4m3"
    """e4m3 in both directions."""


class GroupedGemm(Enum):
    """Computation of all experts of a rank in one kernel."""

    auto = "auto"
    """One kernel if Transformer Engine is installed."""
    always = "always"
    """One kernel; refuse to start without Transformer Engine."""
    never = "never"
    """One kernel per expert."""


class RouterDtype(Enum):
    """Precision of the router's logits."""

    fp32 = "fp32"
    """The usual choice."""
    fp64 = "fp64"
    """Fewer near ties that resolve differently from run to run."""
    model = "model"
    """The model's own dtype. In bfloat16, near ties resolve differently in trainer and servers."""


class LoadBalancing(Enum):
    """Method that balances the load of an MoE model's experts during training."""

    none = "none"
    """The objective alone trains the router; an expert bias stays unchanged."""
    aux_loss = "aux_loss"
    """A loss over each sequence's loads (DeepSeek-V3's sequence-wise balance loss)."""
    bias = "bias"
    """The expert bias changes by bias_update_rate after each update; for families that have an expert bias."""


class RoutingReplay(Enum):
    """Source of the expert choices that the policy's update follows (MoE models)."""

    none = "none"
    """No replay: every pass chooses its own experts."""
    R2 = "R2"
    """The trainer's old-log-prob pass; enough with a few updates per step."""
    R3 = "R3"
    """The server that sampled the tokens, in the old-log-prob pass too; for servers that choose differently from the
    trainer, as in bfloat16 (arXiv 2510.11370)."""


class Dispatcher(Enum):
    """Method that sends tokens to the ranks of their experts."""

    alltoall = "alltoall"
    """Each token is sent to the ranks of its experts."""
    allgather = "allgather"
    """Every rank gets all tokens: fewer, larger messages, for few ranks and many experts per token."""
    flex = "flex"
    """DeepEP, on GPUs."""


@dataclass
class MoeConfig:
    """Mixture-of-experts models; for a dense model all keys stay at their defaults."""

    router_dtype: RouterDtype = RouterDtype.fp32
    """Precision of the router's logits."""
    load_balancing: LoadBalancing = LoadBalancing.none
    """Method that balances the load of the experts; none is usual in RL, where the balance comes from pre-training."""
    aux_loss_coef: float = at_least(0, default=0.0)
    """Weight of the balance loss; needs load_balancing=aux_loss."""
    bias_update_rate: float = at_least(0, default=0.0)
    """Step size of the expert bias (0.001 is in use); needs load_balancing=bias. 0: the bias is frozen."""
    routing_replay: RoutingReplay = RoutingReplay.none
    """Source of the expert choices that the policy's update follows."""
    dispatcher: Dispatcher = Dispatcher.alltoall
    """Method that sends tokens to the ranks of their experts."""
    grouped_gemm: GroupedGemm = GroupedGemm.auto
    """Computation of all experts of a rank in one kernel."""


class DecayStyle(Enum):
    """Decay of the learning rate from lr to min_lr."""

    constant = "constant"
    """No decay: lr after the warm-up."""
    linear = "linear"
    """A straight line over decay_steps."""
    cosine = "cosine"
    """Half a cosine over decay_steps."""


class Moments(Enum):
    """Precision of Adam's two moments, in memory and in checkpoints."""

    float32 = "float32"
    """12 bytes per parameter, main weights included."""
    bfloat16 = "bfloat16"
    """8 bytes per parameter, for bfloat16 models on GPUs with Transformer Engine. Updates differ by the rounding, a 256th
    of a moment."""


@dataclass
class OptimizerConfig:
    """AdamW (Megatron's distributed optimizer) and its learning rate."""

    lr: float = positive_share(default=1.0e-6)
    """Learning rate after the warm-up, the largest of the run."""
    min_lr: float = at_least(0, default=0.0)
    """Learning rate at the end of the decay; at most lr."""
    warmup_steps: int = at_least(0, default=0)
    """Updates of linear warm-up."""
    decay_style: DecayStyle = DecayStyle.constant
    """Decay of the learning rate from lr to min_lr."""
    decay_steps: int = at_least(0, default=0)
    """Updates until min_lr is reached; required by linear and cosine."""
    weight_decay: float = between(0, 100, default=0.1)
    """Decoupled weight decay, multiplied by the learning rate."""
    beta2: float = below_one(default=0.95)
    """Decay of the mean of squared gradients, per update."""
    eps: float = positive_share(default=1.0e-8)
    """Term added to the root of the mean squared gradient."""
    max_grad_norm: float = above(0, default=1.0)
    """Gradients with a larger norm over the whole model are scaled down to this norm."""
    moments: Moments = Moments.float32
    """Precision of Adam's two moments."""


@dataclass
class ParallelConfig:
    """The layout of a model over the trainer ranks; the remaining factor replicates the model (data parallelism)."""

    num_ranks: int = at_least(0, default=0)
    """Trainer ranks (processes). 0: all that the launcher started; without a launcher, more than 1 starts torchrun."""
    tensor_parallel_size: int = at_least(1, default=1)
    """Ranks that share each matrix of a layer. They exchange the most data, so keep them on one node."""
    pipeline_parallel_size: int = at_least(1, default=1)
    """Consecutive stages that the layers are split into, for models that do not fit one node."""
    sequence_parallel: bool = False
    """Shard activations outside attention and MLP over the tensor-parallel group."""
    context_parallel_size: int = at_least(1, default=1)
    """Ranks that share the tokens of each sequence (zigzag: every rank has an early and a late span)."""
    expert_parallel_size: int = at_least(1, default=1)
    """Ranks that share the experts of a layer, taken from the data-, context- and tensor-parallel ranks."""
    expert_tensor_parallel_size: int = at_least(0, default=0)
    """Ranks that share one expert. 0: tensor_parallel_size."""
    virtual_pipeline_size: int = at_least(1, default=1)
    """Model chunks per pipeline rank; more than 1 interleaves them (smaller bubbles, more messages)."""
    pipeline_layers: list[int] = field(default_factory=list, metadata=items_at_least(1))
    """Layers of each stage in the model's order, pipeline x virtual values. Empty: the same number everywhere."""
    collective_timeout_s: float = above(0, default=600.0)
    """Time limit of a collective in seconds; after it the collective fails and names the rank that did not join."""


@dataclass
class VisionConfig:
    """Trainable parts of a vision-language model's encoder; frozen parts need no memory for gradients."""

    train_encoder: bool = True
    """Train the vision tower: from patches to features."""
    train_adapter: bool = True
    """Train the mergers, which map the encoder's features to the language model's width."""


class LoraSync(Enum):
    """Content of a publish of a policy with adapters."""

    merged = "merged"
    """All weights with the adapters merged, for every family. In bfloat16 a merged weight is rounded, so small changes are lost."""
    adapters = "adapters"
    """The model once, then adapters alone; for dense models whose adapters SGLang can serve."""


@dataclass
class LoraConfig:
    """Low-rank adapters (LoRA, arXiv 2106.09685): adapters train, and the model's own weights are frozen; docs/lora.md."""

    rank: int = at_least(0, default=0)
    """Rank of the adapters. 0: no adapters, all weights train."""
    alpha: float = above(0, default=32.0)
    """Numerator of the adapters' factor alpha / rank."""
    rslora: bool = False
    """Factor alpha / sqrt(rank) instead of alpha / rank (arXiv 2312.03732)."""
    dropout: float = below_one(default=0.0)
    """Share of the adapters' inputs that an update sets to 0."""
    targets: list[str] = field(default_factory=lambda: ["all-linear"])
    """Modules with an adapter: patterns such as q_proj or "*.layers.1?.mlp.*" for names in the Hugging Face files or their ends.
    all-linear: attention, dense MLPs and shared experts."""
    sync: LoraSync = LoraSync.merged
    """Content of a publish; a critic is never published."""
    path: str = ""
    """A folder of peft with the adapters to start from; rank, factor and targets must be its own. Empty: B is 0, so training
    starts from the model."""


@dataclass
class PolicyConfig:
    """The model that is trained."""

    path: str = ""
    """A Hugging Face model folder (config.json, tokenizer and, for init=checkpoint, safetensors), or the name of a model on
    the Hub that was downloaded with `hf download`."""
    init: Init = Init.checkpoint
    """Source of the initial weights."""
    dtype: Dtype = Dtype.float32
    """Dtype of parameters and activations, in the trainer and in the servers of the run."""
    recompute: Recompute = Recompute.none
    """Activations that the backward pass recomputes to save memory."""
    offload: Offload = Offload.auto
    """Offloading of the policy and the reference to host memory while other models use their devices (docs/memory.md)."""
    fp32_head: bool = False
    """Compute the head's products and their gradients from float32 copies of hidden states and head. Logits are float32
    in any case, in the trainer and in managed servers."""
    fp8: Fp8 = Fp8.none
    """Matrix products in 8-bit floating point, by Transformer Engine on GPUs; needs dtype=bfloat16."""
    mtp: Mtp = Mtp.drop
    """Treatment of a checkpoint's multi-token-prediction layers, which are never trained."""
    moe: MoeConfig = field(default_factory=MoeConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    vision: VisionConfig = field(default_factory=VisionConfig)
    megatron: dict[str, Any] = field(default_factory=dict)
    """Fields of Megatron's TransformerConfig under Megatron's names, e.g. {moe_shared_expert_overlap: true}; see docs/models.md."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


@dataclass
class CriticConfig:
    """The model that predicts values; a run has a critic only if its advantage reads values (egae)."""

    path: str = ""
    """A critic, reward model or process reward model with a value head. Empty: the policy's weights with a random value head."""
    dtype: Dtype | None = None
    """Dtype of parameters and activations. null: the policy's dtype."""
    recompute: Recompute = Recompute.none
    """Activations that the backward pass recomputes to save memory."""
    offload: Offload = Offload.auto
    """Offloading of the critic and the process reward model to host memory while other models use their devices."""
    warmup_steps: int = at_least(0, default=0)
    """Number of first steps in which only the critic trains."""
    num_epochs: int = at_least(1, default=1)
    """Passes over the finished responses per step (K critic updates per policy update)."""
    freeze: list[str] = field(default_factory=list)
    """Tensors that keep their values while the critic trains, also in critic-pretrain: patterns such as "*.self_attn.*" for
    names in its Hugging Face files, where * stands for any text. Empty: everything trains."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    parallel: ParallelConfig | None = None
    """A separate layout over the same ranks for the critic and the process reward model. null: the policy's layout."""
    vision: VisionConfig = field(default_factory=VisionConfig)
    megatron: dict[str, Any] = field(default_factory=dict)
    """Same as policy.megatron, for the critic and the process reward model; the policy's fields are not inherited."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=2.0e-6))


@dataclass
class ReferenceConfig:
    """The frozen policy that the KL divergence is measured from: the start of training, or a teacher."""

    path: str = folder_or_server(default="")
    """A Hugging Face model folder, of any size, with the policy's tokenizer; or http://host:port of an SGLang server that serves
    such a model. Empty: policy.path."""
    path_by_type: dict[str, str] = field(default_factory=dict)
    """Folder or server for prompts of a type (data.type_field), such as a teacher of its own; other types use ``path``."""
    api_key_env: str = ""
    """Name of the environment variable with the API key of these servers. Empty: they are called without one."""
