"""Loads, exports and saves weights between Hugging Face folders and Megatron models, in any parallel layout.

Loading needs no communication: each rank reads its own slices from the files. Exporting iterates over the tensors
in the order of the files and assembles each from the ranks that own its shards (``gather.py``).
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PretrainedConfig

from megatron_rl.families.model_facts import dims, text_config
from megatron_rl.families.parameters import VALUE_HEAD, Entry, Role, TensorSpec, entries, stacked_shapes
from megatron_rl.families.transforms import Dims, Shard, Sliceable
from megatron_rl.models.hf.folder import FolderWriter, SharedSave, cut, least_loaded, part_path
from megatron_rl.models.hf.gather import (
    GatherTarget,
    ShardedParameter,
    collect,
    expert_of,
    first_rank_of,
    gather,
    holders,
    named_parameters,
    sharded_parameters,
)
from megatron_rl.models.hf.tensor_sources import (
    INDEX_FILE,
    SINGLE_FILE,
    CheckpointSource,
    TensorSource,
    WeightsError,
    is_mtp,
    mtp_tensors,
)
from megatron_rl.system.files.atomic_files import write_atomic

_MAX_SHARD_BYTES = 5 * 1024**3
_LEAST_BYTES = 64 * 1024**2
"""Bytes that one rank writes before another rank gets a tensor, so that small models are saved in few files."""
_FREQUENCIES = re.compile(r"\brotary_emb\.inv_freq$")
"""Tensors of old files that are ignored: transformers and this trainer compute frequencies from config.json."""
_LM_HEAD, _SCORE_HEAD, _SCORE_BIAS = "lm_head.weight", "score.weight", "score.bias"
_MAIN_FILE, _SCORE_FILE = "model-00001-of-00001.safetensors", "score.safetensors"
_CLASSIFIERS = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
"""Model types for which SGLang has a classifier, with the start of its name."""
_ROWS_PER_COMPARISON = 4096


def expected_names(hf_config: PretrainedConfig, role: Role) -> dict[str, tuple[int, ...]]:
    """Maps the Hugging Face names of the full model's tensors to their shapes, in the order of ``export_weights``."""
    return {name: shape for entry in entries(hf_config, role) for name, shape in entry.hf.items()}


def load_weights(
    chunks: Sequence[nn.Module], hf_config: PretrainedConfig, path: str | Path, *, role: Role = "policy"
) -> list[str]:
    """Fill this rank's parameters from the safetensors in ``path``; returns the names of tensors that were not loaded.

    Only the value head is not loaded, if a critic starts from a policy's checkpoint. Chunks may be wrapped. The
    caller must update an optimizer that keeps its own copy of the weights.

    Raises:
        FileNotFoundError: no safetensors.
        WeightsError: broken files, missing or unknown tensors, or shapes that differ from config.json.
    """
    source, fresh = checked_source(hf_config, path, role)
    fill(chunks, hf_config, source, role=role, skip=fresh)
    return fresh


def checked_source(hf_config: PretrainedConfig, path: str | Path, role: Role) -> tuple[CheckpointSource, list[str]]:
    """The safetensors of ``path``, checked for every tensor and shape, and the names of tensors that they may lack.

    Reads headers only, except for an output head that config.json ties. Errors as in ``load_weights``.
    """
    source = CheckpointSource(path, stacked_shapes(hf_config))
    fresh = [VALUE_HEAD] if role == "critic" and VALUE_HEAD not in source else []
    if role == "policy" and VALUE_HEAD in source:  # checked first: a critic's folder would fail for its missing head
        check_no_unknown_tensors(hf_config, source.folder, [VALUE_HEAD])
    for entry in entries(hf_config, role):
        if not any(name in fresh for name in entry.hf):
            read_entry(source, entry)
    unused(hf_config, source, role)
    return source, fresh


def unused(hf_config: PretrainedConfig, source: CheckpointSource, role: Role) -> list[str]:
    """Tensors of ``source`` that a model of this role does not read: they have no effect, or ``unread_tensors_note`` reports them.

    Raises WeightsError for an unknown tensor, and for a head that differs from the embedding that it is tied to.
    """
    expected = expected_names(hf_config, role)
    names = [name for name in source.files if name not in expected]
    known = {_LM_HEAD, _SCORE_HEAD, _SCORE_BIAS}
    unknown = [name for name in names if not _FREQUENCIES.search(name) and not is_mtp(hf_config, name)]
    # Empty tensors are ignored: transformers saves some if n_shared_experts is 0.
    check_no_unknown_tensors(
        hf_config, source.folder, [name for name in unknown if name not in known and not source.is_empty(name)]
    )
    if _LM_HEAD in names and role == "policy":
        _check_tied_head(hf_config, source)
    return names


def unread_tensors_note(hf_config: PretrainedConfig, path: str | Path, role: Role) -> str:
    """Note on trained tensors of ``path`` that a model of this role does not read; empty if there are none."""
    source = CheckpointSource(path)
    if _SCORE_HEAD not in source or (role == "critic" and VALUE_HEAD in source):
        return ""
    fate = "the critic starts with a fresh value head" if role == "critic" else "a policy has no use for it"
    return f"{path}: {_SCORE_HEAD}, the head of a classifier, is not read: {fate}"


def write_score_head(folder: Path) -> None:
    """Make a critic's folder one that SGLang serves as a classifier with one label, if it has one for this model type.

    The value head is written again under the classifier's name, with a bias of 0: SGLang's heads of Qwen models have a bias, which
    is a random number if the files have none.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] not in _CLASSIFIERS:
        return
    source = CheckpointSource(folder)
    head = source.read(VALUE_HEAD, (1, config["hidden_size"]))[:]
    tensors = {_SCORE_HEAD: head, _SCORE_BIAS: torch.zeros(1, dtype=head.dtype)}
    save_file(tensors, folder / _SCORE_FILE, metadata={"format": "pt"})
    files, single = source.files | dict.fromkeys(tensors, _SCORE_FILE), folder / SINGLE_FILE
    if single.is_file():  # readers look for further files in an index only
        files = {name: _MAIN_FILE if file == SINGLE_FILE else file for name, file in files.items()}
        single.rename(folder / _MAIN_FILE)
    write_atomic(folder / INDEX_FILE, json.dumps({"metadata": {}, "weight_map": files}, indent=2))
    config["architectures"] = [f"{_CLASSIFIERS[config['model_type']]}ForSequenceClassification"]
    config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    write_atomic(folder / "config.json", json.dumps(config, indent=2))


def _check_tied_head(hf_config: PretrainedConfig, source: CheckpointSource) -> None:
    """Raise WeightsError if the head differs from the tied embedding; it would be dropped, unlike in transformers."""
    embedding = next(
        entry for entry in entries(hf_config, "policy") if entry.megatron == "embedding.word_embeddings.weight"
    )
    ((name, shape),) = embedding.hf.items()
    head, tied = source.read(_LM_HEAD, shape), source.read(name, shape)
    for start in range(0, shape[0], _ROWS_PER_COMPARISON):
        rows = slice(start, start + _ROWS_PER_COMPARISON)
        if not torch.equal(head[rows].double(), tied[rows].double()):
            raise WeightsError(
                f"{source.folder}: {_LM_HEAD} differs from {name}, but config.json has tie_word_embeddings=true, so {_LM_HEAD} "
                "would not be used; set tie_word_embeddings=false to use it, or remove it from the file"
            )


def check_no_unknown_tensors(hf_config: PretrainedConfig, folder: str | Path, unknown: Sequence[str]) -> None:
    """Raise WeightsError if there are ``unknown`` tensors in ``folder``, tensors that the model does not have."""
    if unknown:
        raise WeightsError(
            f"{folder} has {len(unknown)} tensors that a {hf_config.model_type} of "
            f"{text_config(hf_config).num_hidden_layers} layers does not have: {', '.join(unknown[:5])}; check "
            "config.json and the path"
        )


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
        # The last stage has a copy of the embedding as its head.
        by_name["output_layer.weight"] = by_name["embedding.word_embeddings.weight"]
    fill_parameters(named_parameters(chunks), by_name, hf_config, source, skip=skip)


def fill_parameters(
    named: Iterable[tuple[str, Tensor]],
    by_name: Mapping[str, Entry],
    hf_config: PretrainedConfig,
    source: TensorSource,
    *,
    skip: Sequence[str] = (),
) -> None:
    """``fill`` for the parameters ``named``, described by the entries ``by_name``."""
    sizes = dims(hf_config)
    shard = Shard(
        parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    )
    expert_shard = Shard(
        parallel_state.get_expert_tensor_parallel_rank(), parallel_state.get_expert_tensor_parallel_world_size()
    )
    for name, parameter in named:
        if name not in by_name:
            raise WeightsError(f"Megatron's parameter {name} has no rule for model_type {hf_config.model_type}")
        entry = by_name[name]
        if any(hf_name in skip for hf_name in entry.hf):
            continue
        value = entry.transform.load(
            read_entry(source, entry), sizes, shard if expert_of(name) is None else expert_shard
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
    to: GatherTarget = GatherTarget.driver,
    held: Sequence[ShardedParameter] | None = None,
    parameters: Mapping[str, Tensor] | None = None,
) -> Iterator[tuple[str, Tensor | None]]:
    """Yield (Hugging Face name, full tensor) of the whole model, in the order of the files.

    The ranks of ``to`` get the tensor, in the parameter's dtype and on its device; the others get None. With
    ``GatherTarget.stage``, a rank's iterator has only the tensors of its pipeline stage. Every rank must exhaust
    the iterator, at about the same pace: all ranks (of a stage) wait for each other at each message, up to the
    groups' timeout. ``held``: cached result of ``sharded_parameters`` for the same model. ``parameters``: values that
    replace the chunks' own.
    """
    own = dict(named_parameters(chunks))
    held = sharded_parameters(own, hf_config, entries(hf_config, role)) if held is None else held
    yield from assemble(gather(held, parameters or own, dims(hf_config), to))


def own_tensors(tensors: Iterable[tuple[str, Tensor | None]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of ``export_weights`` or ``assemble`` that are not None on this rank."""
    return ((name, tensor) for name, tensor in tensors if tensor is not None)


def read_entry(source: TensorSource, entry: Entry) -> list[Sliceable]:
    """The inputs of the entry's transform."""
    part = entry.part[0] if entry.part is not None else None
    return [source.read(name, shape, part) for name, shape in entry.hf.items()]


def assemble(parts: Iterable[tuple[Entry, Sequence[Tensor | None]]]) -> Iterator[tuple[str, Tensor | None]]:
    """Yield full tensors by name, in order, from the exported tensors of the entries; None stays None."""
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


def save_hf(  # noqa: PLR0913 (what is written, where, and by which rules)
    chunks: Sequence[nn.Module],
    hf_config: PretrainedConfig,
    source_folder: str | Path,
    target_folder: str | Path,
    *,
    role: Role = "policy",
    keep_mtp: bool = False,
    max_shard_bytes: int = _MAX_SHARD_BYTES,
    progress: Callable[[str], None] = lambda text: None,
    merged: Mapping[str, Tensor] | None = None,
    also: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Write the model as a Hugging Face folder; collective, and each rank writes its own files (``folder.py``).

    A tensor is assembled and written by one of the ranks that own a shard of it, so no tensor leaves its stage.
    config.json and the tokenizer are copied from ``source_folder``; with ``keep_mtp``, so are the tensors of the
    multi-token-prediction layers. ``target_folder`` must be on a file system shared by all ranks. The folder is
    written next to it under a temporary name and renamed when complete, so that no file of the target is ever
    incomplete; an existing target is moved aside during the renaming, then deleted. An OSError while writing is
    raised on every rank. ``merged``: values that replace the chunks' own. ``also``: called on rank 0 with the temporary
    folder, to write further files.
    """
    parameters, target = dict(named_parameters(chunks)), Path(target_folder)
    held = sharded_parameters(parameters, hf_config, entries(hf_config, role))
    plan = _plan_writers(held, dims(hf_config), min(_LEAST_BYTES, max_shard_bytes))
    headers: list[list[TensorSpec]] = [[] for _ in range(dist.get_world_size())]
    for parameter, rank in plan:
        index, count = parameter.entry.part or (0, 1)
        if index == count - 1:
            headers[rank] += [TensorSpec(*item, parameter.dtype) for item in parameter.entry.hf.items()]

    files = [cut(own, max_shard_bytes) for own in headers]

    def finish(folder: Path) -> None:
        writer = FolderWriter(
            Path(source_folder), folder, target=target, max_shard_bytes=max_shard_bytes, keeps_mtp=keep_mtp
        )
        for rank, own in enumerate(files):
            for index, file in enumerate(own):
                writer.adopt(part_path(folder, rank, index), file)
        if keep_mtp:
            _add_mtp(writer, hf_config, source_folder)
        writer.finish()
        also(folder)

    SharedSave(target, files, finish, progress).run(own_tensors(_to_write(plan, merged or parameters, dims(hf_config))))


def _plan_writers(held: Sequence[ShardedParameter], sizes: Dims, least_bytes: int) -> list[tuple[ShardedParameter, int]]:
    """Each parameter with the rank that writes its tensors; every rank computes the same plan."""
    loads = [0] * dist.get_world_size()
    plan = []
    for item in held:
        # Slices of one tensor must be on the same rank, hence the stage's first.
        ranks = holders(item.entry, item.stage, sizes) if item.entry.part is None else [first_rank_of(item.stage)]
        writer = least_loaded(loads, ranks, least_bytes)
        loads[writer] += item.num_bytes
        plan.append((item, writer))
    return plan


def _to_write(
    plan: Sequence[tuple[ShardedParameter, int]], parameters: Mapping[str, Tensor], sizes: Dims
) -> Iterator[tuple[str, Tensor | None]]:
    """Yield the stage's tensors: full if this rank writes them, else None; collective over the ranks that assemble them."""

    def collected() -> Iterator[tuple[Entry, list[Tensor | None]]]:
        rank, stage = dist.get_rank(), parallel_state.get_pipeline_model_parallel_rank()
        for held, writer in plan:
            if held.stage != stage:
                continue
            if held.entry.part is None:
                # The writer may be in any replica: the writer's own group assembles the tensor.
                size = held.group.size()
                held = replace(held, first=writer, is_here=rank // size == writer // size)
            ((entry, tensors),) = collect([held], parameters, sizes, writer)
            yield entry, tensors

    return assemble(collected())


def _add_mtp(writer: FolderWriter, hf_config: PretrainedConfig, folder: str | Path) -> None:
    try:
        for name, tensor in mtp_tensors(hf_config, folder):
            writer.add(name, tensor)
    except WeightsError as error:
        # As an OSError, because only rank 0 is here, and ``SharedSave`` reports OSErrors to the other ranks.
        raise OSError(str(error)) from error
