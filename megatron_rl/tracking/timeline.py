"""Records when each stage ran: spans on three lanes, and ``timeline.json`` for Perfetto and chrome://tracing.

Invariants:
- Times are seconds since the Unix epoch, so spans of ranks, nodes and resumed processes share one axis.
- Spans that overlap without nesting get separate tracks in the file ("rollout", "rollout 2"): trace viewers cannot draw
  two such spans on one track.
- Memory is bounded: beyond ``max_spans`` the oldest spans are dropped, and the file has their number. The default of 20,000
  covers about 2,000 steps of ten stages in about 10 MB, plus 5 to 15 MB with stage facts. Stage times of all steps stay in
  ``metrics.jsonl``.
Any thread may add spans; an append is the longest wait. Files are written on the caller's thread.
"""

import json
import logging
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.schedule.table import GENERATE, UPDATE_CRITIC
from megatron_rl.system.files.atomic_files import atomic_text_file

logger = logging.getLogger(__name__)

LANES = ("rollout", "trainer", "host")
"""Order of the lanes from the top; other lanes follow below."""
OVERLAP = (GENERATE, UPDATE_CRITIC)
"""The two stages whose overlap is the purpose of windows: the critic trains while the next window is generated."""

_MICROSECONDS = 1_000_000


@dataclass(frozen=True)
class Span:
    """One execution of a stage, with start and end in Unix seconds."""

    name: str
    """Stage name: generate, update_critic, ..."""
    lane: str
    """Resource that the stage occupies: rollout, trainer or host."""
    start_s: float
    end_s: float
    step: int
    args: Mapping[str, Any] = field(default_factory=dict)
    """Additional facts that the trace viewer shows on a click."""


def _merged(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of intervals as disjoint intervals in order."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > start:
            merged.append((start, end))
    return merged


def overlap_intervals(spans: Iterable[Span], name_a: str, name_b: str) -> list[tuple[float, float]]:
    """Disjoint intervals, in order, in which at least one span of each name runs."""
    spans = list(spans)
    queue_a = _merged((span.start_s, span.end_s) for span in spans if span.name == name_a)
    queue_b = _merged((span.start_s, span.end_s) for span in spans if span.name == name_b)
    shared = []
    index_a = index_b = 0
    while index_a < len(queue_a) and index_b < len(queue_b):
        start = max(queue_a[index_a][0], queue_b[index_b][0])
        end = min(queue_a[index_a][1], queue_b[index_b][1])
        if end > start:
            shared.append((start, end))
        if queue_a[index_a][1] < queue_b[index_b][1]:
            index_a += 1
        else:
            index_b += 1
    return shared


def overlap_seconds(spans: Iterable[Span], name_a: str, name_b: str) -> float:
    """Seconds during which a span of each name runs; overlapping spans of one name count once."""
    return sum(end - start for start, end in overlap_intervals(spans, name_a, name_b))


def assign_tracks(spans: Sequence[Span]) -> list[int]:
    """Track number of every span of one lane: spans on a track nest or follow each other, never cross."""
    tracks: list[list[float]] = []  # ends of the open spans per track, outermost first
    numbers = [0] * len(spans)
    # If two spans start at the same time, take the longer one first, so that the shorter one nests.
    for index in sorted(range(len(spans)), key=lambda index: (spans[index].start_s, -spans[index].end_s)):
        span = spans[index]
        for open_ends in tracks:
            while open_ends and open_ends[-1] <= span.start_s:
                open_ends.pop()
        fits = (number for number, ends in enumerate(tracks) if not ends or span.end_s <= ends[-1])
        number = next(fits, len(tracks))
        if number == len(tracks):
            tracks.append([])
        tracks[number].append(span.end_s)
        numbers[index] = number
    return numbers


def _chrome_events(spans: Sequence[Span], origin_s: float) -> Iterator[dict[str, Any]]:
    """Spans in the Chrome trace format: complete events in microseconds after ``origin_s``, and names of tracks."""
    present = {span.lane for span in spans}
    lanes = [lane for lane in LANES if lane in present] + sorted(present - set(LANES))
    yield _metadata("process_name", 0, name="megatron_rl")
    next_thread = 1
    for lane in lanes:
        lane_spans = [span for span in spans if span.lane == lane]
        tracks = assign_tracks(lane_spans)
        for number in range(max(tracks) + 1):
            name = lane if number == 0 else f"{lane} {number + 1}"
            yield _metadata("thread_name", next_thread + number, name=name)
            yield _metadata("thread_sort_index", next_thread + number, sort_index=next_thread + number)
        for span, number in zip(lane_spans, tracks, strict=True):
            yield {
                "ph": "X",
                "name": span.name,
                "cat": lane,
                "pid": 1,
                "tid": next_thread + number,
                "ts": round((span.start_s - origin_s) * _MICROSECONDS, 3),
                "dur": round((span.end_s - span.start_s) * _MICROSECONDS, 3),
                "args": {"step": span.step, **span.args},
            }
        next_thread += max(tracks) + 1


def _metadata(kind: str, thread: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": 1, "tid": thread, "ts": 0, "args": args}


def write_trace(path: str | Path, spans: Sequence[Span], num_dropped_spans: int = 0) -> None:
    """Write a trace file atomically (about 0.1 s for 20,000 spans), one event at a time. Raises OSError."""
    origin_s = min((span.start_s for span in spans), default=0.0)
    about = json.dumps({"origin_unix_s": origin_s, "dropped_spans": num_dropped_spans})
    with atomic_text_file(path) as file:
        file.write(f'{{"displayTimeUnit": "ms", "otherData": {about}, "traceEvents": [')
        for number, event in enumerate(_chrome_events(spans, origin_s)):
            file.write(f"{',' if number else ''}\n{json.dumps(event, default=str)}")
        file.write("\n]}")


def read_timeline(path: str | Path) -> list[Span]:
    """Spans of a file written by ``Timeline.write``; an empty list if it is missing, or unreadable (with a warning)."""
    path = Path(path)
    if not path.exists():
        return []
    try:
        trace = json.loads(path.read_text())
        origin_s = trace["otherData"]["origin_unix_s"]
        return [_span_of(event, origin_s) for event in trace["traceEvents"] if event["ph"] == "X"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s: expected a trace written by megatron_rl, got %r; treated as empty", path, error)
        return []


def _span_of(event: Mapping[str, Any], origin_s: float) -> Span:
    start_s = origin_s + event["ts"] / _MICROSECONDS
    args = dict(event["args"])
    step = args.pop("step")
    return Span(event["name"], event["cat"], start_s, start_s + event["dur"] / _MICROSECONDS, step, args)


class Timeline:
    """Collects spans from any thread. A resumed run passes the spans of the steps before the resumed one:

    timeline = Timeline(spans=[span for span in read_timeline(path) if span.step < resume_step])
    """

    def __init__(self, *, max_spans: int = 20_000, spans: Iterable[Span] = ()):
        if max_spans < 1:
            raise ValueError(f"max_spans: expected at least 1, got {max_spans}")
        self._lock = threading.Lock()
        self._spans: deque[Span] = deque(maxlen=max_spans)
        self._num_dropped = 0
        self._warned = False
        for span in spans:
            self.add(span)

    def add(self, span: Span) -> None:
        """Add a finished span; its times are Unix seconds."""
        with self._lock:
            self._num_dropped += len(self._spans) == self._spans.maxlen
            self._spans.append(span)

    def spans(self) -> list[Span]:
        """A copy of the stored spans, in the order in which they ended."""
        with self._lock:
            return list(self._spans)

    def stage_seconds(self, step: int) -> dict[str, float]:
        """Seconds of every stage of one step; a stage that ran several times counts with its sum."""
        seconds: dict[str, float] = {}
        with self._lock:
            # Search from the newest: spans of a step are among those of the last few steps.
            for span in reversed(self._spans):
                if span.lane not in LANES:  # runs alongside the stages, so its step number is not monotonic
                    continue
                if span.step == step:
                    seconds[span.name] = seconds.get(span.name, 0.0) + span.end_s - span.start_s
                elif span.step < step - 2:
                    break
        return dict(reversed(seconds.items()))

    def idle_shares(self, since_s: float, until_s: float, running: Iterable[tuple[str, float]] = ()) -> dict[str, float]:
        """Idle fraction of the time between ``since_s`` and ``until_s``, for each lane that has spans.

        ``running``: name and seconds so far of stages that have not ended.
        """
        with self._lock:
            spans = [span for span in self._spans if span.end_s > since_s]
            lane_of = {span.name: span.lane for span in self._spans}
        ended = [(span.lane, span.start_s, span.end_s) for span in spans]
        open_spans = [(lane_of[name], until_s - seconds, until_s) for name, seconds in running if name in lane_of]
        shares = {}
        for lane in sorted(set(lane_of.values())):
            times = [(max(start, since_s), min(end, until_s)) for one, start, end in ended + open_spans if one == lane]
            busy_s = sum(end - start for start, end in _merged(times))
            shares[lane] = 1.0 - busy_s / (until_s - since_s) if until_s > since_s else 0.0
        return shares

    def overlap_seconds(self, name_a: str, name_b: str) -> float:
        """Seconds during which both stages run, over the stored spans."""
        return overlap_seconds(self.spans(), name_a, name_b)

    def write(self, path: str | Path) -> None:
        """Write the trace file. A failure is one warning, never an error."""
        with self._lock:
            spans, num_dropped = list(self._spans), self._num_dropped
        try:
            write_trace(path, spans, num_dropped)
        except OSError as error:
            if not self._warned:
                self._warned = True
                logger.warning("cannot write %s (%s); spans stay in memory. Free space on its disk", path, error)
