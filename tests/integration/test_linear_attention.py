"""Models with linear attention: every layout computes the same update, and packs do not leak."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.config.schema import Mtp, ParallelConfig, Recompute
from megatron_rl.desk.doctor.layout_comparison import check_invariance
from megatron_rl.errors import ModelError
from megatron_rl.models import policy
from megatron_rl.models.conversion import convert
from megatron_rl.models.hf.model_config import load_hf_config
from megatron_rl.models.hf.tensor_sources import WeightsError
from megatron_rl.models.hf.weights import load_weights
from megatron_rl.parallel import topology
from megatron_rl.system.megatron_core import linear_attention_problem, release
from tests.integration.models_worker import pack
from tests.integration.preloaded import preloading
from tests.tiny_families import LINEAR_SHAPES, family_config, make_family_model

HEADS = dict(linear_num_key_heads=4, linear_num_value_heads=8, num_attention_heads=4, num_key_value_heads=2)
DENSE = ["tp2", "cp2", "pp2+vpp2", "tp2+sp+cp2", "pp2+layers1/3"]
EXPERTS = ["dp2", "ep2", "tp2+sp+ep2+etp1", "tp2+sp+ep2", "pp2+vpp2+ep2", "tp2+sp+cp2", "pp2+cp2+ep2"]

packs = pytest.mark.skipif(bool(linear_attention_problem()), reason=linear_attention_problem())


@packs
@pytest.mark.parametrize(("shape", "role", "layouts"), [("qwen3_5", "critic", DENSE), ("qwen3_next", "policy", EXPERTS)])
def test_one_update_is_the_same_in_every_layout(shape: str, role: str, layouts: list[str], tmp_path: Path) -> None:
    types = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
    model = make_family_model(tmp_path, shape, **HEADS, num_hidden_layers=4, layer_types=types)
    with preloading():
        findings = check_invariance(str(model), layouts, role=role)
    assert [finding.verdict for finding in findings[1:]] == ["same"] * len(layouts), findings


@packs
@pytest.mark.parametrize("shape", LINEAR_SHAPES)
def test_a_pack_equals_its_sequences_alone_in_outputs_and_gradients(shape: str, tmp_path: Path) -> None:
    config = load_hf_config(make_family_model(tmp_path, shape))
    topology.initialize(ParallelConfig(), seed=1)
    try:
        (chunk,) = policy.build_policy(config, ParallelConfig(), dtype=torch.float32, seed=None)
        load_weights([chunk], config, tmp_path)
        chunk.double()
        generator = torch.Generator().manual_seed(5)
        sequences = [torch.randint(3, 101, (length,), generator=generator) for length in (9, 1, 130, 33, 64)]

        def outputs_and_gradients(batches: list[list[torch.Tensor]]) -> list[torch.Tensor]:
            chunk.zero_grad()
            hidden = torch.cat([policy.forward(chunk, pack(batch))[0] for batch in batches])
            hidden.square().sum().backward()
            return [hidden.detach(), *(p.grad for p in chunk.parameters() if p.grad is not None)]

        together, alone = outputs_and_gradients([sequences]), outputs_and_gradients([[tokens] for tokens in sequences])
        for found, expected in zip(together, alone, strict=True):
            assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    finally:
        topology.destroy()


@packs
@pytest.mark.parametrize("recompute", [Recompute.full, Recompute.selective])
def test_recomputing_activations_changes_no_gradient(recompute: Recompute, tmp_path: Path) -> None:
    config, gradients = load_hf_config(make_family_model(tmp_path, "qwen3_next")), []
    topology.initialize(ParallelConfig(), seed=1)
    try:
        for kind in (Recompute.none, recompute):
            (chunk,) = policy.build_policy(config, ParallelConfig(), dtype=torch.float32, recompute=kind, seed=3)
            policy.forward(chunk, pack([torch.arange(3, 90), torch.arange(7, 20)])).square().sum().backward()
            gradients.append([p.grad for p in chunk.parameters() if p.grad is not None])
    finally:
        topology.destroy()
    assert all(torch.equal(found, expected) for found, expected in zip(*gradients, strict=True))


@packs
@pytest.mark.parametrize(("shape", "fields"), [("qwen3_next", {}), ("qwen3_5", {"mtp_num_hidden_layers": 1})])
def test_multi_token_prediction_is_kept_untouched_or_dropped(shape: str, fields: dict[str, int], tmp_path: Path) -> None:
    source = make_family_model(tmp_path / "hf", shape, **fields)
    tensors, generator = load_file(source / "model.safetensors"), torch.Generator().manual_seed(9)
    extra = {
        "mtp.fc.weight": torch.randn(48, 96, generator=generator).bfloat16(),
        "mtp.layers.0.self_attn.q_norm.weight": torch.randn(16, generator=generator),
    }
    save_file({**tensors, **extra}, source / "model.safetensors", metadata={"format": "pt"})
    sizes = dict(max_shard_bytes=50_000)
    with pytest.raises(WeightsError, match="2 tensors of multi-token-prediction layers, mtp.fc.weight first"):
        convert(source, tmp_path / "refused", to="megatron", **sizes)
    for mtp, expected in ((Mtp.keep, {**tensors, **extra}), (Mtp.drop, tensors)):
        convert(source, tmp_path / mtp.value, to="megatron", mtp=mtp, **sizes)
        convert(tmp_path / mtp.value, tmp_path / f"{mtp.value}_back", to="hf", mtp=mtp, **sizes)
        found = {n: t for file in (tmp_path / f"{mtp.value}_back").glob("*.safetensors") for n, t in load_file(file).items()}
        assert found.keys() == expected.keys()
        assert all(found[name].dtype == tensor.dtype and torch.equal(found[name], tensor) for name, tensor in expected.items())
        saved = json.loads((tmp_path / f"{mtp.value}_back" / "config.json").read_text())
        assert saved.get("mtp_num_hidden_layers") == (int(mtp is Mtp.keep) if fields else None)


@pytest.mark.skipif(release() != "0.16", reason="Megatron Core 0.19 has linear attention for packs")
def test_megatron_core_0_16_is_refused_with_the_remedy(tmp_path: Path) -> None:
    family_config("qwen3_next").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"Gated DeltaNet.*Core 0.16 has none for packed sequences; install 0.19 with Python 3.12"):
        load_hf_config(tmp_path)


@packs
def test_a_layout_that_does_not_divide_the_key_heads_is_refused(tmp_path: Path) -> None:
    (finding,) = check_invariance(str(make_family_model(tmp_path, "qwen3_5")), ["tp2+sp+cp2"])[1:]
    assert finding.verdict == "refused" and "linear_num_key_heads 2 does not divide by" in finding.reason
