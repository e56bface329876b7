"""``megatron-rl doctor``: whether ranks reach one another and add up the same number.

Every rank of a launch calls ``rank_lines``; with ``python -m megatron_rl.desk.doctor.rank_checks JOB`` rank 0 writes the lines
into a file.
"""

import json
import os
import platform
import socket
import statistics
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

TIMEOUT_S = 120.0
_BYTES = {"nccl": 1 << 28, "gloo": 1 << 22}
_NUM_TIMED = 5
_SLOW_GB_S = 10.0
"""Sockets; any NVLink or InfiniBand is faster."""
_NAME = "all-reduce of ranks"
_SAME = ("python", "torch", "megatron-core", "sglang")
"""What all ranks must have in the same version."""
NO_ANSWER = (
    "name the interface that the machines share in NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, let its ports through the "
    "firewall, and look at NCCL_DEBUG=INFO"
)


def main(job_file: str) -> None:
    lines = rank_lines()
    if lines:
        Path(json.loads(Path(job_file).read_text())["out"]).write_text(json.dumps([asdict(line) for line in lines]))


def rank_lines() -> list[CheckResult]:
    """Collective over the ranks that the launcher made; what they found, on rank 0, and nothing on the others."""
    import torch.distributed as dist

    from megatron_rl.parallel import topology as topologies

    # Met as in a run, with its store: another one on the same port might be taken for it.
    place = topologies.initialize(ParallelConfig(collective_timeout_s=TIMEOUT_S), seed=0)
    try:
        # Facts travel over gloo: two ranks on one GPU would end NCCL before it could be said.
        everybody: list[Any] = [None] * place.world_size
        dist.all_gather_object(everybody, _own_facts(), group=topologies.control_plane().group)
        lines = difference_lines(everybody)
        if not any(line.state == FAIL for line in lines):
            lines.append(_sum_line(dist.get_backend(), everybody))
        return lines if place.rank == 0 else []
    finally:
        topologies.destroy()


def _own_facts() -> dict[str, Any]:
    import torch

    device = f"GPU {torch.cuda.get_device_properties('cuda').uuid}" if torch.cuda.is_available() else "CPU"
    versions = {"python": platform.python_version(), **{name: version(name) for name in _SAME[1:]}}
    return {"host": socket.gethostname(), "device": device, "nccl": nccl_values(os.environ), "versions": versions}


def difference_lines(everybody: Sequence[Mapping[str, Any]]) -> list[CheckResult]:
    """What ranks have that they must not share, or share not that they must; ``everybody`` by rank."""
    lines = []
    devices = Counter((facts["host"], facts["device"]) for facts in everybody if facts["device"] != "CPU")
    for (host, device), number in devices.items():
        if number > 1:
            found = f"{number} ranks have {device} of {host}"
            remedy = "NCCL takes one rank per GPU: start as many ranks on a node as it has GPUs (RANKS_PER_NODE)"
            lines.append(CheckResult("devices of ranks", FAIL, found, remedy))
    if len({facts["device"] == "CPU" for facts in everybody}) > 1:
        on_cpu = [str(rank) for rank, facts in enumerate(everybody) if facts["device"] == "CPU"]
        found = f"ranks {', '.join(on_cpu)} see no GPU, the others do"
        lines.append(CheckResult("devices of ranks", FAIL, found, "ask the scheduler for GPUs on every node, and see its driver"))
    for what in ("versions", "nccl"):
        for name in everybody[0][what]:
            values = {facts[what][name]: rank for rank, facts in reversed(list(enumerate(everybody)))}
            if len(values) > 1:
                found = ", ".join(f"{value or 'none'} (rank {rank}, {everybody[rank]['host']})" for value, rank in values.items())
                remedy = "use one environment on all nodes" if what == "versions" else "export the same value on all nodes"
                lines.append(CheckResult(f"{name} of ranks", FAIL, found, remedy))
    return lines


def _sum_line(backend: str, everybody: Sequence[Mapping[str, Any]]) -> CheckResult:
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
    hosts = Counter(facts["host"] for facts in everybody)
    who = f"{world_size} ranks on {len(hosts)} machine{'s' if len(hosts) > 1 else ''}, {backend}"
    expected = world_size * (world_size + 1) / 2
    if not smallest == largest == expected:
        found = f"{who}: the sum is {smallest:g} to {largest:g} instead of {expected:g}"
        return CheckResult(_NAME, FAIL, found, "a link or a device gives wrong numbers: dcgmi diag -r 3, nccl-tests")
    if world_size == 1:
        return CheckResult(_NAME, SKIPPED, "one rank alone: torchrun, srun or launch/slurm.sbatch start more")
    middle_s = statistics.median(seconds[1:])
    bus = 2 * (world_size - 1) / world_size * _BYTES[backend] / middle_s / 1e9
    text = f"{who}: {_BYTES[backend] >> 20} MiB in {middle_s * 1e3:.3g} ms ({bus:.3g} GB/s on the bus)"
    is_slow = backend == "nccl" and bus < _SLOW_GB_S
    remedy = "NCCL_DEBUG=INFO says which way it takes: NVLink and InfiniBand give 100 GB/s and more" if is_slow else ""
    return CheckResult(_NAME, WARN if is_slow else OK, text, remedy)


if __name__ == "__main__":
    main(sys.argv[1])
