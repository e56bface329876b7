"""Transfers between pipeline stages without sending shapes first.

Micro-batches differ in length, and Megatron then sends the shape before every tensor and waits for the GPU to read it. But all
stages of a replica have the same micro-batches, and messages between two ranks keep their order, so every shape is known from
the plan.
"""

from collections.abc import Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig

_NOTHING = [0, 0, 0]


class _KnownShapes(P2PCommunicator):
    """Megatron's communicator of one pass over micro-batches; ``num_rows``: rows of each micro-batch."""

    def __init__(self, config: TransformerConfig, num_rows: Sequence[int]) -> None:
        group = parallel_state.get_pipeline_model_parallel_group()
        super().__init__(group, config)
        shapes = [[rows, 1, config.hidden_size] for rows in num_rows]
        num_chunks = config.virtual_pipeline_model_parallel_size or 1
        order = arrivals(len(shapes), num_chunks, group.size(), is_end=group.rank() == 0)
        self._from_previous = iter([shapes[index] for index in order])
        order = arrivals(len(shapes), num_chunks, group.size(), is_end=group.rank() == group.size() - 1)
        self._from_next = iter([shapes[index] for index in order])

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        return (
            next(self._from_previous) if recv_prev else _NOTHING,
            next(self._from_next) if recv_next else _NOTHING,
        )


def arrivals(num_microbatches: int, num_chunks: int, num_stages: int, *, is_end: bool) -> list[int]:
    """Micro-batches of the messages that a rank receives from one neighbor, in order, in one direction.

    ``num_chunks``: model chunks per rank. ``is_end``: the rank has the model's end on that side (first layers for activations from
    the previous rank, last layers for gradients from the next), so it receives nothing for that chunk.
    """
    table = get_schedule_table(num_microbatches, num_chunks, num_stages)
    return [index for index, chunk in table if not is_end or chunk < num_chunks - 1]


def stage_options(config: TransformerConfig, num_rows: Sequence[int]) -> dict[str, Any]:
    """Arguments of Megatron's schedule for a pass over micro-batches of ``num_rows`` rows of hidden states each."""
    if config.pipeline_model_parallel_size == 1:
        return {}
    groups = ProcessGroupCollection()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    groups.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True)
    groups.tp_dp_cp = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    return dict(p2p_communicator=_KnownShapes(config, num_rows), pg_collection=groups)
