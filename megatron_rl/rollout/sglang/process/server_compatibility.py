"""Compatibility of an attached server with this run. Pure: compares its /server_info with the options of a managed
server."""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_rl.config.checks.servers import RANDOM_DRAFT
from megatron_rl.families.sglang_limits import quantization_problem
from megatron_rl.rollout.sglang.process.options import SAID_LABELS, ServerOptions
from megatron_rl.system.gpu.gpu_environment import NCCL_DEFAULTS

_SIZES = (
    "model_type", "num_hidden_layers", "hidden_size", "vocab_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "num_experts", "n_routed_experts", "num_local_experts", "num_experts_per_tok",
)  # fmt: skip
_SINGLE = {
    "pp_size": "a pipelined server gives two workers one rank of the weight sync group",
    "dp_size": "SGLang takes no weights from a trainer with data-parallel replicas; start as many servers",
}


def disagreements(
    info: Mapping[str, Any], ours: ServerOptions, *, broadcasts: bool, model_type: object = None
) -> Iterator[str]:
    """Yield the reasons why weight sync would hang or fail, a sleep would free nothing, or drafts would be random. A
    field missing in ``info`` is assumed to match.

    ``ours``: options that this run would start a server with. ``broadcasts``: weights travel over a process group of
    trainer and servers.
    """
    if problem := quantization_problem(info.get("quantization"), info.get("load_format"), model_type):
        yield f"it has {problem}"
    size = info.get("tp_size", ours.tensor_parallel_size)
    if size != ours.tensor_parallel_size:
        yield (
            f"it has tp_size {size}, rollout.tensor_parallel_size is {ours.tensor_parallel_size}; set that to {size}, or start it "
            f"with --tensor-parallel-size {ours.tensor_parallel_size}"
        )
    yield from (f"it has {name} {info[name]}: {reason}" for name, reason in _SINGLE.items() if info.get(name, 1) != 1)
    algorithm = info.get("speculative_algorithm")
    random = info.get("load_format") == "dummy" and not info.get("speculative_draft_load_format")
    if algorithm and algorithm != "NGRAM" and random and not ours.load_weights:
        yield f"its speculative_algorithm {algorithm} drafts at random: {RANDOM_DRAFT}. Start it with --speculative-draft-load-format auto"
    device = info.get("device", ours.device)
    if broadcasts and device != ours.device:
        yield f"it runs on {device} and the trainer on {ours.device}: no process group has both; set rollout.weight_sync=disk"
    # The remaining checks concern GPUs only.
    if ours.device == "cpu":
        return
    if ours.can_sleep and info.get("enable_memory_saver") is False:
        yield "it cannot give its memory to the trainer (rollout.placement=colocated); start it with enable-memory-saver=true"
    if broadcasts:
        theirs = nccl_of(info)
        differing = [name for name, value in ours.nccl.items() if theirs.get(name, value) != value]
        if differing:
            differences = ", ".join(f"{name} is {theirs[name]} there and {ours.nccl[name]} here" for name in differing)
            yield f"NCCL would fail or hang: {differences}; export the same values before both are started"


def model_differences(served: Mapping[str, Any], trained: Mapping[str, Any]) -> str:
    """Differences in size between two model configurations (``read_model_json``), or an empty string.

    A layer that the trainer does not have would silently keep the weights that the server loaded.
    """
    differing = [name for name in _SIZES if name in served and name in trained and served[name] != trained[name]]
    return ", ".join(f"{name} {served[name]} (policy.path: {trained[name]})" for name in differing)


def nccl_of(info: Mapping[str, Any]) -> dict[str, str]:
    """NCCL variables of a server: as reported, or as SGLang sets them for its options. Unreported variables are
    omitted."""
    reported = info.get(SAID_LABELS)
    known = {name: str(reported[name]) for name in NCCL_DEFAULTS if name in reported} if isinstance(reported, Mapping) else {}
    if info.get("enable_symm_mem"):
        known |= dict.fromkeys(NCCL_DEFAULTS, "1")
    if info.get("enable_nccl_nvls"):
        known["NCCL_NVLS_ENABLE"] = "1"
    return known
