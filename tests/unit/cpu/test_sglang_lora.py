"""Laws of the replacement of pinned memory, on SGLang's source text."""

import re
from pathlib import Path

import pytest

from megatron_rl.cpu.megatron import FACTORIES
from megatron_rl.cpu.sglang_lora import MODULES

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
