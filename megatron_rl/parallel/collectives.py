"""Control traffic between the driver (rank 0) and the other ranks, over the gloo group of ``topology.py``.

Every rank calls the same functions in the same order. Each call has a deadline (by default
``parallel.collective_timeout_s``) and raises ``CollectiveTimeout`` with the waiting rank, the awaited rank, the action and the
time; for a peer that died it raises immediately. Batches are sent as one flat buffer: over the gloo group to one rank of each
replica, and from there over Megatron's groups. Arrays in shared files (``system/files/shared_file.py``) do not pass rank 0:
ranks on its machine map them, other ranks fetch them (``array_server.py``).
"""

import io
import pickle
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_rl.data.rows import Rows
from megatron_rl.errors import UserError
from megatron_rl.parallel import topology
from megatron_rl.parallel.array_server import Reachability
from megatron_rl.parallel.topology import RankCoordinates, Topology

_PAYLOAD_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.bool, torch.uint8)
"""Dtypes that ``gather_tensors`` supports; the index is the code in its messages."""
_NO_TENSOR = -1
_PIECE_BYTES = 1 << 26
"""Maximum number of a payload's bytes on a device at a time."""


Payload = Mapping[str, Tensor | np.ndarray | Rows]


_HERE = Reachability(0, True, {})


class CollectiveTimeout(UserError, RuntimeError):
    """A rank waited for another rank longer than the timeout."""


class PeerLost(RuntimeError):
    """A rank ended while another rank waited for it; the log of the lost rank has the reason."""


def is_lost_connection(error: RuntimeError) -> bool:
    """True if a peer's process ended while this rank waited for it, here or inside one of Megatron's collectives."""
    lost_texts = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
    return isinstance(error, PeerLost) or any(text in str(error) for text in lost_texts)


def rank() -> int:
    return dist.get_rank()


def barrier(what: str = "barrier", *, timeout_s: float | None = None) -> None:
    """Wait until every rank has called this."""
    # Rank 0 receives from each rank in turn, so that its error names the missing rank.
    _gather_raw(torch.ones(1, dtype=torch.uint8), what, timeout_s)
    broadcast_object(None, what=what, timeout_s=timeout_s)


def broadcast_object(obj: Any, src: int = 0, *, what: str = "an object", timeout_s: float | None = None) -> Any:
    """Return ``obj`` of rank ``src`` on every rank; pickled, so for small objects only.

    Ranks forward it along a binomial tree, so no rank sends it more than log2(ranks) times.
    """
    num_ranks = dist.get_world_size()
    place = (dist.get_rank() - src) % num_ranks  # counted from src
    if place:
        # The sender is the own place without its lowest bit.
        data = _receive_bytes(((place & (place - 1)) + src) % num_ranks, what, timeout_s)
        obj = pickle.loads(data.numpy().tobytes())
    else:
        data = _bytes_tensor(pickle.dumps(obj))
    reach = place & -place if place else 1 << (num_ranks - 1).bit_length()
    while reach := reach >> 1:
        # The largest subtree first, because it is the deepest.
        if place + reach < num_ranks:
            _send_bytes(data, (place + reach + src) % num_ranks, what, timeout_s)
    return obj


def send_object(obj: Any, peer: int, *, what: str = "an object", timeout_s: float | None = None) -> None:
    """Send ``obj`` to rank ``peer``, which calls ``receive_object``; pickled, so for small objects only."""
    _send_bytes(_bytes_tensor(pickle.dumps(obj)), peer, what, timeout_s)


def receive_object(peer: int, *, what: str = "an object", timeout_s: float | None = None) -> Any:
    """Receive the object that rank ``peer`` passes to ``send_object``."""
    return pickle.loads(_receive_bytes(peer, what, timeout_s).numpy().tobytes())


def gather_objects(obj: Any, *, what: str = "objects", timeout_s: float | None = None) -> list[Any]:
    """Return the objects of all ranks, by rank, on rank 0; an empty list elsewhere. Pickled, so for small objects only."""
    if dist.get_rank() != 0:
        send_object(obj, 0, what=what, timeout_s=timeout_s)
        return []
    # One rank at a time, so that a timeout names the rank that is missing.
    others = range(1, dist.get_world_size())
    return [obj, *(receive_object(peer, what=what, timeout_s=timeout_s) for peer in others)]


def scatter_payloads(
    payloads: Sequence[Payload] | None,
    heads: Sequence[int],
    place: Topology,
    *,
    reaches: Sequence[Reachability] = (),
    what: str = "batches",
    timeout_s: float | None = None,
) -> dict[str, Any]:
    """Return this rank's payload; rank 0 passes a payload per replica of the layout of ``place``, other ranks None. Collective.

    A payload has tensors, arrays and ``Rows`` by name, on the CPU. Rank 0 sends it once, to the replica's root (``heads``), which
    broadcasts it over Megatron's groups. Rows in shared files are sent as addresses. ``reaches``, by replica: if all ranks of a
    replica can map all rows of a name, each rank maps them; otherwise the root maps or fetches the rows and broadcasts them.
    Mapped rows are their writer's memory, which stays unchanged for as long as a rank may read it.
    """
    flat = None
    if payloads is not None:
        flats = [_message(payload, reaches[index] if reaches else _HERE) for index, payload in enumerate(payloads)]
        for head, of_head in zip(heads, flats, strict=True):
            if head != place.rank:
                _send_bytes(of_head, head, what, timeout_s)
        flat = _found(flats[0]) if place.rank in heads else None
    elif place.rank in heads:
        flat = _found(_receive_bytes(0, what, timeout_s))
    return unflatten(_broadcast_in_replica(flat, place, place.coordinates_of(heads[place.dp_rank])))


def _message(payload: Payload, reach: Reachability) -> Tensor:
    """Flatten ``payload`` for a replica; of the array servers in ``reach``, only those of nodes that have rows of the payload are sent."""
    nodes = {node for rows in payload.values() if isinstance(rows, Rows) for node in rows.all_nodes}
    return flatten(payload, reach._replace(services={node: reach.services[node] for node in nodes - {reach.node}}))


def _found(flat: Tensor) -> Tensor:
    """Return the message; rows that some rank of the replica cannot map are fetched and replaced by their content."""
    reach, payload = _loaded(flat)
    lacks = {name: value for name, value in payload.items() if isinstance(value, Rows) and not reach.maps(value.all_nodes)}
    if not lacks:
        return flat
    return flatten(payload | {name: rows.fetched(reach.read) for name, rows in lacks.items()}, reach)


def _broadcast_in_replica(flat: Tensor | None, place: Topology, head: RankCoordinates) -> Tensor:
    """Broadcast ``flat`` of the rank at ``head`` in its replica: over stages, then context- and tensor-parallel peers."""
    with place.active():
        is_beside = place.tp_rank == head.tp_rank
        is_behind = is_beside and place.cp_rank == head.cp_rank
        axes = (
            (place.pp_size, is_behind, head.pp_rank, parallel_state.get_pipeline_model_parallel_group),
            (place.cp_size, is_beside, head.cp_rank, parallel_state.get_context_parallel_group),
            (place.tp_size, True, head.tp_rank, parallel_state.get_tensor_model_parallel_group),
        )
        for size, takes_part, source, group in axes:
            if size > 1 and takes_part:
                flat = _broadcast_bytes(flat, group(), source, place.device)
    assert flat is not None  # a replica of one rank is its own root
    return flat


def _broadcast_bytes(flat: Tensor | None, group: dist.ProcessGroup, source: int, device: torch.device) -> Tensor:
    """Broadcast ``flat``, uint8 on the CPU, from the group's rank ``source``; in pieces, through ``device``."""
    size = torch.tensor([0 if flat is None else flat.numel()], device=device)
    dist.broadcast(size, group=group, group_src=source)
    result = torch.empty(int(size), dtype=torch.uint8) if flat is None else flat
    for piece in result.split(_PIECE_BYTES):
        there = piece.to(device)
        dist.broadcast(there, group=group, group_src=source)
        if flat is None and there is not piece:
            piece.copy_(there)
    return result


def flatten(payload: Mapping[str, Any], reach: Reachability = _HERE) -> Tensor:
    """[bytes] uint8: ``payload`` and ``reach``, pickled; rows in shared files as addresses.

    Pickle is safe here, because the ranks of a job trust each other.
    """
    buffer = io.BytesIO()
    pickle.dump((reach, dict(payload)), buffer, protocol=pickle.HIGHEST_PROTOCOL)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def _loaded(flat: Tensor) -> tuple[Reachability, dict[str, Any]]:
    """(reach, payload) of a message made by ``flatten``; rows in shared files are not mapped yet."""
    found: tuple[Reachability, dict[str, Any]] = pickle.loads(flat.numpy().data)
    return found


def unflatten(flat: Tensor) -> dict[str, Any]:
    """Inverse of ``flatten``: the payload, with rows in shared files mapped. Raises OSError for a file that this process cannot map."""
    _, payload = _loaded(flat)
    return {name: value.mapped() if isinstance(value, Rows) else value for name, value in payload.items()}


def gather_tensors(
    tensor: Tensor | None,
    *,
    senders: Sequence[int] | None = None,
    what: str = "results",
    timeout_s: float | None = None,
) -> list[Tensor | None]:
    """Return the 1-D tensors of the ranks ``senders`` (None: all ranks), in order, on rank 0; an empty list elsewhere.

    Lengths and dtypes may differ between ranks; a rank without a result passes None. Raises ValueError for a tensor that is not
    1-D or of a dtype outside ``_PAYLOAD_DTYPES``.
    """
    if tensor is not None and (tensor.dim() != 1 or tensor.dtype not in _PAYLOAD_DTYPES):
        found = f"shape {tuple(tensor.shape)} of {tensor.dtype}"
        raise ValueError(f"expected a 1-D tensor of one of {_PAYLOAD_DTYPES}, got {found}")
    return _gather_raw(tensor, what, timeout_s, senders)


def _gather_raw(
    tensor: Tensor | None, what: str, timeout_s: float | None, senders: Sequence[int] | None = None
) -> list[Tensor | None]:
    senders = range(dist.get_world_size()) if senders is None else senders
    if dist.get_rank() != 0:
        if dist.get_rank() not in senders:
            return []
        if tensor is None:
            _send(torch.tensor([_NO_TENSOR, 0]), 0, what, timeout_s)
            return []
        _send(torch.tensor([tensor.numel(), _PAYLOAD_DTYPES.index(tensor.dtype)]), 0, what, timeout_s)
        # The control group is gloo's, which takes CPU tensors only.
        _send(tensor.detach().cpu(), 0, what, timeout_s)
        return []
    gathered: list[Tensor | None] = []
    for peer in senders:
        if peer == 0:
            gathered.append(tensor if tensor is None else tensor.detach().cpu())
            continue
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


def _send_bytes(data: Tensor, peer: int, what: str, timeout_s: float | None) -> None:
    _send(torch.tensor([data.numel()]), peer, what, timeout_s)
    _send(data, peer, what, timeout_s)


def _receive_bytes(peer: int, what: str, timeout_s: float | None) -> Tensor:
    size = torch.empty(1, dtype=torch.int64)
    _receive(size, peer, what, timeout_s)
    data = torch.empty(int(size), dtype=torch.uint8)
    _receive(data, peer, what, timeout_s)
    return data


def _bytes_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _send(tensor: Tensor, peer: int, what: str, timeout_s: float | None) -> None:
    if tensor.numel() > 0:
        _wait(dist.isend, tensor.contiguous().view(torch.uint8), peer, f"take {what}", timeout_s)


def _receive(tensor: Tensor, peer: int, what: str, timeout_s: float | None) -> None:
    if tensor.numel() > 0:
        _wait(dist.irecv, tensor.view(torch.uint8), peer, f"send {what}", timeout_s)


def _wait(start: Any, tensor: Tensor, peer: int, verb: str, timeout_s: float | None) -> None:
    """Complete one transfer; ``verb``: the expected action of the peer, for errors."""
    plane = topology.control_plane()
    timeout_s = plane.timeout_s if timeout_s is None else timeout_s
    rank = dist.get_rank()
    try:
        start(tensor, peer, group=plane.group).wait(timedelta(seconds=timeout_s))
    except RuntimeError as error:
        # torch raises a plain RuntimeError for both, so only the text tells a timeout from a lost peer.
        if "imed out" in str(error) or "imeout" in str(error):
            raise CollectiveTimeout(
                f"rank {rank} waited {timeout_s:g} s for rank {peer} to {verb}; look at rank {peer}'s log for what "
                "held it up, or raise parallel.collective_timeout_s if it was only slow"
            ) from error
        raise PeerLost(
            f"rank {rank} lost rank {peer}, which should {verb}: {error}; look at rank {peer}'s log for why it ended"
        ) from error
