"""One Megatron model on this rank: computes log-probs or values, and makes updates.

Every method is collective. All data-parallel ranks pass the same number of micro-batches, each rank its own
(``batching.plan_microbatches``); the tensor-, context- and pipeline-parallel peers of a rank pass the same
micro-batches as the rank. A rank waits for its pipeline neighbors in every micro-batch, for its tensor-, context-
and expert-parallel peers in every layer, and for all ranks at the end of an update; a wait ends with an error after
the process group's collective timeout.

Invariants:

- The gradient of an update is the sum of the losses' gradients over all micro-batches of all ranks. Nothing divides by
  micro-batches, tokens or ranks: a loss is already divided by its global denominators.
- A micro-batch without sequences runs as a dummy of two masked tokens and adds nothing.
- Outputs follow the alignment rule of ``data/batch.py``.
- While a method runs, Megatron's globals are those of the engine's layout; afterwards the previous globals are restored. So
  engines of different layouts may take turns.
"""

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_rl.config.schema import (
    Dtype,
    Fp8,
    Init,
    LoraConfig,
    MoeConfig,
    Mtp,
    Offload,
    OptimizerConfig,
    ParallelConfig,
    Recompute,
    VisionConfig,
)
from megatron_rl.data.batch import TEACHER_IDS, PackedBatch, dummy_batch, on_device
from megatron_rl.families.model_facts import text_config
from megatron_rl.families.parameters import Role
from megatron_rl.models import critic, policy
from megatron_rl.models.freezing import freeze_matching
from megatron_rl.models.hf.gather import GatherTarget
from megatron_rl.models.hf.model_config import load_hf_config
from megatron_rl.models.hf.tensor_sources import check_mtp_present, mtp_note
from megatron_rl.models.hf.weights import expected_names, load_weights, unread_tensors_note
from megatron_rl.models.image_encoding import freeze
from megatron_rl.models.layers.context import num_rows
from megatron_rl.models.layers.moe import Routing
from megatron_rl.models.layers.torch_layers import layers_note, unwrap
from megatron_rl.models.logprobs import DEFAULT_CHUNK_SIZE
from megatron_rl.models.lora import FIXED_FIELDS, add_adapters, seed_dropout, share_weights, without_adapters
from megatron_rl.models.megatron_fields import MegatronSettings
from megatron_rl.parallel.pipeline_shapes import stage_options
from megatron_rl.parallel.topology import Topology
from megatron_rl.training import ddp
from megatron_rl.training.losses import LossFunction, Metrics
from megatron_rl.training.model_checkpoint import CheckpointWrite, load_checkpoint, start_checkpoint
from megatron_rl.training.model_export import ModelExport
from megatron_rl.training.model_memory import ModelMemory
from megatron_rl.training.optimizer import build_optimizer, build_scheduler, guarded_step

_LOGITS_PER_CHUNK = 2**22
"""Maximum number of logits at a time (16 MiB): a small vocabulary needs few chunks, and so few all-reduces."""


def _in_own_layout(method: Callable) -> Callable:
    """Run a method of an engine, or the constructor, with Megatron's globals of the engine's layout."""

    @functools.wraps(method)
    def run(self: "Engine", *args: Any, **kwargs: Any) -> Any:
        topology = kwargs["topology"] if method.__name__ == "__init__" else self.topology
        with topology.active():
            return method(self, *args, **kwargs)

    return run


@dataclass(frozen=True)
class UpdateResult:
    grad_norm: float
    """Global 2-norm before clipping; not finite if the step was skipped."""
    lr: float
    metrics: dict[str, tuple[float, float]]
    """Maps each name to (sum, denominator) over all micro-batches of all ranks; the same on every rank."""
    skipped: bool
    """True if the gradient was not finite: weights, Adam's state and the schedule are unchanged."""
    plan: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the micro-batches' balance, from ``TrainerGroup``, under the names in docs/metrics.md."""
    logprobs: Tensor | None = None
    """[T] float32 log-probs of the batch before this update, as of ``TrainerGroup.logprobs``, if requested."""


class Engine:
    """One policy or critic: its model chunks on this rank and, if it trains, gradients, optimizer and schedule."""

    role: Role
    memory: ModelMemory
    _kept_logprobs: list[Tensor]
    _save: CheckpointWrite | None = None
    """Save that was started and is not finished."""
    _adapters_off = False
    """True if forward passes compute the base model."""

    @_in_own_layout
    def __init__(  # noqa: PLR0913 (the engine is the public face of training: one keyword per setting)
        self,
        role: Role,
        path: str | Path,
        *,
        parallel: ParallelConfig,
        topology: Topology,
        optimizer: OptimizerConfig | None,
        init: Init = Init.checkpoint,
        dtype: Dtype = Dtype.float32,
        recompute: Recompute = Recompute.none,
        offload: Offload = Offload.never,
        moe: MoeConfig | None = None,
        fp8: Fp8 = Fp8.none,
        fp32_head: bool = False,
        mtp: Mtp = Mtp.drop,
        vision: VisionConfig | None = None,
        frozen: Sequence[str] = (),
        lora: LoraConfig | None = None,
        base: "Engine | None" = None,
        megatron: Mapping[str, Any] | None = None,
        seed: int = 1,
    ) -> None:
        """``path`` is a Hugging Face folder; ``optimizer=None`` makes a model without updates (a reference).

        ``moe``: the choice of a policy's experts; with replay the field ``routes`` of the batches determines it. ``offload``: when
        ``offload`` moves the model. ``fp8``, ``fp32_head``: a policy's precision. ``mtp``: whether ``save_hf`` keeps the
        multi-token-prediction layers of ``path``. ``vision``: trained parts of a vision-language model's encoder. ``frozen``: patterns of
        tensors that do not train (``models.freezing``). ``lora``: adapters that train instead. ``base``: a policy with adapters in this
        layout, whose frozen weights a critic with adapters uses. ``megatron``: fields of TransformerConfig (``models.megatron_fields``).
        """
        if role not in ("policy", "critic"):
            raise ValueError(f"role is 'policy' or 'critic', got {role!r}")
        moe, vision = moe or MoeConfig(), vision or VisionConfig()
        self.role, self.parallel, self.topology, self.path = role, parallel, topology, Path(path)
        self.hf_config = load_hf_config(path)
        self.lora, self._seed = (lora if lora is not None and lora.rank else None), seed
        settings = MegatronSettings(moe=moe, fp8=fp8, fields={**(megatron or {}), **(FIXED_FIELDS if self.lora else {})})
        builder: Any = critic.build_critic if role == "critic" else functools.partial(policy.build_policy, fp32_head=fp32_head)
        torch_dtype = getattr(torch, dtype.value)
        self._tokens_per_chunk = max(DEFAULT_CHUNK_SIZE, _LOGITS_PER_CHUNK // text_config(self.hf_config).vocab_size)
        loads = init is Init.checkpoint
        self._note_origin(loads, mtp)
        options = {"dtype": torch_dtype, "recompute": recompute, "settings": settings, "seed": None if loads else seed}
        self.chunks = builder(self.hf_config, parallel, **options)
        if base is not None:
            share_weights(self.chunks, base.chunks)
        elif loads:
            load_weights(self.chunks, self.hf_config, path, role=role)
        if self.lora:
            add_adapters(self.chunks, self.hf_config, role, self.lora, seed=seed)
        self.export = ModelExport(self.chunks, self.hf_config, role, self.path, self.lora)
        self._routing, self._optimizer, self._kept_logprobs = Routing(moe, self.chunks), None, []
        self._replicas: list[DistributedDataParallel] = []
        if optimizer is None:
            torch.nn.ModuleList(self.chunks).requires_grad_(False)
        else:
            self._make_trainable(optimizer, vision, frozen, torch_dtype)
        moves = offload is Offload.always or (offload is Offload.auto and topology.device.type == "cuda")
        self.memory = ModelMemory(self.chunks, self._replicas, self._optimizer, moves=moves, base=base.memory if base else None)

    def _note_origin(self, loads: bool, mtp: Mtp) -> None:
        """Note what of ``path`` the model does not read; ``loads``: whether its weights come from there."""
        self._keeps_mtp = mtp is Mtp.keep
        self.mtp_note = mtp_note(self.hf_config, self.path, keeps=self._keeps_mtp) if loads and self.role == "policy" else ""
        self.unread_tensors_note = unread_tensors_note(self.hf_config, self.path, self.role) if loads else ""
        if self._keeps_mtp:
            check_mtp_present(self.hf_config, self.path, remedy="set policy.mtp=drop")

    def _make_trainable(self, optimizer: OptimizerConfig, vision: VisionConfig, frozen: Sequence[str], dtype: torch.dtype) -> None:
        if not self.lora:
            freeze(self.chunks, train_encoder=vision.train_encoder, train_adapter=vision.train_adapter)
            freeze_matching(self.chunks, self.hf_config, self.role, frozen)
        self._replicas = ddp.wrap(self.chunks, dtype)
        self._optimizer = build_optimizer(optimizer, self._replicas, dtype)
        self._scheduler = build_scheduler(optimizer, self._optimizer)

    def layers_note(self, longest: int = 0) -> str:
        """Note on missing GPU kernels for this model and sequences of ``longest`` tokens, or an empty string."""
        return layers_note(self.chunks[0].config, longest)

    @property
    def is_output_rank(self) -> bool:
        """True if this rank reports for its tensor-, context- and pipeline-parallel peers; exactly one of the peers does."""
        return self.topology.is_output_rank

    @_in_own_layout
    def logprobs(
        self, microbatches: Sequence[PackedBatch], *, temperature: float = 1.0, record_routes: bool = False
    ) -> list[Tensor]:
        """Per micro-batch the log-probabilities [T] where fields["mask"], else 0; float32, no gradient.

        The list is empty on ranks before the last pipeline stage. ``record_routes``: call ``pop_routes`` next.
        """
        self._expect_role("policy")
        outputs = self._forward(microbatches, temperature, record_routes=record_routes)
        # Before the last stage there are no outputs.
        return [output["logprobs"][: len(batch.tokens)] for output, batch in zip(outputs, microbatches, strict=False)]

    @_in_own_layout
    def pop_routes(self) -> list[Tensor]:
        """Routes [T, L, K] int16 (data/batch.py) of each micro-batch of the last pass with ``record_routes``; on every rank."""
        return self._routing.pop_routes()

    @_in_own_layout
    def values(self, microbatches: Sequence[PackedBatch]) -> list[tuple[Tensor, Tensor]]:
        """Per micro-batch (values [T], final_values [N]): V before each token, and after the last of each sequence.

        float32, no gradient. The list is empty on ranks before the last pipeline stage.
        """
        self._expect_role("critic")
        pairs = zip(self._forward(microbatches, temperature=1.0), microbatches, strict=False)
        return [(found["values"][: len(batch.tokens)], found["final_values"][: batch.num_sequences]) for found, batch in pairs]

    @_in_own_layout
    def update(
        self,
        microbatches: Sequence[PackedBatch],
        loss: LossFunction,
        *,
        temperature: float = 1.0,
        keeps_logprobs: bool = False,
    ) -> UpdateResult:
        """One optimizer step on all micro-batches of all ranks. ``keeps_logprobs``: call ``pop_logprobs`` next.

        Raises ValueError without micro-batches, or for a loss without a gradient.
        """
        optimizer = self._trained()
        if not microbatches:
            raise ValueError("an update needs at least one micro-batch on every rank; without data, skip the step")

        def scaled_loss(chunk: torch.nn.Module, batch: PackedBatch, output: Tensor) -> tuple[Tensor, Tensor, Metrics]:
            outputs = self._outputs(chunk, batch, output, temperature)
            value, metrics = loss(outputs, on_device(batch, self.topology.device))
            if keeps_logprobs:
                self._kept_logprobs.append(outputs["logprobs"].detach())
            if not value.requires_grad:
                raise ValueError("the loss has no gradient: compute it from the model's outputs, without detach()")
            # The second entry is Megatron's own token count; it stays 0, because the loss has its own denominators.
            return value, torch.zeros((), dtype=torch.int), metrics

        self._kept_logprobs = []
        if self.lora and self.lora.dropout:
            # By the step, so that a resumed run drops the same inputs.
            seed_dropout(self._seed, self._scheduler.num_steps, self.topology.dp_rank)
        with self.memory.training():
            for replica in self._replicas:
                replica.train()
                replica.zero_grad_buffer()
            totals = ddp.reduce_metrics(self._schedule(self._replicas, microbatches, scaled_loss, forward_only=False), self.topology)
            grad_norm, lr = guarded_step(optimizer, self._scheduler)
            skipped = not math.isfinite(grad_norm)
            loads = self._routing.finish_update(skipped=skipped)
            # Last, because the host waits for all that precedes it: the gather overlaps what the caller does next.
            ddp.start_weight_allgather(self._replicas)
        whole = zip(self._kept_logprobs, microbatches, strict=False)
        self._kept_logprobs = [logprobs[: len(batch.tokens)] for logprobs, batch in whole]
        return UpdateResult(grad_norm, lr, totals | loads, skipped)

    def pop_logprobs(self) -> list[Tensor]:
        """Return, and forget, the log-probs of each micro-batch from the forward pass of the last ``update`` with ``keeps_logprobs``.

        These log-probs equal those of ``logprobs`` before the update. The list is empty on ranks before the last pipeline stage.
        """
        kept, self._kept_logprobs = self._kept_logprobs, []
        return kept

    def export_weights(
        self, to: GatherTarget = GatherTarget.driver, *, merged: bool = True
    ) -> Iterator[tuple[str, Tensor | None]]:
        """Hugging Face names and, on the ranks of ``to``, whole tensors; ``merged=False``: without the adapters.

        Every rank must exhaust the stream, because it gathers.
        """
        ddp.wait_for_weights(self._replicas)
        with self.topology.active():
            weights = self.export.weights(to, merged=merged)
        with self.memory.weights():
            while True:
                # Between two tensors the caller's layout is active, so that the caller may use another engine.
                with self.topology.active():
                    item = next(weights, None)
                if item is None:
                    return
                yield item

    @_in_own_layout
    def export_adapters(self) -> dict[str, Tensor]:
        """The adapters' tensors under the names of peft's files, on rank 0; empty on other ranks."""
        ddp.wait_for_weights(self._replicas)
        with self.memory.weights():
            return {name: tensor for name, tensor in self.export.adapters() if tensor is not None}

    def expected_weights(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor of ``export_weights``."""
        return expected_names(self.hf_config, self.role)

    @_in_own_layout
    def save_hf(self, folder: str | Path, progress: Callable[[str], None] = lambda text: None) -> None:
        """Write ``folder`` (``ModelExport.save``), which appears once it is complete. Rank 0 calls ``progress``."""
        ddp.wait_for_weights(self._replicas)
        with self.memory.weights():
            self.export.save(folder, keep_mtp=self._keeps_mtp, progress=progress)

    def as_base(self, moe: MoeConfig) -> "Engine":
        """This engine without its adapters and its optimizer, on the same weights; ``moe``: its choice of experts."""
        base = copy.copy(self)
        base._optimizer, base._adapters_off, base._routing = None, True, Routing(moe, self.chunks)
        return base

    def save_state(self, folder: str | Path) -> None:
        """Write weights, optimizer state and schedule to ``folder``; it appears once it is complete."""
        self.start_save(folder, in_background=False)
        self.finish_save()

    @_in_own_layout
    def start_save(self, folder: str | Path, *, in_background: bool) -> None:
        """Start ``save_state``; ``finish_save`` ends it. ``in_background``: the model may be used and trained meanwhile."""
        self.finish_save()
        optimizer = self._trained()
        ddp.wait_for_weights(self._replicas)
        with self.memory.state(changes=False):
            options: dict[str, Any] = {"in_background": in_background, "adapters": self.export.adapter_config}
            self._save = start_checkpoint(folder, self.chunks, optimizer, self._scheduler, **options)

    @property
    def save_is_complete(self) -> bool:
        """True if ``finish_save`` would not wait for this rank."""
        return self._save is None or self._save.is_written

    @_in_own_layout
    def finish_save(self) -> None:
        """Wait for the save that was started, if any, and give its folder the final name."""
        save, self._save = self._save, None
        if save is not None:
            save.finish()

    @_in_own_layout
    def load_state(self, folder: str | Path) -> None:
        """Continue from a checkpoint of ``save_state``, in any layout."""
        optimizer = self._trained()
        ddp.wait_for_weights(self._replicas)
        with self.memory.state(changes=True):
            load_checkpoint(folder, self.chunks, optimizer, self._scheduler)

    def offload(self, *, keep_weights: bool = False) -> None:
        """Offload this model (as ``offload`` says) until the next call of one of its methods; ``keep_weights``: only its state.

        Not collective; weights that an unfinished ``export_weights`` reads stay.
        """
        ddp.wait_for_weights(self._replicas)
        self.memory.offload(keep_weights=keep_weights)

    def _expect_role(self, role: str) -> None:
        if self.role != role:
            raise ValueError(f"expected an engine of role {role!r}, this one is a {self.role}")

    def _trained(self) -> Any:
        if self._optimizer is None:
            raise ValueError(f"this {self.role} was built without an optimizer; pass an OptimizerConfig to train it")
        return self._optimizer

    def _outputs(
        self, chunk: torch.nn.Module, batch: PackedBatch, output: Tensor, temperature: float, *, with_entropy: bool = True
    ) -> dict[str, Tensor]:
        if self.role == "critic":
            return {
                "values": critic.token_values(chunk, output, batch),
                "final_values": critic.final_values(chunk, output, batch),
            }
        options = {"others": batch.fields.get(TEACHER_IDS), "chunk_size": self._tokens_per_chunk, "mask": policy.wanted_tokens(batch)}
        logprobs, entropy = policy.token_logprobs(chunk, output, batch, temperature=temperature, **options)
        own = {"logprobs": logprobs} if logprobs.ndim == 1 else {"logprobs": logprobs[:, 0], TEACHER_IDS: logprobs[:, 1:]}
        return {**own, "entropy": entropy} if with_entropy else own

    @torch.no_grad()
    def _forward(
        self, microbatches: Sequence[PackedBatch], temperature: float, *, record_routes: bool = False
    ) -> list[dict[str, Tensor]]:
        if not microbatches:
            return []
        for chunk in self.chunks:
            chunk.eval()
        outputs = functools.partial(self._outputs, temperature=temperature, with_entropy=False)
        off = without_adapters(self.chunks) if self._adapters_off else contextlib.nullcontext()
        with self.memory.weights(), off:
            return self._schedule(self.chunks, microbatches, outputs, forward_only=True, record_routes=record_routes)

    def _schedule(
        self,
        models: Sequence[torch.nn.Module],
        microbatches: Sequence[PackedBatch],
        consume: Callable[[torch.nn.Module, PackedBatch, Tensor], Any],
        *,
        forward_only: bool,
        record_routes: bool = False,
    ) -> list[Any]:
        """Run Megatron's pipeline schedule; per micro-batch what ``consume`` made of it, on the last stage only."""
        # An interleaved schedule takes the micro-batches in groups of as many as there are stages.
        missing = -len(microbatches) % self.topology.pp_size if len(models) > 1 else 0
        empty = microbatches[0].select([])
        whole = [dummy_batch(batch) for batch in (*microbatches, *missing * [empty])]
        stand_ins = [*(batch.num_sequences == 0 for batch in microbatches), *missing * [True]]
        device = self.topology.device
        self._routing.begin(whole, stand_ins, device, trains=not forward_only, records=record_routes)

        def forward_step(iterator: Iterator[int], model: torch.nn.Module) -> tuple[Tensor, Callable]:
            chunk, index = unwrap(model), next(iterator)
            # Assembled when its turn comes, in host memory, so that no size has to be read from the device.
            batch = whole[index].joined()
            trace = self._routing.trace(index, batch)

            def consume_output(output: Tensor, non_loss_data: bool = False) -> Any:
                return consume(chunk, batch, output)

            return policy.forward(chunk, batch, trace, (critic if self.role == "critic" else policy).read_outputs), consume_output

        iterators = [iter(range(len(whole))) for _ in models]
        config = self.chunks[0].config
        results = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(models) > 1 else iterators[0],
            model=list(models) if len(models) > 1 else models[0],
            num_microbatches=len(whole),
            # Both are overridden: the shapes between stages are those of each micro-batch.
            seq_length=max(len(batch.tokens) for batch in whole),
            micro_batch_size=1,
            **stage_options(config, [num_rows(batch.lengths.tolist(), config) for batch in whole]),
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return results[: len(microbatches)]
