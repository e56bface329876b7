"""What environment variables have to say about GPUs, the same for trainer ranks and servers; which GPUs torch finds.

A broadcast of weights runs in one NCCL communicator of trainer ranks and server workers. NCCL fails or hangs there where the
two sides have different values of ``NCCL_DEFAULTS``, which SGLang sets to 0 in a server that has none.
"""

import os
import socket
import sysconfig
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from megatron_rl.errors import UserError

REQUIRE_GPU = "MEGATRON_RL_REQUIRE_GPU"
"""1: whoever finds no GPU ends with an error. Without it, a node without GPUs computes on its CPUs."""
NCCL_DEFAULTS = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""Multi-node NVLink (GB200, GB300) wants 1 for both, in the environment of the trainer and of the servers."""
_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_EXPANDABLE = "expandable_segments"


def set_gpu_defaults(environ: MutableMapping[str, str] = os.environ) -> None:
    """What training on GPUs needs and the user has not set; to be called before CUDA is in use."""
    # Megatron overlaps tensor-parallel communication with computation only when kernels are queued in order.
    for name, value in {**NCCL_DEFAULTS, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}.items():
        environ.setdefault(name, value)


def own_cuda_home() -> dict[str, str]:
    """``CUDA_HOME`` of the toolkit that launch/setup.sh completes in this environment, of torch's CUDA; empty where none is.

    SGLang compiles kernels at run time, and would take whatever ``nvcc`` is on the PATH, of another CUDA perhaps.
    """
    folder = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13"
    return {"CUDA_HOME": str(folder)} if (folder / "bin" / "nvcc").exists() else {}


def nccl_values(environ: Mapping[str, str]) -> dict[str, str]:
    """NCCL's variables that both ends of a communicator must share, with what holds where they are not set."""
    return {name: environ.get(name, default) for name, default in NCCL_DEFAULTS.items()}


def check_required_gpus(num_gpus: int, environ: Mapping[str, str] = os.environ) -> None:
    """Raise UserError where a GPU is required (``REQUIRE_GPU``) and this process finds none."""
    if num_gpus or environ.get(REQUIRE_GPU, "0") in ("", "0"):
        return
    raise UserError(
        f"{REQUIRE_GPU}={environ[REQUIRE_GPU]}, but torch finds no GPU on {socket.gethostname()}. Ask the scheduler for GPUs "
        "(sbatch --gpus-per-node=8, docker run --gpus all), see whether nvidia-smi answers and python -c 'import torch; "
        f"print(torch.version.cuda)' names a CUDA version that the driver serves; or set {REQUIRE_GPU}=0 to compute on CPUs"
    )


def expandable_segments(environ: Mapping[str, str]) -> str:
    """``NAME=value`` of the variable that turns expandable segments on; empty where none does."""
    for name in _ALLOCATOR_VARIABLES:
        for setting in environ.get(name, "").split(","):
            key, _, value = setting.partition(":")
            if key.strip() == _EXPANDABLE and value.strip().lower() == "true":
                return f"{name}={environ[name]}"
    return ""


def without_expandable_segments(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` for a server that sleeps: with expandable segments its memory saver turns itself off, and frees nothing."""
    kept = dict(environ)
    for name in _ALLOCATOR_VARIABLES:
        settings = [one for one in kept.get(name, "").split(",") if one and one.partition(":")[0].strip() != _EXPANDABLE]
        if kept.pop(name, "") and settings:
            kept[name] = ",".join(settings)
    return kept


def detect_device() -> str:
    """cuda where torch finds a GPU, else cpu; UserError where a GPU is required and none is found."""
    import torch

    found = torch.cuda.is_available()
    check_required_gpus(int(found))
    return "cuda" if found else "cpu"


def count_gpus() -> int:
    import torch

    return torch.cuda.device_count()
