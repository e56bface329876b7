"""The amount of work of a stage, stored with its span in ``timeline.json``; `megatron-rl simulate` calibrates with it.

For every round of requests, a generate stage stores ``rows`` and ``tokens`` (responses and new tokens in all). For each
row it stores ``prompt`` (tokens), ``held`` (response tokens from earlier steps), ``new``, ``ended`` (0 or 1) and ``ms``
(from arrival at the server to the last token, as the server reports; 0 if unknown). Values are space-separated text in
the order in which the requests were sent. At most ``MAX_ROWS`` rows are kept, spaced evenly over the rows sorted by length,
longest first.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import psutil

from megatron_rl.data.trajectory import Trajectory

MAX_ROWS = 512


def generated_rows(
    trajectories: Sequence[Trajectory], step: int, engine_s: Mapping[int, float]
) -> dict[str, int | str]:
    """Return the facts of one round of requests of ``step``; O(responses). ``engine_s``: server seconds by trajectory id."""
    prompt = np.array([len(t.prompt.token_ids) for t in trajectories], dtype=np.int64)
    new = np.array([t.window_tokens(step) for t in trajectories], dtype=np.int64)
    held = np.array([t.num_response_tokens for t in trajectories], dtype=np.int64) - new
    ended = np.array([t.finished for t in trajectories], dtype=np.int64)
    kept = _kept(new, held)
    ms = np.array([round(1000 * engine_s.get(t.id, 0.0)) for t in trajectories], dtype=np.int64)
    words = {"prompt": prompt, "held": held, "new": new, "ended": ended, "ms": ms}
    rows = {name: " ".join(map(str, values[kept].tolist())) for name, values in words.items()}
    return {"rows": len(trajectories), "tokens": int(new.sum()), **rows}


def _kept(new: np.ndarray, held: np.ndarray) -> np.ndarray:
    """Return the indices of the rows to store."""
    num_rows = len(new)
    if num_rows <= MAX_ROWS:
        return np.arange(num_rows)
    by_length = np.lexsort((held, new))[::-1]
    even = ((np.arange(MAX_ROWS) + 0.5) * num_rows / MAX_ROWS).astype(np.int64)
    even[0] = 0  # the round lasts as long as its longest row
    return by_length[even]


class ChildCpuClock:
    """Sums the CPU seconds of this process's descendants: servers, reward workers and their children."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def cpu_s(self) -> float:
        """Return the CPU seconds since the processes started; an exited process counts up to the last call."""
        for process in psutil.Process().children(recursive=True):
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            self._seconds[process.pid] = times.user + times.system
        return sum(self._seconds.values())
