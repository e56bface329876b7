"""How much memory and CPU time the ranks used."""

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.system.host_memory import take_host_peak_gib


@dataclass(frozen=True)
class MemoryPeaks:
    """Of the rank that used the most."""

    host_gib: float
    """Resident memory."""
    device_gib: float
    """Allocated by PyTorch; 0 on a CPU."""
    others_cpu_s: float
    """CPU seconds of all ranks but the driver's: its threads do more than the trainer's work."""

    @classmethod
    def largest(cls, reports: Iterable[Tensor | None]) -> "MemoryPeaks":
        """Of what the ranks' ``take_memory_peaks`` gave, by rank."""
        all_reports = torch.stack([report for report in reports if report is not None])
        host_gib, device_gib, _ = all_reports.amax(dim=0).tolist()
        return cls(host_gib, device_gib, float(all_reports[1:, 2].sum()))


_last_cpu_s = 0.0


def take_memory_peaks() -> Tensor:
    """[3] float64: host and device GiB and CPU seconds of this rank since the last call."""
    global _last_cpu_s
    last_cpu_s, _last_cpu_s = _last_cpu_s, time.process_time()
    device_gib = 0.0
    if torch.cuda.is_available():
        device_gib = torch.cuda.max_memory_allocated() / 1024**3
        torch.cuda.reset_peak_memory_stats()
    return torch.tensor([take_host_peak_gib(), device_gib, _last_cpu_s - last_cpu_s], dtype=torch.float64)
