"""Names the rank that a timed-out collective was waiting for: each rank records its current work in the key-value store.

The timeout error of one of Megatron's collectives names neither the awaited rank nor the work. Inside ``track_activity`` such an
error becomes a ``CollectiveTimeout`` that names both. All ranks do their work in the same order, so equal counts mean equal work:
a rank with a smaller count blocks the others, and so does a rank with the same count that has not timed out itself.

Only gloo raises in the waiting call. NCCL's watchdog ends the process and writes its own report.
"""

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch.distributed as dist

from megatron_rl.parallel import topology
from megatron_rl.parallel.collectives import CollectiveTimeout
from megatron_rl.system.processes import process_probe

GRACE_S = 5.0
"""Time for other ranks to report their timeouts: ranks that wait for the same rank time out almost together."""
_ASK_S = 10.0
"""Longest wait for the store, whose own process may be the one that hangs."""

_numbers: Iterator[int] = itertools.count(1)


class RankActivity(NamedTuple):
    """Last action that a rank started; ``number`` counts from 1, and 0 means none yet."""

    number: int
    what: str
    gave_up: bool = False
    """True if the rank itself timed out."""


@contextmanager
def track_activity(what: str) -> Iterator[None]:
    """Record the block as a unit of collective work; all ranks have the same blocks in the same order."""
    plane, rank, start = topology.control_plane(), dist.get_rank(), time.monotonic()
    number = next(_numbers)
    plane.store.set(f"progress/{rank}", f"{number} begun {what}")
    process_probe.set_status("work", what)
    try:
        yield
        process_probe.set_status("work")
    except RuntimeError as error:
        # A CollectiveTimeout already names the awaited rank.
        if isinstance(error, CollectiveTimeout) or not _is_timeout(error):
            raise
        elapsed_s = time.monotonic() - start
        notes = _notes_of_all(f"{number} late {what}")
        raise CollectiveTimeout(describe_timeout(rank, RankActivity(number, what), elapsed_s, notes)) from error


def _is_timeout(error: RuntimeError) -> bool:
    """True for a timeout of torch's own wait."""
    return "imed out waiting" in str(error) or (isinstance(error, dist.DistBackendError) and "imeout" in str(error))


def describe_timeout(rank: int, own: RankActivity, elapsed_s: float, notes: Sequence[RankActivity] | None) -> str:
    """One sentence with the rank that timed out, its work, and the ranks that it waited for.

    ``notes``: last activity by rank; None: the store does not reply.
    """
    waited = f"rank {rank} gave up {elapsed_s:.0f} s into the {own.what}: it waited for"
    if notes is None:
        return f"{waited} one that cannot be named, for the process that holds the store does not answer"
    behind = {
        peer: f"which is at the {note.what}" if note.number else "which has begun nothing"
        for peer, note in enumerate(notes)
        if note.number < own.number
    }
    if not behind:
        behind = {
            peer: "which began it and has not come through"
            for peer, note in enumerate(notes)
            if peer != rank and note.number == own.number and not note.gave_up
        }
    if not behind:
        return f"{waited} others, as did every other rank that is in it; look for a slow network or a lost message"
    names = ", ".join(f"rank {peer} ({why})" for peer, why in behind.items())
    return (
        f"{waited} {names}; look there for what held it up, or raise parallel.collective_timeout_s "
        "(critic.parallel.collective_timeout_s for a critic with a layout of its own) if it was only slow"
    )


def _notes_of_all(own: str) -> list[RankActivity] | None:
    """Record ``own``, wait until the other ranks may have timed out, and read all activities; None if the store hangs."""
    plane, rank, num_ranks = topology.control_plane(), dist.get_rank(), dist.get_world_size()
    notes: list[RankActivity] = []

    def ask() -> None:
        plane.store.set(f"progress/{rank}", own)
        time.sleep(GRACE_S)
        keys = [f"progress/{peer}" for peer in range(num_ranks)]
        # A get of a missing key would wait for it.
        notes.extend(_read(plane.store.get(key)) if plane.store.check([key]) else RankActivity(0, "") for key in keys)

    # In a thread, because a call to a store that hangs cannot be cancelled.
    thread = threading.Thread(target=ask, name="progress", daemon=True)
    thread.start()
    thread.join(GRACE_S + _ASK_S)
    return notes if len(notes) == num_ranks else None


def _read(text: bytes) -> RankActivity:
    number, state, what = text.decode().split(" ", 2)
    return RankActivity(int(number), what, gave_up=state == "late")
