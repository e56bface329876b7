"""Moves one model's storages between this rank's device and host memory.

Gradient buffers exist from a model's first update to its first use of another kind, so a stage with several updates
allocates and frees them once. Freeing waits for the device; an update does not. Weights and optimizer state of an
offloaded model are in host memory (pinned if there are GPUs) until the model's next call. Storages are emptied and
filled in place, so Megatron's views of them (buckets, shards, main gradients) stay valid, and results are the same,
bit for bit. All operations are local to a rank; no rank waits for another.
"""

import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from megatron_rl.errors import UserError
from megatron_rl.system.processes.host_memory import available_bytes_per_rank, num_ranks_here
from megatron_rl.training.optimizer import state_tensors

_GB = 1e9


class ModelMemory:
    """The memory of one engine's model; a model without an optimizer has weights only."""

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        replicas: Sequence[DistributedDataParallel],
        optimizer: MegatronOptimizer | None,
        *,
        moves: bool,
        base: "ModelMemory | None" = None,
    ) -> None:
        """``moves``: whether ``offload`` moves weights and state; gradients are allocated and freed in any case.

        ``base``: memory of another model whose weights this one uses as its own; only the other model moves these.
        """
        # Megatron's offload_grad_buffers does the same, but warns about its own use of typed storages.
        storages = [
            buffer.grad_data.untyped_storage()
            for replica in replicas
            for buffer in (*replica.buffers, *replica.expert_parallel_buffers)
        ]
        self._gradients = [(storage, storage.nbytes()) for storage in storages]
        self._has_gradients = True
        self._optimizer = optimizer
        self._moves, self.base = moves, base
        self._num_users = 0
        self._weights: _HostBuffer = _HostBuffer(
            lambda: (parameter.data for chunk in chunks for parameter in chunk.parameters()), besides=base._weights if base else None
        )
        self._state = _HostBuffer(lambda: state_tensors(optimizer) if optimizer else (), besides=self._weights)
        self._free_gradients()

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Keep the weights on the device inside the block, even if another model asks for an offload; free the gradients."""
        self._free_gradients()
        with self._in_use():
            yield

    @contextmanager
    def state(self, *, changes: bool) -> Iterator[None]:
        """Keep weights and optimizer state on the device inside the block; ``changes``: the block may change both."""
        self._free_gradients()
        with self._in_use(state=True, changes=changes):
            yield

    @contextmanager
    def training(self) -> Iterator[None]:
        """Keep all that an update needs on the device inside the block: also gradient buffers, with arbitrary content.

        The buffers stay for the next update.
        """
        with self._in_use(state=True, changes=True):
            if not self._has_gradients:
                for storage, size in self._gradients:
                    storage.resize_(size)
                self._has_gradients = True
            try:
                yield
            finally:
                if self._optimizer is not None:
                    self._optimizer.zero_grad()  # drops the views of the buffers, and float32 copies of their shards

    @contextmanager
    def _in_use(self, *, state: bool = False, changes: bool = False) -> Iterator[None]:
        with self.base.weights() if self.base else nullcontext():
            self._weights.back()
            if state:
                self._state.back()
            self._num_users += 1
            try:
                yield
            finally:
                self._num_users -= 1
                if changes:
                    self._weights.is_copied = self._state.is_copied = False

    def offload(self, *, keep_weights: bool = False) -> None:
        """Free the device: drop the gradients, and move state, and weights if they may go, that are not in use to host memory."""
        self._free_gradients()
        if not self._moves or self._num_users:
            return
        if (self._state.out() | (not keep_weights and self._weights.out())) and torch.cuda.is_available():
            torch.cuda.empty_cache()  # large blocks of other sizes come next

    def _free_gradients(self) -> None:
        if not self._has_gradients:
            return
        _wait_for_device()
        for storage, _ in self._gradients:
            storage.resize_(0)
        self._has_gradients = False
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


class _HostBuffer:
    """Storages of some tensors, on the device or in host memory; the host memory is allocated once and kept."""

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], *, besides: "_HostBuffer | None" = None) -> None:
        self._tensors = tensors
        self._besides = besides
        self._host: Tensor | None = None
        self._emptied: list[tuple[torch.UntypedStorage, int]] = []
        self.is_copied = False
        """True if host memory has the same content as the device, so that ``out`` copies nothing."""

    def out(self) -> bool:
        """Empty the storages, after a copy to host memory if there is none yet. Returns False if they were empty."""
        if self._emptied:
            return False
        storages = self._storages()
        sizes = [storage.nbytes() for storage in storages.values()]
        if self._host is None or len(self._host) != sum(sizes):
            self._host, self.is_copied = _host_memory(sum(sizes)), False
        parts = self._host.split(sizes)
        _wait_for_device()
        if not self.is_copied:
            for storage, part in zip(storages.values(), parts, strict=True):
                part.copy_(_bytes_of(storage), non_blocking=True)
        _wait_for_device()
        self._emptied = list(zip(storages.values(), sizes, strict=True))
        for storage, _ in self._emptied:
            storage.resize_(0)
        self.is_copied = True
        return bool(self._emptied)

    def back(self) -> None:
        """Fill the storages again."""
        if not self._emptied or self._host is None:
            return
        parts = self._host.split([size for _, size in self._emptied])
        for (storage, size), part in zip(self._emptied, parts, strict=True):
            storage.resize_(size)
            _bytes_of(storage).copy_(part, non_blocking=True)
        _wait_for_device()
        self._emptied = []

    def _storages(self) -> dict[int, torch.UntypedStorage]:
        """Storages by identity, because tensors share storages, and some float32 optimizer state is the weights' own storage."""
        others = self._besides._storages() if self._besides else {}
        found = (tensor.untyped_storage() for tensor in self._tensors())
        return {one._cdata: one for one in found if one.nbytes() and one._cdata not in others}


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _wait_for_device() -> None:
    """Wait for all streams: weights are gathered and sent on streams other than the one that copies."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _host_memory(num_bytes: int) -> Tensor:
    """[num_bytes] uint8, pinned if there is a GPU. Raises UserError if the machine has too little memory."""
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    room = available_bytes_per_rank()
    if num_bytes > room:
        raise UserError(
            f"no host memory for an offloaded model: {num_ranks_here()} ranks of this machine need "
            f"{num_bytes / _GB:.1f} GB each, and {room / _GB:.1f} GB are available for each; set policy.offload=never and "
            "critic.offload=never, or use more ranks"
        )
    # Not torch's own pinned memory, whose sizes are rounded up to a power of two.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK)  # a fork would copy all pages that are pinned
    host = torch.frombuffer(memory, dtype=torch.uint8)
    if torch.cuda.is_available():
        status = int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), num_bytes, 0))
        if status:
            raise UserError(
                f"{num_bytes / _GB:.1f} GB of host memory could not be pinned (CUDA error {status}); raise the limit on locked "
                "memory (ulimit -l), or set policy.offload=never and critic.offload=never"
            )
    return host
