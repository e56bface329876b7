"""Which factor makes trainer and servers disagree, from what was measured with one after the other held fixed. Pure."""

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
"""Held fixed one after the other on the same trainer and servers. Each stays fixed: what was sent to a server or taken out of its
cache cannot be taken back. Weights come after the cache, which new weights empty, and before what a stale router would change."""
ALL = (CHAT_TEMPLATE, AS_IT_IS, *HELD_HERE, EXPERT_PARALLELISM, DTYPE)
RELEASED = (SAMPLING, BATCH_SHAPE, ROUTING)
"""Of those, what can be let go again."""
_HELPS = 5.0
"""Times smaller: the share of a mismatch that a factor must take away to be at fault for it."""

REMEDIES = {
    CHAT_TEMPLATE: "bring back the tokenizer files and the chat template that the run began with, or start a new run; evaluate and serve "
    "with the same ones",
    SAMPLING: "servers sample from another distribution than the trainer's log-probs are of: take penalties, min_p, "
    "preferred_sampling_params and logit processors out of rollout.server_args, and let everybody use rollout.temperature",
    BATCH_SHAPE: "the servers' kernels give other numbers in other batches: rollout.deterministic=true, another attention "
    "backend, or a newer SGLang",
    PREFIX_CACHE: "the prefix cache holds what other weights or positions computed: flush it with every publish (nobody else may "
    "send these servers weights), or rollout.server_args={disable-radix-cache: true}",
    WEIGHTS: "the servers hold other weights than the trainer: one trainer per server, the same config.json on both sides; "
    "rollout.weight_sync=disk if a broadcast arrives damaged",
    ROUTING: "trainer and servers choose other experts: policy.moe.routing_replay=R3, and compare router dtype, score function, groups and "
    "correction bias of both sides",
    EXPERT_PARALLELISM: "expert parallelism changes what is computed: compare `megatron-rl doctor --invariance --layouts ep2,...`, and the "
    "servers' ep-size, dispatcher and all-to-all backend",
    DTYPE: "the two sides round in different ways: the same dtype on both (policy.dtype, no dtype or quantization in rollout.server_args), "
    "logits in float32 on both (enable-fp32-lm-head, policy.fp32_head)",
}


@dataclass(frozen=True)
class Trial:
    """What was measured with a factor, and all before it, held fixed."""

    factor: str
    held: str
    """How; or why it was not tried."""
    figures: MismatchStats | None = None
    """None: not tried."""
    bounds: MismatchStats | None = None
    num_tokens: int = 0
    evidence: str = ""
    """What else was seen of the factor."""
    is_at_fault: bool = False
    """Seen without figures: tokens that differ; or a factor that is no longer held, and the two sides disagree again."""

    @property
    def agrees(self) -> bool:
        """Figures are within their bounds. A nan is not."""
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
    """What was held so far makes them agree."""
    measured = [trial for trial in trials if trial.figures is not None]
    return bool(measured) and measured[-1].agrees


def culprits(trials: Sequence[Trial]) -> list[str]:
    """Factors at fault: with them held, a mismatch is gone or several times smaller; or seen otherwise (``is_at_fault``)."""
    found = {trial.factor for trial in trials if trial.is_at_fault}
    before: Trial | None = None
    for trial in trials:
        if trial.figures is None:
            continue
        if before is not None and before.figures is not None and not before.agrees and _helps(before.figures, trial):
            found.add(trial.factor)
        before = trial
    return [name for name in ALL if name in found]


def _helps(before: MismatchStats, trial: Trial) -> bool:
    """inf, of what is no number on one side, is helped by any number."""
    after = math.inf if trial.figures is None else trial.figures.mean
    return trial.agrees or (after < math.inf and after * _HELPS <= before.mean)


def verdict(trials: Sequence[Trial]) -> list[str]:
    """In words, with remedies."""
    found = culprits(trials)
    lines = [f"{name}: {REMEDIES[name]}" for name in found]
    base = next((trial for trial in trials if trial.factor == AS_IT_IS), None)
    if base is not None and base.agrees and not found:
        return ["trainer and servers agree on the tokens that these servers sample now"]
    if base is not None and not base.agrees and not is_settled(trials):
        tried = [trial.factor for trial in trials if trial.figures is not None and trial.factor != AS_IT_IS]
        rest = "what is left" if found else "the mismatch"
        lines.append(
            f"{rest} is none of {', '.join(tried)}: the forward passes themselves differ. Compare rope scaling, attention backend, norms "
            "and head of both sides (`megatron-rl doctor --config` compares what servers were started with; docs/agreement.md)"
        )
    return lines


def table(trials: Sequence[Trial]) -> Table:
    result = Table(title="trainer against servers, one factor after the other held fixed", title_justify="left", box=None, pad_edge=False)
    for name in ("factor", "mean\ndifference", "k3", "beyond\nln 2", "largest", "held fixed by"):
        is_text = name in ("factor", "held fixed by")
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
