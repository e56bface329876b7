"""Reads a finished run's folder: its configuration, its spans, and the rows of its generate stages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.config.load import load_config
from megatron_rl.config.schedule_facts import Overlap, overlap_of
from megatron_rl.config.schema import Config
from megatron_rl.desk.simulate.lengths import LengthDistribution, empirical, named_lengths, read_lengths
from megatron_rl.errors import UserError
from megatron_rl.schedule.table import GENERATE, LAST, PUBLISH
from megatron_rl.tracking.timeline import Span, read_timeline

DEFAULT_PROMPTS = "fixed:length=200"
"""Prompt lengths of a run that does not record its prompts."""


@dataclass(frozen=True)
class RequestRound:
    """One round of requests of a generate stage; arrays are [rows]. In large rounds the stored rows are a sample of all rows."""

    num_rows: int
    num_tokens: int
    """Number of new tokens of all rows."""
    prompt: np.ndarray
    held: np.ndarray
    new: np.ndarray
    ended: np.ndarray
    """True for responses that ended in this round."""
    seconds: np.ndarray
    """Seconds from arrival at the server to the last token; 0 if unknown."""


@dataclass(frozen=True)
class RecordedRun:
    """A finished run's spans."""

    folder: Path
    spans: Sequence[Span]
    """Spans of completed steps, in the order of their starts."""

    @cached_property
    def num_steps(self) -> int:
        return len(self.steps)

    @cached_property
    def steps(self) -> list[int]:
        """Completed steps, increasing, counted from 1."""
        return sorted({span.step for span in self.spans if span.name == LAST})

    def seconds(self, name: str) -> dict[int, float]:
        """Return a stage's seconds by step, summed if it ran several times; ``generate`` without the pauses of a publish."""
        found: dict[int, float] = {}
        for span in self.spans:
            if span.name == name:
                found[span.step] = found.get(span.step, 0.0) + span.end_s - span.start_s
        if name == GENERATE:
            windows = self.by_name(name)
            for publish in self.by_name(PUBLISH).values():
                window = windows.get(publish.step + 1)  # the only window that this publish can overlap
                if window is not None:
                    found[window.step] -= max(min(window.end_s, publish.end_s) - max(window.start_s, publish.start_s), 0.0)
        return found

    def by_name(self, name: str) -> dict[int, Span]:
        return {span.step: span for span in self.spans if span.name == name}

    @cached_property
    def rounds(self) -> dict[int, list[RequestRound]]:
        """Return the rounds of requests by step; empty if the timeline has no facts of the stages."""
        return {
            span.step: [_round_of(one) for one in span.args["rounds"]]
            for span in self.spans
            if span.name == GENERATE and span.args.get("rounds")
        }

    @property
    def step_s(self) -> np.ndarray:
        """[steps] seconds between the records of consecutive steps; the first step counts from the start of its first stage."""
        ends = self.by_name(LAST)
        begin_s = min(span.start_s for span in self.spans)
        return np.diff([ends[step].end_s for step in self.steps], prepend=begin_s)


def read_run(folder: Path) -> RecordedRun:
    """Read a run's folder. Raises UserError if there is no run, or no completed step in its timeline."""
    path = folder / "timeline.json"
    if not (folder / "config.yaml").is_file() or not path.is_file():
        missing = path if (folder / "config.yaml").is_file() else folder / "config.yaml"
        raise UserError(f"--run {folder}: expected the output folder of a run (run.output_dir), but {missing} does not exist")
    spans = read_timeline(path)
    whole = {span.step for span in spans if span.name == LAST}
    # The oldest steps may have lost spans, and a run resumed from a checkpoint does not repeat them.
    whole &= {span.step for span in spans if span.name == GENERATE}
    kept = sorted((span for span in spans if span.step in whole), key=lambda span: span.start_s)
    if not whole:
        raise UserError(
            f"--run {folder}: {path} has no completed step; give a run with at least a few steps"
        )
    return RecordedRun(folder, kept)


def _round_of(facts: Mapping[str, Any]) -> RequestRound:
    def numbers(name: str) -> np.ndarray:
        return np.array(str(facts[name]).split(), dtype=np.int64)

    return RequestRound(
        num_rows=int(facts["rows"]),
        num_tokens=int(facts["tokens"]),
        prompt=numbers("prompt"),
        held=numbers("held"),
        new=numbers("new"),
        ended=numbers("ended") > 0,
        seconds=numbers("ms") / 1000.0,
    )


def prompt_lengths(run: RecordedRun) -> LengthDistribution:
    fresh = [one.prompt[one.held == 0] for rounds in run.rounds.values() for one in rounds]
    return empirical(np.concatenate(fresh), "the run's prompts")


def response_lengths(run: RecordedRun, *, carries: bool) -> LengthDistribution:
    """Estimate the lengths of all responses that the run started, by the product limit (Kaplan and Meier, 1958).

    The finished responses alone are too short on average, so an unfinished response counts as longer than its tokens so far.
    ``carries``: unfinished responses continue in the next step; otherwise they were discarded.
    """
    lengths, ended, weights = [], [], []
    newest = max(run.rounds)
    for step, rounds in run.rounds.items():
        for one in rounds:
            counts = one.ended | (step == newest) | (not carries)
            lengths.append((one.held + one.new)[counts])
            ended.append(one.ended[counts])
            weights.append(np.full(int(counts.sum()), one.num_rows / max(len(one.new), 1)))
    values, shares = product_limit(np.concatenate(lengths), np.concatenate(ended), np.concatenate(weights))
    edges = np.cumsum(shares)
    mean = float((values * shares).sum())
    return LengthDistribution(
        f"{run.folder} ({int(np.concatenate(ended).sum()):,} ended, mean {mean:.0f})",
        lambda rng, n: values[
            np.minimum(np.searchsorted(edges, rng.random(n) * edges[-1], side="right"), len(values) - 1)
        ],
    )


def product_limit(lengths: np.ndarray, ended: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (values, shares): the distribution of ``lengths``, of which those without ``ended`` are lower limits.

    The share beyond the longest finished response counts as the longest observed length.
    """
    known = lengths >= 1
    lengths, ended, weights = lengths[known], ended[known], weights[known]
    if not len(lengths):
        raise UserError("--run: its timeline has no response; give --lengths")
    values = np.unique(lengths)
    place = np.searchsorted(values, lengths)
    ends = np.bincount(place, weights * ended, len(values))
    leaves = np.bincount(place, weights, len(values))
    at_risk = np.cumsum(leaves[::-1])[::-1]
    survival = np.cumprod(1 - ends / at_risk)
    shares = -np.diff(survival, prepend=1.0)
    shares[-1] += survival[-1]
    some = shares > 0
    return values[some], shares[some]


def config_of_run(run: RecordedRun) -> Config:
    return load_config(run.folder / "config.yaml")


def parse_lengths(words: str) -> LengthDistribution:
    path = Path(words)
    if path.is_dir():
        return load_lengths(read_run(path))
    if path.name in ("metrics.jsonl", "timeline.json"):
        return load_lengths(read_run(path.parent))
    return read_lengths(path) if path.is_file() else named_lengths(words)


def load_lengths(run: RecordedRun) -> LengthDistribution:
    if not run.rounds:
        raise UserError(f"{run.folder}: the run's timeline lacks the lengths of its responses; give --lengths")
    return response_lengths(run, carries=overlap_of(config_of_run(run).schedule) > Overlap.nothing)
