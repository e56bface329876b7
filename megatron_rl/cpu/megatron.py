"""Runs Megatron Core on a CPU with gloo, without a fork: only device placement is redirected.

Groups, schedules, collectives and optimizers stay Megatron's own code. The first import of ``megatron.core``
installs the redirection (``import_hook.py``); it does nothing where CUDA is available.

Every ``megatron.core`` module gets a private copy of the name ``torch``, in which device "cuda" means the CPU,
streams and events do nothing and ``torch.compile`` is the identity. ``torch`` itself stays unchanged: wrapping its
factory functions for the whole process breaks ``with torch.device("meta")``, and transformers then loads wrong
weights silently. The exceptions are three methods that Megatron reaches through objects: ``Tensor.cuda``,
``Tensor.type`` and ``Module.cuda``.

``tests/integration/test_cpu_compat.py`` fails when a name used here has moved; ``system/megatron_core.py`` has all differences between
Megatron's releases.
"""

import collections
import contextlib
import functools
import importlib.machinery
import logging
import os
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from megatron_rl.cpu import delta_rule
from megatron_rl.system import megatron_core
from megatron_rl.system.gpu import gpu_environment

CPU = torch.device("cpu")
FACTORIES = ("tensor", "zeros", "empty", "ones", "full", "arange", "as_tensor")
"""Functions of torch that Megatron calls with ``device="cuda"`` or ``pin_memory=True``."""

_torch_for_megatron: types.ModuleType | None = None


def find_spec(
    fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None, *, is_first: bool = False
) -> importlib.machinery.ModuleSpec | None:
    """Import spec of a Megatron Core module, which gets the private ``torch`` once it has run. None where CUDA is available.

    ``is_first``: the module is the package itself, whose import precedes that of all its modules.
    """
    if is_first:
        megatron_core.prepare_import()
    if torch.cuda.is_available():
        if is_first:
            gpu_environment.hide_broken_transformer_engine()
        return None
    spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
    if spec is None or spec.loader is None:
        return spec
    run_module = spec.loader.exec_module

    def exec_module(module: types.ModuleType) -> None:
        with _prepared() if is_first else contextlib.nullcontext():
            run_module(module)
            if getattr(module, "torch", None) is torch:
                vars(module)["torch"] = _torch_for_megatron
            if fullname == megatron_core.LINEAR_KERNELS:
                vars(module).update(HAVE_FLA=True, **delta_rule.KERNELS)

    loader: Any = spec.loader
    loader.exec_module = exec_module
    return spec


@contextlib.contextmanager
def _prepared() -> Iterator[None]:
    """Prepare ``torch`` before the first module of Megatron Core runs, and Megatron's own functions after it."""
    global _torch_for_megatron
    _torch_for_megatron = _make_torch_for_megatron()
    _redirect_methods()
    # A CUDA build of torch warns in every process that finds nvcc, but no GPU; an empty path ends its search.
    os.environ.setdefault("CUDA_PATH", "")
    # Several modules warn about this at import, but it is normal on a CPU.
    warnings.filterwarnings("ignore", message="(Transformer Engine and )?Apex (is|are) not installed")
    # Decorators run at import: with the real torch.compile they would call a C++ compiler at the first step.
    real_compile, torch.compile = torch.compile, _torch_for_megatron.compile
    try:
        yield
        _redirect_functions()
    finally:
        torch.compile = real_compile


class _CpuStream:
    """Replaces a CUDA stream; on a CPU, work is done when the call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def record_event(self, event: "_CpuEvent | None" = None) -> "_CpuEvent":
        return event or _CpuEvent()


class _CpuEvent:
    """Replaces a CUDA event."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        return 0.0


class _TypeName(str):
    """The name "torch.FloatTensor", which also equals "torch.cuda.FloatTensor": the optimizer compares type names."""

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, str(other).replace("torch.cuda.", "torch.", 1))

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


class ModuleCopy(types.ModuleType):
    """A copy of a module with some names replaced. It is a plain dictionary, so the hot path costs nothing."""

    def __init__(self, real: types.ModuleType, replaced: dict[str, Any]) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(real.__dict__)
        self.__dict__.update(replaced, _real=real)

    def __getattr__(self, name: str) -> Any:  # for submodules that torch loads on first use
        return getattr(self.__dict__["_real"], name)


def _make_torch_for_megatron() -> types.ModuleType:
    stream = _CpuStream()

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    cuda = dict(
        set_device=nothing,
        synchronize=nothing,
        empty_cache=nothing,
        reset_peak_memory_stats=nothing,
        current_device=lambda: CPU,
        current_stream=lambda device=None: stream,
        default_stream=lambda device=None: stream,
        stream=lambda stream=None: contextlib.nullcontext(),
        Stream=_CpuStream,
        Event=_CpuEvent,
        memory_stats=lambda device=None: collections.defaultdict(int),
        memory_allocated=lambda device=None: 0,
        get_rng_state=lambda device=None: torch.get_rng_state(),
        set_rng_state=lambda state, device=None: torch.set_rng_state(state),
        manual_seed=torch.default_generator.manual_seed,
        nvtx=types.SimpleNamespace(range_push=nothing, range_pop=nothing),
    )
    replaced: dict[str, Any] = {name: on_cpu(getattr(torch, name)) for name in FACTORIES}
    replaced["cuda"] = ModuleCopy(torch.cuda, cuda)
    replaced["compile"] = lambda function=None, *args, **kwargs: function if function is not None else (lambda f: f)
    return ModuleCopy(torch, replaced)


def on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``factory`` with a CUDA device replaced by the CPU, and without pinned memory."""

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


def _redirect_methods() -> None:
    real_type = torch.Tensor.type

    def tensor_type(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        return _TypeName(real_type(self)) if dtype is None else real_type(self, dtype, *args, **kwargs)

    def stay(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self

    for owner, name, method in (
        (torch.Tensor, "type", tensor_type),
        (torch.Tensor, "cuda", stay),
        (torch.nn.Module, "cuda", stay),
    ):
        setattr(owner, name, method)


def _redirect_functions() -> None:
    """Replace functions of Megatron that use the GPU without going through the name ``torch``."""
    import megatron.core.tensor_parallel.mappings as mappings
    import megatron.core.tensor_parallel.random as rng
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    # On a CPU the tracked generator is torch's default one.
    rng._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    rng._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)
    logging.getLogger(rng.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())

    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    # Split sizes of the all-to-all must be numpy arrays; the stock helper converts CUDA tensors only.
    token_dispatcher.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu
    mappings._gather_along_first_dim = _with_uneven_sizes(mappings._gather_along_first_dim, _gather_uneven)
    mappings._reduce_scatter_along_first_dim = _with_uneven_sizes(
        mappings._reduce_scatter_along_first_dim, _reduce_scatter_uneven
    )


def _with_uneven_sizes(even: Callable[..., torch.Tensor], uneven: Callable[..., torch.Tensor]) -> Callable:
    """Megatron's collective ``even``, but ``uneven`` if ranks have different numbers of rows, which gloo cannot handle.

    Experts that are sharded over several expert-parallel and expert-tensor-parallel ranks need this.
    """

    def collective(tensor: torch.Tensor, group: Any, sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if sizes is None or group.size() == 1:
            return even(tensor, group, None, use_global_buffer)
        return uneven(tensor, group, [int(size) for size in sizes])

    return collective


def _gather_uneven(rows: torch.Tensor, group: Any, sizes: list[int]) -> torch.Tensor:
    """Gather [sizes[rank], ...] of each rank to [sum(sizes), ...], by padding all parts to equal size."""
    padded = rows.new_zeros((max(sizes), *rows.shape[1:]))
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in sizes]
    torch.distributed.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _reduce_scatter_uneven(rows: torch.Tensor, group: Any, sizes: list[int]) -> torch.Tensor:
    """Reduce-scatter [sum(sizes), ...] to this rank's [sizes[rank], ...] of the sum over ranks."""
    total = rows.clone()
    torch.distributed.all_reduce(total, group=group)
    return total.split(sizes)[group.rank()].contiguous()
