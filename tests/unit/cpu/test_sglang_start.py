"""A server's start skips only parts that it never uses."""

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_rl.cpu.sglang_start import not_defining

SOURCES = {
    "qwen2": "class Qwen2Model:\n    pass\nclass Qwen2ForCausalLM(Base):\n    pass\nEntryClass = Qwen2ForCausalLM\n",
    "qwen3": "from sglang.srt.models.qwen2 import Qwen2Model\nclass Qwen3ForCausalLM(Base):\n    pass\n",
    "pixtral": "# serves Qwen3ForCausalLM as its language model\nclass PixtralModel:\n    pass\n",
    "qwen3_next": "class Qwen3ForCausalLMNext:\n    pass\n",
}


def test_files_that_only_mention_an_architecture_are_skipped():
    assert not_defining(["Qwen3ForCausalLM"], SOURCES) == ["pixtral", "qwen2", "qwen3_next"]


@pytest.mark.parametrize("architectures", [[], ["Unheard"], ["Qwen3ForCausalLM", "Unheard"]])
def test_unknown_architecture_keeps_all_files(architectures):
    assert not_defining(architectures, SOURCES) == []


def test_only_server_processes_disable_collector_and_compiler():
    program = (
        "import gc, torch\nfrom megatron_rl.cpu import sglang_start\nreal = torch.compile\nsglang_start.begin()\n"
        "assert gc.isenabled() and torch.compile is real\n"
        "import sys; sys.orig_argv = ['python', '-m', 'sglang.launch_server']\nsglang_start.begin()\n"
        "assert not gc.isenabled()\nf = len\nassert torch.compile(f) is f and torch.compile(dynamic=True)(f) is f\n"
        "sglang_start.end()\nassert gc.isenabled() and gc.get_freeze_count() > 10_000\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_transformers_skips_sklearn_and_scipy_but_others_can_import_them():
    program = (
        "import sys\nfrom megatron_rl.system.gpu.torchvision_ops import declare_torchvision_ops\ndeclare_torchvision_ops()\n"
        "import transformers.generation.candidate_generator as generator\n"
        "import transformers.loss.loss_for_object_detection\n"
        "assert 'sklearn' not in sys.modules and 'scipy' not in sys.modules, 'imported after all'\n"
        "from transformers.utils import is_scipy_available, is_sklearn_available\n"
        "assert generator.is_sklearn_available is not is_sklearn_available and not generator.is_sklearn_available()\n"
        "import importlib.util\nassert is_scipy_available() == (importlib.util.find_spec('scipy') is not None)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("has_gpu", [True, False])
def test_server_processes_cannot_import_megatron(has_gpu):
    program = (
        f"import sys, torch\nfrom megatron_rl.cpu import sglang_platform as platform\ntorch.cuda.is_available = lambda: {has_gpu}\n"
        "platform._fork_workers = platform.process_probe.enable_probe = lambda *name: None\n"
        f"assert (platform.activate() is None) is {has_gpu} and 'megatron' not in sys.modules\n"
        "sys.orig_argv = ['python', '-m', 'sglang.launch_server']\nplatform.activate()\n"
        "try:\n    import megatron.core\nexcept ImportError:\n    pass\nelse:\n    raise SystemExit('imported after all')\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def unguarded_imports(node: ast.AST, package: str, guarded: bool = False) -> Iterator[int]:
    """Lines of a source that import from ``package`` when the module is imported, outside "except ImportError"."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        catches = isinstance(child, ast.Try) and any("ImportError" in ast.dump(handler) for handler in child.handlers)
        names = [child.module or ""] if isinstance(child, ast.ImportFrom) else []
        names += [alias.name for alias in child.names] if isinstance(child, ast.Import) else []
        if not guarded and any(name.split(".")[0] == package for name in names):
            yield child.lineno
        yield from unguarded_imports(child, package, guarded or catches)


def test_sglang_runs_without_megatron_wherever_it_imports_it():
    root = Path(importlib.util.find_spec("sglang").origin).parent / "srt"
    sources = {path: path.read_text() for path in root.rglob("*.py")}
    importing = {path: text for path, text in sources.items() if "from megatron" in text or "import megatron" in text}
    assert [path.name for path in importing] == ["dumper.py"]
    for path, text in importing.items():
        assert not list(unguarded_imports(ast.parse(text), "megatron")), path
