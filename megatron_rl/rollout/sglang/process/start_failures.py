"""Explains a failed server start: the last lines of its log and the likely remedy."""

import re
from pathlib import Path

_REMEDIES: tuple[tuple[str, str], ...] = (
    (
        r"address already in use|port \d+ is (already in use|not available)",
        "another process took the port: choose another rollout.port, or set it to 0 for any free port",
    ),
    (
        r"does not recognize this architecture|not supported for now|Unrecognized model|Should have a `model_type`",
        "SGLang or transformers does not know this model type: check model_type and architectures in the model "
        "folder's config.json, or use versions that support them",
    ),
    (
        r"unrecognized arguments|error: argument|invalid choice|expected one argument",
        "an option in rollout.server_args is not one of this SGLang version's: see `python -m sglang.launch_server -h`",
    ),
    (
        r"Cannot find any model weights|No safetensors|does not appear to have a file named|HFValidationError",
        "the model folder is incomplete: it needs config.json and *.safetensors (the weights may be left out only "
        "when the server starts without loading them)",
    ),
    (
        r"out of memory|OutOfMemoryError|Not enough memory|mem.fraction.static|DefaultCPUAllocator",
        "not enough memory: lower mem-fraction-static or max-total-tokens in rollout.server_args, or use a larger "
        "rollout.tensor_parallel_size",
    ),
    (
        r"sgl_kernel|Failed to infer device|No accelerator|Torch not compiled with CUDA",
        "SGLang found no usable device: without a GPU it needs this package's platform plugin, so install the package "
        "(pip install -e .) into the environment that runs the server",
    ),
    (
        r"ModuleNotFoundError|ImportError",
        "a package is missing: install requirements/cpu.txt or requirements/gpu.txt",
    ),
)
"""(regular expression for the log, remedy), most specific first."""


def last_lines(path: Path, start: int, count: int = 25, max_bytes: int = 65536) -> str:
    """Last ``count`` non-empty lines written to ``path`` after byte ``start``."""
    if not path.exists():
        return ""
    with path.open("rb") as log:
        size = log.seek(0, 2)
        log.seek(max(start, size - max_bytes))
        lines = log.read().decode(errors="replace").splitlines()
    # SGLang logs all its options in one line of 25,000 characters.
    return "\n".join([line[:500] for line in lines if line.strip()][-count:])


def port_taken(log: str) -> bool:
    return re.search(_REMEDIES[0][0], log, re.IGNORECASE) is not None


def remedy(log: str) -> str:
    for pattern, advice in _REMEDIES:
        if re.search(pattern, log, re.IGNORECASE):
            return advice
    return "read the log from its first error on"


def start_failure(url: str, exit_code: int, log_path: Path, log: str) -> str:
    """Error message: how the server ended, what to try, and the end of its log."""
    how = f"was killed by signal {-exit_code}" if exit_code < 0 else f"exited with code {exit_code}"
    return f"server {url} {how} while starting. Likely remedy: {remedy(log)}. Its log {log_path} ends:\n{log}"
