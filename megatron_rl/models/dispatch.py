"""Token dispatch to the ranks of the experts: adapts Megatron's all-gather dispatcher to packed batches.

Megatron's dispatcher needs the same number of rows from every rank, and refuses configurations whose batches may differ
in length. The dispatcher of this module pads each rank's rows to the longest in the group before the all-gather and
removes the padding afterwards; padding is routed nowhere. The ranks of a group synchronize one more time per layer, to
find the longest.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher
from torch import Tensor, nn

from megatron_rl.config.schema import Dispatcher


class PackedAllGatherDispatcher(MoEAllGatherTokenDispatcher):
    """Gathers the tokens of all ranks that share experts; each rank applies its own experts to every token."""

    def dispatch_preprocess(self, hidden: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Pad the rows: hidden [T_local, 1, H], routing_map [T_local, E] bool, probs [T_local, E] -> rows and probs."""
        rows, probs = super().dispatch_preprocess(hidden, routing_map, probs)
        self._num_rows = len(rows)
        if self.tp_size * self.ep_size > 1:
            longest = torch.tensor(len(rows), device=rows.device)
            dist.all_reduce(longest, dist.ReduceOp.MAX, group=self.tp_ep_group)
            padding = (0, 0, 0, int(longest) - len(rows))
            rows, probs = F.pad(rows, padding), F.pad(probs, padding)
            self.routing_map: Tensor = F.pad(self.routing_map, padding)
        return rows, probs

    def combine_postprocess(self, hidden: Tensor) -> Tensor:
        """Remove the padding: padded rows -> [T_local, 1, H]."""
        return super().combine_postprocess(hidden[: self._num_rows])


def install_dispatcher(model: nn.Module, dispatcher: Dispatcher) -> None:
    """Replace the dispatchers of a built model if ``dispatcher`` is not available through Megatron's configuration."""
    if dispatcher is not Dispatcher.allgather:
        return
    for layer in model.modules():
        if isinstance(layer, MoELayer):
            layer.token_dispatcher = PackedAllGatherDispatcher(
                layer.num_local_experts,
                layer.local_expert_indices,
                config=layer.config,
                pg_collection=get_default_pg_collection(),
            )
