"""Checks of the servers: addresses, API key, devices shared with ranks, SGLang options."""

import contextlib
import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.config.derived import WeightMethod, key_in, shares_devices, uses_attached_servers, weight_method
from megatron_rl.config.layout import ranks_of_replica
from megatron_rl.config.schema import Config, Dtype, RolloutConfig, WeightSync
from megatron_rl.config.schema.bounds import shown
from megatron_rl.config.schema.commands import RL_COMMANDS
from megatron_rl.errors import UserError
from megatron_rl.families.sglang_limits import quantization_problem, server_flags
from megatron_rl.system.files.probes import read_regular
from megatron_rl.system.gpu.gpu_environment import expandable_segments, nccl_values
from megatron_rl.system.http.addresses import LOOPBACK, address_problem, server_problem

_KEY_FLAGS = ("api-key", "admin-api-key")
_WORKER_FLAGS = {
    "tensor-parallel-size": "set rollout.tensor_parallel_size (serve: --tensor-parallel-size)",
    "pipeline-parallel-size": "remove it: a pipelined server cannot receive weights while it runs",
    "data-parallel-size": "start more servers: rollout.num_servers (serve: --num-servers); attention by data is attn-dp-size",
    "nnodes": "remove it: a run starts servers on its own node, megatron-rl serve --num-nodes starts one over several",
}
"""SGLang options that change the number of server workers -> the alternative."""
_OWN_FLAGS = {
    "host": "set rollout.host (serve: --host)",
    "port": "set rollout.port (serve: --port)",
    "model-path": "set policy.path (serve: --model-path)",
    "device": "remove it: servers run where the trainer runs",
    "dtype": "set policy.dtype (serve: --dtype)",
}
"""SGLang options that a run sets itself -> the alternative."""
_KINDS: Mapping[str, tuple[str, type | tuple[type, ...]]] = {
    "int": ("a whole number", int),
    "float": ("a number", (int, float)),
    "bool": ("true or false, because the option takes no value", bool),
}
_SHORT_FLAGS = {"tp": "tensor-parallel-size", "pp": "pipeline-parallel-size", "dp": "data-parallel-size"}
_FEWEST_LETTERS = len("tensor-p")
"""Length of the shortest unambiguous abbreviation of an option."""
_NCCL_FLAGS = {"enable-symm-mem": ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"), "enable-nccl-nvls": ("NCCL_NVLS_ENABLE",)}
"""SGLang options that set NCCL variables to 1 in a server, regardless of its environment."""
RANDOM_DRAFT = (
    "servers of a trainer start with random weights and receive only the policy's: neither multi-token-prediction layers nor "
    "another draft model. Nearly every guess of a random draft is wrong. A draft read from its folder keeps its weights "
    "(the sampled tokens are exact for any draft)"
)
_SPECULATIVE = "speculative-algorithm"
_WITHOUT_DRAFT_MODEL = "NGRAM"
"""The speculative algorithm that predicts tokens from the text, without a draft model."""
_HALF_PRECISION_ATTENTION = ("fa3", "fa4", "flashinfer", "flashmla")


@dataclass(frozen=True)
class Node:
    """GPUs and ranks of one node of the run; 0 means an unknown number."""

    num_gpus: int
    """Number of GPUs; 0: no GPU, or unknown."""
    num_ranks: int
    """Number of trainer ranks on the node; 0: unknown."""

    @staticmethod
    def of(num_gpus: int, num_ranks: int) -> "Node":
        """Return a node for ``num_ranks`` ranks spread evenly over as few nodes of ``num_gpus`` GPUs as possible."""
        num_nodes = -(-num_ranks // num_gpus) if num_gpus else 1
        return Node(num_gpus, -(-num_ranks // num_nodes) if num_nodes else 0)


def address_problems(rollout: RolloutConfig) -> Iterator[str]:
    yield from _list_problems("rollout.urls", rollout.urls)
    if rollout.urls and rollout.urls_file:
        yield "rollout.urls_file: rollout.urls also lists servers; keep one of the two keys"
    if rollout.urls_file.startswith(("http://", "https://")):
        if problem := address_problem(rollout.urls_file):
            yield f"rollout.urls_file: {problem}"
    elif rollout.urls_file and not Path(rollout.urls_file).parent.is_dir():
        yield f"rollout.urls_file: {rollout.urls_file} cannot be created: there is no folder {Path(rollout.urls_file).parent}"
    yield from key_problems(rollout)
    if rollout.port > 65535 - rollout.num_servers:
        yield f"rollout.port: expected 0 (any free port) or a port up to {65535 - rollout.num_servers}, got {rollout.port}"


def _list_problems(key: str, urls: Sequence[str]) -> Iterator[str]:
    yield from (f"{key}: {problem}" for problem in map(server_problem, urls) if problem)
    plain = [url.rstrip("/") for url in urls]
    if twice := [url for url in dict.fromkeys(plain) if plain.count(url) > 1]:
        yield f"{key}: {twice[0]} is listed {plain.count(twice[0])} times; list each server once"


def fleet_problems(config: Config) -> Iterator[str]:
    """Yield the problems of eval.urls: invalid, repeated or training addresses, and any with colocated servers. Contacts no server."""
    urls = config.eval.urls
    yield from _list_problems("eval.urls", urls)
    if both := {url.rstrip("/") for url in urls} & {url.rstrip("/") for url in config.rollout.urls}:
        yield f"eval.urls: {min(both)} is also in rollout.urls; a server has one model at a time, so list other servers or none"
    if urls and shares_devices(config.rollout):
        yield "eval.urls: rollout.placement=colocated sends weights only within the trainer's devices; leave eval.urls empty"


def key_problems(rollout: RolloutConfig) -> Iterator[str]:
    yield from key_value_problems("rollout.api_key_env", rollout.api_key_env)
    if named := [name for name in rollout.server_args if name.lstrip("-").replace("_", "-") in _KEY_FLAGS]:
        yield (
            f"rollout.server_args: {named[0]} would be visible in recipes and process lists; export the key in an environment "
            "variable and set rollout.api_key_env to its name"
        )


def key_value_problems(name: str, variable: str) -> Iterator[str]:
    """Yield the problems of the API key in the environment variable ``variable``, the value of the key ``name``."""
    key = key_in(variable)
    if variable and not key:
        yield f"{name}: the environment variable {variable} is not set; export it with the servers' key"
    elif key.startswith("-") or not (key.isascii() and key.isprintable()) or " " in key:
        yield (
            f"{name}: the key in {variable} must be ASCII without spaces, and must not start with a dash: the key is sent in a header "
            "and on SGLang's command line"
        )


def placement_problems(rollout: RolloutConfig, num_ranks: int) -> Iterator[str]:
    """Yield the reasons why colocated servers cannot share the devices of ``num_ranks`` trainer ranks (0: unknown)."""
    if not shares_devices(rollout):
        return
    if rollout.urls_file:
        yield "rollout.urls_file: colocated servers share the trainer's devices, so servers cannot join or leave; list them in rollout.urls"
    num_servers, size = len(rollout.urls) or rollout.num_servers, rollout.tensor_parallel_size
    if num_ranks and size >= 1 and num_servers * size != num_ranks:
        counted = "the rollout.urls" if rollout.urls else "rollout.num_servers"
        remedy = f"list {num_ranks // size} servers" if rollout.urls else f"set rollout.num_servers={num_ranks // size}"
        if num_ranks % size:
            remedy = f"set a rollout.tensor_parallel_size that divides {num_ranks}"
        yield (
            f"rollout.placement=colocated: every trainer rank shares its device with one server worker, but {counted} "
            f"{num_servers} x rollout.tensor_parallel_size {size} = {num_servers * size} is not the {num_ranks} trainer "
            f"ranks; {remedy}"
        )
    if not rollout.urls and rollout.host not in LOOPBACK:
        yield (
            f"rollout.host={rollout.host}: colocated servers read pickles, which any process that connects to their port could send; "
            "leave it at 127.0.0.1"
        )
    if setting := expandable_segments(os.environ):
        yield (
            f"rollout.placement=colocated: {setting} is set; weights are sent as handles of GPU memory, which containers refuse for "
            "expandable segments, and the servers' memory saver turns itself off. Unset it"
        )
    if rollout.weight_sync is WeightSync.disk:
        yield (
            "rollout.weight_sync=disk: colocated servers get their weights from the trainer's memory; leave it at broadcast, "
            "or set rollout.placement=disaggregated"
        )


def gpu_problems(config: Config, node: Node, num_ranks: int, command: str) -> Iterator[str]:
    """Yield the reasons why the GPUs of the driver's node are too few for its ranks and managed servers.

    Processes may share a GPU only if they alternate, or if they are not in the same NCCL group.
    """
    rollout, ranks, gpus = config.rollout, node.num_ranks, node.num_gpus
    has_servers = command in RL_COMMANDS and not uses_attached_servers(rollout)
    if ranks > gpus > 0:
        yield f"{ranks} trainer ranks on a node of {gpus} GPUs: each needs its own GPU; start {gpus} (RANKS_PER_NODE={gpus})"
        return
    if shares_devices(rollout) and has_servers and num_ranks > ranks > 0:
        yield (
            f"rollout.placement=colocated: the run starts its servers only on the driver's node, which has {ranks} of the "
            f"{num_ranks} trainer ranks; start the job with ROLLOUT_NODES=all (launch/slurm.sbatch), or start the servers of each node "
            "there (bash launch/serve_sglang.sh --config RECIPE) and list them in the order of the ranks in rollout.urls"
        )
    if not gpus or not has_servers or shares_devices(rollout):
        return
    workers = rollout.num_servers * rollout.tensor_parallel_size
    servers = f"rollout.num_servers={rollout.num_servers} x rollout.tensor_parallel_size={rollout.tensor_parallel_size}"
    if ranks and ranks + workers > gpus and weight_method(rollout) is WeightMethod.broadcast:
        helps = "; or ".join(_room_for_servers(config, node))
        yield (
            f"{servers}: {workers} server workers and the {ranks} trainer ranks of this node need {ranks + workers} GPUs, and it "
            f"has {gpus}. NCCL allows only one process of a group per GPU. Remedies: {helps}. (A dry run for another machine: "
            "--gpus-per-node)"
        )


def _room_for_servers(config: Config, node: Node) -> Iterator[str]:
    """Yield remedies if ranks and servers need more GPUs than the node has."""
    gpus, size = node.num_gpus, config.rollout.tensor_parallel_size
    replica = ranks_of_replica(config.parallel)
    ranks = max(gpus // 2 // replica, 1) * replica
    if gpus - ranks >= size:
        servers = (gpus - ranks) // size
        yield (
            f"fewer ranks, parallel.num_ranks={ranks} rollout.num_servers={servers} (with launch/torchrun.sh: "
            f"RANKS_PER_NODE={ranks})"
        )
    if node.num_ranks <= gpus and node.num_ranks % size == 0:
        yield f"shared devices, rollout.placement=colocated rollout.num_servers={node.num_ranks // size}"
    yield "servers on other nodes, rollout.urls (launch/slurm.sbatch starts and lists them with ROLLOUT_NODES)"


def flag_problems(
    server_args: Mapping[str, Any],
    *,
    num_servers: int,
    dtype: str,
    key: str = "rollout.server_args.",
    loads_weights: bool = False,
) -> Iterator[str]:
    """Yield a problem for each SGLang option that megatron_rl sets itself, or that conflicts with ``dtype``.

    ``loads_weights``: the servers load the weights of their folder and do not wait for a publish.
    """
    given = _given_flags(server_args)
    yield from _unknown_flags(given, key)
    for flag, (name, value) in given.items():
        if flag in _WORKER_FLAGS and str(value) != "1":
            yield f"{key}{name}={value}: weight sync would wait for more or fewer workers than the server has; {_WORKER_FLAGS[flag]}"
    if "base-gpu-id" in given and num_servers > 1:
        name, value = given["base-gpu-id"]
        yield f"{key}{name}={value}: all {num_servers} servers would use the same GPUs; remove it, each server uses the next ones"
    for flag, changed in _NCCL_FLAGS.items():
        if given.get(flag, ("", False))[1] is True and (unlike := [n for n in changed if nccl_values(os.environ)[n] != "1"]):
            values = " ".join(f"{name}=1" for name in unlike)
            yield f"{key}{given[flag][0]}: it sets the servers' NCCL differently from the trainer's; export {values} for the trainer too"
    name, value = given.get(_SPECULATIVE, ("", ""))
    if value and str(value).upper() != _WITHOUT_DRAFT_MODEL and not loads_weights and "speculative-draft-load-format" not in given:
        yield f"{key}{name}={value}: {RANDOM_DRAFT}. Add speculative-draft-load-format=auto, or turn speculative decoding off"
    name, value = given.get("attention-backend", ("", ""))
    if dtype == Dtype.float32.value and value in _HALF_PRECISION_ATTENTION:
        yield f"{key}{name}={value}: it has no float32 kernels; use triton, or policy.dtype=bfloat16"


def _unknown_flags(given: Mapping[str, tuple[str, Any]], key: str) -> Iterator[str]:
    """Yield a problem for each option that SGLang does not have, that a run sets itself, or whose value has another type."""
    known = server_flags()
    for flag, (name, value) in given.items():
        starts = [one for one in known if one.startswith(flag)]  # SGLang accepts a start that is one option's
        meant = starts[0] if flag not in known and len(starts) == 1 else flag
        if meant in _OWN_FLAGS:
            yield f"{key}{name}={value}: a run sets this option itself; {_OWN_FLAGS[meant]}"
        elif known and meant not in known:
            close = difflib.get_close_matches(flag, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "`python -m sglang.launch_server --help` lists them"
            yield f"{key}{name}: SGLang has no option --{flag}; {hint}"
        elif value is not None and value is not False and (problem := _flag_value_problem(known.get(meant, ""), value)):
            yield f"{key}{name}: {problem}"


def _flag_value_problem(kind: str, value: Any) -> str:
    """Return the reason why SGLang cannot read ``value`` of an option of type ``kind``; empty if it can, or if unknown."""
    expected, types = _KINDS.get(kind, ("text or a number", (str, int, float, bool, list)))
    if isinstance(value, str) and kind in ("int", "float"):
        with contextlib.suppress(ValueError):
            value = float(value) if kind == "float" else int(value)
    is_one = isinstance(value, types) and isinstance(value, bool) <= (kind not in ("int", "float"))
    if isinstance(value, list):
        is_one = is_one and all(isinstance(part, str | int | float) for part in value)
    return "" if is_one else f"expected {expected}, got {shown(value)}"


def quantization_problems(server_args: Mapping[str, Any], model_type: object) -> Iterator[str]:
    """Yield a problem for each SGLang option with which a server cannot receive weights from a trainer."""
    given = _given_flags(server_args)
    load_format = given.get("load-format", ("", None))[1]
    for flag in ("quantization", "modelopt-quant", "quantize-and-serve"):
        name, value = given.get(flag, (flag, None))
        if problem := quantization_problem(value, load_format, model_type):
            yield f"rollout.server_args.{name}={value}: {problem}"
    name, value = given.get("json-model-override-args", ("", ""))
    if "quantization_config" in str(value):
        yield f"rollout.server_args.{name}: quantization_config: {quantization_problem('of the model', load_format, model_type)}"


def _flag(name: str) -> str:
    """Return SGLang's long name of an option; SGLang accepts the abbreviations of argparse."""
    flag = name.lstrip("-").replace("_", "-")
    flag = _SHORT_FLAGS.get(flag.removesuffix("-size"), flag)
    whole = [name for name in (*_WORKER_FLAGS, _SPECULATIVE) if len(flag) >= _FEWEST_LETTERS and name.startswith(flag)]
    return whole[0] if whole else flag


def _given_flags(server_args: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Map SGLang's long names to (name as given, value); ``server_args`` override the file named by its ``config``."""
    given = {_flag(name): (name, value) for name, value in server_args.items()}
    in_file = _flags_of_file(given)
    return {**{flag: (f"config: {flag}", value) for flag, value in in_file.items()}, **given}


def _flags_of_file(given: Mapping[str, tuple[str, Any]]) -> dict[str, Any]:
    """Read the options of the ``config`` file; {} if the file is unreadable, which SGLang reports itself."""
    path = Path(str(given["config"][1])) if "config" in given else None
    if path is None or not path.is_file():
        return {}
    try:
        content = yaml.safe_load(read_regular(path).decode())
    except (OSError, UserError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return {_flag(str(name)): value for name, value in content.items()} if isinstance(content, dict) else {}
