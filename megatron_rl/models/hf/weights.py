"""Weights between Hugging Face folders and Megatron models, under any layout of ranks.

Loading needs no communication: each rank reads from the files the slices that it holds. Exporting walks the tensors in
the order of the files: the tensor-parallel ranks of the stage that owns a tensor send their shards to the first of
them, which sends the full tensor where it is wanted (``Destination``). Of the ranks that hold copies (data- and
context-parallel ones) only the first take part. Experts have their own split: by expert over the expert-parallel ranks,
each within those over the expert-tensor-parallel ranks.
"""

import itertools
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PretrainedConfig

from megatron_rl.families.facts import dims, text_config
from megatron_rl.families.family import families
from megatron_rl.families.parameters import VALUE_HEAD, Entry, Role, canonical_name, entries, stacked_shapes
from megatron_rl.families.transforms import Shard, Sliceable
from megatron_rl.models.hf.mtp import is_mtp, mtp_tensors
from megatron_rl.models.hf.sources import INDEX_FILE, SINGLE_FILE, CheckpointSource, TensorSource, WeightsError
from megatron_rl.models.packed import unwrap
from megatron_rl.parallel import collectives
from megatron_rl.system.files import replace_folder

_MAX_SHARD_BYTES = 5 * 1024**3
COPIED_FILES = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "*.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
    "*processor_config.json",
)
"""What goes with the weights into a saved folder: tokenizer, generation settings and image processor."""
IGNORED_TENSORS = re.compile(r"rotary_emb\.inv_freq$|^lm_head\.weight$|^score\.weight$")
"""Tensors of a checkpoint that a model may leave unread: derived ones, and heads that it has no use for."""
_EXPERT = re.compile(r"(\.mlp\.experts\.)(\d+)(\.)")


class Destination(Enum):
    """Where ``export_weights`` puts a model's tensors together."""

    driver = "driver"
    """All of them on rank 0."""
    stage = "stage"
    """Those of a pipeline stage on the stage's first rank; stages do not wait for each other."""
    everywhere = "everywhere"
    """All of them on every rank."""


def expected_names(hf_config: PretrainedConfig, role: Role) -> dict[str, tuple[int, ...]]:
    """Every tensor of the full model by its Hugging Face name, in the order of ``export_weights``, with its shape."""
    return {name: shape for entry in entries(hf_config, role) for name, shape in entry.hf.items()}


def load_weights(
    chunks: Sequence[nn.Module], hf_config: PretrainedConfig, path: str | Path, *, role: Role = "policy"
) -> list[str]:
    """Fill this rank's parameters from the safetensors in ``path``; returns the tensors it left as they were.

    That is the value head when a critic starts from a policy's checkpoint, else nothing. Wrapped chunks may be passed;
    an optimizer that keeps its own copy of the weights has to be told. Errors: FileNotFoundError, or ``WeightsError``
    for broken files, missing or unknown tensors and other shapes than config.json says.
    """
    source = CheckpointSource(path, stacked_shapes(hf_config))
    expected = expected_names(hf_config, role)
    fresh = [VALUE_HEAD] if role == "critic" and VALUE_HEAD not in source else []
    unknown = [
        name
        for name in source.files
        if name not in expected and not IGNORED_TENSORS.search(name) and not is_mtp(hf_config, name)
    ]
    if unknown:
        raise WeightsError(
            f"{path} holds {len(unknown)} tensors that a {role} of model_type {hf_config.model_type} with "
            f"{text_config(hf_config).num_hidden_layers} layers has no place for, {unknown[0]} first; check config.json and the path"
        )
    fill(chunks, hf_config, source, role=role, skip=fresh)
    return fresh


def fill(
    chunks: Sequence[nn.Module],
    hf_config: PretrainedConfig,
    source: TensorSource,
    *,
    role: Role,
    skip: Sequence[str] = (),
) -> None:
    """Copy this rank's slices of ``source`` into the parameters of ``chunks``, except the tensors named in ``skip``."""
    by_name = {entry.megatron: entry for entry in entries(hf_config, role)}
    if role == "policy" and hf_config.tie_word_embeddings:
        # The last stage holds a copy of the embedding as its head.
        by_name["output_layer.weight"] = by_name["embedding.word_embeddings.weight"]
    sizes = dims(hf_config)
    shard = Shard(
        parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    )
    expert_shard = Shard(
        parallel_state.get_expert_tensor_parallel_rank(), parallel_state.get_expert_tensor_parallel_world_size()
    )
    for name, parameter in _named_parameters(chunks):
        if name not in by_name:
            raise WeightsError(f"Megatron's parameter {name} has no rule for model_type {hf_config.model_type}")
        entry = by_name[name]
        if any(hf_name in skip for hf_name in entry.hf):
            continue
        value = entry.transform.load(
            read_entry(source, entry), sizes, shard if _expert_of(name) is None else expert_shard
        )
        if value.shape != parameter.shape:
            raise WeightsError(f"{name}: the tables give {tuple(value.shape)}, the model has {tuple(parameter.shape)}")
        with torch.no_grad():
            parameter.copy_(value)


def export_weights(
    chunks: Sequence[nn.Module],
    hf_config: PretrainedConfig,
    *,
    role: Role = "policy",
    to: Destination = Destination.driver,
) -> Iterator[tuple[str, Tensor | None]]:
    """(Hugging Face name, full tensor) of the whole model, or of this rank's stage, in the order of the files.

    The ranks that ``to`` names get the tensor, in the parameters' dtype and on its device; the others get None. Every
    rank must exhaust the iterator, at about the same pace: ranks wait for each other at each tensor (with ``stage``,
    those of one stage), up to the groups' time-out.
    """
    parameters = dict(_named_parameters(chunks))
    pp_group, sizes = parallel_state.get_pipeline_model_parallel_group(), dims(hf_config)

    def collected() -> Iterator[tuple[Entry, list[Tensor | None]]]:
        for entry in entries(hf_config, role):
            key = _any_expert(entry.megatron)
            stage = next((s for s, names in enumerate(held) if key in names), None)
            if stage is None:
                raise WeightsError(f"no pipeline stage holds Megatron's parameter {entry.megatron}")
            if to is Destination.stage and stage != pp_group.rank():
                continue
            target = _first_rank_of(stage) if to is Destination.stage else 0
            owner, dtype = _owner(entry, stage, sizes), held[stage][key]
            yield entry, _collect(entry, parameters.get(entry.megatron), owner, target, dtype, sizes, to)

    held: list[dict[str, torch.dtype]] = [{} for _ in range(pp_group.size())]
    # Pipeline peers hold the same experts, which may not be those of an entry: a stage has all of a layer's or none.
    dist.all_gather_object(held, {_any_expert(name): p.dtype for name, p in parameters.items()}, group=pp_group)
    yield from assemble(collected())


def read_entry(source: TensorSource, entry: Entry) -> list[Sliceable]:
    """What the entry's transform takes."""
    part = entry.part[0] if entry.part is not None else None
    return [source.read(name, shape, part) for name, shape in entry.hf.items()]


def assemble(parts: Iterable[tuple[Entry, list[Tensor | None]]]) -> Iterator[tuple[str, Tensor | None]]:
    """Whole tensors by name, in order, from what the entries' transforms gave; a None stays one."""
    whole: dict[str, Tensor] = {}
    for entry, tensors in parts:
        index, count = entry.part or (0, 1)
        for (name, shape), tensor in zip(entry.hf.items(), tensors, strict=True):
            if entry.part is None:
                yield name, tensor
                continue
            if tensor is not None:
                if index == 0:
                    whole[name] = tensor.new_empty(shape)
                whole[name][index] = tensor
            if index == count - 1:
                yield name, whole.pop(name, None)


def _first_rank_of(stage: int) -> int:
    """The first rank of pipeline stage ``stage``, by Megatron's order of ranks: stages are the slowest."""
    return stage * (dist.get_world_size() // parallel_state.get_pipeline_model_parallel_world_size())


@dataclass(frozen=True)
class _Owner:
    """The ranks that put a tensor together: ``group`` of them, of which global rank ``first`` sends it on."""

    first: int
    group: dist.ProcessGroup
    is_here: bool


def _owner(entry: Entry, stage: int, sizes: dict[str, int]) -> _Owner:
    """Who holds ``entry`` on pipeline stage ``stage``."""
    rank, expert = dist.get_rank(), _expert_of(entry.megatron)
    group = parallel_state.get_tensor_model_parallel_group()
    first = _first_rank_of(stage)
    if expert is not None:
        group = parallel_state.get_expert_tensor_parallel_group()
        experts_per_rank = sizes["experts"] // parallel_state.get_expert_model_parallel_world_size()
        first += group.size() * (expert // experts_per_rank)
    return _Owner(first, group, first <= rank < first + group.size())


def _collect(
    entry: Entry,
    parameter: Tensor | None,
    owner: _Owner,
    target: int,
    dtype: torch.dtype,
    sizes: dict[str, int],
    to: Destination,
) -> list[Tensor | None]:
    """The full tensors of ``entry`` on rank ``target`` (or on all ranks), Nones elsewhere."""
    rank, group = dist.get_rank(), owner.group
    full: list[Tensor] | None = None
    if owner.is_here:
        shards = [parameter.detach()]
        if entry.transform.is_split and group.size() > 1:
            shards = [torch.empty_like(parameter) for _ in range(group.size())] if rank == owner.first else None
            dist.gather(parameter.detach().contiguous(), shards, group=group, group_dst=0)
        if rank == owner.first:
            full = [tensor.contiguous() for tensor in entry.transform.export(shards, sizes)]
    if full is None and (rank == target or to is Destination.everywhere):
        full = [torch.empty(shape, dtype=dtype, device=_device()) for shape in entry.shapes]
    if full is None:
        return [None] * len(entry.hf)
    for tensor in full:
        if to is Destination.everywhere:
            dist.broadcast(tensor, src=owner.first)
        elif owner.first != target and rank == owner.first:
            dist.send(tensor, dst=target)
        elif owner.first != target:
            dist.recv(tensor, src=owner.first)
    return list(full) if rank == target or to is Destination.everywhere else [None] * len(full)


def save_hf(
    chunks: Sequence[nn.Module],
    hf_config: PretrainedConfig,
    source_folder: str | Path,
    target_folder: str | Path,
    *,
    role: Role = "policy",
    keep_mtp: bool = False,
    max_shard_bytes: int = _MAX_SHARD_BYTES,
) -> None:
    """Write the model as a Hugging Face folder; all ranks call it, rank 0 writes.

    config.json and the tokenizer come from ``source_folder``, and with ``keep_mtp`` the tensors of its
    multi-token-prediction layers. The folder is written beside ``target_folder`` under another name and renamed when
    whole, so that no file of the target is ever half written; a target that exists is moved aside for the moment of the
    renaming, then deleted. An OSError while writing is raised on every rank.
    """
    failure: str | None = None
    writer: FolderWriter | None = None
    if dist.get_rank() == 0:
        try:
            writer = FolderWriter(Path(source_folder), Path(target_folder), max_shard_bytes, keeps_mtp=keep_mtp)
        except OSError as error:
            failure = str(error)
    for name, tensor in export_weights(chunks, hf_config, role=role):
        # After a failure the other ranks' tensors are still taken: they would wait for it otherwise.
        if writer is not None and failure is None:
            try:
                writer.add(name, tensor)
            except OSError as error:
                failure = str(error)
    if writer is not None and failure is None:
        try:
            for name, tensor in mtp_tensors(hf_config, source_folder) if keep_mtp else ():
                writer.add(name, tensor)
            writer.finish()
        except (OSError, WeightsError) as error:
            failure = str(error)
    if writer is not None and failure is not None:
        writer.discard()
    failure = collectives.broadcast_object(failure, what=f"the saved model {target_folder}")
    if failure is not None:
        raise OSError(f"rank 0 could not write {target_folder}: {failure}")


class FolderWriter:
    """Collects tensors into safetensors files of at most ``max_shard_bytes`` in a temporary folder."""

    def __init__(self, source: Path, target: Path, max_shard_bytes: int, *, keeps_mtp: bool = False) -> None:
        """``source`` has config.json and the tokenizer; ``keeps_mtp``: multi-token-prediction layers are among the tensors."""
        target.parent.mkdir(parents=True, exist_ok=True)
        self.keeps_mtp = keeps_mtp
        self.source, self.target, self.max_shard_bytes = source, target, max_shard_bytes
        self.folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        self.pending: dict[str, Tensor] = {}
        self.pending_bytes = 0
        self.shards: list[list[str]] = []
        self.total_bytes = 0
        self.dtype: torch.dtype | None = None

    def add(self, name: str, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self.pending and self.pending_bytes + size > self.max_shard_bytes:
            self._flush()
        # A copy where the tensor is the live parameter, or a view that safetensors would refuse.
        self.pending[name] = tensor.detach().cpu().clone()
        self.pending_bytes += size
        self.total_bytes += size
        self.dtype = self.dtype or tensor.dtype

    def finish(self) -> None:
        """Write what is pending, config.json and the tokenizer; the target appears."""
        self._write_index()
        self._write_config()
        for pattern in COPIED_FILES:
            for file in self.source.glob(pattern):
                if file.is_file():
                    shutil.copy2(file, self.folder)
        self._publish()

    def finish_weights(self) -> None:
        """The same without config.json and tokenizer: a folder of weights alone."""
        self._write_index()
        self._publish()

    def _write_index(self) -> None:
        self._flush()
        if len(self.shards) == 1:
            os.rename(self._shard_path(0), self.folder / SINGLE_FILE)
        else:
            weight_map = {}
            for i, names in enumerate(self.shards):
                file = f"model-{i + 1:05d}-of-{len(self.shards):05d}.safetensors"
                os.rename(self._shard_path(i), self.folder / file)
                weight_map.update(dict.fromkeys(names, file))
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
            (self.folder / INDEX_FILE).write_text(json.dumps(index, indent=2))

    def discard(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _flush(self) -> None:
        try:
            save_file(self.pending, self._shard_path(len(self.shards)), metadata={"format": "pt"})
        except SafetensorError as error:
            # Of an error while writing it keeps the text alone; tensors that cannot be serialised do not come here.
            raise OSError(f"{self.target} could not be written: {error}") from error
        self.shards.append(list(self.pending))
        self.pending, self.pending_bytes = {}, 0

    def _shard_path(self, index: int) -> Path:
        return self.folder / f"shard-{index}.safetensors"

    def _write_config(self) -> None:
        config = json.loads((self.source / "config.json").read_text())
        config.pop("torch_dtype", None)
        count = families()[config["model_type"]].num_mtp_layers
        if config.get(count) and not self.keeps_mtp:
            config[count] = 0
        config["dtype"] = str(self.dtype).removeprefix("torch.")
        (self.folder / "config.json").write_text(json.dumps(config, indent=2))

    def _publish(self) -> None:
        self.folder.chmod(0o755)  # mkdtemp's own mode shuts everyone else out
        replace_folder(self.folder, self.target)


def _expert_of(name: str) -> int | None:
    """The expert that a parameter (by the tables' name) belongs to; None for what all ranks share."""
    match = _EXPERT.search(name)
    return int(match[2]) if match else None


def _any_expert(name: str) -> str:
    return _EXPERT.sub(r"\1*\3", name)


def _named_parameters(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Parameters of this rank under the tables' names: layers and experts numbered through the whole model."""
    for chunk in chunks:
        model = unwrap(chunk)
        numbers = {i: layer.layer_number - 1 for i, layer in enumerate(model.decoder.layers)}
        num_experts = model.config.num_moe_experts or 0
        first_expert = (
            num_experts // model.config.expert_model_parallel_size * parallel_state.get_expert_model_parallel_rank()
        )
        biases = ((name, buffer) for name, buffer in model.named_buffers() if name.endswith(".expert_bias"))
        for name, parameter in itertools.chain(model.named_parameters(), biases):
            name = canonical_name(name)
            match = re.match(r"decoder\.layers\.(\d+)\.(.+)", name)
            if match:
                name = f"decoder.layers.{numbers[int(match[1])]}.{match[2]}"
            name = _EXPERT.sub(lambda match: f"{match[1]}{int(match[2]) + first_expert}{match[3]}", name)
            yield name, parameter


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
