"""How much memory the ranks used."""

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

    @classmethod
    def largest(cls, reports: Iterable[Tensor | None]) -> "MemoryPeaks":
        """Of what the ranks' ``take_memory_peaks`` gave."""
        host_gib, device_gib = torch.stack([report for report in reports if report is not None]).amax(dim=0).tolist()
        return cls(host_gib, device_gib)


def take_memory_peaks() -> Tensor:
    """[2] float64: host and device GiB of this rank since the last call."""
    device_gib = 0.0
    if torch.cuda.is_available():
        device_gib = torch.cuda.max_memory_allocated() / 1024**3
        torch.cuda.reset_peak_memory_stats()
    return torch.tensor([take_host_peak_gib(), device_gib], dtype=torch.float64)
