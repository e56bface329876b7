"""Runs the stage graph: trainer stages on the calling thread, the others on threads next to it.

The thread that ends a stage launches the rollout and host stages that became ready, so that generation starts while
the calling thread is inside a trainer stage.

The calling (main) thread waits for completions of rollout and host stages. Coroutines that need the Megatron ranks
(to send weights to a restarted server) wait for the main thread through ``call_on_trainer``. A wait longer than
``stall_timeout_s`` ends with an error that names the running stages.
"""

import asyncio
import inspect
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from megatron_rl.schedule.graph import Frontier, Resource, Stage, StageRun
from megatron_rl.schedule.table import KEEPER, LASTING, OUTPUT_ONLY
from megatron_rl.system.processes import process_probe

_Action = Callable[[int], Any]
HEARTBEAT_S = 10.0


class StageRunner:
    """Owns the frontier of the running steps; one ``run`` per runner."""

    def __init__(
        self,
        graph: Sequence[Stage],
        event_loop: asyncio.AbstractEventLoop,
        *,
        stall_timeout_s: float,
        on_span: Callable[[str, str, int, float, float], None],
        heartbeat: Callable[[], None],
        stop_requested: Callable[[], object] = bool,
    ) -> None:
        """
        Args:
            on_span: called after every stage with name, resource, step, start and end in Unix seconds.
            stop_requested: returns a true value if the run must stop; checked between stages, and after ``wake``.
        """
        self.graph = graph
        self._actions: Mapping[str, _Action] = {}
        self._event_loop = event_loop
        self._stall_timeout_s = stall_timeout_s
        self._on_span = on_span
        self._heartbeat = heartbeat
        self._stop_requested = stop_requested
        self._is_stopping = False
        self._abandoned: set[StageRun] = set()
        self._running_coroutines: dict[StageRun, Future] = {}
        self._events: queue.Queue[Callable[[], None]] = queue.Queue()
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="host")
        self._lock = threading.RLock()  # guards the frontier and the start times
        self._frontier = Frontier(graph, 0, -1)  # nothing to run before ``run``
        self._ended = False
        self._started_s: dict[StageRun, float] = {}

    def run(self, actions: Mapping[str, _Action], first_step: int, last_step: int) -> None:
        """Run steps first_step..last_step; the first stage that fails ends it with its own exception.

        ``actions`` maps every stage's name to a function of the step, plain or a coroutine function. A run that is
        requested to stop returns early. Models and slots are then in the state after the last step that started to
        change the models; the remaining work of that step and of later ones is dropped.
        """
        missing = [stage.name for stage in self.graph if stage.name not in actions]
        if missing:
            raise ValueError(f"stages without an action: {missing}")
        self._actions = actions
        self._frontier = Frontier(self.graph, first_step, last_step)
        try:
            while True:
                if self._stop_requested() and not self._is_stopping:
                    self._finish_open_steps()
                with self._lock:
                    if self._frontier.done:
                        return
                    self._launch_ready()
                    ready = [r for r in self._frontier.ready() if r.stage.resource is Resource.trainer]
                    # Calls that wait for this thread (weights for a restarted server) go before the next stage.
                    if ready and self._events.empty():
                        self._start(ready[0])
                    else:
                        ready = []
                if ready:
                    # Outside the lock, because other threads launch stages while this one works.
                    self._actions[ready[0].stage.name](ready[0].step)
                    self._complete(ready[0], time.time())
                else:
                    self._next_event()
        finally:
            with self._lock:
                self._ended = True  # stages that are still running launch no others
            # Without a wait, because a stage that hangs would hide the error that ends the run.
            self._threads.shutdown(wait=False, cancel_futures=True)

    def wake(self) -> None:
        """Make the main thread check again for a requested stop (from any thread)."""
        self._events.put(lambda: None)

    def _finish_open_steps(self) -> None:
        with self._lock:
            self._is_stopping = True
            still_needed = self._frontier.finish_open_steps(LASTING, KEEPER, OUTPUT_ONLY)
            futures = dict(self._running_coroutines)
            self._abandoned = futures.keys() - still_needed
        for stage_run in self._abandoned:
            futures[stage_run].cancel()

    def running(self) -> list[tuple[str, float]]:
        """Return (stage, seconds so far) of each stage in progress (from any thread)."""
        now_s = time.time()
        return [(stage_run.stage.name, now_s - started_s) for stage_run, started_s in list(self._started_s.items())]

    def stop_after(self, step: int) -> None:
        """Open no step after ``step`` (called by a stage's action)."""
        with self._lock:
            self._frontier.stop_after(step)

    def wait_for(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine outside the graph and return its result; the main thread serves ``call_on_trainer`` meanwhile."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._event_loop)
        # An empty event wakes this thread once the coroutine has ended.
        future.add_done_callback(lambda done: self._events.put(lambda: None))
        while not future.done():
            self._next_event()
        return future.result()

    def call_on_trainer(self, function: Callable[[], Any]) -> Future:
        """Have the main thread call ``function`` between two trainer stages (from any other thread)."""
        result: Future = Future()

        def call() -> None:
            try:
                result.set_result(function())
            except Exception as error:
                result.set_exception(error)

        self._events.put(call)
        return result

    def _launch_ready(self) -> None:
        """Start every rollout and host stage that can run (under the lock)."""
        for stage_run in self._frontier.ready():
            if stage_run.stage.resource is not Resource.trainer:
                self._start(stage_run)
                self._launch(stage_run)

    def _start(self, stage_run: StageRun) -> None:
        self._frontier.start(stage_run)
        self._started_s[stage_run] = time.time()
        process_probe.set_status(f"{stage_run.stage.name} of step {stage_run.step + 1}", stage_run.stage.resource.value)

    def _launch(self, stage_run: StageRun) -> None:
        action = self._actions[stage_run.stage.name]
        is_coroutine = inspect.iscoroutinefunction(action)
        if is_coroutine:
            future = asyncio.run_coroutine_threadsafe(action(stage_run.step), self._event_loop)
            self._running_coroutines[stage_run] = future
        else:
            future = self._threads.submit(action, stage_run.step)

        def completed(done: Future) -> None:
            self._running_coroutines.pop(stage_run, None)
            abandoned = stage_run in self._abandoned
            try:
                if abandoned or (not done.cancelled() and done.exception() is None):
                    self._complete(stage_run, time.time())
            finally:
                # Wake the calling thread, which raises the stage's failure unless the stage was abandoned.
                self._events.put((lambda: None) if abandoned else done.result)

        future.add_done_callback(completed)

    def _complete(self, stage_run: StageRun, ended_s: float) -> None:
        with self._lock:
            started_s, stage = self._started_s.pop(stage_run), stage_run.stage
            process_probe.set_status(f"{stage.name} of step {stage_run.step + 1}")
            self._on_span(stage.name, stage.resource.value, stage_run.step, started_s, ended_s)
            self._frontier.finish(stage_run)
            if not self._ended:
                self._launch_ready()

    def _next_event(self) -> None:
        deadline_s = time.monotonic() + self._stall_timeout_s
        while True:
            try:
                self._events.get(timeout=HEARTBEAT_S)()
                return
            except queue.Empty:
                self._heartbeat()
            if time.monotonic() > deadline_s:
                running = ", ".join(f"{r.stage.name} of step {r.step}" for r in self._frontier.running)
                raise TimeoutError(
                    f"the trainer waited {self._stall_timeout_s:.0f} s for {running or 'the rollout side'} without a "
                    "reply; see the server logs in the output folder, or raise rollout.request_timeout_s"
                )
