"""``megatron-rl doctor`` on ranks: can they communicate, and does an all-reduce give the same sum everywhere?

Every rank of a launch calls ``rank_lines``; with ``python -m megatron_rl.desk.doctor.rank_checks JOB`` rank 0
writes the results into a file. ``run_ranks`` starts such ranks on this node, also for the other checks of ``doctor``.
"""

import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megatron_rl.config.schema import ParallelConfig
from megatron_rl.desk.doctor.machine_checks import FAIL, OK, SKIPPED, WARN, CheckResult
from megatron_rl.system.gpu.gpu_environment import nccl_values
from megatron_rl.system.processes.child_process import wait_or_kill
from megatron_rl.system.processes.torchrun import LAUNCHER_VARIABLES

TIMEOUT_S = 120.0
_BYTES = {"nccl": 1 << 28, "gloo": 1 << 22}
_NUM_TIMED = 5
_SLOW_GB_S = 10.0
"""Bandwidth below which NCCL uses sockets: any NVLink or InfiniBand is faster."""
_NAME = "all-reduce of ranks"
_LOG_TAIL_LINES = 15
_SAME = ("python", "torch", "megatron-core", "sglang")
"""Software whose version must be the same on all ranks."""
NO_ANSWER = (
    "set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the interface that the nodes share, open its ports in the "
    "firewall, and check NCCL_DEBUG=INFO"
)


def main(job_file: str) -> None:
    lines = rank_lines()
    if lines:
        Path(json.loads(Path(job_file).read_text())["out"]).write_text(json.dumps([asdict(line) for line in lines]))


def rank_lines() -> list[CheckResult]:
    """Collective over the ranks of the launcher. Returns the results on rank 0, an empty list on the others."""
    import torch.distributed as dist

    from megatron_rl.parallel import topology as topologies

    # Use a run's own rendezvous and store: a second store on the same port could be mistaken for it.
    topology = topologies.initialize(ParallelConfig(collective_timeout_s=TIMEOUT_S), seed=0)
    try:
        # Exchange facts over gloo: two ranks on one GPU would crash NCCL before the result is printed.
        facts_by_rank: list[Any] = [None] * topology.world_size
        dist.all_gather_object(facts_by_rank, _own_facts(), group=topologies.control_plane().group)
        lines = difference_lines(facts_by_rank)
        if not any(line.state == FAIL for line in lines):
            lines.append(_sum_line(dist.get_backend(), facts_by_rank))
        return lines if topology.rank == 0 else []
    finally:
        topologies.destroy()


def _own_facts() -> dict[str, Any]:
    import torch

    device = f"GPU {torch.cuda.get_device_properties('cuda').uuid}" if torch.cuda.is_available() else "CPU"
    versions = {"python": platform.python_version(), **{name: version(name) for name in _SAME[1:]}}
    return {"host": socket.gethostname(), "device": device, "nccl": nccl_values(os.environ), "versions": versions}


def difference_lines(facts_by_rank: Sequence[Mapping[str, Any]]) -> list[CheckResult]:
    """Resources that ranks share but must not, or must share but do not. ``facts_by_rank``: facts of each rank."""
    lines = []
    devices = Counter((facts["host"], facts["device"]) for facts in facts_by_rank if facts["device"] != "CPU")
    for (host, device), number in devices.items():
        if number > 1:
            found = f"{number} ranks use {device} of {host}"
            remedy = "NCCL allows one rank per GPU: start as many ranks on a node as it has GPUs (RANKS_PER_NODE)"
            lines.append(CheckResult("devices of ranks", FAIL, found, remedy))
    if len({facts["device"] == "CPU" for facts in facts_by_rank}) > 1:
        on_cpu = [str(rank) for rank, facts in enumerate(facts_by_rank) if facts["device"] == "CPU"]
        found = f"ranks {', '.join(on_cpu)} have no GPU, the others do"
        remedy = "request GPUs on every node from the scheduler, and check the node's driver"
        lines.append(CheckResult("devices of ranks", FAIL, found, remedy))
    for what in ("versions", "nccl"):
        for name in facts_by_rank[0][what]:
            values = {facts[what][name]: rank for rank, facts in reversed(list(enumerate(facts_by_rank)))}
            if len(values) > 1:
                found = ", ".join(f"{value or 'none'} (rank {rank}, {facts_by_rank[rank]['host']})" for value, rank in values.items())
                remedy = "use one environment on all nodes" if what == "versions" else "export the same value on all nodes"
                lines.append(CheckResult(f"{name} of ranks", FAIL, found, remedy))
    return lines


def _sum_line(backend: str, facts_by_rank: Sequence[Mapping[str, Any]]) -> CheckResult:
    import torch
    import torch.distributed as dist

    world_size, rank = dist.get_world_size(), dist.get_rank()
    device = "cuda" if backend == "nccl" else "cpu"
    values = torch.empty(_BYTES[backend] // 4, device=device)
    seconds = []
    for _ in range(_NUM_TIMED + 1):
        values.fill_(rank + 1)
        started_s = time.perf_counter()
        dist.all_reduce(values)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started_s)
    largest, smallest = float(values.max()), float(values.min())
    hosts = Counter(facts["host"] for facts in facts_by_rank)
    who = f"{world_size} ranks on {len(hosts)} node{'s' if len(hosts) > 1 else ''}, {backend}"
    expected = world_size * (world_size + 1) / 2
    if not smallest == largest == expected:
        found = f"{who}: the sum is {smallest:g} to {largest:g} instead of {expected:g}"
        return CheckResult(_NAME, FAIL, found, "a link or a device computes wrong values: dcgmi diag -r 3, nccl-tests")
    if world_size == 1:
        return CheckResult(_NAME, SKIPPED, "a single rank: torchrun, srun or launch/slurm.sbatch start more")
    # The first all-reduce includes the setup of connections.
    middle_s = statistics.median(seconds[1:])
    # Bus bandwidth as in nccl-tests, which does not depend on the number of ranks.
    bus = 2 * (world_size - 1) / world_size * _BYTES[backend] / middle_s / 1e9
    text = f"{who}: {_BYTES[backend] >> 20} MiB in {middle_s * 1e3:.3g} ms ({bus:.3g} GB/s on the bus)"
    is_slow = backend == "nccl" and bus < _SLOW_GB_S
    remedy = "NCCL_DEBUG=INFO shows the transport in use: NVLink and InfiniBand give 100 GB/s and more" if is_slow else ""
    return CheckResult(_NAME, WARN if is_slow else OK, text, remedy)


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


if __name__ == "__main__":
    main(sys.argv[1])
