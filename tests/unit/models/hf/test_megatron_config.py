"""Yarn's attention factor is applied on GPUs, although Megatron's fused rotary embedding of packs ignores it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils
from torch import Tensor

from megatron_rl.config.schema import ParallelConfig
from megatron_rl.errors import ModelError
from megatron_rl.families.rotary import inverse_frequencies
from megatron_rl.models import critic, policy
from megatron_rl.models.hf import megatron_config as translation
from megatron_rl.models.hf.model_config import load_hf_config
from megatron_rl.models.hf.weights import load_weights
from megatron_rl.models.megatron_fields import PLAIN, MegatronSettings
from megatron_rl.parallel import topology
from tests.integration.models_worker import pack
from tests.tiny_families import make_family_model

FUSED = MegatronSettings(fields={"apply_rope_fusion": True})
SEQUENCES = [torch.arange(3, 43), torch.arange(50, 60)]


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Simulate a GPU with Transformer Engine, with a fake kernel; the list has one entry per call of the kernel."""
    calls: list[int] = []

    def kernel(t: Tensor, cu_seqlens: Tensor, freqs: Tensor, cp_size: int, cp_rank: int) -> Tensor:
        calls.append(len(t))
        group = torch.distributed.group.WORLD
        return rope_utils._apply_rotary_pos_emb_thd(t, cu_seqlens, freqs, cp_group=group)

    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb_thd", kernel)
    monkeypatch.setattr(translation, "has_transformer_engine", lambda: True)
    topology.initialize(ParallelConfig(), seed=1)
    yield calls
    topology.destroy()


def logprobs(folder: Path, settings: MegatronSettings = PLAIN) -> Tensor:
    config = load_hf_config(folder)
    (chunk,) = policy.build_policy(config, ParallelConfig(), dtype=torch.float32, settings=settings, seed=None)
    load_weights([chunk], config, folder)
    batch = pack(SEQUENCES)
    with torch.no_grad():
        return policy.token_logprobs(chunk, policy.forward(chunk, batch), batch)[0]


@pytest.mark.parametrize("shape,is_fused", [("qwen2_yarn_one_group", False), ("qwen3_wide_heads_yarn", False),
                                            ("llama3_scaled", True), ("llama_linear_tied", True)])
def test_fused_rope_is_used_only_without_a_factor(
    shape: str, is_fused: bool, fused_calls: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_family_model(tmp_path / "model", shape)
    found = logprobs(folder)
    assert bool(fused_calls) is is_fused
    monkeypatch.setattr(translation, "has_transformer_engine", lambda: False)
    torch.testing.assert_close(found, logprobs(folder), atol=1e-5, rtol=0)


def test_megatrons_fused_rope_drops_the_factor(
    fused_calls: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reason for disabling fusion with a factor. If this test fails, Megatron is fixed and fusion may be enabled."""
    folder = make_family_model(tmp_path / "model", "qwen2_yarn_one_group")
    right = logprobs(folder)
    monkeypatch.setattr(translation, "_check_rope_fusion", lambda *args: None)
    wrong = logprobs(folder, FUSED)
    assert fused_calls and (right - wrong).abs().max() > 0.05


@pytest.mark.parametrize("build", [policy.build_policy, critic.build_critic])
def test_rope_fusion_that_drops_the_factor_is_rejected(build: Any, fused_calls: list[int], tmp_path: Path) -> None:
    config = load_hf_config(make_family_model(tmp_path / "model", "qwen2_yarn_one_group"))
    assert inverse_frequencies(config)[1] == 0.8
    with pytest.raises(ModelError, match=r"apply_rope_fusion=true: .* attention factor of 0.8 \(yarn\)"):
        build(config, ParallelConfig(), dtype=torch.float32, settings=FUSED, seed=1)
