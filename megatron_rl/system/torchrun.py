"""Starting the trainer ranks of one machine with torchrun when nobody else has."""

import logging
import os
import signal
import sys
from collections.abc import Sequence

_INTERRUPTED = 130


def run_under_torchrun(num_ranks: int, arguments: Sequence[str]) -> int:
    """Run ``megatron-rl <arguments>`` on num_ranks ranks; returns the exit status of the first rank that failed, or 0.

    On Ctrl-C torchrun hands the signal to the ranks and waits for them (30 s); they stop their own children.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    # The ranks say themselves why they failed; the launcher's own account of it only buries that.
    for name in ("agent.server.api", "multiprocessing.api"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // num_ranks)))
    try:
        torchrun(["--standalone", "--nproc-per-node", str(num_ranks), "--module", "megatron_rl.cli", *arguments])
    except ChildFailedError as failure:
        rank, first = failure.get_first_failure()
        if first.exitcode < 0:
            print(_killed_by(rank, -first.exitcode), file=sys.stderr, flush=True)
            return 1
        return first.exitcode
    except (SignalException, KeyboardInterrupt):
        print("interrupted: all ranks and servers have been stopped", file=sys.stderr, flush=True)
        return _INTERRUPTED
    return 0


def _killed_by(rank: int, number: int) -> str:
    """What to say for a rank that could not say it itself."""
    cause = "the kernel does so when memory runs out: see `dmesg`" if number == signal.SIGKILL else "see its log"
    return f"error: trainer rank {rank} was killed by signal {number} ({cause}); the other ranks and servers were stopped"
