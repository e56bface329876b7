"""Checks the arguments of the algorithms: shapes, dtypes, devices, ranges.

Every refusal is a ValueError with the argument's name, the expected and the actual value. Nothing is silently cast to a
different precision: per-token values are float32 or float64, and all of one call share a dtype and a device.
"""

import math

import torch
from torch import Tensor

_FLOAT_DTYPES = (torch.float32, torch.float64)
INDEX_DTYPES = (torch.int32, torch.int64)


def describe(value: object) -> str:
    """Describe an argument's type, shape and device for an error message."""
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {list(value.shape)} on {value.device}"
    return f"{type(value).__name__} {value!r}"


def check_float_vector(name: str, value: Tensor) -> None:
    """Raise ValueError unless ``value``, the argument ``name``, is a 1-D float32 or float64 tensor."""
    if not isinstance(value, Tensor) or value.dim() != 1 or value.dtype not in _FLOAT_DTYPES:
        raise ValueError(
            f"{name}: expected a 1-D float32 or float64 tensor, got {describe(value)}; "
            "convert lower precision with .float() and batches with a mask to the packed form"
        )


def check_same_kind(name: str, value: Tensor, like_name: str, like: Tensor) -> None:
    """Raise ValueError unless ``value`` is a float vector with the length, dtype and device of the argument ``like_name``."""
    check_float_vector(name, value)
    if value.shape != like.shape or value.dtype != like.dtype or value.device != like.device:
        raise ValueError(f"{name}: expected the same form as {like_name}, {describe(like)}, got {describe(value)}")


def check_mask(mask: Tensor, like_name: str, like: Tensor) -> None:
    """Raise ValueError unless the mask is a real-valued tensor with the shape and device of the argument ``like_name``."""
    if not isinstance(mask, Tensor) or mask.is_complex() or mask.shape != like.shape or mask.device != like.device:
        raise ValueError(
            f"mask: expected a bool, integer or float tensor of shape {list(like.shape)} on {like.device} "
            f"like {like_name}, got {describe(mask)}"
        )


def check_mask_vector(mask: Tensor) -> None:
    """Raise ValueError unless the mask is a real-valued 1-D tensor."""
    if not isinstance(mask, Tensor) or mask.is_complex() or mask.dim() != 1:
        raise ValueError(f"mask: expected a 1-D bool, integer or float tensor [T], got {describe(mask)}")


def check_factor(name: str, value: Tensor, like_name: str, like: Tensor) -> Tensor:
    """A per-token factor (float32 or float64), checked and detached, in the dtype of ``like``."""
    check_float_vector(name, value)
    if value.shape != like.shape or value.device != like.device:
        raise ValueError(
            f"{name}: expected one value per token of {like_name}, {describe(like)}, got {describe(value)}"
        )
    return value.detach().to(like.dtype)


def check_per_sequence(name: str, value: Tensor, num_sequences: int) -> None:
    """Raise ValueError unless ``value`` is a real-valued tensor of shape [N]."""
    if not isinstance(value, Tensor) or value.is_complex() or value.shape != (num_sequences,):
        raise ValueError(
            f"{name}: expected a tensor of shape [{num_sequences}], one entry per sequence, got {describe(value)}"
        )


def check_cu_seqlens(cu_seqlens: Tensor, num_tokens: int | None = None) -> Tensor:
    """The checked ``cu_seqlens`` [N+1] as int64 on the CPU. Synchronizes with the GPU.

    Raises:
        ValueError: the entries do not start at 0, decrease, or do not end at ``num_tokens`` (if given).
    """
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dim() != 1 or cu_seqlens.dtype not in INDEX_DTYPES:
        raise ValueError(f"cu_seqlens: expected a 1-D int32 or int64 tensor [N+1], got {describe(cu_seqlens)}")
    bounds = cu_seqlens.detach().to("cpu", torch.int64)
    if len(bounds) == 0 or bounds[0] != 0:
        raise ValueError(f"cu_seqlens: expected N+1 entries, the first of them 0, got {bounds[:4].tolist()}...")
    if len(bounds) > 1 and bool((bounds[1:] < bounds[:-1]).any()):
        sequence = int((bounds[1:] < bounds[:-1]).nonzero()[0])
        raise ValueError(
            f"cu_seqlens: expected entries that never decrease, got {int(bounds[sequence])} then "
            f"{int(bounds[sequence + 1])} at sequence {sequence}"
        )
    if num_tokens is not None and bounds[-1] != num_tokens:
        raise ValueError(
            f"cu_seqlens: expected the last entry to be the number of tokens {num_tokens}, got {int(bounds[-1])}"
        )
    return bounds


def check_fraction(name: str, value: float) -> float:
    """Return ``value`` as a float. Raises ValueError unless it is within [0, 1]."""
    number = float(value)
    if not 0.0 <= number <= 1.0:
        raise ValueError(f"{name}: expected a number within [0, 1], got {value!r}")
    return number


def check_not_negative(name: str, value: float) -> float:
    """Return ``value`` as a float. Raises ValueError unless it is finite and at least 0."""
    number = float(value)
    if not (math.isfinite(number) and number >= 0.0):
        raise ValueError(f"{name}: expected a finite number of at least 0, got {value!r}")
    return number


def check_positive(name: str, value: float) -> float:
    """Return ``value`` as a float. Raises ValueError unless it is above 0."""
    if not value > 0.0:
        raise ValueError(f"{name}: expected a number above 0, got {value!r}")
    return float(value)


def float_lengths(name: str, lengths: Tensor) -> Tensor:
    """[N] lengths without gradient: float dtypes are kept, integers become float64. Raises ValueError for other dtypes or shapes."""
    if not isinstance(lengths, Tensor) or lengths.dim() != 1 or lengths.is_complex() or lengths.dtype == torch.bool:
        raise ValueError(f"{name}: expected a 1-D integer or float tensor [N], got {describe(lengths)}")
    return lengths.detach() if lengths.is_floating_point() else lengths.detach().double()
