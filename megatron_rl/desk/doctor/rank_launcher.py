"""Starts ranks on this node for a check of ``megatron-rl doctor``, and reports why they failed."""

import os
import subprocess
import sys
from pathlib import Path

from megatron_rl.system.processes.child_process import wait_or_kill
from megatron_rl.system.processes.torchrun import LAUNCHER_VARIABLES

_LOG_TAIL_LINES = 15


def run_ranks(module: str, job_file: Path, num_ranks: int, log: Path, timeout_s: float) -> str:
    """Run ``python -m module job_file`` on ``num_ranks`` ranks of this node. Returns the reason of a failure, or ""."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    command += ["--module", module, str(job_file)]
    # An outer launcher's variables would make these ranks join its rendezvous.
    environment = {key: value for key, value in os.environ.items() if key not in LAUNCHER_VARIABLES}
    environment.setdefault("OMP_NUM_THREADS", "1")
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return f"not finished after {timeout_s:g} s"
        finally:
            _stop(process)
    return "" if code == 0 else _reason(log.read_text(errors="replace"))


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Terminate torchrun, which passes the signal to its ranks and waits for them."""
    if process.poll() is None:
        process.terminate()
        wait_or_kill(process, 30.0)


def _reason(log: str) -> str:
    """The last error line of the ranks, or the end of the log."""
    lines = [line.split("]:", 1)[-1].strip(" :") for line in log.splitlines() if line.startswith("[rank")]
    errors = [line for line in lines if "Error" in line and ":" in line]
    return errors[-1] if errors else "\n".join(log.splitlines()[-_LOG_TAIL_LINES:])
