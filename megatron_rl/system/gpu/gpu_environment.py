"""Environment variables for GPUs, the same for trainer ranks and servers; the GPUs and Transformer Engine that work here.

A broadcast of weights uses one NCCL communicator of trainer ranks and server workers. NCCL fails or hangs if the two
sides have different values of ``NCCL_DEFAULTS``, which SGLang sets to 0 in a server that has none.

Megatron Core expects Transformer Engine complete or missing: some of its modules catch only ModuleNotFoundError, but the
import of Transformer Engine may raise anything. A package that does not load, for example because a shared library is
missing, therefore counts as missing, and the reason is recorded.
"""

import importlib
import os
import socket
import sys
import sysconfig
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from megatron_rl.errors import UserError

REQUIRE_GPU = "MEGATRON_RL_REQUIRE_GPU"
"""Variable that, set to 1, makes a process without a GPU end with an error. Otherwise such a process computes on the
CPU."""
NCCL_DEFAULTS = {"NCCL_NVLS_ENABLE": "0", "NCCL_CUMEM_ENABLE": "0"}
"""Values of NCCL variables if neither is set: SGLang's. NCCL's own values are 1; multi-node NVLink (GB200, GB300) needs
them. An NCCL_CUMEM_ENABLE that is not set follows NCCL_NVLS_ENABLE."""
_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_EXPANDABLE = "expandable_segments"
_TRANSFORMER_ENGINE = "transformer_engine"
transformer_engine_problem = ""
"""Reason why Transformer Engine does not load; empty if it loads or is not installed."""


def set_gpu_defaults(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set variables that training on GPUs needs and the user has not set; must be called before CUDA is in use."""
    # Megatron overlaps tensor-parallel communication with computation only when kernels are queued in order.
    for name, value in {**nccl_values(environ), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}.items():
        environ.setdefault(name, value)


def own_cuda_home() -> dict[str, str]:
    """``CUDA_HOME`` of the toolkit that launch/setup.sh installs into this environment; empty if there is none.

    SGLang compiles kernels at run time, and would otherwise use any ``nvcc`` on the PATH, possibly of another CUDA
    version.
    """
    folder = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13"
    return {"CUDA_HOME": str(folder)} if (folder / "bin" / "nvcc").exists() else {}


def nccl_values(environ: Mapping[str, str]) -> dict[str, str]:
    """NCCL variables that both ends of a communicator must share, with defaults for unset ones."""
    nvls = environ.get("NCCL_NVLS_ENABLE", NCCL_DEFAULTS["NCCL_NVLS_ENABLE"])
    return {"NCCL_CUMEM_ENABLE": environ.get("NCCL_CUMEM_ENABLE", nvls), "NCCL_NVLS_ENABLE": nvls}


def check_required_gpus(num_gpus: int, environ: Mapping[str, str] = os.environ) -> None:
    """Raise UserError if a GPU is required (``REQUIRE_GPU``) and this process finds none."""
    if num_gpus or environ.get(REQUIRE_GPU, "0") in ("", "0"):
        return
    raise UserError(
        f"{REQUIRE_GPU}={environ[REQUIRE_GPU]}, but torch finds no GPU on {socket.gethostname()}. Ask the scheduler for GPUs "
        "(sbatch --gpus-per-node=8, docker run --gpus all), check that nvidia-smi works and that python -c 'import torch; "
        f"print(torch.version.cuda)' prints a CUDA version that the driver supports; or set {REQUIRE_GPU}=0 to compute on CPUs"
    )


def expandable_segments(environ: Mapping[str, str]) -> str:
    """``NAME=value`` of the variable that enables expandable segments, or an empty string."""
    for name in _ALLOCATOR_VARIABLES:
        for setting in environ.get(name, "").split(","):
            key, _, value = setting.partition(":")
            if key.strip() == _EXPANDABLE and value.strip().lower() == "true":
                return f"{name}={environ[name]}"
    return ""


def without_expandable_segments(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` without expandable segments, for a server that sleeps: with them its memory saver disables itself."""
    kept = dict(environ)
    for name in _ALLOCATOR_VARIABLES:
        settings = [item for item in kept.get(name, "").split(",") if item and item.partition(":")[0].strip() != _EXPANDABLE]
        if kept.pop(name, "") and settings:
            kept[name] = ",".join(settings)
    return kept


def detect_device() -> str:
    """``"cuda"`` if torch finds a GPU, else ``"cpu"``. Raises UserError if a GPU is required and none is found."""
    import torch

    has_gpu = torch.cuda.is_available()
    check_required_gpus(int(has_gpu))
    return "cuda" if has_gpu else "cpu"


def count_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def hide_broken_transformer_engine() -> None:
    """Call before Megatron's first import: later imports of a Transformer Engine that does not load then find none."""
    global transformer_engine_problem
    try:
        importlib.import_module(f"{_TRANSFORMER_ENGINE}.pytorch")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == _TRANSFORMER_ENGINE:
            return
        transformer_engine_problem = f"{type(error).__name__}: {error}"
    except Exception as error:
        transformer_engine_problem = f"{type(error).__name__}: {error}"
    else:
        return
    for name in [name for name in sys.modules if name.partition(".")[0] == _TRANSFORMER_ENGINE]:
        del sys.modules[name]
    vars(sys)["modules"][_TRANSFORMER_ENGINE] = None
