"""The algorithm: advantages, losses, KL, corrections, selection of groups."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from megatron_rl.config.schema.bounds import above, at_least, below_one, bounded, items_at_least, share


class LambdaKind(Enum):
    """Lambda of the policy's advantages, fixed or by length."""

    constant = "constant"
    """lambda_value, for every length."""
    length_adaptive = "length_adaptive"
    """1 - 1 / (lambda_alpha * length), at least lambda_value: larger for longer responses (VAPO)."""


class Bootstrap(Enum):
    """The value at the edge of a window that ends before its response does."""

    copy_last = "copy_last"
    """V(s_l) = V(s_{l-1}) at the edge of a window: the paper's assumption."""
    critic = "critic"
    """V(s_l) read from the critic."""


class Normalization(Enum):
    """Normalization of the advantages over a step's trained tokens, before the loss."""

    none = "none"
    """Advantages are used unchanged."""
    scale = "scale"
    """Divide by the standard deviation; zero stays zero."""
    whiten = "whiten"
    """Subtract the mean, divide by the standard deviation."""


class Overlong(Enum):
    """Treatment of responses close to or at batch.max_response_tokens."""

    none = "none"
    """The score is used unchanged."""
    soft = "soft"
    """A penalty that grows from 0 to -1 over the last algorithm.overlong_buffer_tokens of the budget (DAPO)."""
    filter = "filter"
    """Responses truncated at the budget do not train."""


class KlPlace(Enum):
    """The term that the KL divergence from the reference policy enters."""

    none = "none"
    """No KL term; no reference policy is loaded."""
    reward = "reward"
    """Subtracted from the reward of each token (PPO, REINFORCE++)."""
    loss = "loss"
    """Added to the policy's loss (GRPO)."""


@dataclass
class KlConfig:
    """KL divergence from the reference policy."""

    place: KlPlace = KlPlace.none
    """The term that the divergence enters: the reward, the loss or none."""
    estimator: str = "k3"
    """Estimator of the divergence from one sampled token: k1 in the reward, k3 or k2 in the loss, or package.module:function."""
    estimator_options: dict[str, Any] = field(default_factory=dict)
    """Parameters of the estimator."""
    top_k: int = at_least(0, default=0)
    """With place=loss and a served reference: the loss is the divergence over the reference's k most likely tokens and one event
    of all others, instead of the estimate from the sampled token. 0: the estimate."""
    coef: float = at_least(0, default=0.0)
    """Coefficient of the divergence."""
    coef_by_type: dict[str, float] = field(default_factory=dict, metadata=items_at_least(0))
    """Coefficient for prompts of a type (data.type_field); other types use ``coef``."""
    target: float = at_least(0, default=0.0)
    """KL per response, over all its windows, to which the adaptive controller steers ``coef``. Prompts with a separate
    coefficient (``coef_by_type``) are not measured. 0: ``coef`` is fixed."""
    horizon: int = at_least(1, default=10000)
    """Number of responses over which the adaptive controller acts."""


class OldPolicy(Enum):
    """Source of the log-probs that the policy loss takes its ratio against."""

    recomputed = "recomputed"
    """The trainer's own log-probs at the start of the step (three policies: server, old, new). The step's first update
    reuses the log-probs of its own forward pass."""
    rollout = "rollout"
    """The servers' log-probs replace the old ones: no recomputation (two policies)."""


@dataclass
class CorrectionConfig:
    """Corrections for the difference between the servers that sample and the trainer; rho = trainer / server."""

    old_policy: OldPolicy = OldPolicy.recomputed
    """Source of the old policy's log-probs. rollout saves a forward pass per step, but leaves nothing to correct."""
    weight: str = "none"
    """Importance weight of each token's loss: a registered correction weight or package.module:function. With
    schedule.mode=async, whose tokens an older policy sampled, the default is token (decoupled loss)."""
    weight_options: dict[str, Any] = field(default_factory=dict)
    """Parameters of the weight in addition to max_weight, icepop_low and icepop_high."""
    max_weight: float = above(0, default=2.0)
    """Largest weight, with weight=token or sequence."""
    icepop_low: float = share(default=0.5)
    """Smallest rho that still trains, with weight=icepop; at most 1."""
    icepop_high: float = at_least(1, default=5.0)
    """Largest rho that still trains, with weight=icepop; at least 1."""
    normalize: bool = False
    """Divide the weights by their mean over the batch."""
    rejection: str = "none"
    """Rule that excludes tokens or responses from the loss: a registered rejection or package.module:function."""
    rejection_options: dict[str, Any] = field(default_factory=dict)
    """Parameters of the rejection in addition to rejection_low and rejection_high."""
    rejection_low: float = share(default=0.5)
    """Lower limit of rejection=token, sequence and geometric; at most 1."""
    rejection_high: float = at_least(0, default=2.0)
    """Upper limit of the rejection; at least 1 for token, sequence and geometric."""
    veto_below: float = below_one(default=0.0)
    """Exclude responses with any rho_t below this value (1e-4 is in use). 0: none."""
    opsm_delta: float = at_least(0, default=0.0)
    """Exclude responses with a negative advantage and a mean log(pi_old / pi) above this value. 0: none."""


@dataclass
class DynamicSamplingConfig:
    """Train only on groups whose rewards differ (DAPO). Not available with a critic in windows."""

    enabled: bool = False
    """Replace groups whose responses all have the same reward by new prompts. In windows such groups are excluded, not replaced."""
    max_rounds: int = at_least(1, default=10)
    """Rounds of generation in one step before the run stops."""
    correct_from: float = 1.0
    """Smallest score, before any shaping, that counts as correct: for select-prompts, and for the counts of excluded groups."""


@dataclass
class AlgorithmConfig:
    """The objective that a run optimizes, as pieces that a preset chooses."""

    advantage: str = "egae"
    """Advantage: a registered one or package.module:function. An advantage that reads values, such as egae, adds a critic."""
    advantage_options: dict[str, Any] = field(default_factory=dict)
    """Parameters of the advantage in addition to the inputs of every advantage."""
    policy_loss: str = "clip"
    """Loss that trains the policy on the advantages: a registered policy loss or package.module:function."""
    policy_loss_options: dict[str, Any] = field(default_factory=dict)
    """Parameters of the policy loss in addition to the inputs of every policy loss, such as clip_low."""
    aggregation: str = "token_mean"
    """Reduction of the token losses to one value: a registered aggregation or package.module:function."""
    aggregation_options: dict[str, Any] = field(default_factory=dict)
    """Parameters of the aggregation."""
    outcome_coef: float = at_least(0, default=1.0)
    """Factor of a response's reward in training. 0: the reward is measured, and only token rewards and the loss's KL train."""
    gamma: float = share(default=1.0)
    """Discount per token; 1 is usual for responses that are scored at their end."""
    lambda_policy: LambdaKind = LambdaKind.length_adaptive
    """Lambda of the policy's advantages, fixed or by length."""
    lambda_value: float = share(default=0.95)
    """The constant lambda, or the lower limit of the length-adaptive one."""
    lambda_alpha: float = above(0, default=0.05)
    """Factor of the length in the length-adaptive lambda, 1 - 1 / (lambda_alpha * length)."""
    lambda_critic: float = share(default=1.0)
    """Lambda of the critic's targets. 1: Monte-Carlo returns (VC-PPO); equal to the policy's lambda: ordinary PPO."""
    critic_aggregation: str = "token_mean"
    """Same as ``aggregation``, for the critic's loss. sequence_mean: long and short responses have the same weight."""
    critic_aggregation_options: dict[str, Any] = field(default_factory=dict)
    """Parameters of the critic's aggregation."""
    bootstrap: Bootstrap = Bootstrap.copy_last
    """Source of the value at the edge of a window, for unfinished responses."""
    ignore_boundary_tokens: int = at_least(0, default=8)
    """Number of tokens at the end of an unfinished window that the policy loss excludes."""
    normalization: Normalization = Normalization.scale
    """Normalization of a step's advantages before the loss."""
    advantage_clamp: float = at_least(0, default=0.0)
    """Clamp advantages to +-this value after normalization. 0: no clamp."""
    clip_low: float = at_least(0, default=0.2)
    """Clip the ratio of new to old policy below 1 - this value."""
    clip_high: float = at_least(0, default=0.28)
    """Clip the ratio above 1 + this value; more than clip_low preserves exploration (clip-higher, DAPO)."""
    dual_clip: float = bounded(
        "more than 1 (3 and 10 are in use), or 0 for none", lambda value: value == 0 or value > 1, default=0.0
    )
    """Lower bound c * A for negative advantages. 0: none."""
    value_clip_low: float = at_least(0, default=0.5)
    """Clip the critic's value below its old value - this value. 0 for both limits: no clip."""
    value_clip_high: float = at_least(0, default=0.6)
    """Clip the critic's value above its old value + this value. 0 for both limits: no clip."""
    entropy_coef: float = at_least(0, default=0.0)
    """Weight of the entropy bonus, the mean over the trained tokens."""
    positive_lm_coef: float = at_least(0, default=0.0)
    """Weight of the language-model loss on finished responses with the full reward (VAPO)."""
    positive_lm_threshold: float = 1.0
    """Smallest reward that counts as full."""
    normalize_by_role: bool = False
    """Normalize the advantages of each role of a dialogue separately (PAG)."""
    overlong: Overlong = Overlong.none
    """Treatment of responses close to or at the budget batch.max_response_tokens."""
    overlong_buffer_tokens: int = at_least(0, default=4096)
    """Number of tokens at the end of the budget over which the soft penalty grows."""
    overlong_factor: float = at_least(0, default=1.0)
    """Soft penalty at the end of the budget."""
    kl: KlConfig = field(default_factory=KlConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
