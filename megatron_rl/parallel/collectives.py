"""Control traffic between the driver (rank 0) and the other ranks, over the gloo group of ``topology.py``.

Every rank calls the same functions in the same order. Each call has a deadline (by default
``parallel.collective_timeout_s``) and raises ``CollectiveTimeout``, which says which rank waited for which one, for
what and how long; a peer that died raises at once. Batches travel as raw tensors: a short JSON header, then one flat
buffer per rank.
"""

import json
import pickle
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.errors import UserError
from megatron_rl.parallel import topology

_PAYLOAD_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.bool, torch.uint8)
"""Dtypes that ``gather_tensors`` carries, by their code on the wire."""
_NO_TENSOR = -1
_NO_BYTES = torch.zeros(0, dtype=torch.uint8)


class CollectiveTimeout(UserError, RuntimeError):
    """A rank waited for another one longer than it was told to."""


class PeerLost(RuntimeError):
    """A rank is gone while another one waits for it; its own log says why."""


def is_lost_connection(error: RuntimeError) -> bool:
    """A peer's process ended while this rank waited for it, here or inside one of Megatron's collectives."""
    lost_words = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
    return isinstance(error, PeerLost) or any(words in str(error) for words in lost_words)


def barrier(what: str = "barrier", *, timeout_s: float | None = None) -> None:
    """Wait until every rank is here."""
    # Rank 0 hears from each rank in turn, so that its error names the one that is missing.
    _gather_raw(torch.ones(1, dtype=torch.uint8), what, timeout_s)
    broadcast_object(None, what=what, timeout_s=timeout_s)


def broadcast_object(obj: Any, src: int = 0, *, what: str = "an object", timeout_s: float | None = None) -> Any:
    """``obj`` of rank ``src`` on every rank; pickled, so for small things only."""
    if dist.get_rank() != src:
        return receive_object(src, what=what, timeout_s=timeout_s)
    for peer in range(dist.get_world_size()):
        if peer != src:
            send_object(obj, peer, what=what, timeout_s=timeout_s)
    return obj


def send_object(obj: Any, peer: int, *, what: str = "an object", timeout_s: float | None = None) -> None:
    """``obj`` to rank ``peer``, which calls ``receive_object``; pickled, so for small things only."""
    data = _bytes_tensor(pickle.dumps(obj))
    _send(torch.tensor([data.numel()]), peer, what, timeout_s)
    _send(data, peer, what, timeout_s)


def receive_object(peer: int, *, what: str = "an object", timeout_s: float | None = None) -> Any:
    """What rank ``peer`` gave to ``send_object``."""
    size = torch.empty(1, dtype=torch.int64)
    _receive(size, peer, what, timeout_s)
    data = torch.empty(int(size), dtype=torch.uint8)
    _receive(data, peer, what, timeout_s)
    return pickle.loads(data.numpy().tobytes())


def gather_objects(obj: Any, *, what: str = "objects", timeout_s: float | None = None) -> list[Any]:
    """The objects of all ranks, by rank, on rank 0; an empty list elsewhere. Pickled, so for small things only."""
    if dist.get_rank() != 0:
        send_object(obj, 0, what=what, timeout_s=timeout_s)
        return []
    others = range(1, dist.get_world_size())
    return [obj, *(receive_object(peer, what=what, timeout_s=timeout_s) for peer in others)]


def send_batches(
    payloads: Sequence[dict[str, Tensor]], *, what: str = "batches", timeout_s: float | None = None
) -> dict[str, Tensor]:
    """Rank 0 sends ``payloads[rank]`` to each rank and gets its own back; the others call ``receive``.

    Tensors of any shape and dtype, on the CPU; names and shapes may differ between ranks.
    """
    if len(payloads) != dist.get_world_size():
        raise ValueError(f"one payload per rank: expected {dist.get_world_size()}, got {len(payloads)}")
    of, header, flat = None, _NO_BYTES, _NO_BYTES
    # Rank by rank, so that a time-out names the one that does not answer.
    for peer, payload in enumerate(payloads[1:], start=1):
        # Neighbours are tensor- and context-parallel peers: they are sent the same payload.
        if payload is not of:
            of, (header, flat) = payload, _flatten(payload)
        _send(torch.tensor([header.numel(), flat.numel()]), peer, what, timeout_s)
        _send(header, peer, what, timeout_s)
        _send(flat, peer, what, timeout_s)
    return payloads[0]


def _flatten(payload: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(header, all bytes back to back)."""
    entries = [[name, _dtype_name(tensor.dtype), list(tensor.shape)] for name, tensor in payload.items()]
    body = [t.contiguous().view(-1).view(torch.uint8) for t in payload.values() if t.numel() > 0]
    flat = torch.cat(body) if body else _NO_BYTES
    return _bytes_tensor(json.dumps(entries).encode()), flat


def receive(*, what: str = "batches", timeout_s: float | None = None) -> dict[str, Tensor]:
    """This rank's payload of the ``send_batches`` that rank 0 calls."""
    sizes = torch.empty(2, dtype=torch.int64)
    _receive(sizes, 0, what, timeout_s)
    header, flat = (torch.empty(int(size), dtype=torch.uint8) for size in sizes)
    _receive(header, 0, what, timeout_s)
    _receive(flat, 0, what, timeout_s)
    payload, start = {}, 0
    for name, dtype_name, shape in json.loads(header.numpy().tobytes()):
        tensor = torch.empty(shape, dtype=getattr(torch, dtype_name))
        end = start + tensor.numel() * tensor.element_size()
        if tensor.numel() > 0:
            # A copy: a view into the buffer may start at an address that the dtype does not allow.
            tensor.view(-1).view(torch.uint8).copy_(flat[start:end])
        payload[name] = tensor
        start = end
    return payload


def gather_tensors(
    tensor: Tensor | None, *, what: str = "results", timeout_s: float | None = None
) -> list[Tensor | None]:
    """The 1-D tensors of all ranks, by rank, on rank 0; an empty list elsewhere.

    Lengths and dtypes may differ between ranks; a rank that has nothing passes None. Raises ValueError for a tensor
    that is not 1-D or of a dtype outside ``_PAYLOAD_DTYPES``.
    """
    if tensor is not None and (tensor.dim() != 1 or tensor.dtype not in _PAYLOAD_DTYPES):
        found = f"shape {tuple(tensor.shape)} of {tensor.dtype}"
        raise ValueError(f"expected a 1-D tensor of one of {_PAYLOAD_DTYPES}, got {found}")
    return _gather_raw(tensor, what, timeout_s)


def _gather_raw(tensor: Tensor | None, what: str, timeout_s: float | None) -> list[Tensor | None]:
    if dist.get_rank() != 0:
        if tensor is None:
            _send(torch.tensor([_NO_TENSOR, 0]), 0, what, timeout_s)
            return []
        _send(torch.tensor([tensor.numel(), _PAYLOAD_DTYPES.index(tensor.dtype)]), 0, what, timeout_s)
        _send(tensor.detach().cpu(), 0, what, timeout_s)
        return []
    gathered: list[Tensor | None] = [tensor if tensor is None else tensor.detach().cpu()]
    for peer in range(1, dist.get_world_size()):
        header = torch.empty(2, dtype=torch.int64)
        _receive(header, peer, what, timeout_s)
        length, dtype_code = header.tolist()
        if length == _NO_TENSOR:
            gathered.append(None)
            continue
        result = torch.empty(length, dtype=_PAYLOAD_DTYPES[dtype_code])
        _receive(result, peer, what, timeout_s)
        gathered.append(result)
    return gathered


def _bytes_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _send(tensor: Tensor, peer: int, what: str, timeout_s: float | None) -> None:
    if tensor.numel() > 0:
        _wait(dist.isend, tensor.contiguous().view(torch.uint8), peer, f"take {what}", timeout_s)


def _receive(tensor: Tensor, peer: int, what: str, timeout_s: float | None) -> None:
    if tensor.numel() > 0:
        _wait(dist.irecv, tensor.view(torch.uint8), peer, f"send {what}", timeout_s)


def _wait(start: Any, tensor: Tensor, peer: int, verb: str, timeout_s: float | None) -> None:
    """Run one transfer to its end; ``verb`` is what the peer should do."""
    plane = topology.control_plane()
    timeout_s = plane.timeout_s if timeout_s is None else timeout_s
    rank = dist.get_rank()
    try:
        start(tensor, peer, group=plane.group).wait(timedelta(seconds=timeout_s))
    except RuntimeError as error:
        if "imed out" in str(error) or "imeout" in str(error):
            raise CollectiveTimeout(
                f"rank {rank} waited {timeout_s:g} s for rank {peer} to {verb}; look at rank {peer}'s log for what "
                "held it up, or raise parallel.collective_timeout_s if it was only slow"
            ) from error
        raise PeerLost(
            f"rank {rank} lost rank {peer}, which should {verb}: {error}; look at rank {peer}'s log for why it ended"
        ) from error
