"""Transformer Engine's own Python classes on a machine without CUDA, with kernels in plain PyTorch under them.

The wheel ``transformer_engine`` on PyPI is pure Python; its compiled extension is replaced here by a module that takes any
name. The classes are the real ones, and so are their constructors and parameters. What would call a kernel is replaced,
and every call is bound to the signature that the real one has in this version: an argument that it does not take is a
TypeError. For processes of their own: once ``install`` has run, Megatron finds Transformer Engine.
"""

import collections
import enum
import functools
import importlib.machinery
import importlib.util
import inspect
import os
import re
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

CALLS: collections.Counter[str] = collections.Counter()
"""Number of calls of each stand-in, by name."""
_OPTIONAL = ("onnx", "onnxscript", "nvdlfw_inspect")
"""Packages that some versions import and no test needs."""


class _Extension(types.ModuleType):
    """A compiled module whose attributes are mocks."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, MagicMock(name=f"{self.__name__}.{name}"))
        return vars(self)[name]


class _Optional:
    """Finds the optional packages, as mocks."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] in _OPTIONAL else None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = _Extension(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _Names(types.ModuleType):
    """A module with some names replaced."""

    def __init__(self, real: types.ModuleType, **replaced: Any) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(real.__dict__)
        self.__dict__.update(replaced)


def install(folder: Path) -> None:
    """Make ``transformer_engine`` in ``folder`` (an unpacked wheel) importable and its layers work; before Megatron is imported."""
    version = next(folder.glob("transformer_engine-*.dist-info")).name.split("-")[1].removesuffix(".dist")
    warnings.filterwarnings("ignore")
    # It loads no shared objects then.
    os.environ["NVTE_PROJECT_BUILDING"] = "1"
    sys.path.insert(0, str(folder))
    sys.meta_path.append(_Optional())
    extension = sys.modules["transformer_engine_torch"] = _Extension("transformer_engine_torch")
    _declare_types(extension, folder / "transformer_engine/pytorch")
    for kernel in (multi_tensor_l2norm, multi_tensor_scale, multi_tensor_adam):
        setattr(extension, kernel.__name__, kernel)
    # The package's own file imports every framework; what it would bind is put in place by hand.
    spec = importlib.util.find_spec("transformer_engine")
    assert spec is not None
    package: Any = importlib.util.module_from_spec(spec)
    sys.modules["transformer_engine"] = package
    import transformer_engine.common as common  # type: ignore[import-not-found]

    common.load_framework_extension = lambda *_: None
    import transformer_engine.pytorch as pytorch  # type: ignore[import-not-found]

    package.pytorch, package.common, package.__version__ = pytorch, common, version
    _pretend_cuda()
    _replace_kernels(pytorch)


def let_models_use_it() -> None:
    """After megatron_rl is imported: its models take the layers that they take on a GPU."""
    import megatron.core.extensions.transformer_engine as extensions
    from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb  # type: ignore[import-not-found]

    # Its unfused function has the same arguments.
    extensions.apply_rotary_pos_emb = functools.partial(_unfused, apply_rotary_pos_emb)
    import megatron_rl.models.hf.megatron_config
    import megatron_rl.models.packed_gpt  # noqa: F401

    for name, module in list(sys.modules.items()):
        if name.startswith("megatron_rl.") and "has_transformer_engine" in vars(module):
            vars(module)["has_transformer_engine"] = lambda: True


def _unfused(apply: Callable, *args: Any, fused: bool, **kwargs: Any) -> Tensor:
    return apply(*args, fused=False, **kwargs)


def _declare_types(extension: types.ModuleType, pytorch: Path) -> None:
    """Newer versions mirror enumerations of the extension, number by number, and compare."""
    mirrored = collections.defaultdict(list)
    for file in (pytorch / "constants.py", *(pytorch / "cpp_extensions").glob("*.py")):
        for kind, member in re.findall(r"^    \w+ = int\((?:tex\.)?(\w+)\.(\w+)\)$", file.read_text(), re.M):
            mirrored[kind].append(member)
    for kind, members in mirrored.items():
        vars(extension)[kind] = enum.IntEnum(kind, {member: i for i, member in enumerate(members)})  # type: ignore[misc]


def _pretend_cuda() -> None:
    """For the constructors of layers and optimizers, which put their tensors on the current device: the CPU."""
    import transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention as attention  # type: ignore[import-not-found]
    import transformer_engine.pytorch.module.base as base  # type: ignore[import-not-found]
    import transformer_engine.pytorch.optimizers.fused_adam as fused_adam  # type: ignore[import-not-found]
    import transformer_engine.pytorch.utils as utils  # type: ignore[import-not-found]

    cuda = _Names(torch.cuda, is_available=lambda: True, current_device=lambda: torch.device("cpu"))
    for module in (base, attention):
        module.torch = _Names(torch, cuda=cuda, zeros=_on_cpu(torch.zeros), empty=_on_cpu(torch.empty))
    fused_adam.torch = _Names(torch, **{name: _on_cpu(getattr(torch, name)) for name in ("tensor", "zeros", "empty")})
    utils.get_cudnn_version = attention.get_cudnn_version = lambda: (9, 24, 0)
    for name, module in list(sys.modules.items()):
        if name.startswith("transformer_engine.") and "get_device_compute_capability" in vars(module):
            vars(module)["get_device_compute_capability"] = lambda: (9, 0)


def _on_cpu(factory: Callable) -> Callable:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Tensor:
        return factory(*args, **(kwargs | ({"device": "cpu"} if "device" in kwargs else {})))

    return make


def _bound(real: Callable, ours: Callable) -> Callable:
    """``ours``, which is refused what ``real`` does not take."""
    signature = inspect.signature(real)

    def call(*args: Any, **kwargs: Any) -> Any:
        signature.bind(*args, **kwargs)
        CALLS[ours.__name__] += 1
        return ours(*args, **kwargs)

    return call


def _replace_kernels(te: Any) -> None:
    import transformer_engine.pytorch.permutation as permutation  # type: ignore[import-not-found]
    import transformer_engine.pytorch.router as router  # type: ignore[import-not-found]

    for kind, forward in (
        (te.Linear, linear),
        (te.LayerNormLinear, norm_linear),
        (te.GroupedLinear, grouped_linear),
        (te.DotProductAttention, attention),
    ):
        kind.forward = _bound(kind.forward, forward)
    te.RMSNorm.forward = lambda self, hidden: F.rms_norm(hidden, hidden.shape[-1:], self.weight, self.eps)
    real_init = te.DotProductAttention.__init__

    @functools.wraps(real_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        real_init(self, *args, **kwargs)
        self.given = inspect.signature(real_init).bind(self, *args, **kwargs).arguments

    te.DotProductAttention.__init__ = init
    for function in (
        moe_permute,
        moe_permute_with_probs,
        moe_unpermute,
        moe_sort_chunks_by_index,
        moe_sort_chunks_by_index_with_probs,
    ):
        setattr(permutation, function.__name__, _bound(getattr(permutation, function.__name__), function))
    router.fused_topk_with_score_function = _bound(
        router.fused_topk_with_score_function, fused_topk_with_score_function
    )


# Layers ---------------------------------------------------------------------------------------------------------------


def linear(self: Any, hidden: Tensor, is_first_microbatch: bool | None = None) -> Any:
    """Column- and row-parallel too; sums over ranks are Megatron's own regions, which tests elsewhere compare."""
    from megatron.core.tensor_parallel import mappings

    is_split = self.tp_size > 1
    if is_split and self.parallel_mode == "column":
        if self.sequence_parallel:
            hidden = mappings.gather_from_sequence_parallel_region(hidden, group=self.tp_group)
        else:
            hidden = mappings.copy_to_tensor_model_parallel_region(hidden, group=self.tp_group)
    product = _product(self, hidden, self.weight)
    if is_split and self.parallel_mode == "row":
        if self.sequence_parallel:
            product = mappings.reduce_scatter_to_sequence_parallel_region(product, group=self.tp_group)
        else:
            product = mappings.reduce_from_tensor_model_parallel_region(product, group=self.tp_group)
    if self.return_bias:
        return product, self.bias
    return product + self.bias if self.use_bias else product


def norm_linear(self: Any, hidden: Tensor, is_first_microbatch: bool | None = None) -> Any:
    assert self.normalization == "RMSNorm" and not self.zero_centered_gamma
    return linear(self, F.rms_norm(hidden, hidden.shape[-1:], self.layer_norm_weight, self.eps))


def grouped_linear(self: Any, rows: Tensor, m_splits: list[int], is_first_microbatch: bool | None = None) -> Any:
    assert len(m_splits) == self.num_gemms
    parts = rows.split([int(size) for size in m_splits])
    products = [_product(self, part, getattr(self, f"weight{i}")) for i, part in enumerate(parts)]
    biases = [getattr(self, f"bias{i}") for i in range(self.num_gemms)] if self.use_bias else []
    if self.return_bias:
        return torch.cat(products), biases
    return torch.cat([part + bias for part, bias in zip(products, biases, strict=True)] if biases else products)


def _product(self: Any, rows: Tensor, weight: Tensor) -> Tensor:
    if self.fuse_wgrad_accumulation and weight.requires_grad:
        return _AccumulatingProduct.apply(rows, weight)
    return F.linear(rows, weight)


class _AccumulatingProduct(torch.autograd.Function):
    """The gradient of the weight is added to ``main_grad`` here, and autograd gets a dummy."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.weight = weight
        return F.linear(rows, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        rows, weight = ctx.saved_tensors
        flat = grad.flatten(0, -2).float().t() @ rows.flatten(0, -2).float()
        ctx.weight.main_grad.add_(flat)
        ctx.weight.grad_added_to_main_grad = True
        return grad @ weight, torch.full_like(weight, float("nan"))


def attention(  # noqa: PLR0913 (the kernel's own arguments)
    self: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    qkv_format: str,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    attn_mask_type: str,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    **others: Any,
) -> Tensor:
    """Causal attention over a pack; under context parallelism every rank computes all of it and keeps its own rows."""
    assert qkv_format == "thd" and attn_mask_type == "padding_causal" and attention_mask is None
    assert cu_seqlens_q.dtype == torch.int32 and torch.equal(cu_seqlens_q, cu_seqlens_kv)
    assert all(value is None for value in others.values()), others
    left, right = self.given.get("window_size") or (-1, -1)
    assert right <= 0
    lengths = cu_seqlens_q.diff().tolist()
    assert max_seqlen_q == max_seqlen_kv == max(lengths)
    ranks = dist.get_world_size(self.cp_group) if self.cp_group is not None else 1
    assert sum(lengths) == len(query) * ranks, (lengths, query.shape)
    if ranks > 1:
        assert left < 0 and self.softmax_offset is None
        # The zigzag is asserted by the kernels.
        assert all(length % (2 * ranks) == 0 for length in lengths), lengths
        order = torch.cat([_zigzag_order(lengths, ranks, rank) for rank in range(ranks)])
        query, key, value = (_Gather.apply(t, self.cp_group)[order.argsort()] for t in (query, key, value))
    out, start = [], 0
    for length in lengths:
        q, k, v = (t[start : start + length].transpose(0, 1)[None] for t in (query, key, value))
        scale = self.given.get("softmax_scale")
        if left >= 0 or self.softmax_offset is not None:
            attended = _with_sinks(q, k, v, left, scale or q.shape[-1] ** -0.5, self.softmax_offset)
        else:
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        out.append(attended[0].transpose(0, 1).flatten(1))
        start += length
    result = torch.cat(out)
    return result if ranks == 1 else result[_zigzag_order(lengths, ranks, dist.get_rank(self.cp_group))]


def _with_sinks(query: Tensor, key: Tensor, value: Tensor, left: int, scale: float, sinks: Tensor | None) -> Tensor:
    """[1, heads, t, d]: each token attends to itself and ``left`` tokens before it (-1: all), and to its head's sink."""
    group = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(group, 1).transpose(2, 3) * scale
    allowed = torch.ones(scores.shape[2:], dtype=torch.bool).tril()
    scores = scores.masked_fill(~(allowed.triu(-left) if left >= 0 else allowed), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(-1, -1, scores.shape[2], -1)], -1)
    return scores.softmax(-1)[..., : key.shape[2]] @ value.repeat_interleave(group, 1)


def _zigzag_order(lengths: list[int], ranks: int, rank: int) -> Tensor:
    """Rows of the whole pack that a rank holds: of each sequence the parts ``rank`` and ``2 * ranks - 1 - rank``."""
    rows, start = [], 0
    for length in lengths:
        part = length // (2 * ranks)
        for index in (rank, 2 * ranks - 1 - rank):
            rows.append(torch.arange(start + index * part, start + (index + 1) * part))
        start += length
    return torch.cat(rows)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, rows.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


# Experts --------------------------------------------------------------------------------------------------------------


def _chosen(routing_map: Tensor) -> Tensor:
    """[2, n]: experts and tokens of the pairs in ``routing_map`` [T, E], by expert and then by token."""
    return routing_map.bool().t().nonzero().t()


def moe_permute(
    tokens: Tensor, routing_map: Tensor, num_out_tokens: int = -1, max_token_num: int = -1, map_type: str = "mask"
) -> tuple[Tensor, Tensor]:
    assert map_type == "mask"
    pairs = _chosen(routing_map)
    assert num_out_tokens in (-1, pairs.shape[1])
    return tokens.index_select(0, pairs[1]), pairs


def moe_permute_with_probs(
    tokens: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int = -1
) -> tuple[Tensor, Tensor, Tensor]:
    rows, pairs = moe_permute(tokens, routing_map, num_out_tokens)
    return rows, probs[pairs[1], pairs[0]], pairs


def moe_unpermute(
    rows: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None = None,
    restore_shape: torch.Size | None = None,
    pad_offsets: None = None,
) -> Tensor:
    assert restore_shape is not None and pad_offsets is None
    if merging_probs is not None:
        rows = rows * merging_probs[row_id_map[1], row_id_map[0]].unsqueeze(-1)
    return rows.new_zeros(restore_shape).index_add(0, row_id_map[1], rows)


def moe_sort_chunks_by_index(rows: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    parts = rows.split(split_sizes.tolist())
    return torch.cat([parts[i] for i in sorted_index.tolist()])


def moe_sort_chunks_by_index_with_probs(
    rows: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Tensor, Tensor]:
    return tuple(moe_sort_chunks_by_index(t, split_sizes, sorted_index) for t in (rows, probs))  # type: ignore[return-value]


def fused_topk_with_score_function(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(probs, routing map), both [T, E], of logits [T, E]; the kernel takes no float64 and counts in float32."""
    assert logits.dtype is not torch.float64
    scores = logits.float().softmax(-1) if score_function == "softmax" else logits.float().sigmoid()
    if score_function == "softmax" and not use_pre_softmax:
        scores = logits.float()
    ranking = scores.detach() if expert_bias is None else scores.detach() + expert_bias
    if num_groups and group_topk:
        groups = ranking.view(len(ranking), num_groups, -1)
        best = groups.topk(topk // group_topk, -1).values.sum(-1).topk(group_topk, -1).indices
        kept = torch.zeros(groups.shape[:2], dtype=torch.bool).scatter(1, best, True)
        ranking = groups.masked_fill(~kept[:, :, None], float("-inf")).flatten(1)
    ids = ranking.topk(topk, -1).indices
    probs = scores.gather(1, ids)
    if score_function == "softmax" and not use_pre_softmax:
        probs = probs.softmax(-1)
    elif score_function == "sigmoid" and topk > 1:
        probs = probs / (probs.sum(-1, keepdim=True) + 1e-20)
    probs = probs * (scaling_factor or 1.0)
    routing_map = torch.zeros(logits.shape, dtype=torch.bool).scatter(1, ids, True)
    return torch.zeros_like(logits).scatter(1, ids, probs.to(logits.dtype)), routing_map


# Optimizer ------------------------------------------------------------------------------------------------------------


def multi_tensor_l2norm(
    chunk_size: int, noop: Tensor, lists: list[list[Tensor]], per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    norms = torch.stack([tensor.float().norm() for tensor in lists[0]])
    return norms.norm().view(1), norms


def multi_tensor_scale(chunk_size: int, noop: Tensor, lists: list[list[Tensor]], scale: float) -> None:
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)


def multi_tensor_adam(  # noqa: PLR0913 (the kernel's own arguments)
    chunk_size: int,
    noop: Tensor,
    lists: list[list[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """AdamW (``mode`` 1) on lists of gradients, parameters and both moments."""
    assert mode == 1 and bias_correction
    for grad, parameter, first, second in zip(*lists, strict=True):
        first.mul_(beta1).add_(grad, alpha=1 - beta1)
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        denominator = (second / (1 - beta2**step)).sqrt_().add_(eps)
        parameter.mul_(1 - lr * weight_decay).addcdiv_(first, denominator, value=-lr / (1 - beta1**step))
