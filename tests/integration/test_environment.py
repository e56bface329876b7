"""The environment as launch/setup.sh leaves it, for a user's own scripts: no import of megatron_rl comes first."""

import subprocess
import sys
from importlib.metadata import version

import pytest

ANSWER = """
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, vocab_size=32)
print(tuple(Qwen2ForCausalLM(Qwen2Config(**sizes))(torch.tensor([[1, 2]])).logits.shape))
"""
RESIZED = """
import torch
from torchvision.transforms.v2 import functional
print(tuple(functional.resize(torch.zeros(3, 8, 8), [4, 4]).shape))
"""


@pytest.mark.parametrize(("program", "printed"), [(ANSWER, "(1, 2, 32)"), (RESIZED, "(3, 4, 4)")], ids=["transformers", "torchvision"])
def test_a_plain_program_uses_the_libraries_of_the_environment(program, printed, tmp_path):
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == printed


def test_torch_and_torchvision_are_versions_that_belong_to_each_other():
    torch, torchvision = (version(name).partition("+")[0].split(".") for name in ("torch", "torchvision"))
    assert int(torchvision[1]) == int(torch[1]) + 15 and torchvision[0] == "0" and torch[0] == "2"
