"""Layers for machines without Transformer Engine, with and without a GPU."""

import functools
import inspect
import sys
from pathlib import Path

import pytest
import torch
from megatron.core.transformer import TransformerConfig, multi_latent_attention
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_rl.cpu import megatron as cpu
from megatron_rl.models.layers import torch_layers as layers
from megatron_rl.system.gpu import gpu_environment


def test_megatrons_names_are_fixed_without_transformer_engine() -> None:
    assert not layers.has_transformer_engine()
    assert multi_latent_attention.HAVE_TE is False
    logits = moe_utils.router_gating_linear(torch.ones(2, 3), torch.ones(4, 3), None, torch.float32)
    assert torch.equal(logits, torch.full((2, 4), 3.0))
    # The fix must not depend on the absence of a GPU.
    assert "te_general_gemm" not in inspect.getsource(cpu)


def test_layers_inside_partial_calls_are_replaced_too() -> None:
    spec = functools.partial(dict, [torch.nn.Linear], submodules=ModuleSpec(module=torch.nn.Linear), size=3)
    swapped = layers.swap_layers(spec, {torch.nn.Linear: torch.nn.Identity, dict: list})
    assert swapped.func is list and swapped.keywords["size"] == 3
    assert swapped.keywords["submodules"].module is torch.nn.Identity


@pytest.mark.parametrize(
    "fields,words",
    [
        ({}, []),
        ({"num_moe_experts": 4}, ["experts one at a time"]),
        ({"context_parallel_size": 2}, ["masks of length x length"]),
    ],
)
def test_missing_transformer_engine_is_reported_on_a_gpu(
    fields: dict[str, int], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2)
    for name, value in fields.items():
        setattr(config, name, value)
    assert layers.layers_note(config) == ""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    note = layers.layers_note(config)
    assert "Transformer Engine is missing" in note and "docs/cluster.md" in note
    for kind in ("experts one at a time", "masks of length x length", "latent attention"):
        assert (kind in note) == (kind in words)
    monkeypatch.setattr(layers.te_layers, "HAVE_TE", True)
    assert layers.layers_note(config) == "" and layers.has_transformer_engine()
    assert layers.layers_note(config, 2048) == "" and "4.3 GB for a sequence of 23,170" in layers.layers_note(config, 23170)
    config.params_dtype = torch.bfloat16
    assert layers.layers_note(config, 23170) == ""


@pytest.mark.parametrize(
    "failure",
    [
        *("OSError('libcudart.so.13: cannot open')", "ImportError('undefined symbol')", "RuntimeError('wrong CUDA')"),
        *("ModuleNotFoundError('no part', name='part')", "AssertionError('no cuDNN')"),
    ],
)
def test_broken_transformer_engine_is_reported_with_the_reason(
    failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "transformer_engine" / "pytorch").mkdir(parents=True)
    (tmp_path / "transformer_engine" / "__init__.py").write_text("")
    (tmp_path / "transformer_engine" / "pytorch" / "__init__.py").write_text(f"raise {failure}")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(gpu_environment, "transformer_engine_problem", "")
    monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    gpu_environment.hide_broken_transformer_engine()
    assert gpu_environment.transformer_engine_problem.startswith(failure.partition("(")[0])
    with pytest.raises(ModuleNotFoundError):
        import transformer_engine as engine  # noqa: F401
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    note = layers.layers_note(TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2))
    assert f"does not load on this GPU ({failure.partition('(')[0]}: " in note


def test_bfloat16_on_a_cpu_is_reported_because_a_gpu_may_be_hidden() -> None:
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2)
    assert layers.layers_note(config) == ""
    config.params_dtype = torch.bfloat16
    note = layers.layers_note(config)
    assert all(words in note for words in ("torch finds no GPU", "nvidia-smi", "MEGATRON_RL_REQUIRE_GPU=1", "policy.dtype=float32"))


@pytest.mark.parametrize("shape", [(7, 1, 64), (5, 4, 16), (1, 3)])
def test_rms_norm_on_a_cpu_equals_pytorchs_with_its_gradients(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(len(shape))
    norm = layers._LocalNorm(TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, normalization="RMSNorm"), shape[-1], 1e-6)
    norm = norm.double()
    torch.nn.init.normal_(norm.weight, generator=generator)
    # Heads are slices of a larger tensor, and their gradients are transposed.
    rows = torch.randn(*shape[:-1], 2 * shape[-1], dtype=torch.float64, generator=generator)[..., : shape[-1]].requires_grad_()
    grad = torch.randn(shape[::-1], dtype=torch.float64, generator=generator).permute(*reversed(range(len(shape))))
    expected = torch.nn.functional.rms_norm(rows, (shape[-1],), norm.weight, 1e-6)
    torch.testing.assert_close(norm(rows), expected, rtol=1e-12, atol=1e-12)
    of_own = torch.autograd.grad(norm(rows), (rows, norm.weight), grad)
    torch.testing.assert_close(of_own, torch.autograd.grad(expected, (rows, norm.weight), grad), rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lambda x, w: layers._CpuRmsNorm.apply(x, w, 1e-6), (rows, norm.weight))


@pytest.mark.parametrize(("device", "dtype"), [("meta", torch.float32), ("cpu", torch.bfloat16)])
def test_rms_norm_is_pytorchs_on_other_devices_and_in_16_bits(device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    norm = layers._LocalNorm(TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, normalization="RMSNorm"), 8)
    monkeypatch.setattr(layers._CpuRmsNorm, "apply", None)
    assert norm.to(device, dtype)(torch.ones(2, 8, device=device, dtype=dtype)).dtype is dtype
