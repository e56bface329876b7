"""Generation and training on the cores of one machine: how much each wants, and how much they slow each other down.

The timeline says the CPU seconds of a stage; while only one runs, these over its seconds are the cores that it wants. Where
generation overlaps trainer stages all of them are taken to run at a common rate r, of a machine that is full then:

    r (cpu_g / G + cpu_t / T) = cores, G and T the seconds without the other: G = measured - overlap (1 - r), T alike.

r is 1 where they find room next to each other, as servers on GPUs of their own do.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.simulation.fitting import usual_mean
from megatron_rl.simulation.recorded import RecordedRun
from megatron_rl.tracking.timeline import Span

_LEAST_RATE = 0.1


@dataclass(frozen=True)
class Contention:
    cores: float
    """Of the machine; 0: the run does not say."""
    generate_cores: float
    stage_cores: dict[str, float]
    rate: float
    """At which stages ran while generation and the trainer overlapped."""
    trainer: Sequence[Span]
    generate: Sequence[Span]

    def alone(self, run: RecordedRun, name: str) -> dict[int, float]:
        """Seconds of a stage by step, as if nothing had run next to it."""
        others = self.trainer if name in ("generate", "evaluate") else self.generate
        slowed = name == "generate" or any(span.name == name for span in self.trainer)
        return {
            span.step: span.end_s - span.start_s - (1 - self.rate) * (_overlap_s(span, others) if slowed else 0.0)
            for span in run.spans
            if span.name == name
        }

    def undisturbed(self, span: Span, times_s: np.ndarray) -> np.ndarray:
        """Moments after the start of a generate stage, on a clock that stands still for what others took away."""
        lost = [
            (1 - self.rate)
            * (np.minimum(times_s + span.start_s, other.end_s) - max(span.start_s, other.start_s)).clip(0)
            for other in self.trainer
            if other.end_s > span.start_s and other.start_s < span.end_s
        ]
        return times_s - np.sum(lost, axis=0) if lost else times_s


def contention_of(run: RecordedRun, steps: Sequence[int]) -> Contention:
    chosen = set(steps)
    generate = [span for span in run.spans if span.name == "generate" and span.step in chosen]
    trainer = [span for span in run.spans if span.lane == "trainer" and span.args.get("cpu_s") and span.step in chosen]
    cores = max((float(span.args.get("cores", 0)) for span in generate), default=0.0)
    if not cores or not all("cpu_s" in span.args for span in generate):
        return Contention(0.0, 0.0, {}, 1.0, trainer, generate)
    overlaps = {id(span): _overlap_s(span, generate) for span in trainer}
    overlapping = [span for span in trainer if overlaps[id(span)] > 0]
    rate = _common_rate(
        cores,
        (sum(_cpu_s(span) for span in generate), sum(map(_seconds, generate))),
        (sum(_cpu_s(span) for span in overlapping), sum(map(_seconds, overlapping))),
        sum(overlaps.values()),
    )
    found = Contention(cores, 0.0, {}, rate, trainer, generate)
    alone = found.alone(run, "generate")
    generate_cores = usual_mean(np.array([_cpu_s(span) / max(alone[span.step], 1e-9) for span in generate]))
    stage_cores = {}
    for name in {span.name for span in trainer}:
        alone = found.alone(run, name)
        spans = [span for span in trainer if span.name == name]
        stage_cores[name] = sum(map(_cpu_s, spans)) / max(sum(alone[span.step] for span in spans), 1e-9)
    return Contention(
        cores, min(generate_cores, cores), {k: min(v, cores) for k, v in stage_cores.items()}, rate, trainer, generate
    )


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
