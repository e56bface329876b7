"""Generation and training on the cores of one machine: how much each wants, and how much they slow each other down.

The timeline says the CPU seconds of a stage; while only one runs, these over its seconds are the cores that it wants. Where
generation overlaps trainer stages all of them are taken to run at a common rate r, of a machine that is full then:

    r (cpu_g / G + cpu_t / T) = cores, G and T the seconds without the other: G = measured - overlap (1 - r), T alike.

r is 1 where they find room next to each other, as servers on GPUs of their own do.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.simulation.recorded import RecordedRun
from megatron_rl.tracking.timeline import Span

_LEAST_RATE = 0.1
_FULL_RATE, _FULL_SHARE = 0.8, 0.85
"""Where generation and the trainer together want more than this share of the cores, they usually run at this rate next to each
other: two busy CPUs share more than cores. Measured on two cores of a shared machine."""


@dataclass(frozen=True)
class Contention:
    cores: float
    """Of the machine; 0: the run does not say."""
    rate: float
    """At which stages ran while generation and the trainer overlapped."""
    trainer: Sequence[Span]
    generate: Sequence[Span]

    @property
    def overlaps(self) -> bool:
        """Enough of them that the run tells how much they slow each other down."""
        overlap_s = sum(_overlap_s(span, self.generate) for span in self.trainer)
        return self.cores > 0 and overlap_s > 0.05 * sum(map(_seconds, self.generate))

    @property
    def usual_rate(self) -> float:
        """Of stages that overlap on a machine with such stages; a run says it exactly only if they did."""
        wanted = [
            sum(map(_cpu_s, s)) / max(sum(map(_seconds, s)), 1e-9) for s in (self.generate, self.trainer) if self.cores
        ]
        is_full = self.cores > 0 and sum(wanted) > _FULL_SHARE * self.cores
        return min(_FULL_RATE if is_full else 1.0, self.rate)

    def alone(self, run: RecordedRun, name: str) -> dict[int, float]:
        """Seconds of a stage by step, as if nothing had run next to it."""
        others = self.trainer if name in ("generate", "evaluate") else self.generate
        slowed = name == "generate" or any(span.name == name for span in self.trainer)
        found: dict[int, float] = {}
        for span in run.spans:
            if span.name == name:
                lost = (1 - self.rate) * _overlap_s(span, others) if slowed else 0.0
                found[span.step] = found.get(span.step, 0.0) + _seconds(span) - lost
        return found

    def undisturbed(self, starts_s: np.ndarray, ends_s: np.ndarray) -> np.ndarray:
        """[intervals] seconds of generation between two moments, without what the trainer took away."""
        lost = np.zeros(len(starts_s))
        for other in self.trainer:
            lost += (np.minimum(ends_s, other.end_s) - np.maximum(starts_s, other.start_s)).clip(0)
        return ends_s - starts_s - (1 - self.rate) * lost

    def stage_cores(self, run: RecordedRun) -> dict[str, float]:
        """Cores that each stage keeps busy where nothing else runs."""
        found = {}
        for name in {span.name for span in (*self.trainer, *self.generate)}:
            alone = self.alone(run, name)
            spans = [span for span in (*self.trainer, *self.generate) if span.name == name]
            seconds = sum(alone[step] for step in {span.step for span in spans})
            found[name] = min(sum(map(_cpu_s, spans)) / max(seconds, 1e-9), self.cores)
        return found if self.cores else {}


def contention_of(run: RecordedRun, steps: Sequence[int]) -> Contention:
    """The rate is the largest that CPU seconds allow."""
    chosen = set(steps)
    generate = [span for span in run.spans if span.name == "generate" and span.step in chosen]
    trainer = [span for span in run.spans if span.lane == "trainer" and span.args.get("cpu_s") and span.step in chosen]
    cores = max((float(span.args.get("cores", 0)) for span in generate), default=0.0)
    if not cores or not all("cpu_s" in span.args for span in generate):
        return Contention(0.0, 1.0, trainer, generate)
    overlaps = {id(span): _overlap_s(span, generate) for span in trainer}
    overlapping = [span for span in trainer if overlaps[id(span)] > 0]
    rate = _common_rate(
        cores,
        (sum(map(_cpu_s, generate)), sum(map(_seconds, generate))),
        (sum(map(_cpu_s, overlapping)), sum(map(_seconds, overlapping))),
        sum(overlaps.values()),
    )
    return Contention(cores, rate, trainer, generate)


def _common_rate(cores: float, generate: tuple[float, float], trainer: tuple[float, float], overlap_s: float) -> float:
    """generate, trainer: (CPU seconds, seconds) of what overlapped."""
    if not overlap_s:
        return 1.0

    def wanted(rate: float) -> float:
        lost = overlap_s * (1 - rate)
        return rate * sum(cpu / max(seconds - lost, 1e-9) for cpu, seconds in (generate, trainer))

    low, high = _LEAST_RATE, 1.0
    if wanted(1.0) <= cores * 0.999:
        return 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if wanted(middle) < cores else (low, middle)
    return (low + high) / 2


def _cpu_s(span: Span) -> float:
    return float(span.args["cpu_s"])


def _seconds(span: Span) -> float:
    return span.end_s - span.start_s


def _overlap_s(span: Span, others: Sequence[Span]) -> float:
    return sum(max(min(span.end_s, o.end_s) - max(span.start_s, o.start_s), 0.0) for o in others)
