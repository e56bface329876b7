"""The pieces of the algorithm: advantages, losses, KL, corrections, sampling of groups."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from megatron_rl.config.schema.bounds import above, at_least, bounded, items_at_least, share


class LambdaKind(Enum):
    """How far ahead the policy's advantages look."""

    constant = "constant"
    """lambda_value, whatever the length."""
    length_adaptive = "length_adaptive"
    """1 - 1 / (lambda_alpha * length), at least lambda_value: longer responses look further ahead (VAPO)."""


class Bootstrap(Enum):
    """The value at the edge of a window that cuts a response."""

    copy_last = "copy_last"
    """V(s_l) = V(s_{l-1}) at a window edge: the paper's assumption."""
    critic = "critic"
    """V(s_l) read from the critic."""


class Normalization(Enum):
    """What is done to the advantages of a step's counted tokens before the loss."""

    none = "none"
    """They stay as they are."""
    scale = "scale"
    """Divide by the standard deviation; zero stays zero."""
    whiten = "whiten"
    """Subtract the mean, divide by the standard deviation."""


class Overlong(Enum):
    """What becomes of responses that near or reach batch.max_response_tokens."""

    none = "none"
    """Their score stands."""
    soft = "soft"
    """A penalty that grows from 0 to -1 over the last algorithm.overlong_buffer_tokens of the budget (DAPO)."""
    filter = "filter"
    """Responses cut at the budget train nothing."""


class KlPlace(Enum):
    """Where the KL divergence acts."""

    none = "none"
    """Nowhere; no reference policy is loaded."""
    reward = "reward"
    """Taken off the reward of each token (PPO, REINFORCE++)."""
    loss = "loss"
    """Added to the policy's loss (GRPO)."""


@dataclass
class KlConfig:
    """KL divergence from the reference policy."""

    place: KlPlace = KlPlace.none
    """Where the divergence acts: in the reward, in the loss or nowhere."""
    estimator: str = "k3"
    """How it is estimated from one sampled token: k1 in the reward, k3 or k2 in the loss, or package.module:function."""
    estimator_options: dict[str, Any] = field(default_factory=dict)
    """Parameters of the estimator."""
    coef: float = at_least(0, default=0.0)
    """What the divergence is multiplied by."""
    coef_by_type: dict[str, float] = field(default_factory=dict, metadata=items_at_least(0))
    """Coefficient of prompts of a type (data.type_field); other types use ``coef``."""
    target: float = at_least(0, default=0.0)
    """KL per response, over all its windows, that the adaptive controller steers ``coef`` to; 0 means a fixed one.
    Prompts with a coefficient of their own (``coef_by_type``) are not measured."""
    horizon: int = at_least(1, default=10000)
    """Responses over which the adaptive controller acts."""


class OldPolicy(Enum):
    """Whose log-probs the ratio of the policy loss is taken against."""

    recomputed = "recomputed"
    """The trainer's own log-probs at the start of the step (three policies: engine, old, new). Its first update's are those of its own
    pass."""
    rollout = "rollout"
    """The engine's log-probs stand for them: no recomputation (two policies)."""


@dataclass
class CorrectionConfig:
    """Corrections for the difference between the engine that samples and the trainer; rho = trainer / engine."""

    old_policy: OldPolicy = OldPolicy.recomputed
    """Whose log-probs are the old policy's. rollout saves a forward pass per step, but leaves nothing to correct."""
    weight: str = "none"
    """Importance weight of each token's loss: a registered correction weight or package.module:function. With
    schedule.mode=async, whose tokens an older policy sampled, the default is token (decoupled loss)."""
    weight_options: dict[str, Any] = field(default_factory=dict)
    """Parameters of the weight beyond max_weight, icepop_low and icepop_high."""
    max_weight: float = above(0, default=2.0)
    """Largest weight, with weight=token or sequence."""
    icepop_low: float = at_least(0, default=0.5)
    """Smallest rho that still trains, with weight=icepop; at most 1."""
    icepop_high: float = at_least(0, default=5.0)
    """Largest rho that still trains, with weight=icepop; at least 1."""
    normalize: bool = False
    """Divide the weights by their mean over the batch."""
    rejection: str = "none"
    """Which tokens or responses are left out: a registered rejection or package.module:function."""
    rejection_options: dict[str, Any] = field(default_factory=dict)
    """Parameters of the rejection beyond rejection_low and rejection_high."""
    rejection_low: float = at_least(0, default=0.5)
    """Lower limit of rejection=token, sequence and geometric; at most 1."""
    rejection_high: float = at_least(0, default=2.0)
    """Upper limit of the rejection; at least 1 for token, sequence and geometric."""
    veto_below: float = at_least(0, default=0.0)
    """Responses with any rho_t below this are left out; 0 means none (1e-4 is in use)."""
    opsm_delta: float = at_least(0, default=0.0)
    """Responses with a negative advantage and mean log(pi_old / pi) above this are left out; 0 means none."""


@dataclass
class DynamicSamplingConfig:
    """Only groups of responses whose rewards differ are trained on (DAPO); not with a critic in windows."""

    enabled: bool = False
    """Replace groups whose responses all have the same reward by new prompts; in windows they are left out alone."""
    max_rounds: int = at_least(1, default=10)
    """Rounds of generation in one step before the run stops."""
    correct_from: float = 1.0
    """A score of at least this, before any shaping, counts as correct: for select-prompts, and where what was left out
    is counted."""


@dataclass
class AlgorithmConfig:
    """What is optimised: the pieces that a preset chooses."""

    advantage: str = "egae"
    """Where advantages come from: a registered advantage or package.module:function; one that reads values, as egae
    does, brings a critic."""
    advantage_options: dict[str, Any] = field(default_factory=dict)
    """Parameters of the advantage beyond what every advantage is given."""
    policy_loss: str = "clip"
    """The objective that moves the policy along the advantages: a registered policy loss or package.module:function."""
    policy_loss_options: dict[str, Any] = field(default_factory=dict)
    """Parameters of the policy loss beyond what every policy loss is given, such as clip_low."""
    aggregation: str = "token_mean"
    """How token losses become one number: a registered aggregation or package.module:function."""
    aggregation_options: dict[str, Any] = field(default_factory=dict)
    """Parameters of the aggregation."""
    gamma: float = share(default=1.0)
    """Discount per token; 1 is usual for responses that are scored at their end."""
    lambda_policy: LambdaKind = LambdaKind.length_adaptive
    """Lambda of the policy's advantages."""
    lambda_value: float = share(default=0.95)
    """The constant lambda, or the floor of the length-adaptive one."""
    lambda_alpha: float = above(0, default=0.05)
    """Length-adaptive lambda is 1 - 1 / (lambda_alpha * length)."""
    lambda_critic: float = share(default=1.0)
    """Lambda of the critic's targets; 1: Monte-Carlo returns (VC-PPO); that of the policy: ordinary PPO."""
    critic_aggregation: str = "token_mean"
    """As ``aggregation``, for the critic's loss; sequence_mean: a long response counts as much as a short one."""
    critic_aggregation_options: dict[str, Any] = field(default_factory=dict)
    """Parameters of the critic's aggregation."""
    bootstrap: Bootstrap = Bootstrap.copy_last
    """Where the value at the edge of a window comes from, for responses that go on."""
    ignore_boundary_tokens: int = at_least(0, default=8)
    """Last tokens of an unfinished window that the policy loss leaves out."""
    normalization: Normalization = Normalization.scale
    """What is done to the advantages of a step before the loss."""
    advantage_clamp: float = at_least(0, default=0.0)
    """Advantages are clamped to +-this after normalisation; 0 means no clamp."""
    clip_low: float = at_least(0, default=0.2)
    """The ratio of new to old policy is clipped below 1 - this."""
    clip_high: float = at_least(0, default=0.28)
    """The ratio is clipped above 1 + this; more than clip_low keeps exploration alive (clip-higher, DAPO)."""
    dual_clip: float = bounded(
        "more than 1 (3 and 10 are in use), or 0 for none", lambda value: value == 0 or value > 1, default=0.0
    )
    """Lower bound c * A for negative advantages; 0 means none."""
    value_clip_low: float = at_least(0, default=0.5)
    """The critic's value is clipped below its old value - this; both 0 mean no clip."""
    value_clip_high: float = at_least(0, default=0.6)
    """The critic's value is clipped above its old value + this; both 0 mean no clip."""
    entropy_coef: float = at_least(0, default=0.0)
    """Weight of the entropy bonus, the mean over the trained tokens."""
    positive_lm_coef: float = at_least(0, default=0.0)
    """Weight of the language-model loss on finished responses with the full reward (VAPO)."""
    positive_lm_threshold: float = 1.0
    """A reward of at least this counts as positive."""
    normalize_by_role: bool = False
    """Normalise the advantages of each role of a dialogue on its own (PAG)."""
    overlong: Overlong = Overlong.none
    """What becomes of responses that near or reach the budget batch.max_response_tokens."""
    overlong_buffer_tokens: int = at_least(0, default=4096)
    """Tokens at the end of the budget over which the soft penalty grows."""
    overlong_factor: float = at_least(0, default=1.0)
    """The soft penalty at the end of the budget."""
    kl: KlConfig = field(default_factory=KlConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
