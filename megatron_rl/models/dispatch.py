"""How tokens travel to the ranks of their experts: Megatron's dispatchers, and its all-gather one made fit for packs.

Megatron's all-gather dispatcher takes as many rows from every rank, and refuses configurations whose batches may differ
in length. Ours pads each rank's rows to the longest of the group before they are gathered and cuts them afterwards;
padding is routed nowhere. The ranks of a group wait for each other once more in every layer, for the one number.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher
from torch import Tensor


class PackedAllGatherDispatcher(MoEAllGatherTokenDispatcher):
    """Gathers the tokens of all ranks that share experts; each computes its own experts' part of every token."""

    def dispatch_preprocess(self, hidden: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [T_local, 1, H], routing_map [T_local, E] bool, probs [T_local, E] -> padded rows and probs."""
        rows, probs = super().dispatch_preprocess(hidden, routing_map, probs)
        self._num_rows = len(rows)
        if self.tp_size * self.ep_size > 1:
            longest = torch.tensor(len(rows), device=rows.device)
            dist.all_reduce(longest, dist.ReduceOp.MAX, group=self.tp_ep_group)
            padding = (0, 0, 0, int(longest) - len(rows))
            rows, probs = F.pad(rows, padding), F.pad(probs, padding)
            self.routing_map = F.pad(self.routing_map, padding)
        return rows, probs

    def combine_postprocess(self, hidden: Tensor) -> Tensor:
        """Padded rows -> [T_local, 1, H]."""
        return super().combine_postprocess(hidden[: self._num_rows])


class AllGatherMoELayer(MoELayer):
    """Megatron's layer with this dispatcher in the place of the one that its configuration names."""

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        pg_collection: ProcessGroupCollection | None = None,
        **kwargs: Any,
    ) -> None:
        groups = pg_collection or get_default_pg_collection()
        super().__init__(config, *args, pg_collection=groups, **kwargs)
        self.token_dispatcher = PackedAllGatherDispatcher(
            self.num_local_experts, self.local_expert_indices, config=config, pg_collection=groups
        )


ALL_GATHER_LAYERS: dict[type, type] = {MoELayer: AllGatherMoELayer}
