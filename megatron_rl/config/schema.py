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


class Placement(Enum):
    """Where the SGLang servers run."""

    disaggregated = "disaggregated"
    """On devices of their own."""
    colocated = "colocated"
    """On the trainer's devices: servers and trainer take turns, and weights go from memory to memory (CUDA IPC)."""


class AdvantageKind(Enum):
    """Where advantages come from; only ``egae`` has a critic."""

    egae = "egae"
    """(E)GAE over the critic's values (PPO, VC-PPO, VAPO, T-PPO)."""
    group = "group"
    """(R - mean) / std over the responses to one prompt (GRPO, DAPO)."""
    group_mean = "group_mean"
    """R - mean over the responses to one prompt, without the division (Dr. GRPO)."""
    rloo = "rloo"
    """R - mean of the other responses to the prompt (REINFORCE leave-one-out)."""
    reinforce_pp = "reinforce_pp"
    """Reward-to-go, whitened over the whole batch (REINFORCE++)."""
    reinforce_pp_baseline = "reinforce_pp_baseline"
    """R - mean over the prompt's responses, then whitened over the whole batch."""


class PolicyLossKind(Enum):
    clip = "clip"
    """PPO's clipped ratio, with clip-higher and dual clip."""
    gspo = "gspo"
    """Clipped ratio of whole sequences (length-normalised)."""
    cispo = "cispo"
    """Log-likelihood weighted by the clipped, constant ratio: no token loses its gradient."""


class Aggregation(Enum):
    """How token losses become one number; denominators are those of the whole mini-batch."""

    token_mean = "token_mean"
    sequence_mean = "sequence_mean"
    """Mean over a response's tokens first, then over responses."""


class KlPlace(Enum):
    none = "none"
    reward = "reward"
    loss = "loss"


class KlEstimator(Enum):
    k1 = "k1"
    k2 = "k2"
    k3 = "k3"


class Overlong(Enum):
    none = "none"
    soft = "soft"
    """A penalty that grows from 0 to -1 over the last algorithm.overlong_buffer_tokens of the budget (DAPO)."""
    filter = "filter"
    """Responses cut at the budget train nothing."""


class CorrectionWeight(Enum):
    """Importance weight of the engine's samples, rho = trainer / engine."""

    none = "none"
    token = "token"
    """min(rho_t, max_weight): token TIS."""
    sequence = "sequence"
    """min(prod rho, max_weight): sequence TIS."""
    icepop = "icepop"
    """rho_t inside [icepop_low, icepop_high], else 0; the denominator stays."""


class Rejection(Enum):
    """Which samples leave mask and denominator because engine and trainer disagree."""

    none = "none"
    token = "token"
    """Tokens with rho outside [low, high]."""
    sequence = "sequence"
    """Responses with prod rho outside [low, high]."""
    geometric = "geometric"
    """Responses with exp(mean log rho) outside [low, high]."""
    k2 = "k2"
    """Responses with mean (log rho)^2 / 2 above high."""
    k3 = "k3"
    """Responses with mean (rho - 1 - log rho) above high."""


class OldPolicy(Enum):
    recomputed = "recomputed"
    """The trainer's own log-probs at the start of the step (three policies: engine, old, new)."""
    rollout = "rollout"
    """The engine's log-probs stand for them: no recomputation (two policies)."""


class FireLoss(Enum):
    mask = "mask"
    """The hot token trains nothing."""
    keep = "keep"
    """The hot token counts like any other; use it with a correction."""


class DuplicateIds(Enum):
    error = "error"
    drop = "drop"
    """The first row stays; the others are counted."""


class SelectionRule(Enum):
    lowest = "lowest"
    """The lowest share of standardised scores inside each type (Pre-PPO)."""
    pass_rate = "pass_rate"
    """Prompts that are solved sometimes."""
    spread = "spread"
    """Prompts whose best response is better than their mean one."""


class RewardModelKind(Enum):
    bradley_terry = "bradley_terry"
    pairwise = "pairwise"
    process = "process"


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
class ParallelConfig:
    num_ranks: int = 0
    """Trainer ranks (processes). 0: as many as the launcher started; without a launcher, more than 1 starts torchrun."""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    sequence_parallel: bool = False
    """Shard activations outside attention and MLP over the tensor-parallel group."""
    context_parallel_size: int = 1
    """Ranks that share the tokens of each sequence (zigzag: every rank holds an early and a late part)."""
    expert_parallel_size: int = 1
    """Ranks that share the experts of a layer; they are taken from the data-, context- and tensor-parallel ranks."""
    expert_tensor_parallel_size: int = 0
    """Ranks that share one expert; 0 means tensor_parallel_size."""
    virtual_pipeline_size: int = 1
    """Model chunks of a pipeline rank: more than 1 interleaves them (smaller bubbles, more messages)."""
    pipeline_layers: list[int] = field(default_factory=list)
    """Layers of each stage in the model's order, pipeline x virtual numbers; empty: the same number everywhere."""
    collective_timeout_s: float = 600.0
    """A collective that waits longer fails and says so."""


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
class KlConfig:
    """KL divergence from the reference policy."""

    place: KlPlace = KlPlace.none
    estimator: KlEstimator = KlEstimator.k3
    coef: float = 0.0
    coef_by_type: dict[str, float] = field(default_factory=dict)
    """Coefficient of prompts of a type (data.type_field); other types use ``coef``."""
    target: float = 0.0
    """KL per response that the adaptive controller steers to; 0 means a fixed coefficient."""
    horizon: int = 10000
    """Responses over which the adaptive controller acts."""


@dataclass
class CorrectionConfig:
    """Corrections for the difference between the engine that samples and the trainer (papers 11.2)."""

    old_policy: OldPolicy = OldPolicy.recomputed
    weight: CorrectionWeight = CorrectionWeight.none
    max_weight: float = 2.0
    icepop_low: float = 0.5
    icepop_high: float = 5.0
    normalize: bool = False
    """Divide the weights by their mean over the batch."""
    rejection: Rejection = Rejection.none
    rejection_low: float = 0.5
    rejection_high: float = 2.0
    veto_below: float = 0.0
    """Responses with any rho_t below this are left out; 0 means none (1e-4 is in use)."""
    opsm_delta: float = 0.0
    """Responses with a negative advantage and mean log(pi_old / pi) above this are left out; 0 means none."""


@dataclass
class DynamicSamplingConfig:
    """Only groups of responses with a mixed outcome are trained on (DAPO); needs schedule.mode=sync."""

    enabled: bool = False
    max_rounds: int = 10
    """Rounds of generation in one step before the run stops."""
    correct_from: float = 1.0
    """A score of at least this, before any shaping, counts as correct."""


@dataclass
class AlgorithmConfig:
    advantage: AdvantageKind = AdvantageKind.egae
    policy_loss: PolicyLossKind = PolicyLossKind.clip
    aggregation: Aggregation = Aggregation.token_mean
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
    normalize_by_role: bool = False
    """Normalise the advantages of each role of a dialogue on its own (PAG)."""
    overlong: Overlong = Overlong.none
    overlong_buffer_tokens: int = 4096
    overlong_factor: float = 1.0
    """The soft penalty at the end of the budget."""
    kl: KlConfig = field(default_factory=KlConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)


@dataclass
class ScheduleConfig:
    mode: Mode = Mode.tppo


@dataclass
class ReferenceConfig:
    """The frozen policy that KL is measured from."""

    path: str = ""
    """A Hugging Face model folder; empty: policy.path."""


@dataclass
class EnvironmentConfig:
    """Dialogues: who answers the model's turns."""

    name: str = ""
    """A registered environment (pag, calculator) or package.module:Class; empty: one response, no dialogue."""
    max_turn_tokens: int = 0
    """Generated tokens of one turn; 0 means the rest of the budget."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment."""


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
class CurriculumPhase:
    until_step: int = 0
    """The phase covers the steps before this one."""
    mixture: dict[str, float] = field(default_factory=dict)


@dataclass
class DataConfig:
    train_files: list[str] = field(default_factory=list)
    """Prompts: JSONL or Parquet files, or folders of local Hugging Face datasets."""
    eval_files: list[str] = field(default_factory=list)
    id_field: str = "id"
    """Optional in the file; the place file:line stands in for it."""
    prompt_field: str = "prompt"
    answer_field: str = "answer"
    answer_required: bool = True
    """False: a row may lack the answer (a judge decides)."""
    response_field: str = "response"
    """The reference solution that sft trains on."""
    type_field: str = "type"
    """The prompt's type or domain: mixtures, KL coefficients and rewards go by it. Optional in the file."""
    reward_fields: list[str] = field(default_factory=list)
    """Further fields of a row that its reward reads. Fields may be nested: reward_model.ground_truth."""
    split: str = "train"
    """Which split of a Hugging Face dataset folder."""
    duplicate_ids: DuplicateIds = DuplicateIds.error
    mixture: dict[str, float] = field(default_factory=dict)
    """Weight of each prompt type; empty: every prompt once an epoch."""
    curriculum: list[CurriculumPhase] = field(default_factory=list)
    """Mixtures of the first steps, in order; ``mixture`` holds after the last phase."""
    shuffle: bool = True
    use_chat_template: bool = False
    """Wrap the prompt as a user message in the tokenizer's chat template."""
    system_prompt: str = ""
    """System message before the prompt; needs use_chat_template."""
    images_field: str = "images"
    """Column of images for the <image> marks of a prompt that is text. Optional in the file."""
    image_dir: str = ""
    """Where image paths start; empty: the folder of the data file."""
    max_video_tokens: int = 81_920
    """Most visual tokens of one video: its frames get coarser, then fewer (arXiv 2505.07062)."""
    video_frame_tokens: list[int] = field(default_factory=lambda: [640, 512, 384, 256, 160, 128])
    """Tokens that a frame may take; the largest at which all frames fit is chosen."""


@dataclass
class RewardRouteConfig:
    """The reward of one prompt type."""

    name: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    timeout_s: float = 0.0
    """0 means reward.timeout_s."""
    rescale_to: list[float] = field(default_factory=list)
    """[low, high]: the reward's range is mapped onto this one linearly."""


@dataclass
class ProcessRewardConfig:
    """Dense rewards at line ends from a process reward model; needs schedule.mode=sync."""

    path: str = ""
    """The model's folder; empty: none."""
    weight_if_failed: float = 0.25
    weight_if_passed: float = 0.025
    comment_prefixes: list[str] = field(default_factory=lambda: ["#"])


@dataclass
class RewardConfig:
    name: str = "math"
    """An entry of the reward registry, or package.module:function."""
    by_type: dict[str, RewardRouteConfig] = field(default_factory=dict)
    """Rewards chosen by prompt type; then ``name`` is not used and every type needs an entry."""
    require_think: bool = False
    """A response that is not <think>...</think>solution scores 0; only the solution is graded."""
    process: ProcessRewardConfig = field(default_factory=ProcessRewardConfig)
    num_workers: int = 2
    timeout_s: float = 5.0
    """A response that takes longer to score is killed, masked and counted."""
    max_error_rate: float = 0.1
    """More unscored responses than this share of a step stop the run."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the reward."""
    max_concurrency: int = 256
    """Requests under way of a reward that asks a server."""
    max_retries: int = 1
    """Times an item is tried again after its worker died or its server failed."""
    memory_limit_mb: int = 2048
    """What one worker may allocate."""
    start_timeout_s: float = 60.0
    """Importing the reward may take this long."""


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
    """`megatron-rl critic-pretrain`: regress the critic onto returns of the frozen policy until it has settled."""

    output_path: str = ""
    """Folder that receives the critic."""
    num_steps: int = 20
    """At most."""
    min_steps: int = 0
    """At least."""
    settle_window: int = 0
    """Steps over which value loss and explained variance must have stopped changing; 0: always num_steps."""
    settle_tolerance: float = 0.02
    """Relative change between two windows that counts as settled."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1.0e-3))


@dataclass
class RewardTrainConfig:
    """`megatron-rl reward-train`: a reward model from preferences or line labels."""

    kind: RewardModelKind = RewardModelKind.bradley_terry
    output_path: str = ""
    """Folder that receives the model."""
    train_files: list[str] = field(default_factory=list)
    """Preferences {prompt, chosen, rejected}, or for ``process`` what label-lines writes."""
    eval_files: list[str] = field(default_factory=list)
    num_steps: int = 100
    eval_every_steps: int = 20
    batch_size: int = 64
    """Pairs (process: responses) in one optimizer step, over all ranks."""
    max_tokens: int = 4096
    """Longer rows are left out and counted."""
    yes_word: str = "YES"
    no_word: str = "NO"
    """The judgement words of ``pairwise``; each must be one token."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1.0e-5))


@dataclass
class LabelLinesConfig:
    """`megatron-rl label-lines`: which lines of a program can still be completed to a right one."""

    input_path: str = ""
    """Responses with their tests, as `score --reward code` takes them."""
    output_path: str = ""
    num_completions: int = 20
    max_new_tokens: int = 512


@dataclass
class SelectPromptsConfig:
    """`megatron-rl select-prompts`: which prompts are worth training on."""

    rule: SelectionRule = SelectionRule.lowest
    output_path: str = ""
    """JSONL that receives the kept rows; the report lies beside it."""
    scores_path: str = ""
    """JSONL with id and score, one row a response; empty: responses of policy.path are generated and graded."""
    num_samples: int = 1
    """Responses to a prompt."""
    keep_share: float = 0.1
    """Share kept inside each type by ``lowest``."""
    max_pass_rate: float = 0.75
    """``pass_rate`` keeps prompts above 0 and up to this."""
    min_spread: float = 0.1
    """``spread`` keeps prompts with max - mean of at least this."""


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
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    critic_pretrain: CriticPretrainConfig = field(default_factory=CriticPretrainConfig)
    reward_train: RewardTrainConfig = field(default_factory=RewardTrainConfig)
    label_lines: LabelLinesConfig = field(default_factory=LabelLinesConfig)
    select_prompts: SelectPromptsConfig = field(default_factory=SelectPromptsConfig)
