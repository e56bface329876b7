"""Finds the factor that makes trainer and servers disagree, from measurements with more and more factors fixed. Pure."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from megatron_rl.algorithms.mismatch import MismatchStats

CHAT_TEMPLATE, AS_IT_IS = "chat template", "as the run does"
SAMPLING, BATCH_SHAPE, PREFIX_CACHE, WEIGHTS, ROUTING = "sampling mask", "batch shape", "prefix cache", "weights", "routing"
EXPERT_PARALLELISM, DTYPE = "expert parallelism", "dtype"
HELD_HERE = (SAMPLING, BATCH_SHAPE, PREFIX_CACHE, WEIGHTS, ROUTING)
"""Factors fixed one at a time on the same trainer and servers. Each stays fixed: a sent weight or an evicted cache entry cannot be
undone. Weights come after the prefix cache, which new weights empty, and before routing, which depends on the router's weights."""
ALL = (CHAT_TEMPLATE, AS_IT_IS, *HELD_HERE, EXPERT_PARALLELISM, DTYPE)
RELEASED = (SAMPLING, BATCH_SHAPE, ROUTING)
"""Factors among ``HELD_HERE`` that can be released again."""
_HELPS = 5.0
"""A factor is a cause if fixing it makes the mismatch smaller by this ratio."""

REMEDIES = {
    CHAT_TEMPLATE: "restore the tokenizer files and the chat template that the run started with, or start a new run; evaluate and serve "
    "with the same files",
    SAMPLING: "servers sample from another distribution than the one of the trainer's log-probs: remove penalties, min_p, "
    "preferred_sampling_params and logit processors from rollout.server_args, and let every request use rollout.temperature",
    BATCH_SHAPE: "the servers' kernels give different values in different batches: use rollout.deterministic=true, another attention "
    "backend, or a newer SGLang",
    PREFIX_CACHE: "the prefix cache has entries that other weights or positions computed: flush it with every publish (no other process "
    "may send weights to these servers), or set rollout.server_args={disable-radix-cache: true}",
    WEIGHTS: "the servers have other weights than the trainer: use one trainer per server and the same config.json on both sides; "
    "set rollout.weight_sync=disk if a broadcast corrupts weights",
    ROUTING: "trainer and servers choose different experts: set policy.moe.routing_replay=R3, and compare router dtype, score function, "
    "groups and correction bias of both sides",
    EXPERT_PARALLELISM: "expert parallelism changes the result: compare `megatron-rl doctor --invariance --layouts ep2,...`, and the "
    "servers' ep-size, dispatcher and all-to-all backend",
    DTYPE: "the two sides round differently: use the same dtype on both (policy.dtype, no dtype or quantization in rollout.server_args), "
    "logits in float32 on both (enable-fp32-lm-head, policy.fp32_head)",
}


@dataclass(frozen=True)
class Trial:
    """Measurement with a factor, and all factors before it, held fixed."""

    factor: str
    held: str
    """Method of fixing the factor, or the reason why it was not tried."""
    figures: MismatchStats | None = None
    """Measured differences, or None if the factor was not tried."""
    bounds: MismatchStats | None = None
    num_tokens: int = 0
    evidence: str = ""
    """Additional observations about the factor."""
    is_at_fault: bool = False
    """True if the factor is a cause without figures: tokens differ, or releasing it makes the two sides disagree again."""

    @property
    def agrees(self) -> bool:
        """True if the trial was measured and all figures are within their bounds; NaN is out of bounds."""
        return self.figures is not None and self.bounds is not None and all(
            value <= vars(self.bounds)[name] for name, value in vars(self.figures).items()
        )

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Trial":
        figures = {name: MismatchStats(**values[name]) if values[name] else None for name in ("figures", "bounds")}
        return cls(**{**values, **figures})


def is_settled(trials: Sequence[Trial]) -> bool:
    """True if trainer and servers agree in the last measured trial, in which all factors tried so far are fixed."""
    measured = [trial for trial in trials if trial.figures is not None]
    # Factors stay fixed, so the last measurement includes all of them.
    return bool(measured) and measured[-1].agrees


def culprits(trials: Sequence[Trial]) -> list[str]:
    """Causes of the mismatch: factors that remove it or shrink it several times when fixed, or with ``is_at_fault`` set."""
    causes = {trial.factor for trial in trials if trial.is_at_fault}
    before: Trial | None = None
    for trial in trials:
        if trial.figures is None:
            continue
        if before is not None and before.figures is not None and not before.agrees and _helps(before.figures, trial):
            causes.add(trial.factor)
        before = trial
    return [name for name in ALL if name in causes]


def _helps(before: MismatchStats, trial: Trial) -> bool:
    """True if fixing the trial's factor helps. A finite difference counts as an improvement over inf."""
    after = math.inf if trial.figures is None else trial.figures.mean
    return trial.agrees or (after < math.inf and after * _HELPS <= before.mean)


def verdict(trials: Sequence[Trial]) -> list[str]:
    """Conclusions with remedies, one per line."""
    causes = culprits(trials)
    lines = [f"{name}: {REMEDIES[name]}" for name in causes]
    base = next((trial for trial in trials if trial.factor == AS_IT_IS), None)
    if base is not None and base.agrees and not causes:
        return ["trainer and servers agree on the tokens that these servers sample now"]
    if base is not None and not base.agrees and not is_settled(trials):
        tried = [trial.factor for trial in trials if trial.figures is not None and trial.factor != AS_IT_IS]
        rest = "the remaining mismatch" if causes else "the mismatch"
        lines.append(
            f"{rest} is not caused by {', '.join(tried)}: the forward passes themselves differ. Compare rope scaling, attention backend, "
            "norms and head of both sides (`megatron-rl doctor --config` compares the servers' options; docs/agreement.md)"
        )
    return lines


def table(trials: Sequence[Trial]) -> Table:
    result = Table(title="trainer against servers, with one more factor fixed in each row", title_justify="left", box=None, pad_edge=False)
    for name in ("factor", "mean\ndifference", "k3", "beyond\nln 2", "largest", "fixed by"):
        is_text = name in ("factor", "fixed by")
        result.add_column(name, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
    at_fault = culprits(trials)
    for trial in trials:
        result.add_row(_name(trial, at_fault), *_numbers(trial.figures), "; ".join(filter(None, (trial.held, trial.evidence))))
    return result


def _name(trial: Trial, at_fault: Sequence[str]) -> str:
    return f"{trial.factor} <==" if trial.factor in at_fault else trial.factor


def _numbers(figures: MismatchStats | None) -> Iterator[str]:
    if figures is None:
        return iter(("-",) * 4)
    return iter((f"{figures.mean:.2g}", f"{figures.k3:.2g}", f"{figures.outliers:.2%}", f"{figures.max:.2g}"))
