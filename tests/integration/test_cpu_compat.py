"""The CPU layer against the installed Megatron Core: the names that it replaces exist, and torch itself is unchanged.

On a machine with a GPU the layer does nothing and these tests are skipped.
"""

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_rl.cpu import import_hook
from megatron_rl.cpu import megatron as cpu
from megatron_rl.system.megatron_core import release

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU layer is not installed next to a GPU")

NEWER = ["_resolve_qk_norm_config", "_prepare_mla_core_attention_value"] if release() == "0.19" else []
NAMES = {
    "megatron.core.tensor_parallel.random": ["_get_cuda_rng_state", "_set_cuda_rng_state"],
    "megatron.core.transformer.moe.token_dispatcher": ["maybe_move_tensor_to_cpu"],
    "megatron.core.transformer.multi_latent_attention": ["HAVE_TE", *NEWER],
    "megatron.core.models.gpt.gpt_layer_specs": ["LNImpl", "get_gpt_decoder_block_spec"],
    "megatron.core.models.gpt": ["GPTModel"],
    "megatron.core.transformer.dot_product_attention": ["DotProductAttention"],
    "megatron.core.transformer.torch_norm": ["WrappedTorchNorm"],
}
"""Names that the CPU layer and the layers without Transformer Engine replace, by module."""


@pytest.mark.parametrize("module", NAMES)
def test_replaced_names_exist_in_the_untouched_library(module: str) -> None:
    """Read from its source: assigning to a name that has moved would go unnoticed."""
    source = importlib.util.find_spec(module).origin
    assert source is not None
    defined = set()
    for node in ast.walk(ast.parse(Path(source).read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Assign):
            defined.update(target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.ImportFrom):
            defined.update(alias.asname or alias.name for alias in node.names)
    assert set(NAMES[module]) <= defined, f"{module} lost {set(NAMES[module]) - defined}"


def test_the_replacements_are_in_place() -> None:
    import megatron.core.tensor_parallel.random as rng
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    assert rng._get_cuda_rng_state.__module__ == cpu.__name__
    assert token_dispatcher.maybe_move_tensor_to_cpu.__module__ == cpu.__name__
    assert torch.equal(rng._get_cuda_rng_state(), torch.get_rng_state())


def test_every_module_of_megatron_imports_the_private_torch() -> None:
    import megatron.core.distributed
    import megatron.core.models.gpt
    import megatron.core.optimizer
    import megatron.core.pipeline_parallel  # noqa: F401

    modules = [
        m for name, m in sys.modules.items() if name.startswith("megatron.core.") and hasattr(m, "torch")
    ]
    assert len(modules) > 50
    assert [m.__name__ for m in modules if m.torch is torch] == []


def test_torch_itself_is_untouched() -> None:
    for name in (*cpu.FACTORIES, "compile"):
        assert getattr(torch, name).__module__ != cpu.__name__, name
        assert not hasattr(getattr(torch, name), "__wrapped__"), name
    with torch.device("meta"):
        assert torch.zeros(2).is_meta
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda")


def test_cuda_is_the_cpu_inside_megatron() -> None:
    from megatron.core import parallel_state

    private = parallel_state.torch
    assert private is not torch
    assert private.zeros(2, device="cuda").device.type == "cpu"
    assert private.empty(2, device=torch.device("cuda", 0), pin_memory=True).device.type == "cpu"
    assert private.tensor([1.0]).cuda().device.type == "cpu"
    assert private.cuda.current_device() == torch.device("cpu")
    with private.cuda.stream(private.cuda.Stream()):
        private.cuda.current_stream().wait_event(private.cuda.Event())
    assert private.ones(1).type() == "torch.cuda.FloatTensor"
    assert private.ones(1).type() == "torch.FloatTensor"
    assert private.ones(1).type() != "torch.cuda.HalfTensor"


def test_installing_twice_changes_nothing() -> None:
    finders = list(sys.meta_path)
    import_hook.install()
    assert sys.meta_path == finders


def test_importing_megatron_first_is_refused() -> None:
    code = "import megatron.core; import megatron_rl"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode != 0
    assert "import megatron_rl first" in result.stderr


def test_torch_warns_of_no_toolkit_without_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "nvcc").touch(0o755)
    environment = {name: value for name, value in os.environ.items() if name not in ("CUDA_HOME", "CUDA_PATH")}
    environment["PATH"] = f"{tmp_path}:{environment['PATH']}"
    code = "import megatron_rl, megatron.core\nfrom torch.utils import cpp_extension\nassert not cpp_extension._find_cuda_home()"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "CUDA" not in done.stderr, done.stderr


def test_megatron_does_not_import_wandb_but_others_can(tmp_path: Path) -> None:
    """The import of wandb makes temporary folders, which a killed process leaves."""
    (tmp_path / "wandb.py").write_text("import tempfile\nFOLDER = tempfile.TemporaryDirectory('wandb-media')\n")
    (tmp_path / "tmp").mkdir()
    code = (
        "import os, sys, megatron_rl, megatron.core.timers\n"
        "assert 'wandb' not in sys.modules and not [name for name in os.listdir(os.environ['TMPDIR']) if 'wandb' in name]\n"
        "import wandb, importlib.util\nassert importlib.util.find_spec('wandb') and wandb.FOLDER\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
