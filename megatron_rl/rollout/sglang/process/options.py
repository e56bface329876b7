"""What an SGLang server is started with: its command line and its environment. Pure."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.rollout.sglang.wire.routes import SERVER_FLAG
from megatron_rl.system.gpu.gpu_environment import own_cuda_home, without_expandable_segments
from megatron_rl.system.processes.torchrun import LAUNCHER_VARIABLES

SAID_LABELS = "extra_metric_labels"
"""The field of /server_info, and the option, that carries ``ServerOptions.nccl``: SGLang tells its options and no environment."""


@dataclass(frozen=True)
class ServerOptions:
    model_path: str
    """A Hugging Face model folder."""
    host: str = "127.0.0.1"
    port: int = 0
    """0 means any free port."""
    dtype: str = "float32"
    tensor_parallel_size: int = 1
    deterministic: bool = False
    """Requests carry seeds; without it SGLang ignores them."""
    load_weights: bool = True
    """False starts with random weights, for a trainer that sends its own before the first request."""
    tokenizer: bool = False
    """True lets the server speak text (stop strings, chat); training sends and receives token ids only."""
    device: str = "cpu"
    """cpu or cuda."""
    first_gpu: int = 0
    """Of the machine's GPUs, the one that the first tensor-parallel rank takes."""
    can_sleep: bool = False
    """On a GPU: SGLang's memory saver, which lets the server give its memory back between generations."""
    returns_routes: bool = False
    """Answers say which experts each token went to."""
    api_key: str = field(default="", repr=False)
    """That every request must carry; empty: none."""
    nccl: Mapping[str, str] = field(default_factory=dict)
    """NCCL's variables that both ends of a group must share; the server gets them, and says so (``SAID_LABELS``)."""
    num_threads: int = 1
    """CPU threads of each tensor-parallel rank, where the model runs on the CPU."""
    server_args: Mapping[str, Any] = field(default_factory=dict)
    """More SGLang options, as flag name without dashes: value (True for a bare flag, a list for several values)."""
    env: Mapping[str, str] = field(default_factory=dict)
    """More environment variables, e.g. CUDA_VISIBLE_DEVICES."""


def server_command(options: ServerOptions, port: int, config_file: str = "") -> list[str]:
    """The command line of a server; ``server_args`` come last and win over what is set here.

    ``config_file``: of ``secret_config``, for what a command line would show to everybody on the machine.
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
        # As the trainer: logits in float32. SGLang rounds them to ``dtype`` otherwise, by up to 0.06 at a logit of 16.
        "enable-fp32-lm-head": options.dtype != "float32",
    }
    if not options.load_weights:
        flags["load-format"] = "dummy"
    if not _given_flags(options).get("enable-priority-scheduling"):
        # Of a group whose prompt is in no cache yet one request goes first; in their order, they would compute it side by side.
        flags["schedule-policy"] = "lpm"
    if options.device == "cpu":
        # An idle scheduler polls without a pause otherwise, and takes a whole core from the trainer.
        flags["sleep-on-idle"] = True
    else:
        flags["base-gpu-id"] = options.first_gpu
        flags["enable-memory-saver"] = options.can_sleep
        if options.dtype == "float32":
            # SGLang's choices, fa3 on Hopper, have no kernels for it.
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
    """The server's configuration file (YAML) with the API key; a file that server_args name is taken over."""
    given = _given_flags(options).get("config")
    return f"api-key: {json.dumps(options.api_key)}\n" + (Path(given).read_text() if given else "")


def _given_flags(options: ServerOptions) -> dict[str, Any]:
    return {name.lstrip("-").replace("_", "-"): value for name, value in options.server_args.items()}


def server_environment(options: ServerOptions, base: Mapping[str, str], cores: Sequence[int]) -> dict[str, str]:
    """The environment of a server: ``base`` without the launcher's own variables, plus what SGLang needs.

    ``cores`` are the CPUs this process may use; tensor-parallel ranks on a CPU take ``num_threads`` of them each.
    """
    # torchrun's variables would make the server's own process group look for the trainer's rendezvous.
    inherited = {name: value for name, value in base.items() if name not in LAUNCHER_VARIABLES}
    if options.can_sleep or _given_flags(options).get("enable-memory-saver"):
        inherited = without_expandable_segments(inherited)
    env = {
        **(own_cuda_home() if options.device != "cpu" else {}),
        **inherited,
        **options.nccl,
        # Otherwise /health generates a token: slow, and 503 after 20 s while generation is paused.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        # Longer than the client keeps an idle connection, so that it never sends into one that is being closed.
        "SGLANG_TIMEOUT_KEEP_ALIVE": "60",
        # What the vision encoder made of an image would be kept over weight updates, and nothing empties that cache.
        "SGLANG_VLM_CACHE_SIZE_MB": "0",
        "PYTHONUNBUFFERED": "1",
    }
    if options.device == "cpu":
        env["OMP_NUM_THREADS"] = str(options.num_threads)
        if options.tensor_parallel_size > 1:
            env["SGLANG_CPU_OMP_THREADS_BIND"] = _core_binding(options, cores)
    return {**env, **options.env}


def _core_binding(options: ServerOptions, cores: Sequence[int]) -> str:
    """Cores of each tensor-parallel rank in SGLang's notation: ``0,1|2,3``; ranks share where there are too few."""
    per_rank = []
    for rank in range(options.tensor_parallel_size):
        first = rank * options.num_threads
        per_rank.append(",".join(str(cores[(first + i) % len(cores)]) for i in range(options.num_threads)))
    return "|".join(per_rank)
