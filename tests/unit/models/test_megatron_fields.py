"""Megatron's own fields: accepted fields reach TransformerConfig, other fields are rejected with the reason."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from megatron_rl.cli import main
from megatron_rl.config.load import load_config
from megatron_rl.config.schema import Fp8, Init, KlPlace, MoeConfig, ParallelConfig, Recompute
from megatron_rl.errors import ModelError
from megatron_rl.models import critic, policy
from megatron_rl.models.hf.megatron_config import megatron_config
from megatron_rl.models.layers.moe import moe_kwargs
from megatron_rl.models.layers.torch_layers import unwrap
from megatron_rl.models.megatron_fields import (
    ADJUSTABLE,
    REFUSED,
    MegatronSettings,
    check_fp8,
    checked_fields,
    fp8_kwargs,
)
from megatron_rl.parallel import topology
from megatron_rl.training.trainer_ranks import rl_engines
from tests.tiny_families import COMMON, SHAPES, VISION_SHAPES
from tests.unit.config.recipes import DENSE, load


@pytest.fixture
def single_rank() -> Iterator[ParallelConfig]:
    topology.initialize(ParallelConfig(), seed=1)
    try:
        yield ParallelConfig()
    finally:
        topology.destroy()


@pytest.mark.parametrize("build", [policy.build_policy, critic.build_critic])
def test_given_megatron_field_is_in_the_built_model(build: Any, single_rank: ParallelConfig) -> None:
    config = AutoConfig.for_model(**{**COMMON, **SHAPES["qwen3_wide_heads_yarn"]})
    settings = MegatronSettings(fields={"init_method_std": 0.5, "bias_dropout_fusion": True})
    (chunk,) = build(config, single_rank, dtype=torch.float32, settings=settings, seed=1)
    assert chunk.config.init_method_std == 0.5 and chunk.config.bias_dropout_fusion
    assert chunk.decoder.layers[0].config.init_method_std == 0.5


def test_engines_have_the_megatron_fields_of_the_recipe(tmp_path: Path) -> None:
    config = load(tmp_path, {**DENSE, "hidden_size": 32, "head_dim": 8})
    config.policy.init, config.algorithm.kl.place = Init.random, KlPlace.loss
    config.policy.megatron, config.critic.megatron = {"init_method_std": 0.5}, {"init_method_std": 0.25}
    place = topology.initialize(config.parallel, seed=1)
    try:
        engines = rl_engines(config)(place)
        found = {name: unwrap(engine.chunks[0]).config.init_method_std for name, engine in engines.items()}
    finally:
        topology.destroy()
    # The reference is the initial policy, so it has the policy's fields.
    assert found == {"policy": 0.5, "critic": 0.25, "reference": 0.5}


def test_refusals_of_megatron_are_reported_with_the_given_fields(single_rank: ParallelConfig) -> None:
    config = AutoConfig.for_model(**{**COMMON, **SHAPES["qwen3_wide_heads_yarn"]})
    settings = MegatronSettings(fields={"cpu_offloading": True, "cpu_offloading_num_layers": 99})
    with pytest.raises(
        ModelError, match="Megatron refuses this model with the fields .*'cpu_offloading_num_layers': 99"
    ):
        policy.build_policy(config, single_rank, dtype=torch.float32, settings=settings, seed=None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"moe_shared_expert_overlp": True}, "no such field; did you mean moe_shared_expert_overlap"),
        ({"nothing_alike_at_all": 1}, "policy.megatron.nothing_alike_at_all: .* no such field$"),
        ({"num_layers": 4}, "policy.megatron.num_layers: .* config.json of the model's folder sets it"),
        ({"bf16": True}, "policy.dtype and critic.dtype set it"),
        ({"tensor_model_parallel_size": 2}, "parallel.tensor_parallel_size sets it"),
        ({"recompute_granularity": "full"}, "policy.recompute and critic.recompute set it"),
        ({"moe_aux_loss_coeff": 0.1}, "policy.moe.aux_loss_coef sets it"),
        ({"variable_seq_lengths": False}, "passes over packs rely on"),
        ({"moe_permute_fusion": "yes"}, "policy.megatron.moe_permute_fusion: expected bool, got 'yes'"),
        ({"init_method_std": True}, "init_method_std: expected float, got True"),
        ({"finalize_model_grads_func": "f"}, "finalize_model_grads_func: expected Optional.*Callable"),
        ({"attention_backend": "quick"}, "attention_backend: expected one of flash, fused"),
    ],
)
def test_reserved_megatron_fields_are_rejected_with_the_reason(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        checked_fields(fields, key="policy.megatron")


def test_all_megatron_field_problems_are_reported_together() -> None:
    with pytest.raises(ModelError) as error:
        checked_fields({"num_layers": 4, "moe_permute_fusion": 1}, key="critic.megatron")
    assert [line.split(":")[0] for line in str(error.value).splitlines()] == [
        "critic.megatron.num_layers",
        "critic.megatron.moe_permute_fusion",
    ]


def test_megatron_field_values_must_have_the_dataclass_types() -> None:
    given = {
        "init_method_std": 1,
        "activation_func_fp8_input_store": True,
        "cpu_offloading_num_layers": 2,
        "num_microbatches_with_partial_activation_checkpoints": None,
        "cp_comm_type": ["p2p", "a2a"],
        "cross_entropy_fusion_impl": "te",
    }
    assert checked_fields(given) == given
    from megatron.core.transformer.enums import AttnBackend

    assert checked_fields({"attention_backend": "flash"}) == {"attention_backend": AttnBackend.flash}


@pytest.mark.parametrize("shape", [*SHAPES, *VISION_SHAPES])
def test_fields_set_by_the_trainer_are_rejected(shape: str) -> None:
    fields = {**COMMON, **SHAPES[shape]} if shape in SHAPES else VISION_SHAPES[shape]
    config = AutoConfig.for_model(**fields)
    overrides = moe_kwargs(MoeConfig(), config, ParallelConfig()) | fp8_kwargs(Fp8.hybrid)
    for recompute in Recompute:
        kwargs, _ = megatron_config(config, ParallelConfig(), dtype=torch.float32, recompute=recompute, **overrides)
        assert kwargs.keys() - REFUSED.keys() - set(ADJUSTABLE) == set()


def test_recipe_with_a_wrong_megatron_field_is_rejected_early(tmp_path, capsys) -> None:
    config = load(tmp_path, DENSE)
    assert config.policy.megatron == {} and config.critic.megatron == {}
    recipe = tmp_path / "recipe.yaml"
    given = load_config(recipe, ["policy.megatron.moe_permute_fusion=true", "critic.megatron={num_layers: 3}"])
    assert given.policy.megatron == {"moe_permute_fusion": True}
    assert main(["train", f"--config={recipe}", "--dry-run", "critic.megatron={num_layers: 3}"]) != 0
    assert "critic.megatron.num_layers" in capsys.readouterr().err


def megatron(**fields: Any) -> Any:
    from megatron.core.transformer import TransformerConfig

    sizes = dict(num_layers=2, hidden_size=64, num_attention_heads=4, use_cpu_initialization=True)
    return TransformerConfig(**sizes, **fields)


@pytest.mark.parametrize("fp8", [Fp8.hybrid, Fp8.e4m3])
def test_fp8_fields_keep_parameters_in_bfloat16(fp8: Fp8) -> None:
    config = megatron(bf16=True, params_dtype=torch.bfloat16, **fp8_kwargs(fp8))
    assert (config.fp8, config.fp8_recipe, config.fp8_param) == (fp8.value, "tensorwise", False)


def test_no_fp8_changes_no_field() -> None:
    assert fp8_kwargs(Fp8.none) == {} and megatron().fp8 is None
    check_fp8(Fp8.none, torch.float32)


def test_fp8_needs_bfloat16_a_gpu_and_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="policy.fp8=hybrid: needs parameters in bfloat16, got float32"):
        check_fp8(Fp8.hybrid, torch.float32)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelError, match="policy.fp8=e4m3: needs a GPU, and none is present; set none"):
        check_fp8(Fp8.e4m3, torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match="needs Transformer Engine, which is not installed"):
        check_fp8(Fp8.e4m3, torch.bfloat16)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(ModelError, match=r"NVIDIA A100 \(compute capability 8.0\) has no 8-bit products"):
        check_fp8(Fp8.e4m3, torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    check_fp8(Fp8.e4m3, torch.bfloat16)
