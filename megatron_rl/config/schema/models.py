"""The models of a run: policy, critic and reference."""

from dataclasses import dataclass, field
from enum import Enum

from megatron_rl.config.schema.optimizer import OptimizerConfig
from megatron_rl.config.schema.parallel import ParallelConfig


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


class Mtp(Enum):
    """What becomes of the multi-token-prediction layers of a checkpoint, which are never trained."""

    drop = "drop"
    keep = "keep"
    """Carried unchanged from policy.path into every model folder that is saved."""


class Fp8(Enum):
    """Matrix products in 8-bit floating point, by Transformer Engine on GPUs."""

    none = "none"
    hybrid = "hybrid"
    """e4m3 forward, e5m2 for gradients."""
    e4m3 = "e4m3"


class GroupedGemm(Enum):
    """Whether all experts of a rank run in one kernel."""

    auto = "auto"
    """Where Transformer Engine is present."""
    always = "always"
    never = "never"


class RouterDtype(Enum):
    """Precision of the router's logits."""

    fp32 = "fp32"
    fp64 = "fp64"
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
    R2 = "R2"
    """That of the trainer's own old-log-prob pass."""
    R3 = "R3"
    """That of the engine that sampled the tokens, in the old-log-prob pass too."""


class Dispatcher(Enum):
    """How tokens travel to the ranks of their experts."""

    alltoall = "alltoall"
    allgather = "allgather"
    flex = "flex"
    """DeepEP, on GPUs."""


@dataclass
class MoeConfig:
    """Mixture-of-experts models; for a dense model all of it stays at its defaults."""

    router_dtype: RouterDtype = RouterDtype.fp32
    load_balancing: LoadBalancing = LoadBalancing.none
    aux_loss_coef: float = 0.0
    """Weight of the balance loss; needs load_balancing=aux_loss."""
    bias_update_rate: float = 0.0
    """Step of the expert bias (0.001 is in use); needs load_balancing=bias. 0: the bias is frozen."""
    routing_replay: RoutingReplay = RoutingReplay.none
    dispatcher: Dispatcher = Dispatcher.alltoall
    grouped_gemm: GroupedGemm = GroupedGemm.auto


@dataclass
class VisionConfig:
    """Which parts of a vision-language model's encoder learn; what does not learn takes no memory for gradients."""

    train_encoder: bool = True
    train_adapter: bool = True
    """The mergers: what brings the encoder's features to the language model's width."""


@dataclass
class PolicyConfig:
    path: str = ""
    """A Hugging Face model folder: config.json, tokenizer and, for init=checkpoint, safetensors."""
    init: Init = Init.checkpoint
    dtype: Dtype = Dtype.float32
    recompute: Recompute = Recompute.none
    fp32_head: bool = False
    """Logits in float32 from float32 copies of hidden states and head, in the trainer and in the servers of the run."""
    fp8: Fp8 = Fp8.none
    mtp: Mtp = Mtp.drop
    moe: MoeConfig = field(default_factory=MoeConfig)
    vision: VisionConfig = field(default_factory=VisionConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


@dataclass
class CriticConfig:
    path: str = ""
    """A critic, reward model or process reward model with a value head; empty: the policy's weights with a fresh head."""
    dtype: Dtype = Dtype.float32
    recompute: Recompute = Recompute.none
    warmup_steps: int = 0
    """First steps in which only the critic learns."""
    num_epochs: int = 1
    """Passes over the finished responses in one step (K critic updates per policy update)."""
    parallel: ParallelConfig | None = None
    """A layout of its own over the same ranks, for the critic and the process reward model; null: as the policy."""
    vision: VisionConfig = field(default_factory=VisionConfig)
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=2.0e-6))


@dataclass
class ReferenceConfig:
    """The frozen policy that KL is measured from."""

    path: str = ""
    """A Hugging Face model folder; empty: policy.path."""
