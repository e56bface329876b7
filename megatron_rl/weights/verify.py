"""Verifies the servers' weights by comparing checksums, without transferring weights.

SGLang's ``/weights_checker`` hashes each parameter of the server. On CPU the checksum is the first 8 bytes of the
SHA-256 of the parameter's bytes, which the trainer can compute from its own tensors: it joins q/k/v, gate/up and
the experts as SGLang does, and pads the vocabulary and MLPs. If the bytes cannot be reproduced (tensor-parallel shards; GPU
servers, which hash differently), the servers are compared with each other instead, and the report gives the reason.

The trainer waits at most ``timeout_s`` for each server; a server replies after it has hashed all its weights.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
from torch.nn.functional import pad

from megatron_rl.families.sglang_limits import cpu_padding, is_float32, joined_name
from megatron_rl.weights.bucket_plan import ServerAddress, unique_addresses
from megatron_rl.weights.buckets import NamedTensors, exhaust
from megatron_rl.weights.server_calls import ServerCallError, ServerCalls

_HASH_BYTES = 8
_VOCAB_MULTIPLE = 64
"""SGLang pads embedding and output rows with zeros to a multiple of this."""
_DERIVED = ".gemma_weight"
"""End of names of buffers that SGLang computes from a zero-centered norm's weight when it loads one."""
_EXPERTS = ("w13_weight", "w2_weight")
"""Ends of names of experts' matrices; files that stack them have them transposed."""
_VOCAB_LAYERS = ("embed_tokens.weight", "lm_head.weight")

_SERVER_DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}
"""Maps SGLang's --dtype to torch's; "auto" is missing, because it does not determine the dtype."""


@dataclass(frozen=True)
class ChecksumReport:
    reference: Literal["trainer", "servers", "nothing"]
    """Reference of the comparison; if it is not the trainer, ``note`` has the reason."""
    num_compared: int
    """Parameters compared, summed over servers and their ranks."""
    differing: Mapping[str, tuple[str, ...]]
    """Maps URLs of servers with differences to the differing parameters, by SGLang's names."""
    uncompared: tuple[str, ...]
    """Parameters that only one side has."""
    note: str


def compare_checksums(
    servers: Sequence[ServerAddress | tuple[str, int, int]],
    named_tensors: NamedTensors | None = None,
    timeout_s: float = 300.0,
    num_shared_experts: int | None = None,
) -> ChecksumReport:
    """Compare all servers with the trainer's ``named_tensors`` (Hugging Face names, full tensors) where possible.

    ``num_shared_experts``: ``n_shared_experts`` of config.json, if it has the field (``cpu_padding``).
    Without tensors, or if the servers' bytes cannot be reproduced, the servers are compared with each other. The
    stream is exhausted in any case, because other trainer ranks wait in its collectives. Raises ServerCallError.
    """
    stream = iter(named_tensors or ())
    with ServerCalls(unique_addresses(servers), timeout_s) as calls:
        try:
            replies = calls.post("/weights_checker", {"action": "checksum"})
            checksums = {
                server.url: _parse_ranks(server.url, reply["ranks"])
                for server, reply in zip(calls.servers, replies, strict=True)
            }
            infos = calls.get("/server_info")
        except ServerCallError:
            exhaust(stream)
            raise
    obstacle = "no trainer tensors were given" if named_tensors is None else _obstacle(checksums, infos)
    if not obstacle:
        return _compare_with_trainer(checksums, _SERVER_DTYPES.get(infos[0]["dtype"]), stream, num_shared_experts)
    exhaust(stream)
    return _compare_with_each_other(checksums, f"The servers were not compared with the trainer: {obstacle}.")


def _parse_ranks(url: str, ranks: list[Any]) -> list[dict[str, str]]:
    """For each rank, a map from parameters to checksums. Raises ServerCallError for an invalid reply."""
    by_rank = [rank.get("checksums") if isinstance(rank, dict) else None for rank in ranks]
    if by_rank and all(isinstance(own, dict) and set(map(type, own.values())) <= {str} for own in by_rank):
        return [own for own in by_rank if own is not None]
    raise ServerCallError(
        f"{url} replied to POST /weights_checker without the checksums of its ranks; is it an SGLang server, of a version that "
        "requirements/ lists?"
    )


class _ParameterHash:
    """The checksum of one server parameter, computed from parts that may arrive out of order.

    Hashes the bytes in the trainer's dtype, in the server's and, for a parameter that servers keep in float32, in float32:
    trainers keep some parameters of a bfloat16 model in float32 too, and equal bytes in one of the dtypes prove equal weights.
    Parts stay in memory until all earlier parts have arrived.
    """

    def __init__(self, name: str, server_dtype: torch.dtype | None):
        self._name = name
        self._server_dtype = server_dtype
        self._hashes: dict[torch.dtype, Any] = {}
        self._waiting: dict[int, torch.Tensor] = {}
        self._next_part = 0
        self._num_rows = 0
        self._row_numel = 0

    def add(self, part: int, tensor: torch.Tensor) -> None:
        # A part that must wait is copied, because the stream may reuse its memory.
        self._waiting[part] = tensor.detach().to("cpu", copy=part != self._next_part)
        while self._next_part in self._waiting:
            self._update(self._waiting.pop(self._next_part))
            self._next_part += 1

    def checksums(self) -> set[str]:
        """Checksums of equal weights; called once, after the last part. Empty if parts are missing."""
        if self._waiting:
            return set()
        if self._name.endswith(_VOCAB_LAYERS):
            # Padding comes last, because the number of rows is known only after the last part.
            self._update(torch.zeros(-self._num_rows % _VOCAB_MULTIPLE, self._row_numel))
        return {hasher.digest()[:_HASH_BYTES].hex() for hasher in self._hashes.values()}

    def _update(self, tensor: torch.Tensor) -> None:
        if not self._hashes:
            dtypes = [tensor.dtype, self._server_dtype or tensor.dtype, *([torch.float32] if is_float32(self._name) else ())]
            self._hashes = {dtype: hashlib.sha256() for dtype in dtypes}
        self._num_rows += tensor.shape[0] if tensor.dim() else 1
        self._row_numel = prod(tensor.shape[1:])
        for dtype, hasher in self._hashes.items():
            hasher.update(tensor.to(dtype).contiguous().view(-1).view(torch.uint8).numpy().data)


def _compare_with_trainer(
    checksums: Mapping[str, list[dict[str, str]]],
    server_dtype: torch.dtype | None,
    stream: NamedTensors,
    num_shared_experts: int | None = None,
) -> ChecksumReport:
    server_names = {name for ranks in checksums.values() for name in ranks[0] if not name.endswith(_DERIVED)}
    hashes: dict[str, _ParameterHash] = {}
    uncompared = []
    for name, tensor in stream:
        joined = joined_name(name, server_names)
        if joined is None:
            uncompared.append(name)
            continue
        server_name, part = joined
        if server_name not in hashes:
            hashes[server_name] = _ParameterHash(server_name, server_dtype)
        hashes[server_name].add(part, _as_served(tensor, server_name, num_shared_experts))
    uncompared += sorted(server_names - hashes.keys())
    differing: dict[str, list[str]] = {url: [] for url in checksums}
    for name, parameter_hash in hashes.items():
        accepted = parameter_hash.checksums()
        for url, ranks in checksums.items():
            # Each server has one rank, because more ranks are an obstacle to this comparison.
            if ranks[0].get(name) not in accepted:
                differing[url].append(name)
    return ChecksumReport(
        reference="trainer",
        num_compared=len(hashes) * len(checksums),
        differing={url: tuple(names) for url, names in differing.items() if names},
        uncompared=tuple(uncompared),
        note="",
    )


def _as_served(tensor: torch.Tensor, server_name: str, num_shared_experts: int | None) -> torch.Tensor:
    """The part of a server's parameter that ``tensor`` becomes there."""
    if tensor.dim() == 3 and server_name.endswith(_EXPERTS):
        tensor = tensor.transpose(1, 2)
    zeros = cpu_padding(server_name, tensor.shape, num_shared_experts)
    # torch's order is the last dimension first.
    return pad(tensor, [side for number in reversed(zeros) for side in (0, number)]) if any(zeros) else tensor


def _compare_with_each_other(checksums: Mapping[str, list[dict[str, str]]], note: str) -> ChecksumReport:
    """Compare each server with the first server of the same number of ranks."""
    references: dict[int, str] = {}
    differing: dict[str, tuple[str, ...]] = {}
    num_compared = 0
    for url, ranks in checksums.items():
        reference = references.setdefault(len(ranks), url)
        if reference == url:
            continue
        names = []
        for rank, (own, other) in enumerate(zip(ranks, checksums[reference], strict=True)):
            for name in own.keys() | other.keys():
                num_compared += 1
                if own.get(name) != other.get(name):
                    names.append(name if len(ranks) == 1 else f"{name} (rank {rank})")
        if names:
            differing[url] = tuple(sorted(names))
    if num_compared == 0:
        return ChecksumReport("nothing", 0, {}, (), f"{note} No two servers have the same number of ranks.")
    return ChecksumReport("servers", num_compared, differing, (), f"{note} Each was compared with another server.")


def _obstacle(checksums: Mapping[str, list[dict[str, str]]], infos: Sequence[Mapping[str, Any]]) -> str:
    """Reason why the servers' bytes cannot be reproduced from the trainer's tensors; empty if they can."""
    if any(len(ranks) > 1 for ranks in checksums.values()):
        return "tensor parallelism shards their parameters"
    if any(info["device"] != "cpu" for info in infos):
        return "GPU servers hash differently"
    if len({info["dtype"] for info in infos}) > 1:
        return "they run in different dtypes"
    return ""
