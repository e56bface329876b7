"""The models of a run: policy, critic and reference."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from megatron_rl.config.schema.bounds import at_least
from megatron_rl.config.schema.optimizers import OptimizerConfig
from megatron_rl.config.schema.parallel import ParallelConfig


class Dtype(Enum):
    """Of parameters and activations."""

    float32 = "float32"
    """For CPUs and for small models that must agree with SGLang to the last digits."""
    bfloat16 = "bfloat16"
    """For GPUs; the optimizer keeps a float32 copy of the parameters."""


class Init(Enum):
    """Where the first weights come from."""

    checkpoint = "checkpoint"
    """Load safetensors from the model folder."""
    random = "random"
    """Fresh weights; the folder needs config.json and a tokenizer only."""


class Recompute(Enum):
    """What the backward pass computes again, to keep less in memory."""

    none = "none"
    """Nothing: fastest, most memory."""
    selective = "selective"
    """Dense MLPs, activations of grouped experts, norms, latent attention's projections up: much memory for some time."""
    full = "full"
    """Every layer: least memory, about a third more time."""


class Offload(Enum):
    """Whether a model waits in host memory, pinned on GPUs, while another one, or the server on its device, works."""

    auto = "auto"
    """On GPUs; results are the same bit for bit, and each way costs what weights and optimizer state take over PCIe."""
    always = "always"
    """On a CPU, too."""
    never = "never"
    """Its weights and optimizer state stay on the device; gradients exist during an update only in any case."""


class Mtp(Enum):
    """What becomes of the multi-token-prediction layers of a checkpoint, which are never trained."""

    drop = "drop"
    """They are not read, and saved folders lack them."""
    keep = "keep"
    """Carried unchanged from policy.path into every model folder that is saved."""


class Fp8(Enum):
    """Matrix products in 8-bit floating point, by Transformer Engine on GPUs."""

    none = "none"
    """Matrix products in policy.dtype."""
    hybrid = "hybrid"
    """e4m3 forward, e5m2 for gradients."""
    e4m3 = "e4m3"
    """In both directions."""


class GroupedGemm(Enum):
    """Whether all experts of a rank run in one kernel."""

    auto = "auto"
    """Where Transformer Engine is present."""
    always = "always"
    """Refuse to start without it."""
    never = "never"
    """One kernel per expert."""


class RouterDtype(Enum):
    """Precision of the router's logits."""

    fp32 = "fp32"
    """The usual choice."""
    fp64 = "fp64"
    """Fewer near ties that fall differently from run to run."""
    model = "model"
    """The model's own dtype: with bfloat16, near ties fall differently in trainer and engine."""


class LoadBalancing(Enum):
    """What keeps the experts of an MoE model evenly loaded while it trains."""

    none = "none"
    """The router is trained by the objective alone; an expert bias stays as it is."""
    aux_loss = "aux_loss"
    """A loss over each sequence's loads (DeepSeek-V3's sequence-wise balance loss)."""
    bias = "bias"
    """The expert bias moves by bias_update_rate after each optimizer step; for families that have one."""


class RoutingReplay(Enum):
    """Whose choice of experts the policy's update follows (MoE models)."""

    none = "none"
    """Every pass chooses for itself."""
    R2 = "R2"
    """That of the trainer's own old-log-prob pass; enough with a few updates per step."""
    R3 = "R3"
    """That of the engine that sampled the tokens, in the old-log-prob pass too; for engines that
    choose differently from the trainer, as they do in bfloat16 (arXiv 2510.11370)."""


class Dispatcher(Enum):
    """How tokens travel to the ranks of their experts."""

    alltoall = "alltoall"
    """Each token goes to the ranks of its experts."""
    allgather = "allgather"
    """Every rank gets all tokens: fewer, larger messages, for few ranks and many experts per token."""
    flex = "flex"
    """DeepEP, on GPUs."""


@dataclass
class MoeConfig:
    """Mixture-of-experts models; for a dense model all of it stays at its defaults."""

    router_dtype: RouterDtype = RouterDtype.fp32
    """Precision of the router's logits."""
    load_balancing: LoadBalancing = LoadBalancing.none
    """What keeps the experts evenly loaded; none is usual in RL, where the balance comes from pre-training."""
    aux_loss_coef: float = at_least(0, default=0.0)
    """Weight of the balance loss; needs load_balancing=aux_loss."""
    bias_update_rate: float = at_least(0, default=0.0)
    """Step of the expert bias (0.001 is in use); needs load_balancing=bias. 0: the bias is frozen."""
    routing_replay: RoutingReplay = RoutingReplay.none
    """Whose choice of experts the policy's update follows."""
    dispatcher: Dispatcher = Dispatcher.alltoall
    """How tokens travel to the ranks of their experts."""
    grouped_gemm: GroupedGemm = GroupedGemm.auto
    """Whether all experts of a rank run in one kernel."""


@dataclass
class VisionConfig:
    """Which parts of a vision-language model's encoder learn; what does not learn takes no memory for gradients."""

    train_encoder: bool = True
    """The vision tower: from patches to features."""
    train_adapter: bool = True
    """The mergers: what brings the encoder's features to the language model's width."""


@dataclass
class PolicyConfig:
    """The model that is trained."""

    path: str = ""
    """A Hugging Face model folder: config.json, tokenizer and, for init=checkpoint, safetensors."""
    init: Init = Init.checkpoint
    """Where the first weights come from."""
    dtype: Dtype = Dtype.float32
    """Of parameters and activations, in the trainer and in the servers of the run."""
    recompute: Recompute = Recompute.none
    """What the backward pass computes again, to keep less in memory."""
    offload: Offload = Offload.auto
    """Whether it, and the reference, wait in host memory while others work on their devices (docs/memory.md)."""
    fp32_head: bool = False
    """The head's products and their gradients from float32 copies of hidden states and head. Logits are float32 without
    it, in the trainer and in the servers that are started."""
    fp8: Fp8 = Fp8.none
    """Matrix products in 8-bit floating point, by Transformer Engine on GPUs; needs dtype=bfloat16."""
    mtp: Mtp = Mtp.drop
    """What becomes of the multi-token-prediction layers of a checkpoint, which are never trained."""
    moe: MoeConfig = field(default_factory=MoeConfig)
    vision: VisionConfig = field(default_factory=VisionConfig)
    megatron: dict[str, Any] = field(default_factory=dict)
    """Fields of Megatron's TransformerConfig by their own names, e.g. {moe_shared_expert_overlap: true}; see docs/models.md."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


@dataclass
class CriticConfig:
    """The model that predicts values; only an advantage that reads values has one (egae)."""

    path: str = ""
    """A critic, reward model or process reward model with a value head; empty: the policy's weights with a fresh head."""
    dtype: Dtype | None = None
    """Of parameters and activations; null: as the policy's."""
    recompute: Recompute = Recompute.none
    """What the backward pass computes again, to keep less in memory."""
    offload: Offload = Offload.auto
    """Whether it, and the process reward model, wait in host memory while others work on their devices."""
    warmup_steps: int = at_least(0, default=0)
    """First steps in which only the critic learns."""
    num_epochs: int = at_least(1, default=1)
    """Passes over the finished responses in one step (K critic updates per policy update)."""
    parallel: ParallelConfig | None = None
    """A layout of its own over the same ranks, for the critic and the process reward model; null: as the policy."""
    vision: VisionConfig = field(default_factory=VisionConfig)
    megatron: dict[str, Any] = field(default_factory=dict)
    """As policy.megatron, for the critic and the process reward model; it takes nothing over from the policy's."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=2.0e-6))


@dataclass
class ReferenceConfig:
    """The frozen policy that KL is measured from."""

    path: str = ""
    """A Hugging Face model folder; empty: policy.path."""
