"""What a stage had to do: facts beside its span in ``timeline.json``, by which `megatron-rl simulate` calibrates itself.

A generate stage says of every round of requests: ``rows`` and ``tokens`` (responses and new tokens in all), and of each
row ``prompt`` (tokens), ``held`` (response tokens from earlier steps), ``new``, ``ended`` (0 or 1) and ``ms`` (from its
arrival at the server to its last token, as the server says; 0: it does not). Words of numbers, in the order in which
the requests were sent: small in memory and on disk. Of more than ``MAX_ROWS`` rows so many are kept, taken evenly from
all of them sorted by length, the longest first.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import psutil

from megatron_rl.data.trajectory import Trajectory

MAX_ROWS = 512


def generated_rows(
    trajectories: Sequence[Trajectory], step: int, engine_s: Mapping[int, float]
) -> dict[str, int | str]:
    """One round of requests of ``step``; O(responses). ``engine_s`` by trajectory id."""
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
    """Indices of the rows that are written down."""
    num_rows = len(new)
    if num_rows <= MAX_ROWS:
        return np.arange(num_rows)
    by_length = np.lexsort((held, new))[::-1]
    even = ((np.arange(MAX_ROWS) + 0.5) * num_rows / MAX_ROWS).astype(np.int64)
    even[0] = 0  # it lasts as long as the longest
    return by_length[even]


class ChildCpuClock:
    """CPU seconds of the processes that this one has started, servers and reward workers, and of theirs."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def cpu_s(self) -> float:
        """Since they began; what has ended counts up to the last call."""
        for process in psutil.Process().children(recursive=True):
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            self._seconds[process.pid] = times.user + times.system
        return sum(self._seconds.values())
