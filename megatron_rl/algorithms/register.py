"""Registers the replaceable functions of an algorithm by name: one decorator per kind, which documents inputs and result.

A registered function receives the inputs of its kind that it names as parameters; its other parameters are options of
the recipe (``<key>_options``). In this module, T tokens of N sequences are packed: concatenated in 1-D tensors.

    from megatron_rl.algorithms import register

    @register.advantage("outcome")
    def outcome(outcomes: Tensor, *, baseline: float = 0.0) -> Tensor:
        return outcomes - baseline

A recipe then sets ``algorithm.advantage: outcome`` if the function is in this package. A function of another package is
named ``my_package.my_module:outcome``. It needs a decorator (without a name) only for properties that its signature
does not show.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_rl.system.plugins import Function, Plugin, Registry, parameters, required


@dataclass(frozen=True)
class PolicyLoss(Plugin):
    averages: str = ""
    """Aggregation built into this loss, which overrides ``algorithm.aggregation``; "" if the loss reads ``coefficients``."""
    needs_rollout: bool = False
    """True if the old policy must be the one that sampled the tokens (``algorithm.correction.old_policy=rollout``)."""
    selects: Callable[..., Tensor] | None = None
    """Function that chooses the loss's input ``kept`` over a whole mini-batch; None: the loss has no such input."""

    def ignored(self) -> list[str]:
        """Names of inputs that this loss does not take, so that the configuration keys behind these inputs have no effect."""
        unread = {"weights", "coefficients", "dual_clip"}.difference(parameters(self.function))
        return sorted(unread - {"coefficients"} if self.averages else unread)


@dataclass(frozen=True)
class Aggregation(Plugin):
    denominator: Callable[[Tensor, Tensor], Tensor] | None = None
    """Function (mask, cu_seqlens) -> []; None means the sum of the coefficients over the mask."""


@dataclass(frozen=True)
class KlEstimator(Plugin):
    places: tuple[str, ...] = ("reward", "loss")
    """Values of ``algorithm.kl.place`` with which the estimator's gradient pulls towards the reference."""


@dataclass(frozen=True)
class CorrectionWeight(Plugin):
    bounded: bool = False
    """True if the caller clamps the function's weights to ``max_weight``."""
    per_sequence: bool = False
    """True if the tokens of a sequence share one weight; the mean weight is then taken over sequences."""
    local: bool = False
    """True if the weights of a sequence depend on that sequence alone (see ``Rejection.local``)."""


@dataclass(frozen=True)
class Rejection(Plugin):
    local: bool = False
    """True if the decision for a sequence depends on that sequence alone; the step's sequences are then passed in blocks."""


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
    "logprobs old_logprobs advantages mask cu_seqlens weights coefficients kept clip_low clip_high dual_clip",
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
"""Maps each key below ``algorithm`` to its registry; the options of a key are in ``<key>_options``."""


def needs_critic(advantage_name: str) -> bool:
    """Return whether an advantage requires a critic's ``values``."""
    return "values" in required(ADVANTAGES.find(advantage_name).function)


def needs_groups(advantage_name: str) -> bool:
    """Return whether an advantage compares the responses to one prompt, that is, requires ``group_ids``."""
    return "group_ids" in required(ADVANTAGES.find(advantage_name).function)


def needs_greedy(advantage_name: str) -> bool:
    """Return whether an advantage compares with the prompt's greedy response, that is, requires ``baselines``."""
    return "baselines" in required(ADVANTAGES.find(advantage_name).function)


def relates_tokens(advantage_name: str) -> bool:
    """Return whether a token's advantage depends on other tokens or on an outcome: the function takes borders, groups or outcomes."""
    taken = parameters(ADVANTAGES.find(advantage_name).function)
    return not {"cu_seqlens", "group_ids", "outcomes", "baselines"}.isdisjoint(taken)


def advantage(name: str = "") -> Callable[[Function], Function]:
    """Register an advantage: a function of the fields of ``advantages.Episodes`` and of

    - ``outcomes``: [N] the rewards of each sequence, summed.

    The function returns advantages [T], or [N] if all tokens of a sequence share one advantage. Required inputs shape
    the run:

    - ``values``: the run has a critic. With windows and no critic, a group trains once all of its responses are finished,
      except if the function takes neither ``cu_seqlens``, ``group_ids``, ``outcomes`` nor ``baselines``: its advantages
      cannot depend on what follows, so every window trains.
    - ``group_ids``: the recipe must sample at least two responses per prompt.
    - ``baselines``: one additional response per prompt is generated greedily; no model trains on this response.
    """
    return ADVANTAGES.register(name)


def policy_loss(
    name: str = "", *, averages: str = "", needs_rollout: bool = False, selects: Callable[..., Tensor] | None = None
) -> Callable[[Function], Function]:
    """Register a policy loss: a function of

    - ``logprobs``: [T] float32, with gradient: the log-probs of the policy in training.
    - ``old_logprobs``, ``advantages``: [T] constants.
    - ``mask``: [T] 1 for the tokens to train.
    - ``cu_seqlens``: [N+1] in host memory; a sequence is never split over calls.
    - ``weights``: [T] or None: the correction; multiplies each token's loss and leaves the denominator unchanged.
    - ``coefficients``: [T] or None for 1: the aggregation; multiplies each token's loss and sums up to the denominator.
    - ``clip_low``, ``clip_high``, ``dual_clip``: as in the ``algorithm`` section; a dual clip of 0 is passed as None.

    The function returns an ``algorithms.Loss``, whose metrics are logged under ``policy/``. A loss that already averages
    over sequences is registered with ``averages="sequence_mean"``; a loss whose ratio must be to the policy that sampled
    the tokens with ``needs_rollout=True``. ``selects``: a function of ``logprobs``, ``old_logprobs``, ``advantages``,
    ``mask`` and the loss's options, called with each whole mini-batch before its update (a separate forward pass); its
    result [T] bool is the loss's input ``kept``. It implies ``needs_rollout``.
    """
    needs_rollout = needs_rollout or selects is not None
    return POLICY_LOSSES.register(name, averages=averages, needs_rollout=needs_rollout, selects=selects)


def aggregation(
    name: str = "", *, denominator: Callable[[Tensor, Tensor], Tensor] | None = None
) -> Callable[[Function], Function]:
    """Register an aggregation: a function of ``mask`` [T] and ``cu_seqlens`` [N+1] (in host memory) that returns coefficients [T].

    The coefficients multiply the tokens' losses. They are of any float dtype and on the mask's device; values outside
    the mask are not read. The loss is the sum of the products over all micro-batches and ranks, divided by the sum of
    the coefficients in the mask, or by the sum of ``denominator(mask, cu_seqlens)``.
    """
    return AGGREGATIONS.register(name, denominator=denominator)


def kl_estimator(name: str = "", *, places: tuple[str, ...] = ("reward", "loss")) -> Callable[[Function], Function]:
    """Register an estimator of KL(pi || pi_ref): a function of ``logprobs`` and ``reference_logprobs`` [T] returning [T].

    The tokens were sampled from pi; the gradient flows through ``logprobs``.

    ``places``: "reward" if the policy gradient of the estimate as a cost pulls towards the reference, as k1's does;
    "loss" if the estimate's own gradient does. The configuration refuses every other ``algorithm.kl.place``. An
    unregistered estimator, named by its import path, is accepted for both.
    """
    return KL_ESTIMATORS.register(name, places=places)


def correction_weight(
    name: str = "", *, bounded: bool = False, per_sequence: bool = False, local: bool = False
) -> Callable[[Function], Function]:
    """Register an importance weight of sampled tokens: a function of

    - ``ratios``: ``corrections.LogRatios`` of pi_old over mu, of the counted tokens.
    - ``max_weight``, ``icepop_low``, ``icepop_high``: as in the ``algorithm.correction`` section.

    The function returns [T] float64, at least 0, and 1 where ``ratios`` are 0. ``bounded``: the caller clamps
    the weights to max_weight. ``per_sequence``: the function gives all tokens of a sequence the same weight, and
    ``normalize`` averages over sequences. ``local``: as for ``rejection``.
    """
    return CORRECTION_WEIGHTS.register(name, bounded=bounded, per_sequence=per_sequence, local=local)


def rejection(name: str = "", *, local: bool = False) -> Callable[[Function], Function]:
    """Register a rule that rejects tokens from training: a function of

    - ``ratios``: ``corrections.LogRatios`` of pi_old over mu, of the counted tokens.
    - ``rejection_low``, ``rejection_high``: as in the ``algorithm.correction`` section.

    The function returns [T] bool: the tokens that may train. ``local``: the decision for a sequence depends on that
    sequence alone. A local rule is called with blocks of sequences, which is faster; any other rule gets the whole step
    in one call.
    """
    return REJECTIONS.register(name, local=local)
