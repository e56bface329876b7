"""Starts the trainer ranks of one machine with torchrun, if no other launcher has. Also a command, for launch/torchrun.sh.

Stop signals are forwarded to the driver (rank 0), which decides how to stop within its grace period; torchrun itself would kill
all ranks after 30 s. The launcher runs until its ranks have exited. A second Ctrl-C kills the ranks.
"""

import logging
import os
import signal
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING

import psutil

from megatron_rl.system.processes.signals import INTERRUPTED, STOP_SIGNALS, STOPPED, StopRequested

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

_USERS_MISTAKE = 2
LAUNCHER_VARIABLES = frozenset(
    "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK ROLE_RANK ROLE_NAME ROLE_WORLD_SIZE GROUP_WORLD_SIZE "
    "MASTER_ADDR MASTER_PORT TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RUN_ID "
    "TORCHELASTIC_USE_AGENT_STORE TORCHELASTIC_ERROR_FILE TORCH_NCCL_ASYNC_ERROR_HANDLING".split()
)
"""Variables that a launcher sets for its ranks and that other child processes must not inherit."""


def run_under_torchrun(num_ranks: int, arguments: Sequence[str]) -> int:
    """Run ``megatron-rl <arguments>`` on ``num_ranks`` ranks of this machine. Returns the exit status of the cause of the end."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // num_ranks)))
    return launch(["--standalone", "--nproc-per-node", str(num_ranks), "--module", "megatron_rl.cli", *arguments])


def launch(arguments: Sequence[str]) -> int:
    """Run torchrun with ``arguments``, in which ``--standalone`` may only come first. Returns the status as ``run_under_torchrun``."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    from megatron_rl.system.processes.torch_store import LOCAL_RENDEZVOUS, register_local_rendezvous

    # Ranks report their own failures, which the launcher's summary would push off the screen.
    for name in ("agent.server.api", "multiprocessing.api"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    if arguments[:1] == ["--standalone"]:
        # torchrun's own store for one machine listens on all addresses.
        register_local_rendezvous()
        # Without an endpoint, which this rendezvous does not read, torchrun warns about its own default address.
        endpoint = ["--rdzv-backend", LOCAL_RENDEZVOUS, "--rdzv-endpoint", "localhost"]
        arguments = [*endpoint, "--rdzv-id", uuid.uuid4().hex, *arguments[1:]]
    with _Forwarder().installed() as forwarder:
        try:
            # torchrun requires at least one signal to handle. Without a folder for logs, a killed launcher leaves none.
            torchrun(["--signals-to-handle", "SIGQUIT", "--log-dir", os.devnull, *arguments])
        except ChildFailedError as failure:
            return _status_of(failure, forwarder)
        except StopRequested as stop:
            print(f"stopped: {stop}, before the ranks were started", file=sys.stderr, flush=True)
            return STOPPED
    return 0


def _status_of(failure: "ChildFailedError", forwarder: "_Forwarder") -> int:
    if forwarder.killed:
        print("stopped at once, by a second Ctrl-C", file=sys.stderr, flush=True)
        return INTERRUPTED
    rank, first = failure.get_first_failure()
    if forwarder.requested:
        status = failure.failures.get(0, first).exitcode
        return status if status > 0 else STOPPED  # a rank that was still starting had nothing to save
    if -first.exitcode in STOP_SIGNALS:  # sent to a rank before it had a handler
        print(f"stopped: rank {rank} was sent {signal.Signals(-first.exitcode).name}", file=sys.stderr, flush=True)
        return STOPPED
    if first.exitcode < 0:
        print(_killed_by(rank, -first.exitcode), file=sys.stderr, flush=True)
        return 1
    # An error on one rank may break another rank's connection: report the user error, which is the cause.
    return _USERS_MISTAKE if _USERS_MISTAKE in [f.exitcode for f in failure.failures.values()] else first.exitcode


class _Forwarder:
    """Forwards stop signals to the driver."""

    def __init__(self) -> None:
        self.requested = False
        self.killed = False

    @contextmanager
    def installed(self) -> Iterator["_Forwarder"]:
        numbers = [n for n in STOP_SIGNALS if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        ranks = _ranks()
        if number == signal.SIGINT and self.requested:
            self.killed = True
            for process in ranks.values():
                process.kill()
        elif not self.requested:
            self.requested = True
            if not ranks:
                raise StopRequested(signal.Signals(number).name)
            if 0 in ranks:  # otherwise the driver is on another machine, whose launcher has received the signal too
                ranks[0].send_signal(signal.SIGTERM)


def _ranks() -> dict[int, psutil.Process]:
    """Map the number of each rank on this machine to its process."""
    found = {}
    for process in psutil.Process().children():
        with suppress(psutil.Error, KeyError, ValueError):
            found[int(process.environ()["RANK"])] = process
    return found


def _killed_by(rank: int, number: int) -> str:
    """Message about a rank that was killed before it could report."""
    cause = "the kernel does so when memory runs out: see `dmesg`" if number == signal.SIGKILL else "see its log"
    return f"error: trainer rank {rank} was killed by signal {number} ({cause}); the other ranks and servers were stopped"


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))
