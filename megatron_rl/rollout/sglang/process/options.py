"""Command line and environment of an SGLang server. Pure."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.rollout.sglang.wire.response_validation import SERVER_FLAG
from megatron_rl.system.gpu.gpu_environment import own_cuda_home, without_expandable_segments
from megatron_rl.system.processes.torchrun import LAUNCHER_VARIABLES

SAID_LABELS = "extra_metric_labels"
"""Field of /server_info, and option, that carries ``ServerOptions.nccl``: SGLang reports its options but not its
environment."""


@dataclass(frozen=True)
class ServerOptions:
    model_path: str
    """Path of a Hugging Face model folder."""
    host: str = "127.0.0.1"
    port: int = 0
    """Port of the server; 0 means any free port."""
    dtype: str = "float32"
    tensor_parallel_size: int = 1
    deterministic: bool = False
    """Requests carry seeds, which SGLang ignores otherwise."""
    load_weights: bool = True
    """Load the model folder's weights. False starts with random weights, for a trainer that sends its own before
    the first request."""
    tokenizer: bool = False
    """Load a tokenizer for text (stop strings, chat); training sends and receives token ids only."""
    device: str = "cpu"
    """"cpu" or "cuda"."""
    first_gpu: int = 0
    """Index of the first tensor-parallel rank's GPU on this node."""
    can_sleep: bool = False
    """Use SGLang's memory saver on a GPU, so that the server can release its memory between generations."""
    returns_routes: bool = False
    """Replies report the experts of each token."""
    api_key: str = field(default="", repr=False)
    """Key that every request must carry, or an empty string."""
    nccl: Mapping[str, str] = field(default_factory=dict)
    """NCCL variables that both ends of a process group must share; the server gets and reports them (``SAID_LABELS``)."""
    num_threads: int = 1
    """CPU threads per tensor-parallel rank, if the model runs on the CPU."""
    server_args: Mapping[str, Any] = field(default_factory=dict)
    """Additional SGLang options: flag name without dashes -> value (True for a bare flag, a list for several values)."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Additional environment variables, e.g. CUDA_VISIBLE_DEVICES."""


def server_command(options: ServerOptions, port: int, config_file: str = "") -> list[str]:
    """Command line of a server; ``server_args`` come last and override the options set here.

    ``config_file``: path of a file with ``secret_config``, because a command line is visible to all users of the
    machine.
    """
    flags: dict[str, Any] = {
        "model-path": options.model_path,
        "host": options.host,
        "port": port,
        "dtype": options.dtype,
        "tensor-parallel-size": options.tensor_parallel_size,
        "device": options.device,
        "log-level-http": "warning",
        "enable-deterministic-inference": options.deterministic,
        "skip-tokenizer-init": not options.tokenizer,
        "skip-server-warmup": True,
        SERVER_FLAG: options.returns_routes,
        # Logits in float32, like the trainer. SGLang otherwise rounds them to ``dtype``, by up to 0.06 at a logit of 16.
        "enable-fp32-lm-head": options.dtype != "float32",
    }
    if not options.load_weights:
        flags["load-format"] = "dummy"
    if not _given_flags(options).get("enable-priority-scheduling"):
        # lpm runs one request of a group first if its prompt is not cached; in arrival order all would compute the same prefix.
        flags["schedule-policy"] = "lpm"
    if options.device == "cpu":
        # Otherwise an idle scheduler polls without a pause and takes a whole core from the trainer.
        flags["sleep-on-idle"] = True
    else:
        flags["base-gpu-id"] = options.first_gpu
        flags["enable-memory-saver"] = options.can_sleep
        if options.dtype == "float32":
            # SGLang's default backends (fa3 on Hopper) have no float32 kernels.
            flags["attention-backend"] = "triton"
    if options.nccl:
        flags[SAID_LABELS.replace("_", "-")] = json.dumps(dict(options.nccl))
    flags |= _given_flags(options)
    if config_file:
        flags["config"] = config_file
    command = [sys.executable, "-m", "sglang.launch_server"]
    for name, value in flags.items():
        if value is None or value is False:
            continue
        command.append(f"--{name}")
        if value is not True:
            values = value if isinstance(value, (list, tuple)) else [value]
            command += [str(item) for item in values]
    return command


def secret_config(options: ServerOptions) -> str:
    """Content of the server's configuration file (YAML): the API key, followed by the file given in server_args, if
    any."""
    given = _given_flags(options).get("config")
    return f"api-key: {json.dumps(options.api_key)}\n" + (Path(given).read_text() if given else "")


def _given_flags(options: ServerOptions) -> dict[str, Any]:
    return {name.lstrip("-").replace("_", "-"): value for name, value in options.server_args.items()}


def server_environment(options: ServerOptions, base: Mapping[str, str], cores: Sequence[int]) -> dict[str, str]:
    """Environment of a server: ``base`` without the launcher's variables, plus the variables that SGLang needs.

    ``cores``: CPU cores that this process may use; tensor-parallel ranks on a CPU take ``num_threads`` cores each.
    """
    # torchrun's variables would make the server's own process group look for the trainer's rendezvous.
    inherited = {name: value for name, value in base.items() if name not in LAUNCHER_VARIABLES}
    if options.can_sleep or _given_flags(options).get("enable-memory-saver"):
        inherited = without_expandable_segments(inherited)
    env = {
        **(own_cuda_home() if options.device != "cpu" else {}),
        # Otherwise a server whose worker died spends 65 s on diagnostics before it exits, and requests to it wait.
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
        **inherited,
        **options.nccl,
        # Otherwise /health generates a token: slow, and 503 after 20 s while generation is paused.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        # Longer than the client keeps an idle connection, so that it never sends into one that is being closed.
        "SGLANG_TIMEOUT_KEEP_ALIVE": "60",
        # Cached outputs of the vision encoder would survive weight updates, and SGLang never clears that cache.
        "SGLANG_VLM_CACHE_SIZE_MB": "0",
        "PYTHONUNBUFFERED": "1",
    }
    if options.can_sleep:
        # Otherwise a sleeping server keeps the memory of its CUDA graphs, 2 GB and more.
        env["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = "1"
    if options.device == "cpu":
        env["OMP_NUM_THREADS"] = str(options.num_threads)
        if options.tensor_parallel_size > 1:
            env["SGLANG_CPU_OMP_THREADS_BIND"] = _core_binding(options, cores)
    return {**env, **options.env}


def _core_binding(options: ServerOptions, cores: Sequence[int]) -> str:
    """Cores of each tensor-parallel rank in SGLang's notation: ``0,1|2,3``. Ranks share cores if there are too few."""
    per_rank = []
    for rank in range(options.tensor_parallel_size):
        first = rank * options.num_threads
        per_rank.append(",".join(str(cores[(first + i) % len(cores)]) for i in range(options.num_threads)))
    return "|".join(per_rank)
