"""Laws of SGLang's adapters on a CPU: its source text where memory is pinned, and the replaced products."""

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from megatron_rl.cpu.megatron import FACTORIES
from megatron_rl.cpu.sglang_lora import MODULES, down_projection, up_projection

sglang = pytest.importorskip("sglang")
FOLDER = Path(sglang.__path__[0], "srt", "lora")


def sources() -> dict[str, str]:
    return {name: (FOLDER / f"{name.replace('.', '/')}.py").read_text() for name in MODULES}


def test_every_pinned_allocation_of_the_modules_is_by_a_replaced_factory():
    pattern = re.compile(r"torch\.(\w+)\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*?pin_memory=True")
    for name, text in sources().items():
        factories = pattern.findall(text)
        assert len(factories) == text.count("pin_memory=True"), name
        assert set(factories) <= set(FACTORIES), name
    assert any("pin_memory=True" in text for text in sources().values()), (
        "SGLang pins nothing: remove cpu/sglang_lora.py"
    )


def test_modules_of_the_backend_that_pin_memory_are_the_replaced_ones():
    pinning = {
        str(path.relative_to(FOLDER).with_suffix("")).replace("/", ".")
        for path in (
            *FOLDER.glob("*.py"),
            FOLDER / "backend" / "torch_backend.py",
            FOLDER / "backend" / "base_backend.py",
        )
        if re.search(r"pin_memory(=True|\(\))", path.read_text())
    }
    # The pool asks the platform first whether memory can be pinned.
    assert pinning - {"mem_pool"} == set(MODULES)


def test_the_products_of_a_batch_with_one_adapter_equal_sglangs():
    spec = importlib.util.spec_from_file_location("lora_ops", FOLDER / "torch_ops" / "lora_ops.py")
    stock = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stock)
    ranks, scalings = torch.tensor([0, 3]), torch.tensor([1.0, 0.7])
    segments = {"weight_indices": torch.tensor([1]), "seg_len_tensor": torch.tensor([5]), "lora_ranks": ranks}
    batch = SimpleNamespace(
        use_cuda_graph=False,
        num_segments=1,
        weight_indices_cpu=torch.tensor([1]),
        lora_ranks_cpu=ranks,
        scalings_cpu=scalings,
    )
    x, a, b, offsets = torch.randn(5, 8), torch.randn(2, 8, 8), torch.randn(2, 10, 4), torch.tensor([0, 6, 10])
    expected = stock.sgemm_lora_a_fwd(x, a, scaling_tensor=scalings, num_slices=2, **segments)
    low = down_projection(F.linear, None)(inputs=x, weights=a, batch_info=batch, num_slices=2)
    torch.testing.assert_close(low, expected)
    base = torch.randn(5, 10)
    expected = stock.sgemm_lora_b_fwd(low, b, slice_offsets=offsets, base_output=base.clone(), **segments)
    found = up_projection(F.linear, None)(
        inputs=low, weights=b, batch_info=batch, slice_offsets=offsets, base_output=base
    )
    torch.testing.assert_close(found, expected)


def test_a_batch_with_several_adapters_or_none_is_sglangs_own():
    batch = SimpleNamespace(use_cuda_graph=False, num_segments=2)
    assert down_projection(F.linear, lambda **named: "stock")(None, None, batch) == "stock"
    assert up_projection(F.linear, lambda **named: "stock")(None, None, batch, None) == "stock"
