"""The pieces of an algorithm by name: a decorator for each kind, which says what a piece is given and what it returns.

A piece is a function. It is given those inputs of its kind that it names as parameters; its other parameters are
options of the recipe (``<key>_options``). In this module T tokens of N sequences lie back to back.

    from megatron_rl.algorithms import register

    @register.advantage("outcome")
    def outcome(outcomes: Tensor, *, baseline: float = 0.0) -> Tensor:
        return outcomes - baseline

A recipe then says ``algorithm.advantage: outcome`` where the function is in this package. From elsewhere it is
``my_package.my_module:outcome``, and a decorator, without a name, is needed only for what a signature cannot say.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_rl.system.plugins import Function, Plugin, Registry, parameters, required


@dataclass(frozen=True)
class PolicyLoss(Plugin):
    averages: str = ""
    """The aggregation that it is, whatever ``algorithm.aggregation`` says; "": it reads ``coefficients``."""

    def ignored(self) -> list[str]:
        """Inputs that others rely on and that this loss does not read."""
        unread = {"weights", "coefficients", "dual_clip"}.difference(parameters(self.function))
        return sorted(unread - {"coefficients"} if self.averages else unread)


@dataclass(frozen=True)
class Aggregation(Plugin):
    denominator: Callable[[Tensor, Tensor], Tensor] | None = None
    """(mask, cu_seqlens) -> []; None: the sum of the coefficients over the mask."""


@dataclass(frozen=True)
class KlEstimator(Plugin):
    places: tuple[str, ...] = ("reward", "loss")
    """Where it pulls towards the reference: the values of ``algorithm.kl.place`` it may be used with."""


@dataclass(frozen=True)
class CorrectionWeight(Plugin):
    bounded: bool = False
    """What exceeds ``max_weight`` is cut to it."""
    per_sequence: bool = False
    """The tokens of a sequence share one weight: the mean weight is taken over sequences."""
    local: bool = False
    """As of a rejection."""


@dataclass(frozen=True)
class Rejection(Plugin):
    local: bool = False
    """What it says of a sequence depends on that sequence alone, so it may be given the step's few at a time."""


def _registry(kind: str, entry: type[Any], key: str, inputs: str) -> Registry[Any]:
    return Registry(
        kind,
        entry,
        packages=["megatron_rl.algorithms"],
        options_key=f"algorithm.{key}_options",
        inputs=inputs.split(),
    )


ADVANTAGES: Registry[Plugin] = _registry(
    "advantage",
    Plugin,
    "advantage",
    "rewards outcomes values cu_seqlens finished valid group_ids bootstrap baselines gamma lam",
)
POLICY_LOSSES: Registry[PolicyLoss] = _registry(
    "policy loss",
    PolicyLoss,
    "policy_loss",
    "logprobs old_logprobs advantages mask cu_seqlens weights coefficients clip_low clip_high dual_clip",
)
AGGREGATIONS: Registry[Aggregation] = _registry("aggregation", Aggregation, "aggregation", "mask cu_seqlens")
KL_ESTIMATORS: Registry[KlEstimator] = _registry(
    "KL estimator", KlEstimator, "kl.estimator", "logprobs reference_logprobs"
)
CORRECTION_WEIGHTS: Registry[CorrectionWeight] = _registry(
    "correction weight", CorrectionWeight, "correction.weight", "ratios max_weight icepop_low icepop_high"
)
REJECTIONS: Registry[Rejection] = _registry(
    "rejection", Rejection, "correction.rejection", "ratios rejection_low rejection_high"
)

SEAMS: dict[str, Registry[Any]] = {
    "advantage": ADVANTAGES,
    "policy_loss": POLICY_LOSSES,
    "aggregation": AGGREGATIONS,
    "critic_aggregation": AGGREGATIONS,
    "kl.estimator": KL_ESTIMATORS,
    "correction.weight": CORRECTION_WEIGHTS,
    "correction.rejection": REJECTIONS,
}
"""By the key below ``algorithm``; next to each key stands ``<key>_options``."""


def needs_critic(advantage_name: str) -> bool:
    """Whether an advantage cannot do without a critic's ``values``."""
    return "values" in required(ADVANTAGES.find(advantage_name).function)


def needs_groups(advantage_name: str) -> bool:
    """Whether an advantage compares the responses to one prompt: it cannot do without ``group_ids``."""
    return "group_ids" in required(ADVANTAGES.find(advantage_name).function)


def needs_greedy(advantage_name: str) -> bool:
    """Whether an advantage compares with the greedy response to the prompt: it cannot do without ``baselines``."""
    return "baselines" in required(ADVANTAGES.find(advantage_name).function)


def advantage(name: str = "") -> Callable[[Function], Function]:
    """Register an advantage: a function of the fields of ``advantages.Episodes`` and of

    - ``outcomes``: [N] the rewards of each sequence, summed.

    It returns advantages [T], or [N] where all tokens of a sequence share one. A function that needs ``values`` gives
    the run a critic; without one, in windows, a group trains when all of its responses have ended. A function that needs
    ``group_ids`` asks for at least two responses to a prompt, and for one that needs ``baselines`` a further response to
    each prompt is generated greedily, which trains nothing.
    """
    return ADVANTAGES.register(name)


def policy_loss(name: str = "", *, averages: str = "") -> Callable[[Function], Function]:
    """Register a policy loss: a function of

    - ``logprobs``: [T] float32, with gradient: of the policy in training.
    - ``old_logprobs``, ``advantages``: [T] constants.
    - ``mask``: [T] 1 for the tokens to train.
    - ``cu_seqlens``: [N+1]; a sequence is never split over calls.
    - ``weights``: [T] or None: the correction; multiplies each token's loss and leaves the denominator alone.
    - ``coefficients``: [T] or None for 1: the aggregation; multiplies each token's loss and sums up to the denominator.
    - ``clip_low``, ``clip_high``, ``dual_clip``: as in the ``algorithm`` section; a dual clip of 0 comes as None.

    It returns an ``algorithms.Loss``, whose metrics are logged under ``policy/``. A loss that is an average over
    sequences by itself says ``averages="sequence_mean"``.
    """
    return POLICY_LOSSES.register(name, averages=averages)


def aggregation(
    name: str = "", *, denominator: Callable[[Tensor, Tensor], Tensor] | None = None
) -> Callable[[Function], Function]:
    """Register an aggregation: a function of ``mask`` [T] and ``cu_seqlens`` [N+1] that returns what each token's loss
    is multiplied by, [T], of any float dtype and on the mask's device; what stands outside the mask is not read.

    The loss is the sum of the products over all micro-batches and ranks, over the sum of the coefficients in the mask,
    or over the sum of ``denominator(mask, cu_seqlens)``.
    """
    return AGGREGATIONS.register(name, denominator=denominator)


def kl_estimator(name: str = "", *, places: tuple[str, ...] = ("reward", "loss")) -> Callable[[Function], Function]:
    """Register an estimator of KL(pi || pi_ref) on tokens drawn from pi: a function of ``logprobs`` and
    ``reference_logprobs`` [T] that returns [T]; the gradient flows through ``logprobs``.

    ``places``: "reward" where the policy gradient of the estimate as a cost pulls towards the reference, as that of d
    does; "loss" where its own gradient does. Elsewhere the configuration refuses it. One that is named by its import
    path alone has not said, and is taken in both.
    """
    return KL_ESTIMATORS.register(name, places=places)


def correction_weight(
    name: str = "", *, bounded: bool = False, per_sequence: bool = False, local: bool = False
) -> Callable[[Function], Function]:
    """Register an importance weight of the engine's samples: a function of

    - ``ratios``: ``corrections.LogRatios`` of pi_old over mu, of the counted tokens.
    - ``max_weight``, ``icepop_low``, ``icepop_high``: as in the ``algorithm.correction`` section.

    It returns [T] float64, at least 0, and 1 where ``ratios`` are 0. ``bounded``: what exceeds max_weight is cut to it.
    ``per_sequence``: all tokens of a sequence have one weight. ``local``: as for ``rejection``.
    """
    return CORRECTION_WEIGHTS.register(name, bounded=bounded, per_sequence=per_sequence, local=local)


def rejection(name: str = "", *, local: bool = False) -> Callable[[Function], Function]:
    """Register a rule for which samples stay: a function of

    - ``ratios``: ``corrections.LogRatios`` of pi_old over mu, of the counted tokens.
    - ``rejection_low``, ``rejection_high``: as in the ``algorithm.correction`` section.

    It returns [T] bool: the tokens that may train. ``local``: what it says of a sequence depends on that sequence alone;
    then it is given the step's sequences a few at a time, which is faster, else all of them in one call.
    """
    return REJECTIONS.register(name, local=local)
