"""One rank's adapters equal their definition, in float64, for every fused layer of Megatron."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megatron_rl.config.schema import LoraConfig, ParallelConfig
from megatron_rl.families.adapters import adapted_linears
from megatron_rl.families.model_facts import dims
from megatron_rl.families.parameters import canonical_name
from megatron_rl.families.transforms import Shard
from megatron_rl.models.lora import Adapter, FreshAdapters, _add_grouped, _normalized, scale_of
from tests.fake_world import fake_rank
from tests.tiny_families import family_config

WHOLE = Shard(0, 1)
TARGETS = [["all-linear"], ["q_proj", "up_proj"], ["k_proj", "v_proj", "gate_proj", "down_proj"]]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("targets", TARGETS, ids=str)
@pytest.mark.parametrize(
    "shape", ["qwen2_gqa7_tied", "qwen3_wide_heads_yarn", "llama3_scaled", "glm4_moe_partial_rotary"]
)
def test_outputs_gradients_and_merged_weights_are_those_of_each_modules_own_a_and_b(shape, targets, rslora):
    torch.manual_seed(0)
    config, lora = family_config(shape), LoraConfig(rank=3, alpha=5.0, targets=targets, rslora=rslora)
    sizes = dims(config)
    with fake_rank(0, 1, ParallelConfig()):
        for linear in adapted_linears(config, targets, lora.rank)[:6]:
            base = {name: random(*shape) for name, shape in linear.base.hf.items()}
            a = [random(*shape).requires_grad_() for shape in linear.a.shapes]
            b = [random(*shape).requires_grad_() for shape in linear.b.shapes]
            weight = linear.base.transform.load(list(base.values()), sizes, WHOLE)
            adapter = Adapter(linear, weight, lora, sizes, sequence_parallel=False)
            with torch.no_grad():
                adapter.A.copy_(linear.a.transform.load(a, sizes, WHOLE))
                kept = [part * has for part, has in zip(b, linear.is_adapted, strict=True)]
                adapter.B.copy_(linear.b.transform.load(kept, sizes, WHOLE))
            hidden = random(7, weight.shape[1])
            kept = random(7, weight.shape[0])
            out = adapter(hidden, kept) - kept
            own = [
                scale_of(lora) * hidden @ (has * up @ down).T
                for down, up, has in zip(a, b, linear.is_adapted, strict=True)
            ]
            expected = linear.base.transform.load([part.T for part in own], sizes, WHOLE).T
            torch.testing.assert_close(out, expected)
            direction = random(*out.shape)
            (out * direction).sum().backward()
            (expected * direction).sum().backward()
            torch.testing.assert_close(adapter.A.grad, linear.a.transform.load([part.grad for part in a], sizes, WHOLE))
            torch.testing.assert_close(adapter.B.grad, linear.b.transform.load([part.grad for part in b], sizes, WHOLE))
            torch.testing.assert_close(hidden @ adapter.merged(weight).T, hidden @ weight.T + out)


def test_fresh_adapters_are_uniform_by_the_inputs_and_zero_and_the_same_in_every_process():
    a, again = (FreshAdapters(3).read("x.lora_A.weight", (8, 400)) for _ in range(2))
    assert torch.equal(a, again) and not torch.equal(a, FreshAdapters(4).read("x.lora_A.weight", (8, 400)))
    assert a.abs().max() <= 1 / 20 and a.std() == pytest.approx(1 / 20 / 3**0.5, rel=0.05)
    assert FreshAdapters(3).read("x.lora_B.weight", (5, 8)).abs().max() == 0


@dataclass
class Added:
    """An adapter whose own part is a linear layer."""

    layer: nn.Linear
    is_on: bool = True

    def __call__(self, hidden: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        return base + self.layer(hidden)


def test_a_grouped_layer_applies_each_experts_adapter_to_its_own_rows():
    layers = [nn.Linear(4, 6, bias=False) for _ in range(3)]
    adapters = [Added(layer) for layer in layers]
    rows, out = torch.randn(9, 4), torch.randn(9, 6)
    found, bias = _add_grouped(SimpleNamespace(lora=adapters), (rows, [2, 0, 7]), (out, None))
    assert bias is None
    torch.testing.assert_close(found, out + torch.cat([layers[0](rows[:2]), layers[2](rows[2:])]))


@pytest.mark.parametrize("zero_centered", [False, True])
def test_the_input_of_a_layer_with_a_fused_norm_is_normed(zero_centered):
    module = SimpleNamespace(
        layer_norm_weight=torch.randn(8), zero_centered_gamma=zero_centered, normalization="RMSNorm", eps=1e-5
    )
    hidden = torch.randn(3, 8)
    expected = (
        hidden / (hidden.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (module.layer_norm_weight + zero_centered)
    )
    torch.testing.assert_close(_normalized(module, hidden), expected)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mlp.experts.linear_fc1.lora.2.A", "mlp.experts.2.linear_fc1.lora.A"),
        ("mlp.experts.local_experts.1.linear_fc2.lora.B", "mlp.experts.1.linear_fc2.lora.B"),
        ("self_attention.linear_qkv.lora.A", "self_attention.linear_qkv.lora.A"),
    ],
)
def test_adapters_of_every_layer_implementation_have_one_name(name, expected):
    assert canonical_name(f"decoder.layers.0.{name}") == f"decoder.layers.0.{expected}"
