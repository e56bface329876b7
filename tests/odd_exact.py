"""Random models (``odd_models.py``) against transformers in float64: logits, gradients, and packs against their sequences alone.

``python -m tests.odd_exact FIRST LAST [family ...]``: a line per model, then the largest differences and the reasons of refusals.
Differences are relative to the largest element of their tensor; gradients of at most 1e-6 of the largest gradient are not counted.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_rl.config.schema import ParallelConfig
from megatron_rl.cpu.megatron import ModuleCopy
from megatron_rl.models import policy
from megatron_rl.models.hf.model_config import load_hf_config
from megatron_rl.models.hf.weights import export_weights, load_weights
from megatron_rl.parallel import topology
from tests.integration.models_worker import pack
from tests.odd_models import FAMILIES, Verdict, judge, odd_config, of_transformers, report, write_model

LENGTHS = (9, 1, 40, 17, 70)
BOUNDS = {"logits": 1e-4, "gradients": 1e-4, "packs": 1e-5}
_TINY = 1e-6
"""Gradients below this share of the largest one are rounding errors."""
_MODULES = ("transformers.models.", "megatron.core.", "megatron_rl.models.", "megatron_rl.cpu.")


def relative(found: Tensor, expected: Tensor, least: float = 0.0) -> float:
    return ((found - expected).abs().max() / max(expected.abs().max().item(), least, 1e-30)).item()


@contextmanager
def in_float64() -> Iterator[None]:
    """Norms, softmax, routers and the gated delta rule are computed in float64, not in float32: in transformers and in the trainer."""
    copies: dict[int, ModuleCopy] = {}
    with ExitStack() as stack:
        stack.enter_context(patch.object(torch.Tensor, "float", torch.Tensor.double))
        for name, module in list(sys.modules.items()):
            # Megatron Core's modules have a copy of torch already.
            used = vars(module).get("torch") if name.startswith(_MODULES) else None
            if isinstance(used, ModuleType) and used.__name__ == "torch":
                wide = copies.setdefault(id(used), ModuleCopy(used, {"float32": torch.float64, "float": torch.float64}))
                stack.enter_context(patch.dict(vars(module), torch=wide))
        yield


def by_transformers(folder: Path, sequences: list[Tensor], weights: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and gradients of their weighted sum by name in files. Raises what transformers does."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    with in_float64():
        logits = torch.cat([model(tokens[None], use_cache=False).logits[0] for tokens in sequences])
        (logits * torch.cat(weights)).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    # Saving takes experts apart as the files have them; handed gradients, it does the same for them.
    model.save_pretrained(folder / "gradients")
    return logits.detach(), {k: v for file in (folder / "gradients").glob("*.safetensors") for k, v in load_file(file).items()}


def differences(folder: Path, config: Any, sequences: list[Tensor], weights: list[Tensor], expected: Any) -> dict[str, float]:
    """Name of ``BOUNDS`` -> difference of the trainer's model."""
    (chunk,) = policy.build_policy(config, ParallelConfig(), dtype=torch.float32, seed=None)
    load_weights([chunk], config, folder)
    chunk.double()

    def run(batches: list[list[int]]) -> tuple[Tensor, dict[str, Tensor]]:
        chunk.zero_grad()
        with in_float64():
            hidden = torch.cat([policy.forward(chunk, pack([sequences[i] for i in batch]))[0] for batch in batches])
            logits = hidden @ policy.head_weight(chunk)[: config.vocab_size].T
            (logits * torch.cat([weights[i] for batch in batches for i in batch])).sum().backward()
        kept = [parameter.detach().clone() for parameter in chunk.parameters()]
        with torch.no_grad():
            for parameter in chunk.parameters():
                parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
            gradients = {name: tensor.clone() for name, tensor in export_weights([chunk], config)}
            for parameter, value in zip(chunk.parameters(), kept, strict=True):
                parameter.copy_(value)
        return logits.detach(), gradients

    everything = list(range(len(sequences)))
    (logits, gradients), (alone, of_alone) = run([everything]), run([[i] for i in everything])

    def worst(others: dict[str, Tensor]) -> float:
        # A router's bias is no parameter, and has no gradient.
        names = [name for name in gradients if not name.endswith("correction_bias")]
        assert set(names) <= others.keys(), sorted(set(names) - others.keys())
        # transformers saves empty tensors for n_shared_experts: 0.
        least = _TINY * max(tensor.abs().max().item() for tensor in others.values() if tensor.numel())
        return max(relative(gradients[name], others[name], least) for name in names)

    packs = max(relative(logits, alone), worst(of_alone))
    return {"logits": relative(logits, expected[0]), "gradients": worst(expected[1]), "packs": packs}


def verdict(folder: Path, family: str, seed: int) -> Verdict:
    """Logits, gradients and packs of the trainer's model against transformers'."""
    fields = odd_config(family, seed)
    unusable = write_model(folder, fields, seed)
    generator = torch.Generator().manual_seed(seed)
    sequences = [torch.randint(3, fields["vocab_size"], (length,), generator=generator) for length in LENGTHS]
    weights = [torch.randn(length, fields["vocab_size"], generator=generator, dtype=torch.float64) for length in LENGTHS]
    expected, unusable = of_transformers(folder, fields, unusable, lambda: by_transformers(folder, sequences, weights))

    def compare() -> dict[str, float]:
        config = load_hf_config(folder)
        topology.initialize(ParallelConfig(), seed=1)
        try:
            return {} if expected is None else differences(folder, config, sequences, weights, expected)
        finally:
            topology.destroy()

    return judge(folder, unusable, compare, BOUNDS)


if __name__ == "__main__":
    report(verdict, int(sys.argv[1]), int(sys.argv[2]), tuple(sys.argv[3:]) or FAMILIES)
