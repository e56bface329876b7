"""The pieces of the algorithm: advantages, losses, KL, corrections, sampling of groups."""

from dataclasses import dataclass, field
from enum import Enum

from megatron_rl.config.schema.bounds import above, at_least, bounded, items_at_least, share


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
    """The objective that moves the policy along the advantages."""

    clip = "clip"
    """PPO's clipped ratio, with clip-higher and dual clip."""
    gspo = "gspo"
    """Clipped ratio of whole sequences (length-normalised)."""
    cispo = "cispo"
    """Log-likelihood weighted by the clipped, constant ratio: no token loses its gradient."""


class Aggregation(Enum):
    """How token losses become one number; denominators are those of the whole mini-batch."""

    token_mean = "token_mean"
    """Every token counts the same, so long responses count more (DAPO)."""
    sequence_mean = "sequence_mean"
    """Mean over a response's tokens first, then over responses."""


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


class KlEstimator(Enum):
    """Estimates of the divergence from one token's d = log pi - log pi_ref."""

    k1 = "k1"
    """d: unbiased, may be negative; the usual one in the reward."""
    k2 = "k2"
    """d^2 / 2: its gradient in the loss is that of KL(policy || reference)."""
    k3 = "k3"
    """exp(-d) - 1 + d: unbiased, never negative; the usual one in the loss."""


@dataclass
class KlConfig:
    """KL divergence from the reference policy."""

    place: KlPlace = KlPlace.none
    """Where the divergence acts: in the reward, in the loss or nowhere."""
    estimator: KlEstimator = KlEstimator.k3
    """How it is estimated from one sampled token."""
    coef: float = at_least(0, default=0.0)
    """What the divergence is multiplied by."""
    coef_by_type: dict[str, float] = field(default_factory=dict, metadata=items_at_least(0))
    """Coefficient of prompts of a type (data.type_field); other types use ``coef``."""
    target: float = at_least(0, default=0.0)
    """KL per response that the adaptive controller steers to; 0 means a fixed coefficient."""
    horizon: int = at_least(1, default=10000)
    """Responses over which the adaptive controller acts."""


class OldPolicy(Enum):
    """Whose log-probs the ratio of the policy loss is taken against."""

    recomputed = "recomputed"
    """The trainer's own log-probs at the start of the step (three policies: engine, old, new)."""
    rollout = "rollout"
    """The engine's log-probs stand for them: no recomputation (two policies)."""


class CorrectionWeight(Enum):
    """Importance weight of the engine's samples, rho = trainer / engine."""

    none = "none"
    """Samples count as if the trainer had drawn them."""
    token = "token"
    """min(rho_t, max_weight): token TIS."""
    sequence = "sequence"
    """min(prod rho, max_weight): sequence TIS."""
    icepop = "icepop"
    """rho_t inside [icepop_low, icepop_high], else 0; the denominator stays."""


class Rejection(Enum):
    """Which samples leave mask and denominator because engine and trainer disagree."""

    none = "none"
    """None of them."""
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


@dataclass
class CorrectionConfig:
    """Corrections for the difference between the engine that samples and the trainer; rho = trainer / engine."""

    old_policy: OldPolicy = OldPolicy.recomputed
    """Whose log-probs are the old policy's. rollout saves a forward pass per step, but leaves nothing to correct."""
    weight: CorrectionWeight = CorrectionWeight.none
    """Importance weight of each token's loss."""
    max_weight: float = above(0, default=2.0)
    """Largest weight, with weight=token or sequence."""
    icepop_low: float = at_least(0, default=0.5)
    """Smallest rho that still trains, with weight=icepop; at most 1."""
    icepop_high: float = at_least(0, default=5.0)
    """Largest rho that still trains, with weight=icepop; at least 1."""
    normalize: bool = False
    """Divide the weights by their mean over the batch."""
    rejection: Rejection = Rejection.none
    """Which tokens or responses are left out."""
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
    """Only groups of responses with a mixed outcome are trained on (DAPO); needs schedule.mode=sync."""

    enabled: bool = False
    """Replace groups whose responses are all correct or all wrong by new prompts."""
    max_rounds: int = at_least(1, default=10)
    """Rounds of generation in one step before the run stops."""
    correct_from: float = 1.0
    """A score of at least this, before any shaping, counts as correct."""


@dataclass
class AlgorithmConfig:
    """What is optimised: the pieces that a preset chooses."""

    advantage: AdvantageKind = AdvantageKind.egae
    """Where advantages come from; only egae has a critic."""
    policy_loss: PolicyLossKind = PolicyLossKind.clip
    """The objective that moves the policy along the advantages."""
    aggregation: Aggregation = Aggregation.token_mean
    """How token losses become one number."""
    gamma: float = share(default=1.0)
    """Discount per token; 1 is usual for responses that are scored at their end."""
    lambda_policy: LambdaKind = LambdaKind.length_adaptive
    """Lambda of the policy's advantages; the critic's targets are always Monte-Carlo returns (lambda 1)."""
    lambda_value: float = share(default=0.95)
    """The constant lambda, or the floor of the length-adaptive one."""
    lambda_alpha: float = above(0, default=0.05)
    """Length-adaptive lambda is 1 - 1 / (lambda_alpha * length)."""
    bootstrap: Bootstrap = Bootstrap.copy_last
    """Where the value at the edge of a window comes from, for responses that go on."""
    ignore_boundary_tokens: int = at_least(0, default=8)
    """Last tokens of an unfinished window that the policy loss leaves out."""
    normalization: Normalization = Normalization.scale
    """What is done to the advantages of a step before the loss."""
    advantage_clamp: float = at_least(0, default=10.0)
    """Advantages are clamped to +-this after normalisation; 0 means no clamp."""
    clip_low: float = at_least(0, default=0.2)
    """The ratio of new to old policy is clipped below 1 - this."""
    clip_high: float = at_least(0, default=0.28)
    """The ratio is clipped above 1 + this; more than clip_low keeps exploration alive (clip-higher, DAPO)."""
    dual_clip: float = bounded(
        "more than 1 (3 and 10 are in use), or 0 for none", lambda value: value == 0 or value > 1, default=10.0
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
