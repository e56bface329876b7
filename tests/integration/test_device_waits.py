"""Counts, on a CPU, the calls of a rank that would make the host wait for a GPU.

The recorder follows the storages that would be on the device: weights, gradients, what ``moved`` returns, and everything
computed from them. A read of such a storage from the host (``item``, ``nonzero``, a bool index, ...) waits for all queued
work, and so does a copy to the device from memory that is not pinned (any other copy than ``moved``).
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from megatron_rl.config.schema import ParallelConfig
from megatron_rl.data import batch as batches
from megatron_rl.parallel import topology as topologies
from megatron_rl.training import ddp, losses, model_memory
from megatron_rl.training.engine import Engine
from tests.integration.engine_worker import ALGORITHM, OPTIMIZER, make_batch
from tests.tiny_models import make_tiny_model

READS = set(
    "item tolist numpy cpu nonzero argwhere masked_select unique unique_consecutive equal allclose is_nonzero "
    "__bool__ __int__ __float__ __index__ __contains__".split()
)
MODELS = {"policy": "qwen2", "critic": "qwen2", "experts": "qwen3_moe"}
GATHER, FREED = ("ddp", "start of the weights' all-gather"), ("model_memory", "synchronize")
NEEDED = [
    ("megatron_rl.training.ddp", "tolist"),
    ("megatron.core.utils", "__float__"),
    ("megatron_rl.cpu.megatron", "tensor"),
    ("megatron.core.optimizer.clip_grads", "item"),
]
"""An update reads its metrics and the gradient's norm; the second and third are Megatron's norm without Transformer Engine."""


class Recorder(TorchFunctionMode):
    """``events``: (module, call) of each wait of the host in order, with the starts of all-gathers and freed gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, str]] = []
        self._storages: dict[int, torch.UntypedStorage] = {}

    def mark(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = storage  # kept alive, so that no other storage gets its address
        return tensor

    def is_marked(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.untyped_storage()._cdata in self._storages

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_on_device = any(map(self.is_marked, tree_leaves((args, kwargs))))
        makes = isinstance(kwargs.get("device"), torch.device)
        if self._waits(func.__name__, args, kwargs, is_on_device):
            self.events.append((sys._getframe(1).f_globals["__name__"], func.__name__))
        result = func(*args, **kwargs)
        if func.__name__ == "cpu":
            return result.clone()
        if is_on_device or makes:
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self.mark(leaf)
        return result

    def _waits(self, name: str, args: Any, kwargs: Any, is_on_device: bool) -> bool:
        options = (*args[1:], *kwargs.values())
        if name == "to":
            if is_on_device:
                return "cpu" in options
            return args[0].dim() > 0 and any(isinstance(option, torch.device) for option in options)
        if name == "tensor":
            return isinstance(kwargs.get("device"), torch.device)
        if name in ("__getitem__", "__setitem__"):
            index = [leaf for leaf in tree_leaves(args[1]) if isinstance(leaf, Tensor) and leaf.dim()]
            return is_on_device and any(leaf.dtype is torch.bool or not self.is_marked(leaf) for leaf in index)
        if name == "repeat_interleave":
            return is_on_device and isinstance(args[1], Tensor) and "output_size" not in kwargs
        return is_on_device and name in READS

    @contextmanager
    def recording(self, engine: Engine) -> Iterator[list[tuple[str, str]]]:
        """Follow the engine's tensors; yields the events."""
        modules = [module for chunk in engine.chunks for module in chunk.modules()]
        for tensor in tree_leaves([(*module.parameters(), *module.buffers(), vars(module)) for module in modules]):
            if isinstance(tensor, Tensor):
                self.mark(tensor)
        for replica in engine._replicas:
            for buffer in (*replica.buffers, *replica.expert_parallel_buffers):
                self.mark(buffer.grad_data)
        original, gather = batches.moved, ddp.start_weight_allgather

        def moved(tensor: Tensor, device: torch.device) -> Tensor:
            return tensor if self.is_marked(tensor) else self.mark(tensor.clone())

        def start(replicas: Any) -> None:
            self.events.append(GATHER)
            gather(replicas)

        with pytest.MonkeyPatch.context() as patch, self:
            for module in list(sys.modules.values()):
                if vars(module).get("moved") is original:
                    patch.setattr(module, "moved", moved)
            patch.setattr(ddp, "start_weight_allgather", start)
            patch.setattr(model_memory, "_wait_for_device", lambda: self.events.append(FREED))
            yield self.events


@pytest.fixture(scope="module")
def place() -> Iterator[topologies.Topology]:
    yield topologies.initialize(ParallelConfig(), seed=1)
    topologies.destroy()


@pytest.fixture(scope="module", params=MODELS)
def engine(request: pytest.FixtureRequest, place: Any, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    path = make_tiny_model(tmp_path_factory.mktemp("model"), MODELS[request.param])
    role = "critic" if request.param == "critic" else "policy"
    return Engine(role, path, parallel=ParallelConfig(), topology=place, optimizer=OPTIMIZER)


def microbatches(number: int) -> list[batches.PackedBatch]:
    batch = make_batch()
    batch.fields["old_logprobs"] = batch.fields["noise"] - 3.0
    rows = list(range(batch.num_sequences))
    return [batch.select(rows[first::number]) for first in range(number)]


def events_of(engine: Engine, action: str, number: int) -> list[tuple[str, str]]:
    """Events of one action on ``number`` micro-batches; of experts, without those of Megatron's own dispatch."""
    batch = microbatches(number)
    with Recorder().recording(engine) as events:
        if action == "update":
            counts = losses.policy_denominators(make_batch(), ALGORITHM)
            objective = losses.build(engine.role, ALGORITHM, {**counts, "value": counts["mask"]})
            engine.update(batch, objective, keeps_logprobs=engine.role == "policy")
        elif action == "forward":
            engine.values(batch) if engine.role == "critic" else engine.logprobs(batch)
        else:
            for _ in engine.export_weights():
                pass
    has_experts = engine.chunks[0].config.num_moe_experts
    return [event for event in events if not (has_experts and "moe" in event[0] and event[0].startswith("megatron.core"))]


def test_an_updates_waits_do_not_grow_with_its_micro_batches_and_end_before_the_all_gather(engine: Engine) -> None:
    few, many = events_of(engine, "update", 1), events_of(engine, "update", 5)
    assert few == many == [*NEEDED, *few[len(NEEDED) : -1], GATHER]
    own_of_experts = [("megatron_rl.models.layers.moe", "cpu")] if engine.chunks[0].config.num_moe_experts else []
    assert few[len(NEEDED) : -1] == own_of_experts


def test_a_forward_pass_and_a_publish_wait_only_to_free_the_gradients_of_the_updates_before(engine: Engine) -> None:
    for action in ("forward", "export"):
        events_of(engine, "update", 2)
        assert events_of(engine, action, 3) == [FREED]
        assert events_of(engine, action, 3) == []


def test_the_recorder_sees_reads_bool_indices_and_plain_copies(engine: Engine) -> None:
    weight, device = next(engine.chunks[0].parameters()), torch.device("cpu")
    with Recorder().recording(engine) as events:
        (weight.detach() * 2).sum().item()
        weight[weight > 0]
        torch.ones(3).to(device)
        torch.ones(3).sum().item()
    assert events == [(__name__, name) for name in ("item", "__getitem__", "to")]
