"""Contention of generation and training for one node's cores: the cores that each uses, and their mutual slowdown.

The timeline has the CPU seconds of a stage; divided by its seconds without contention, they are the cores that the stage uses.
While generation overlaps trainer stages, all of them are assumed to run at a common rate r:

    r = k min(1, cores / (servers * c_g + c_t)), c = CPU seconds / seconds alone, seconds alone = measured - overlap (1 - r)

k is 1 if the cores suffice for both, as with servers on separate GPUs. On full cores k is fitted to the run's rows, or is
_FULL_RATE, because busy CPUs also share caches and memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_rl.desk.simulate.clock import FULL_SHARE
from megatron_rl.desk.simulate.recorded_run import RecordedRun
from megatron_rl.schedule.table import GENERATE
from megatron_rl.tracking.timeline import Span

_LEAST_RATE = 0.25
_FULL_RATE = 0.8
"""Rate on full cores, measured on two cores of a shared machine."""


@dataclass(frozen=True)
class Contention:
    cores: float
    """Cores of the node; 0 if the run does not record them."""
    rate: float
    """Speed of stages, relative to no contention, while generation and the trainer overlapped."""
    trainer: Sequence[Span]
    generate: Sequence[Span]
    num_servers: int
    busy_s: float
    """Measured busy seconds of all servers together in the generate stages."""
    beside_s: Mapping[tuple[str, int], float]
    """(stage, step) -> seconds for which generation and a trainer stage overlapped."""

    @property
    def overlap_s(self) -> float:
        return sum(self.beside_s[span.name, span.step] for span in self.trainer)

    @property
    def overlaps(self) -> bool:
        """True if the run has enough overlap to measure the slowdown."""
        return self.cores > 0 and self.overlap_s > 0.05 * sum(map(_seconds, self.generate))

    @property
    def wanted(self) -> float:
        """Cores that all servers and the trainer need together, at ``rate``."""
        lost_s = (1 - self.rate) * self.overlap_s
        server = sum(map(_cpu_s, self.generate)) / max(self.busy_s - self.num_servers * lost_s, 1e-9)
        # If some trainer stages overlap generation, only those count.
        overlaps = self.overlaps
        spans = [s for s in self.trainer if not overlaps or self.beside_s[s.name, s.step] > 0]
        trainer = sum(map(_cpu_s, spans)) / max(sum(map(_seconds, spans)) - lost_s, 1e-9)
        return self.num_servers * min(server, self.cores) + min(trainer, self.cores)

    @property
    def share_of_cores(self) -> float:
        """Share of the needed cores that each gets while servers and trainer overlap."""
        return min(1.0, self.cores / max(self.wanted, 1e-9)) if self.cores else 1.0

    @property
    def overlap_rate(self) -> float:
        """The factor k: the rate divided by the share of the cores."""
        if self.overlaps:
            return min(self.rate / self.share_of_cores, 1.0)
        return _FULL_RATE if self.wanted > FULL_SHARE * self.cores > 0 else 1.0

    def alone(self, run: RecordedRun, name: str) -> dict[int, float]:
        """Return a stage's seconds by step, without contention."""
        found: dict[int, float] = {}
        for span in run.spans:
            if span.name == name:
                lost = (1 - self.rate) * self.beside_s.get((name, span.step), 0.0)
                found[span.step] = found.get(span.step, 0.0) + _seconds(span) - lost
        return found

    def undisturbed(self, starts_s: np.ndarray, ends_s: np.ndarray) -> np.ndarray:
        """Return [intervals] seconds of generation between two moments, without the trainer's slowdown."""
        lost = np.zeros(len(starts_s))
        for other in self.trainer:
            lost += (np.minimum(ends_s, other.end_s) - np.maximum(starts_s, other.start_s)).clip(0)
        return ends_s - starts_s - (1 - self.rate) * lost

    def stage_cores(self, run: RecordedRun) -> dict[str, float]:
        """Return the cores that each stage keeps busy without contention; for generate, per server."""
        if not self.cores:
            return {}
        lost_s = (1 - self.rate) * self.overlap_s * self.num_servers
        found = {GENERATE: sum(map(_cpu_s, self.generate)) / max(self.busy_s - lost_s, 1e-9)}
        for name in {span.name for span in self.trainer}:
            alone = self.alone(run, name)
            spans = [span for span in self.trainer if span.name == name]
            found[name] = sum(map(_cpu_s, spans)) / max(sum(alone[step] for step in {s.step for s in spans}), 1e-9)
        return {name: float(min(cores, self.cores)) for name, cores in found.items()}


def fit_contention(run: RecordedRun, steps: Sequence[int], num_servers: int) -> Contention:
    """Fit the common rate of overlapping stages to their recorded CPU seconds; 1 without enough overlap. Only ``steps`` count."""
    chosen = set(steps)
    generate = [span for span in run.spans if span.name == GENERATE and span.step in chosen]
    trainer = [span for span in run.spans if span.lane == "trainer" and span.args.get("cpu_s") and span.step in chosen]
    cores = max((float(span.args.get("cores", 0)) for span in generate), default=0.0)
    if not all("cpu_s" in span.args for span in generate):
        cores = 0.0
    busy_s = sum(_busy_s(run, span, num_servers) for span in generate)
    beside_s = _beside_s(trainer, generate) | _beside_s(generate, trainer)
    found = Contention(cores, 1.0, trainer, generate, num_servers, busy_s, beside_s)
    for _ in range(30 if found.overlaps else 0):
        full = found.wanted > FULL_SHARE * cores
        rate = (_FULL_RATE if full else 1.0) * found.share_of_cores
        found = replace(found, rate=max((found.rate + rate) / 2, _LEAST_RATE))
    return found


def _busy_s(run: RecordedRun, span: Span, num_servers: int) -> float:
    """Return the seconds of a generate stage in which servers had requests, summed over the servers."""
    rounds = run.rounds.get(span.step, [])
    if len(rounds) != 1 or len(rounds[0].new) < rounds[0].num_rows or not rounds[0].seconds.any():
        return num_servers * _seconds(span)
    own_s = [float(rounds[0].seconds[server::num_servers].max(initial=0.0)) for server in range(num_servers)]
    return max(_seconds(span) - max(own_s), 0.0) + sum(own_s)


def _cpu_s(span: Span) -> float:
    return float(span.args["cpu_s"])


def _seconds(span: Span) -> float:
    return span.end_s - span.start_s


def _beside_s(spans: Sequence[Span], others: Sequence[Span]) -> dict[tuple[str, int], float]:
    """Return the seconds that each of ``spans`` overlapped ``others``, by (name, step), for steps at most 2 apart."""
    by_step: dict[int, list[Span]] = {}
    for other in others:
        by_step.setdefault(other.step, []).append(other)
    found: dict[tuple[str, int], float] = {}
    for span in spans:
        near = [other for step in range(span.step - 2, span.step + 3) for other in by_step.get(step, ())]
        overlap_s = sum(max(min(span.end_s, o.end_s) - max(span.start_s, o.start_s), 0.0) for o in near)
        found[span.name, span.step] = found.get((span.name, span.step), 0.0) + overlap_s
    return found
