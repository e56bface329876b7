"""Records a run: metrics file, trackers, timeline, display and report. Nothing here stops training."""

import math
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.config.derived import is_due
from megatron_rl.config.load import config_to_yaml
from megatron_rl.config.schema import Config
from megatron_rl.data.tokenizer import TokenText
from megatron_rl.system.files.atomic_files import write_atomic
from megatron_rl.system.processes.host_memory import host_used_share
from megatron_rl.tracking.console import TrainingConsole
from megatron_rl.tracking.metrics_file import MetricsRow, MetricsWriter, read_metrics
from megatron_rl.tracking.samples_file import FOLDER, sample_files, write_samples
from megatron_rl.tracking.sinks.all_trackers import TrackerSet
from megatron_rl.tracking.status import StatusFile
from megatron_rl.tracking.timeline import Span, Timeline, read_timeline

WriteReport = Callable[[Path], None]
"""Writes report.html into the folder of a run."""
_NEWEST_STEPS = 16
"""Number of newest steps that are kept while older ones are removed."""
_REPEATED = re.compile(r"(<[^<>\s]{1,40}>)\1{7,}")


@dataclass(frozen=True)
class Evaluation:
    """Accuracy on held-out prompts at one point of the run."""

    step: int
    """Steps done before the evaluation."""
    accuracy: float
    accuracy_stderr: float | None
    """Standard error over prompts; None for a single prompt."""
    elapsed_s: float
    """Seconds since the first step started; 0 before it."""


class Recorder:
    """Context manager around the run; on exit it writes the report and ends the runs in all stores."""

    def __init__(
        self,
        config: Config,
        *,
        restored: Mapping[str, Any] | None,
        title: str,
        spelling: TokenText | None = None,
        write_report: WriteReport | None = None,
    ) -> None:
        """``restored``: the driver's state of the checkpoint that the run resumes from; None for a new run.

        Records up to the checkpoint are kept. Records of later steps are removed, because the run repeats them.
        ``spelling``: converts stored responses to text; None: they have no texts. ``write_report``: None: the run has no report.html.
        """
        first_step = restored["num_steps_done"] if restored else 0
        self._config = config
        self._folder = Path(config.run.output_dir)
        self._folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self._folder / "config.yaml", config_to_yaml(config))
        earlier = read_timeline(self._folder / "timeline.json") if restored else []
        self.timeline = Timeline(spans=[span for span in earlier if span.step <= first_step])
        self.running: Callable[[], list[tuple[str, float]]] = list
        """Returns the stages in progress; set to the stage runner's method once the runner exists."""
        self.console = TrainingConsole(
            config.run.num_steps,
            title=title,
            first_step=first_step,
            running=lambda: self.running(),
            left_s=lambda: (config.run.stop_after_s or math.inf) - self.elapsed_s,
        )
        # Recorded steps count from 1. Steps after the checkpoint will be repeated, so their lines are removed.
        self._metrics = MetricsWriter(
            self._folder / "metrics.jsonl",
            resume_step=first_step + 1 if restored else 0,
            warn=self.console.warning,
        )
        self.samples = SampleStore(
            self._folder, spelling, first_step=first_step, max_gib=config.tracking.samples_gib, warn=self.console.warning
        )
        self._trackers = TrackerSet(config, resume=bool(config.run.resume), warn=self.console.warning)
        self._trackers.log_artifact(self._folder / "config.yaml")
        self._started_s = self._last_end_s = time.time()
        self._earlier_s = self._num_tokens = 0.0
        self.num_steps_done = first_step
        self.evaluations: list[Evaluation] = []
        self._stage_seconds: dict[str, float] = {}
        self._before_step: dict[str, float] = {}
        self._early: dict[int, dict[str, float]] = {}
        """Metrics measured alongside a step before its row is written, keyed by step."""
        self._lock = threading.Lock()
        self._report = write_report
        self._work: dict[tuple[str, int], dict[str, Any]] = {}
        # A single thread, because matplotlib opens its font files again in each new one.
        self._reporter = ThreadPoolExecutor(1, thread_name_prefix="report")
        self._written: Future[None] | None = None
        if restored:
            self._take_over(first_step, restored.get("metrics") or {})
        self._status = StatusFile(self._folder, self._now)

    def __enter__(self) -> "Recorder":
        self.console.__enter__()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, *rest: object) -> None:
        self.console.__exit__(kind, error, *rest)
        interrupted = kind is not None and issubclass(kind, KeyboardInterrupt)
        reason = f"{kind.__name__}: {error}" if kind else ""
        self._status.end("finished" if kind is None else "stopped" if interrupted else "failed", reason)
        self.samples.close()
        self._reporter.submit(self._write_report).result()
        self._reporter.shutdown()
        for name in ("report.html", "timeline.json", "metrics.jsonl"):
            if (self._folder / name).is_file():
                self._trackers.log_artifact(self._folder / name)
        # Stay well within the 30 s that torchrun gives its ranks to stop after Ctrl-C.
        self._trackers.close("FINISHED" if kind is None else "KILLED" if interrupted else "FAILED", timeout_s=10.0)
        self._metrics.close()

    def _take_over(self, first_step: int, newest: Mapping[str, float]) -> None:
        """Restore the sums of the run so far. ``newest``: metrics of the last step, whose row a kill may have prevented."""
        rows = read_metrics(self._folder / "metrics.jsonl")
        if newest and first_step not in [row.step for row in rows]:
            self.log(first_step, dict(newest))
            rows.append(MetricsRow(first_step, time.time(), dict(newest)))
        for row in rows:
            self._earlier_s += row.metrics.get("step/time_s", 0.0)
            self._num_tokens += row.metrics.get("step/tokens_generated", 0.0)
            if "eval/accuracy" in row.metrics:
                accuracy, error = row.metrics["eval/accuracy"], row.metrics.get("eval/accuracy_stderr")
                self.evaluations.append(Evaluation(row.step, accuracy, error, self._earlier_s))
            for name, seconds in row.metrics.items():
                if name.startswith("time/") and name.endswith("_s"):
                    self._add_stage(name.removeprefix("time/").removesuffix("_s"), seconds)

    def add_to(self, step: int, metrics: dict[str, float], began_s: float = 0.0) -> None:
        """Add metrics measured alongside or after a step, counted from 1. Callable from any thread.

        ``began_s``: start of an evaluation alongside training, which has a separate lane; 0 for other metrics.
        """
        if began_s:
            self.timeline.add(Span("evaluation", "evaluation", began_s, time.time(), step))
        with self._lock:
            if step > self.num_steps_done:
                self._early.setdefault(step, {}).update(metrics)
                return
        self._metrics.add_to(step, metrics)
        self._trackers.log(step, metrics)

    def exported(self, folder: Path, while_waiting: Callable[[], None]) -> None:
        """Register the run's policy after its export as a Hugging Face folder. ``while_waiting`` is called every few seconds."""
        self._trackers.register(folder, while_waiting)

    def log_metrics(self, metrics: dict[str, float]) -> None:
        """Store metrics measured before a step; they are logged with that step."""
        self._before_step |= metrics

    def flush_records(self) -> None:
        """Flush timeline and samples to disk, so that a killed run resumes with them."""
        self.timeline.write(self._folder / "timeline.json")
        self.samples.finish_background_save()

    @property
    def accuracies(self) -> dict[int, float]:
        """Accuracy of all evaluations of the run, keyed by steps done before them."""
        return {evaluation.step: evaluation.accuracy for evaluation in self.evaluations}

    def _add_stage(self, name: str, seconds: float) -> None:
        self._stage_seconds[name] = self._stage_seconds.get(name, 0.0) + seconds

    def log_stage_facts(self, name: str, step: int, **facts: Any) -> None:
        """Store facts about a stage's work, before or after its end; the timeline's span includes them."""
        self._work.setdefault((name, step), {}).update(facts)

    def stage_done(self, name: str, lane: str, step: int, started_s: float, ended_s: float) -> None:
        """Record a finished stage of ``step``, from 0. Called by the stage runner.

        ``lane``: row in the timeline. Start and end are Unix seconds.
        """
        self.timeline.add(Span(name, lane, started_s, ended_s, step + 1, self._work.setdefault((name, step), {})))
        self._add_stage(name, ended_s - started_s)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Log metrics now. Steps count from 1; step 0 is the evaluation before the first step."""
        now_s = time.time()
        self._metrics.log(step, metrics, time_s=now_s)
        self._trackers.log(step, metrics, time_s=now_s)

    def end(self, step: int, metrics: dict[str, float], *, num_server_restarts: int) -> None:
        """Write the record of a finished ``step``, which counts from 0; it is recorded as ``step + 1``."""
        seconds = self.timeline.stage_seconds(step + 1)
        now_s = time.time()
        metrics = self._before_step | metrics | {f"time/{name}_s": duration for name, duration in seconds.items()}
        self._before_step = {}
        metrics["step/time_s"] = now_s - self._last_end_s
        metrics["step/tokens_per_s"] = metrics["step/tokens_generated"] / metrics["step/time_s"]
        metrics["rollout/num_server_restarts"] = float(num_server_restarts)
        metrics["memory/host_used_share"] = host_used_share()
        idle = self.timeline.idle_shares(self._last_end_s, now_s, self.running())
        metrics |= {f"time/{lane}_idle_share": idle[lane] for lane in ("rollout", "trainer") if lane in idle}
        self._last_end_s = now_s
        # Delete in place: stages of a later step may add their facts at the same time.
        for key in [key for key in list(self._work) if key[1] <= step]:
            del self._work[key]
        self._num_tokens += metrics["step/tokens_generated"]
        with self._lock:
            # Under the lock, so that ``add_to`` finds the row either not written yet or complete.
            metrics |= self._early.pop(step + 1, {})
            self.log(step + 1, metrics)
            self.num_steps_done = step + 1
        self.console.update(step + 1, metrics)
        # A report may take longer than a step, so a report that is due meanwhile is left out.
        is_written = self._written is None or self._written.done()
        if is_due(step + 1, self._config.tracking.report_every_steps) and is_written:
            self._written = self._reporter.submit(self._write_report)

    def evaluated(self, num_steps_done: int, accuracy: float, accuracy_stderr: float | None) -> None:
        """Store an evaluation for the summary."""
        elapsed_s = self.elapsed_s if num_steps_done else 0.0
        self.evaluations.append(Evaluation(num_steps_done, accuracy, accuracy_stderr, elapsed_s))

    def _now(self) -> dict[str, Any]:
        """Fields of status.json other than the state. Called on the status thread."""
        return {
            "step": self.num_steps_done,
            "stages": self.running(),
            "warnings": self.console.newest_warnings,
            "num_warnings": self.console.num_warnings,
        }

    def start_clock(self) -> None:
        """Start the clock of the first step and of the run."""
        self._status.training()
        self._started_s = self._last_end_s = time.time()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the first step started, including the steps before a resume."""
        return self._earlier_s + time.time() - self._started_s

    @property
    def num_tokens_generated(self) -> int:
        return int(self._num_tokens)

    @property
    def stage_seconds(self) -> dict[str, float]:
        """Seconds by stage over the whole run; stages overlap, so the sum may exceed the wall-clock time."""
        return dict(self._stage_seconds)

    def _write_report(self) -> None:
        try:
            self.timeline.write(self._folder / "timeline.json")
            if self._report is not None:
                self._report(self._folder)
        except Exception as error:
            self.console.warning(f"the report could not be written: {type(error).__name__}: {error}")


class SampleStore:
    """Stores a run's responses during training on a writer thread: limited in size on disk, each step once, safe against kills.

    Waits: ``add`` waits for the previous step's write only; a checkpoint waits for the rows of its step
    (``finish_background_save``), so that a run resumed from it lacks none. Writing never raises into training.
    """

    def __init__(
        self, folder: Path, spelling: TokenText | None, *, first_step: int, max_gib: float, warn: Callable[[str], None]
    ) -> None:
        """``first_step``: steps done before this start; stored rows of later steps are removed, because the run repeats them."""
        self._folder, self._spelling, self._max_bytes, self._warn = folder, spelling, int(max_gib * 2**30), warn
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="samples")
        self._written: Future[None] | None = None
        self._has_warned = False
        for step, path in sample_files(folder).items():
            if step > first_step:
                path.unlink()
        # A kill leaves partial files.
        for torn in (folder / FOLDER).glob(".*.partial"):
            torn.unlink()

    def add(self, step: int, columns: dict[str, Any]) -> None:
        """Store rows of ``step``, counted from 1, in the format of ``write_samples`` without the texts of the tokens."""
        # One step at a time: a slow disk delays training before rows of many steps fill the memory.
        self.finish_background_save()
        self._written = self._writer.submit(self._write, step, columns)

    def finish_background_save(self) -> None:
        """Wait until all added rows are on disk."""
        if self._written is not None:
            self._written.result()

    def close(self) -> None:
        self._writer.shutdown()

    def _write(self, step: int, columns: dict[str, Any]) -> None:
        try:
            write_samples(self._folder, step, columns | self._texts(columns))
            files = sample_files(self._folder)
            for old in steps_to_drop({number: path.stat().st_size for number, path in files.items()}, self._max_bytes):
                files[old].unlink(missing_ok=True)
        except Exception as error:
            if not self._has_warned:
                self._has_warned = True
                self._warn(f"the responses of step {step} could not be stored ({type(error).__name__}: {error}); training continues")

    def _texts(self, columns: Mapping[str, Any]) -> dict[str, list[Any]]:
        if self._spelling is None:
            return {name: [""] * len(columns["id"]) for name in ("prompt", "response")} | {"token_ends": columns["token_ids"]}
        prompts = [self._spelling.spelled(ids) for ids in columns["prompt_ids"]]
        responses = [self._spelling.spelled(ids) for ids in columns["token_ids"]]
        return {
            # An image is thousands of equal tokens: print one with a count.
            "prompt": [_REPEATED.sub(lambda found: f"{found[1]}[{len(found[0]) // len(found[1])}]", text) for text, _ in prompts],
            "response": [text for text, _ in responses],
            "token_ends": [ends for _, ends in responses],
        }


def steps_to_drop(sizes: Mapping[int, int], max_bytes: int) -> Sequence[int]:
    """Steps to remove so that the rest fits: first those among the older steps whose neighbors are closest together.

    A long run thus keeps its newest steps and its past at even distances. ``sizes``: bytes by step.
    """
    left, removed = sorted(sizes), []
    total = sum(sizes.values())
    while total > max_bytes and left:
        inner = range(1, len(left) - _NEWEST_STEPS)
        # If the newest steps alone are too large, remove the oldest, down to nothing.
        index = min(inner, key=lambda i: left[i + 1] - left[i - 1]) if inner else 0
        total -= sizes[left[index]]
        removed.append(left.pop(index))
    return removed
