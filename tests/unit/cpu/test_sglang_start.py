"""A server's start skips only parts that it never uses."""

import subprocess
import sys

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
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


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
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
