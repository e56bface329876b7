"""The pieces of the algorithm: advantages, losses, KL, corrections, sampling of groups."""

from dataclasses import dataclass, field
from enum import Enum


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


class LambdaKind(Enum):
    constant = "constant"
    length_adaptive = "length_adaptive"


class Bootstrap(Enum):
    copy_last = "copy_last"
    """V(s_l) = V(s_{l-1}) at a window edge: the paper's assumption."""
    critic = "critic"
    """V(s_l) read from the critic."""


class Normalization(Enum):
    none = "none"
    scale = "scale"
    """Divide by the standard deviation; zero stays zero."""
    whiten = "whiten"
    """Subtract the mean, divide by the standard deviation."""


class Overlong(Enum):
    none = "none"
    soft = "soft"
    """A penalty that grows from 0 to -1 over the last algorithm.overlong_buffer_tokens of the budget (DAPO)."""
    filter = "filter"
    """Responses cut at the budget train nothing."""


class KlPlace(Enum):
    none = "none"
    reward = "reward"
    loss = "loss"


class KlEstimator(Enum):
    k1 = "k1"
    k2 = "k2"
    k3 = "k3"


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


class OldPolicy(Enum):
    recomputed = "recomputed"
    """The trainer's own log-probs at the start of the step (three policies: engine, old, new)."""
    rollout = "rollout"
    """The engine's log-probs stand for them: no recomputation (two policies)."""


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
