"""One rank of a world that does not exist: Megatron's groups of any size in this process; collectives on them do nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_rl.config.schema import ParallelConfig
from megatron_rl.parallel import topology
from megatron_rl.parallel.topology import Topology


@contextmanager
def fake_rank(rank: int, world_size: int, *layouts: ParallelConfig) -> Iterator[list[Topology]]:
    """Inside, this process is ``rank`` of a world with these layouts (``topology.add_layout``), the first one active."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    real = parallel_state.create_group

    def without_gloo(*args: Any, backend: str | None = None, **options: Any) -> Any:
        """The twins over gloo would look for their peers."""
        return real(*args, **options)

    try:
        with patch.object(parallel_state, "create_group", without_gloo):
            yield [topology.add_layout(parallel, seed=1) for parallel in layouts]
    finally:
        topology.destroy()
        topology.reset_globals()
