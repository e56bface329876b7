"""Hugging Face names, shapes, layouts and configurations against transformers and by brute force."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from megatron_rl.config.schema import ParallelConfig
from megatron_rl.errors import ModelError
from megatron_rl.families.family import families
from megatron_rl.families.model_facts import dims
from megatron_rl.families.parameters import VALUE_HEAD, canonical_name, entries, stacked_shapes
from megatron_rl.families.rotary import inverse_frequencies
from megatron_rl.families.transforms import (
    QKV,
    ColumnParallel,
    GatedMLP,
    Replicated,
    RowParallel,
    Shard,
    Transform,
    VocabParallel,
)
from megatron_rl.models.hf.megatron_config import check_layout, megatron_config
from megatron_rl.models.hf.model_config import load_hf_config
from megatron_rl.models.hf.tensor_sources import INDEX_FILE, CheckpointSource, RandomSource, WeightsError, is_mtp
from megatron_rl.models.hf.weights import assemble, read_entry
from megatron_rl.models.layers.attention import plan_attention
from megatron_rl.system.gpu.torchvision_ops import declare_torchvision_ops
from tests.tiny_families import SHAPES, VISION_SHAPES, family_config

declare_torchvision_ops()

SIZES = dict(
    vocab_size=101,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=12,
)
LINEAR: dict[str, Any] = dict(
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    linear_key_head_dim=6,
    linear_value_head_dim=10,
    layer_types=["linear_attention", "full_attention"],
)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=28, shared_expert_intermediate_size=20)
EXTRA: dict[str, dict[str, Any]] = {
    "deepseek_v3": dict(
        num_key_value_heads=8,
        q_lora_rank=20,
        kv_lora_rank=12,
        qk_nope_head_dim=6,
        qk_rope_head_dim=4,
        v_head_dim=10,
        n_routed_experts=4,
        num_experts_per_tok=4,
        n_group=2,
        topk_group=2,
        moe_intermediate_size=28,
        first_k_dense_replace=1,
    ),
    "glm4_moe": dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=28, use_qk_norm=True),
    "gpt_oss": dict(num_local_experts=4, num_experts_per_tok=2),
    "mixtral": dict(num_local_experts=4),
    "qwen3_moe": dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=28, mlp_only_layers=[0]),
    "qwen3_next": dict(LINEAR, **EXPERTS, mlp_only_layers=[0]),
    "qwen3_5_text": dict(LINEAR, linear_num_value_heads=4),
    "qwen3_5_moe_text": dict(LINEAR, **EXPERTS),
}
DENSE = ("llama", "qwen2", "qwen3")


def make_config(family: str, **overrides: Any) -> PretrainedConfig:
    sizes = dict(SIZES)
    if family in VISION_SHAPES:
        shape = {**VISION_SHAPES[family], "tie_word_embeddings": False, **overrides}
        heads = dict(num_attention_heads=8, num_key_value_heads=4, hidden_size=48)
        vision = {**shape["vision_config"], "out_hidden_size": 48}
        return AutoConfig.for_model(
            **{**shape, "text_config": {**shape["text_config"], **heads}, "vision_config": vision}
        )
    if family == "qwen2":
        # The heads of this family are always hidden_size / num_attention_heads wide.
        sizes.pop("head_dim")
    return AutoConfig.for_model(family, **{**sizes, **EXTRA.get(families()[family].read_as or family, {}), **overrides})


def shards_of(transform: Transform, tensors: list[Tensor], sizes: dict[str, int], tp: int) -> list[Tensor]:
    return [transform.load(tensors, sizes, Shard(rank, tp)) for rank in range(tp)]


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("family", families())
@pytest.mark.parametrize("role", ["policy", "critic"])
def test_assembled_shards_are_bit_equal_to_the_original(family: str, role: str, tp: int) -> None:
    config = make_config(family)
    source = RandomSource(seed=1, std=1.0)
    for entry in entries(config, role):
        tensors = read_entry(source, entry)
        shards = shards_of(entry.transform, tensors, dims(config), tp)
        assert len({shard.shape for shard in shards}) == 1
        exported = entry.transform.export(shards if entry.transform.is_split else shards[:1], dims(config))
        assert len(exported) == len(tensors)
        for name, before, after in zip(entry.hf, tensors, exported, strict=True):
            assert torch.equal(before, after), name


def test_qkv_orders_queries_key_and_value_within_each_group() -> None:
    sizes = {"groups": 2, "head_dim": 3, "q": 4 * 3, "kv": 2 * 3}
    q, k, v = torch.arange(12.0), 100 + torch.arange(6.0), 200 + torch.arange(6.0)
    first, second = shards_of(QKV(), [q, k, v], sizes, 2)
    assert first.tolist() == [0, 1, 2, 3, 4, 5, 100, 101, 102, 200, 201, 202]
    assert second.tolist() == [6, 7, 8, 9, 10, 11, 103, 104, 105, 203, 204, 205]


def test_gated_mlp_splits_gate_and_up_equally() -> None:
    gate, up = torch.arange(4.0)[:, None], 10 + torch.arange(4.0)[:, None]
    first, second = shards_of(GatedMLP(), [gate, up], {}, 2)
    assert first.flatten().tolist() == [0, 1, 10, 11]
    assert second.flatten().tolist() == [2, 3, 12, 13]


def test_vocabulary_is_padded_with_zeros_at_the_end() -> None:
    embedding = 1 + torch.arange(5.0)[:, None]
    shards = shards_of(VocabParallel(), [embedding], {"vocab": 5}, 4)
    assert [shard.flatten().tolist() for shard in shards] == [[1, 2], [3, 4], [5, 0], [0, 0]]


@pytest.mark.parametrize(("transform", "dim"), [(ColumnParallel(), 0), (RowParallel(), 1)])
def test_uneven_splits_are_rejected(transform: Transform, dim: int) -> None:
    with pytest.raises(ValueError, match="5 rows do not divide by parallel.tensor_parallel_size 2"):
        transform.load([torch.zeros((5, 4) if dim == 0 else (4, 5))], {}, Shard(0, 2))


def test_replicated_tensors_are_equal_on_all_ranks() -> None:
    norm = torch.randn(7)
    assert all(torch.equal(shard, norm) for shard in shards_of(Replicated(), [norm], {}, 4))


@pytest.mark.parametrize("is_as_on_the_hub", [True, False])
def test_stacked_experts_survive_a_round_trip_by_slices(is_as_on_the_hub: bool, tmp_path: Path) -> None:
    config = make_config("qwen3_vl_moe")
    stacked = [entry for entry in entries(config, "policy") if entry.part is not None]
    shapes = {name: shape for entry in stacked for name, shape in entry.hf.items()}
    assert len(stacked) == 4 * len(shapes) == 4 * 2 * 4  # experts, tensors of a layer, layers
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    # transformers 5 saves stacked experts transposed.
    files = tensors if is_as_on_the_hub else {name: t.transpose(1, 2).contiguous() for name, t in tensors.items()}
    save_file(files, tmp_path / "model.safetensors")
    source, sizes = CheckpointSource(tmp_path, shapes), dims(config)
    assert shapes == stacked_shapes(config) and source.are_experts_transposed is not is_as_on_the_hub
    found = assemble(
        (entry, entry.transform.export(shards_of(entry.transform, read_entry(source, entry), sizes, 2), sizes))
        for entry in stacked
    )
    for (name, tensor), (expected_name, expected) in zip(found, tensors.items(), strict=True):
        assert name == expected_name and torch.equal(tensor, expected)


def test_square_stacked_experts_follow_the_other_tensors(tmp_path: Path) -> None:
    square, other = torch.randn(2, 6, 6), torch.randn(2, 3, 6)
    shapes = {"square": (2, 6, 6), "other": (2, 3, 6)}
    save_file(dict(square=square, other=other.transpose(1, 2).contiguous()), tmp_path / "model.safetensors")
    source = CheckpointSource(tmp_path, shapes)
    assert torch.equal(source.read("square", (2, 6, 6), 1)[:], square[1].T)
    assert torch.equal(source.read("other", (2, 3, 6), 1)[:2], other[1, :2])
    both = dict(a=torch.zeros(2, 6, 4), b=torch.zeros(2, 4, 6))
    save_file(both, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match="expert of b is stored as transformers saves it, of a as on the hub"):
        CheckpointSource(tmp_path, {"a": (2, 6, 4), "b": (2, 6, 4)})


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", DENSE)
def test_names_and_shapes_equal_transformers(family: str, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    config = make_config(family, tie_word_embeddings=tied)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    expected = {name: tuple(p.shape) for name, p in model.named_parameters()}
    found = {name: shape for entry in entries(config, "policy") for name, shape in entry.hf.items()}
    assert found == expected


@pytest.mark.parametrize("family", families())
def test_critic_has_a_value_head_instead_of_the_lm_head(family: str) -> None:
    config = make_config(family)
    names = {role: {n for entry in entries(config, role) for n in entry.hf} for role in ("policy", "critic")}
    assert names["policy"] - names["critic"] == {"lm_head.weight"}
    assert names["critic"] - names["policy"] == {VALUE_HEAD}


def test_transformer_engine_names_map_to_the_same_parameters() -> None:
    layer = "decoder.layers.3."
    assert canonical_name(layer + "self_attention.linear_qkv.layer_norm_weight") == layer + "input_layernorm.weight"
    assert canonical_name(layer + "mlp.linear_fc1.layer_norm_weight") == layer + "pre_mlp_layernorm.weight"
    assert canonical_name(layer + "mlp.experts.linear_fc2.weight7") == layer + "mlp.experts.7.linear_fc2.weight"
    expert = "mlp.experts.local_experts.7.linear_fc2.weight"
    assert canonical_name(layer + expert) == layer + "mlp.experts.7.linear_fc2.weight"
    latent = canonical_name(layer + "self_attention.linear_kv_up_proj.layer_norm_weight")
    assert latent == layer + "self_attention.kv_layernorm.weight"
    assert canonical_name("embedding.word_embeddings.weight") == "embedding.word_embeddings.weight"


# Configurations ------------------------------------------------------------------------------------------------------


def write_config(folder: Path, **fields: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def test_unreadable_model_folders_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        load_hf_config(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="no config.json"):
        load_hf_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2",')
    with pytest.raises(ValueError, match="config.json is not a JSON object"):
        load_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match="config.json is not a JSON object"):
        load_hf_config(tmp_path)
    for fields in ({"model_type": "gpt2"}, {}):
        with pytest.raises(
            ValueError, match="supported: deepseek_v3, glm4_moe, gpt_oss, kimi_k2, llama, mixtral, qwen2, qwen2_5_vl, qwen3"
        ):
            load_hf_config(write_config(tmp_path, **fields))


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("qwen2", dict(use_sliding_window=True, sliding_window=8), "use_sliding_window"),
        ("llama", dict(attention_bias=True), "attention_bias"),
        ("llama", dict(mlp_bias=True), "mlp_bias"),
        ("llama", dict(hidden_act="gelu"), "hidden_act"),
        ("qwen3", dict(num_attention_heads=6, num_key_value_heads=4), "num_key_value_heads 4"),
        ("llama", dict(rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=1e4)), "rope_type 'dynamic'"),
        (
            "llama",
            dict(rope_parameters=dict(rope_type="llama3", rope_theta=1e4)),
            "Missing required keys .*low_freq_factor",
        ),
        ("qwen3", dict(rope_parameters=dict(rope_theta=1e4, partial_rotary_factor=0.5)), "partial_rotary_factor 0.5"),
        (
            "llama",
            dict(rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=0.0)),
            "rope_parameters.factor: expected a number above 0, got 0.0",
        ),
        ("llama", dict(num_attention_heads="many"), "num_attention_heads"),
        ("qwen3", dict(head_dim=11), "even rotary dimension"),
        ("llama", dict(quantization_config=dict(quant_method="fp8")), "quantization_config"),
        ("glm4_moe", dict(num_experts_per_tok=1), "num_experts_per_tok 1"),
        ("mixtral", dict(num_experts_per_tok=1, norm_topk_prob=False), "num_experts_per_tok 1 with normalized"),
        ("qwen3_moe", dict(num_experts_per_tok=9), r"num_experts_per_tok 9 is not in \[1, 4\]"),
        ("deepseek_v3", dict(num_key_value_heads=4), "num_key_value_heads 4 is not num_attention_heads 8"),
        ("deepseek_v3", dict(rope_interleave=False), "rope_interleave"),
        ("deepseek_v3", dict(norm_topk_prob=False), "norm_topk_prob"),
        ("deepseek_v3", dict(scoring_func="softmax"), "scoring_func"),
        ("deepseek_v3", dict(rms_norm_eps=1e-5), "rms_norm_eps"),
        ("deepseek_v3", dict(n_group=3), "n_group 3"),
        ("deepseek_v3", dict(n_group=4, topk_group=2, num_experts_per_tok=4), "leave 1 experts per group"),
        ("qwen2", dict(layer_types=["full_attention", "sliding_attention"]), "layer_types"),
        ("glm4_moe", dict(routed_scaling_factor=0.0), "routed_scaling_factor: expected a number above 0"),
        ("deepseek_v3", dict(first_k_dense_replace=2), "no layer of this deepseek_v3"),
        ("qwen3_moe", dict(mlp_only_layers=[0, 1]), "no layer of this qwen3_moe"),
        ("deepseek_v3", dict(topk_group=1, num_experts_per_tok=3), "best 3 experts"),
        ("gpt_oss", dict(attention_bias=False), "attention_bias"),
        ("gpt_oss", dict(swiglu_alpha=1.0), "swiglu_alpha"),
        ("gpt_oss", dict(sliding_window=None), "sliding_window is missing"),
        ("gpt_oss", dict(quantization_config=dict(quant_method="fp8")), "quantization_config"),
    ],
)
def test_features_that_megatron_computes_differently_are_rejected(
    family: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        load_hf_config(write_config(tmp_path, model_type=family, **{**SIZES, **EXTRA.get(family, {}), **fields}))


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (ParallelConfig(tensor_parallel_size=8), "num_key_value_heads 4 .* parallel.tensor_parallel_size 8"),
        (ParallelConfig(pipeline_parallel_size=3), "num_hidden_layers 2 .* parallel.pipeline_parallel_size 3"),
    ],
)
def test_layouts_that_do_not_fit_the_model_are_rejected(parallel: ParallelConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        megatron_config(make_config("qwen3"), parallel, dtype=torch.float32)


def test_gpt_oss_splits_neither_an_expert_nor_a_context() -> None:
    for parallel, key in (
        (ParallelConfig(tensor_parallel_size=2, sequence_parallel=True), "parallel.expert_tensor_parallel_size 1, got 2"),
        (ParallelConfig(context_parallel_size=2), "parallel.context_parallel_size 1, got 2"),
    ):
        with pytest.raises(ModelError, match=key):
            check_layout(family_config("gpt_oss"), parallel)


@pytest.mark.parametrize("shape", SHAPES)
def test_rotary_frequencies_equal_transformers(shape: str) -> None:
    from transformers import AutoModel

    config = family_config(shape)
    rotary = AutoModel.from_config(config).rotary_emb
    frequencies, factor = inverse_frequencies(config)
    torch.testing.assert_close(frequencies, rotary.inv_freq, atol=0, rtol=1e-6)
    assert factor == pytest.approx(rotary.attention_scaling, rel=1e-12)


def test_mtp_layers_are_distinguished_from_other_layers() -> None:
    config = make_config("deepseek_v3", num_nextn_predict_layers=1)
    assert is_mtp(config, "model.layers.2.eh_proj.weight")
    assert not is_mtp(config, "model.layers.1.input_layernorm.weight")
    assert not is_mtp(config, "model.layers.3.eh_proj.weight")
    assert not is_mtp(make_config("llama"), "model.layers.2.x")


# Sources -------------------------------------------------------------------------------------------------------------


def test_random_weights_depend_on_seed_and_name_alone() -> None:
    first, again, other = RandomSource(1, 0.5), RandomSource(1, 0.5), RandomSource(2, 0.5)
    a = first.read("a.weight", (200, 100))
    again.read("b.weight", (3, 3))
    assert torch.equal(a, again.read("a.weight", (200, 100)))
    assert not torch.equal(a, first.read("b.weight", (200, 100)))
    assert not torch.equal(a, other.read("a.weight", (200, 100)))
    assert a.std().item() == pytest.approx(0.5, rel=0.02)


def test_sharded_checkpoints_are_read_through_the_index(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "two.safetensors")
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    source = CheckpointSource(tmp_path)
    assert source.read("a", (2,))[:].tolist() == [1, 1]
    assert source.read("b", (3,))[1:].tolist() == [0, 0]
    with pytest.raises(WeightsError, match="no tensor d"):
        source.read("d", (1,))
    with pytest.raises(WeightsError, match=r"two.safetensors: b has shape \(3,\), config.json requires \(4,\)"):
        source.read("b", (4,))


@pytest.mark.parametrize("content", ["{", "{}", "[]"])
def test_broken_index_is_reported(content: str, tmp_path: Path) -> None:
    (tmp_path / INDEX_FILE).write_text(content)
    with pytest.raises(WeightsError, match=INDEX_FILE):
        CheckpointSource(tmp_path)


def test_folder_without_weights_reports_how_to_start_fresh(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="policy.init=random"):
        CheckpointSource(tmp_path)


# Attention plan ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(1,), (5, 5, 5), (3, 0, 200, 1, 7, 7, 90), tuple(range(20, 84)), (1000, 1, 1)])
def test_attention_plan_round_trips_rows_without_mixing_sequences(lengths: tuple[int, ...]) -> None:
    plan = plan_attention(lengths, torch.device("cpu"))
    total = sum(lengths)
    assert len(plan.pad) == sum(n * longest for n, longest in plan.shapes)
    assert torch.equal(plan.pad[plan.unpad], torch.arange(total))
    sequence_of_row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    start, seen = 0, []
    for n, longest in plan.shapes:
        for row in plan.pad[start : start + n * longest].view(n, longest):
            owners = set(sequence_of_row[row].tolist())
            assert len(owners) == 1
            (owner,) = owners
            # The sequence's rows in order, then its last row repeated.
            assert row.diff().clamp(min=0).sum() == lengths[owner] - 1
            seen.append(owner)
        start += n * longest
    assert sorted(seen) == [i for i, length in enumerate(lengths) if length > 0]


def test_attention_plan_pads_less_than_a_single_call() -> None:
    lengths = tuple(range(20, 111))
    plan = plan_attention(lengths, torch.device("cpu"))
    assert len(plan.pad) < 1.2 * sum(lengths) and len(plan.shapes) <= 12


HUB_CONFIGS: dict[str, dict[str, Any]] = {
    # Qwen2.5-VL-7B: the language model's fields are at the top, next to the encoder's configuration.
    "qwen2_5_vl": dict(
        hidden_size=3584,
        intermediate_size=18944,
        num_attention_heads=28,
        num_hidden_layers=28,
        num_key_value_heads=4,
        rope_theta=1000000.0,
        rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]},
        use_sliding_window=False,
        vocab_size=152064,
        image_token_id=151655,
        video_token_id=151656,
        vision_config=dict(hidden_size=1280, intermediate_size=3420, out_hidden_size=3584, fullatt_block_indexes=[7]),
    ),
    # Qwen3-VL-30B-A3B
    "qwen3_vl_moe": dict(
        text_config=dict(
            model_type="qwen3_vl_moe_text",
            head_dim=128,
            hidden_size=2048,
            intermediate_size=6144,
            moe_intermediate_size=768,
            norm_topk_prob=True,
            num_attention_heads=32,
            num_experts=128,
            num_experts_per_tok=8,
            num_hidden_layers=48,
            num_key_value_heads=4,
            rope_scaling={"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
            rope_theta=5000000,
            vocab_size=151936,
        ),
        vision_config=dict(model_type="qwen3_vl_moe", hidden_size=1152, intermediate_size=4304, out_hidden_size=2048),
    ),
}


@pytest.mark.parametrize(("family", "billions"), [("qwen2_5_vl", 8.292166656), ("qwen3_vl_moe", 31.070754032)])
def test_vision_language_models_have_the_published_parameter_count(
    family: str, billions: float, tmp_path: Path
) -> None:
    config = load_hf_config(write_config(tmp_path, model_type=family, tie_word_embeddings=False, **HUB_CONFIGS[family]))
    shapes = {name: shape for entry in entries(config, "policy") for name, shape in entry.hf.items()}
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == pytest.approx(billions * 1e9, abs=0.5)
