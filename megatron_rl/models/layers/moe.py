"""Mixture-of-experts settings: translates them for Megatron, checks them, and applies them to an engine's passes.

Megatron's own auxiliary loss and bias update stay off: the loss depends on how an update is divided into
micro-batches, and the bias update counts padding and changes the bias even if the step is skipped. ``routing.py``
implements both.

Megatron's dispatcher needs the same number of rows from every rank, and refuses configurations whose batches may
differ in length. The dispatcher of this module pads each rank's rows to the longest in the group before the
all-gather and removes the padding afterwards; padding is routed to no expert. The ranks of a group synchronize once
more per layer, to find the longest.
"""

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher
from torch import Tensor, nn
from transformers import PretrainedConfig

from megatron_rl.config.checks.model_settings import moe_problems
from megatron_rl.config.layout import expert_tensor_size
from megatron_rl.config.schema import (
    Dispatcher,
    GroupedGemm,
    LoadBalancing,
    MoeConfig,
    ParallelConfig,
    RouterDtype,
    RoutingReplay,
)
from megatron_rl.data.batch import ROUTES, PackedBatch
from megatron_rl.errors import ModelError
from megatron_rl.families.model_facts import dims
from megatron_rl.models.layers.context import pack_alignment, split_here
from megatron_rl.models.layers.routing import (
    RoutingStats,
    RoutingTrace,
    gather_routes,
    load_metrics,
    new_account,
    new_trace,
    routers,
    updated_bias,
)
from megatron_rl.models.layers.torch_layers import has_transformer_engine, unwrap

_ROUTER_DTYPES = {RouterDtype.fp32: "fp32", RouterDtype.fp64: "fp64", RouterDtype.model: None}


def moe_kwargs(settings: MoeConfig, hf_config: PretrainedConfig, parallel: ParallelConfig) -> dict[str, Any]:
    """Fields of TransformerConfig that replace those of the family; none for a dense model."""
    sizes, with_te = dims(hf_config), has_transformer_engine()
    if not sizes["experts"]:
        return {}
    are_split = parallel.expert_parallel_size * expert_tensor_size(parallel) > 1
    return dict(
        moe_router_dtype=_ROUTER_DTYPES[settings.router_dtype],
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_router_bias_update_rate=0.0,
        # Megatron's own all-gather refuses packs; ``install_dispatcher`` replaces it in the built model.
        moe_token_dispatcher_type="flex" if settings.dispatcher is Dispatcher.flex else "alltoall",
        moe_grouped_gemm=_uses_grouped_gemm(settings.grouped_gemm),
        moe_permute_fusion=with_te,
        # The fused kernel does not support float64; ``routing.TracedRouter`` disables it in passes that need expert ids.
        moe_router_fusion=with_te and settings.router_dtype is RouterDtype.fp32,
        # With all experts on one rank there is no dispatch that the shared experts could overlap.
        moe_shared_expert_overlap=with_te
        and settings.dispatcher is Dispatcher.alltoall
        and bool(sizes["shared_ffn"])
        and are_split,
    )


def _uses_grouped_gemm(choice: GroupedGemm) -> bool:
    return choice is GroupedGemm.always or (choice is GroupedGemm.auto and has_transformer_engine())


def check_moe(settings: MoeConfig, hf_config: PretrainedConfig, parallel: ParallelConfig) -> None:
    """Raise ModelError for settings that this model or machine does not support."""
    problems = list(moe_problems(settings, hf_config, hf_config.model_type))
    if problems:
        raise ModelError("\n".join(problems))
    num_experts = dims(hf_config)["experts"]
    if not num_experts:
        return
    # Routes are stored as int16, as expert id + 1.
    if settings.routing_replay is not RoutingReplay.none and num_experts >= torch.iinfo(torch.int16).max:
        raise ModelError(
            f"policy.moe.routing_replay: at most {torch.iinfo(torch.int16).max - 1} experts, got {num_experts}"
        )
    if settings.dispatcher is Dispatcher.flex:
        _check_flex(settings, parallel)
    if settings.grouped_gemm is GroupedGemm.always and not has_transformer_engine():
        missing = (
            "Transformer Engine, which is not installed" if torch.cuda.is_available() else "a GPU; none is present"
        )
        raise ModelError(f"policy.moe.grouped_gemm=always: needs {missing}; set auto or never")


def _check_flex(settings: MoeConfig, parallel: ParallelConfig) -> None:
    if not torch.cuda.is_available():
        raise ModelError("policy.moe.dispatcher=flex: DeepEP needs GPUs, and none is present; use alltoall or allgather")
    if importlib.util.find_spec("deep_ep") is None:
        raise ModelError("policy.moe.dispatcher=flex: needs the package deep_ep, which is not installed; use alltoall")
    if parallel.expert_parallel_size * (expert_tensor_size(parallel) or 1) < 2:
        raise ModelError(
            "policy.moe.dispatcher=flex: experts on one rank need no dispatcher; set parallel.expert_parallel_size above 1, "
            "or use alltoall"
        )
    if settings.router_dtype is not RouterDtype.fp32:
        raise ModelError(
            f"policy.moe.router_dtype={settings.router_dtype.value}: DeepEP takes probabilities in float32; set fp32"
        )


class Routing:
    """Routes the passes of one engine: makes the trace of each micro-batch, and balances and reports by their statistics.

    For a dense model every trace is None, and no method has an effect.
    """

    def __init__(self, settings: MoeConfig, chunks: Sequence[nn.Module]) -> None:
        self._settings = settings
        self._config = unwrap(chunks[0]).config
        self._routers = routers(chunks)
        self._has_experts = bool(self._config.num_moe_experts)
        self._is_whole = len(chunks) == 1
        self._device = torch.device("cpu")
        self._aux_loss_scale = 0.0
        self._records = False
        self._accounts: list[RoutingStats] = []
        self._sizes: list[int] = []

    def begin(
        self,
        microbatches: Sequence[PackedBatch],
        stand_ins: Sequence[bool],
        device: torch.device,
        *,
        trains: bool,
        records: bool,
    ) -> None:
        """Reset the statistics for a pass over ``microbatches`` on ``device``; ``stand_ins``: True for dummies.

        ``trains``: apply the balance loss (collective). ``records``: keep the routes for ``pop_routes``.
        """
        if not self._has_experts:
            return
        # The tokens of a dummy take part in collectives, but enter no statistic.
        self._sizes = [0 if empty else len(batch.tokens) for batch, empty in zip(microbatches, stand_ins, strict=True)]
        self._accounts, self._records, self._device, self._aux_loss_scale = [], records, device, 0.0
        if trains and self._settings.load_balancing is LoadBalancing.aux_loss:
            self._aux_loss_scale = self._settings.aux_loss_coef / max(_count_tokens(self._sizes, device), 1)

    def trace(self, index: int, batch: PackedBatch) -> RoutingTrace | None:
        """Trace for a chunk's pass over micro-batch ``index``; None for a dense model. ``batch``: the micro-batch, in host memory."""
        if not self._has_experts:
            return None
        if index == len(self._accounts):
            if self._is_whole and index and self._accounts[-1].recorded is not None:
                # The pass over the previous micro-batch has ended, so its routes may leave the device.
                self._accounts[-1].recorded = self._accounts[-1].recorded.cpu()
            self._accounts.append(new_account(self._config, len(batch.tokens), self._device, records=self._records))
        rows = local_rows(batch.lengths.tolist(), self._config)
        return new_trace(
            rows if self._sizes[index] else torch.full_like(rows, -1),
            batch.cu_seqlens,
            self._accounts[index],
            replayed=batch.fields.get(ROUTES) if self._settings.routing_replay is not RoutingReplay.none else None,
            aux_loss_scale=self._aux_loss_scale,
        )

    def pop_routes(self) -> list[Tensor]:
        """Routes [T, L, K] int16 of each micro-batch of the last pass, which recorded; collective over the replica's ranks."""
        accounts, self._accounts = self._accounts, []
        return [gather_routes(account)[:size] for account, size in zip(accounts, self._sizes, strict=True)]

    @torch.no_grad()
    def finish_update(self, *, skipped: bool) -> dict[str, tuple[float, float]]:
        """Update the expert bias after an optimizer step, unless skipped; returns metrics (sum, denominator). Collective."""
        accounts, self._accounts = self._accounts, []
        if not accounts:
            return {}
        extra = torch.zeros(2, dtype=torch.float64, device=self._device)
        for account in accounts:
            for index, value in enumerate((account.aux_loss, account.num_replayed)):
                if value is not None:
                    extra[index] += value
        totals = torch.cat([extra, torch.stack([account.loads for account in accounts]).sum(0).flatten()])
        # Over all ranks, also ranks that share tokens, because each rank counted only its own part.
        dist.all_reduce(totals)
        loads = totals[2:].view(self._config.num_layers, -1)
        if self._settings.load_balancing is LoadBalancing.bias and not skipped:
            for router in self._routers:
                rate = self._settings.bias_update_rate
                router.expert_bias.copy_(updated_bias(router.expert_bias, loads[router.layer_number - 1], rate))
        totals = totals.cpu()  # by one copy, because every number that is read from the device waits for it
        loads = totals[2:].view(self._config.num_layers, -1)
        metrics = load_metrics(loads)
        aux_loss, num_replayed = totals[:2].tolist()
        if self._settings.load_balancing is LoadBalancing.aux_loss:
            num_layers = float((loads.sum(1) > 0).sum())
            metrics["moe_balance_loss"] = (aux_loss, self._settings.aux_loss_coef * num_layers)
        if self._settings.routing_replay is not RoutingReplay.none:
            metrics["moe_replayed_share"] = (num_replayed, float(loads.sum()) / self._config.moe_router_topk)
        return metrics


def _count_tokens(sizes: Sequence[int], device: torch.device) -> int:
    """Number of tokens of all data-parallel ranks; ``sizes``: tokens of each of this rank's micro-batches."""
    total = torch.tensor(float(sum(sizes)), dtype=torch.float64, device=device)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    return int(total)


def local_rows(lengths: Sequence[int], config: TransformerConfig) -> Tensor:
    """[T_local] int64: the pack's row of each token that this rank's routers see, -1 for padding."""
    rows = torch.arange(sum(lengths))
    if config.context_parallel_size > 1:
        rows = split_here(tuple(lengths), config).token_of_row
    rows = torch.nn.functional.pad(rows, (0, -len(rows) % pack_alignment(config)), value=-1)
    if config.sequence_parallel:
        rows = rows.chunk(config.tensor_model_parallel_size)[parallel_state.get_tensor_model_parallel_rank()]
    return rows


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
