"""Makes torchvision importable with a CPU build of torch."""

_torchvision_library = None
"""Keeps the declared operators alive: torch forgets them with the Library object."""


def declare_torchvision_ops() -> None:
    """Make ``import torchvision`` work with a CPU build of torch.

    PyPI's torchvision is built for CUDA: its compiled part cannot load with CPU torch, and the import then fails
    at ``register_fake("torchvision::nms")``. Declaring the operators that it registers unconditionally is
    sufficient. SGLang and ``transformers`` models import torchvision, so every process that uses either calls this
    first. A second call, or a call with a CUDA build of torch, does nothing.
    """
    global _torchvision_library
    import torch

    if torch.version.cuda is not None or hasattr(torch.ops.torchvision, "nms"):
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _torchvision_library = library
