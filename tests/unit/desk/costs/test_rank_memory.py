"""A rank's memory against sums over single tensors, and its laws: desk/costs: counts, activations, rank_memory."""

import math
from dataclasses import replace

import pytest
from transformers import AutoConfig

from megatron_rl.config.layout import expert_tensor_size, parse_layout
from megatron_rl.config.schema import ParallelConfig, Recompute
from megatron_rl.desk.costs.activations import layer_tensors
from megatron_rl.desk.costs.parameter_counts import num_parameters
from megatron_rl.desk.costs.rank_memory import PassSettings, memory_by_rank
from megatron_rl.families.model_facts import as_config, read_model_json
from megatron_rl.families.parameters import entries
from megatron_rl.families.transforms import Replicated, VocabParallel, padded_vocab_size
from megatron_rl.system.gpu.torchvision_ops import declare_torchvision_ops
from tests.tiny_families import COMMON, SHAPES, VISION_SHAPES

declare_torchvision_ops()


def config_of(name: str):
    fields = {**COMMON, **{**SHAPES, **VISION_SHAPES}[name]}
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


@pytest.mark.parametrize("name", [*SHAPES, *VISION_SHAPES])
def test_parameter_counts_equal_the_checkpoint_files(name, tmp_path):
    config = config_of(name)
    shapes = {name: shape for entry in entries(config, "policy") for name, shape in entry.hf.items()}
    assert num_parameters(config) == sum(map(math.prod, shapes.values()))
    if hasattr(config, "text_config"):
        config.text_config.tie_word_embeddings = config.tie_word_embeddings
    config.save_pretrained(tmp_path)
    assert num_parameters(as_config(read_model_json(tmp_path))) == num_parameters(config)


def on_rank(config, parallel, stage, role):
    """(dense, expert) parameters of a rank of ``stage``, summed tensor by tensor."""
    layers = config.num_hidden_layers // parallel.pipeline_parallel_size
    vocabulary = padded_vocab_size(config.vocab_size, parallel.tensor_parallel_size)
    dense = expert = 0.0
    for entry in entries(config, role):
        if entry.megatron.startswith("decoder.layers."):
            owner = int(entry.megatron.split(".")[2]) // layers
        else:
            owner = 0 if entry.megatron.startswith("embedding") else parallel.pipeline_parallel_size - 1
        if owner != stage or entry.megatron.endswith(".expert_bias"):
            continue
        shapes = entry.shapes
        if isinstance(entry.transform, VocabParallel):
            shapes = [(vocabulary, shape[1]) for shape in shapes]
        size = sum(math.prod(shape) for shape in shapes)
        if ".experts." in entry.megatron:
            expert += size / parallel.expert_parallel_size / expert_tensor_size(parallel)
        else:
            dense += size if isinstance(entry.transform, Replicated) else size / parallel.tensor_parallel_size
    if config.tie_word_embeddings and role == "policy" and 0 < stage == parallel.pipeline_parallel_size - 1:
        dense += vocabulary * config.hidden_size / parallel.tensor_parallel_size
    return dense, expert


@pytest.mark.parametrize("role", ["policy", "critic"])
@pytest.mark.parametrize("layout", ["tp1", "tp2+pp2", "pp2+ep2", "tp2+pp2+ep2+etp1+cp2"])
@pytest.mark.parametrize("name", ["qwen2_gqa7_tied", "qwen3_moe_sparse_step", "deepseek_v3_yarn", "glm4_moe_partial_rotary"])
def test_states_of_a_stage_equal_the_sum_over_its_tensors(name, layout, role):
    config, (parallel, _) = config_of(name), parse_layout(layout)
    ranks = 16
    for stage, memory in enumerate(
        memory_by_rank(config, parallel, PassSettings(0), num_ranks=ranks, is_critic=role == "critic")
    ):
        dense, expert = on_rank(config, parallel, stage, role)
        in_stage = ranks / parallel.pipeline_parallel_size
        assert memory.weights == pytest.approx(2 * (dense + expert))
        assert memory.gradients == pytest.approx(4 * (dense + expert))
        copies = in_stage / parallel.tensor_parallel_size
        expert_copies = in_stage / parallel.expert_parallel_size / expert_tensor_size(parallel)
        assert memory.optimizer == pytest.approx(12 * (dense / copies + expert / expert_copies))
        assert memory.activations == 0


@pytest.mark.parametrize("name", ["llama3_scaled", "qwen3_moe_sparse_step"])
def test_uneven_stages_have_their_configured_layers(name):
    config = config_of(name)
    layers = config.num_hidden_layers
    parallel = ParallelConfig(pipeline_parallel_size=2, pipeline_layers=[1, layers - 1])
    first, last = memory_by_rank(config, parallel, PassSettings(0), num_ranks=2)
    whole = memory_by_rank(config, ParallelConfig(), PassSettings(0), num_ranks=1)[0]
    assert first.weights + last.weights == whole.weights
    assert last.weights > first.weights or layers == 2


def test_activations_of_a_dense_layer_by_hand():
    """hidden 48, 4 heads of 26, 4 groups, MLP 80: 48 x 4 + (104 x 3) + (104 x 2) + 104 + 80 x 3 values, and 4 in float32."""
    tensors = layer_tensors(config_of("llama3_scaled"), with_experts=False)
    assert sum(tensor.width * (4 if tensor.in_float32 else 2) for tensor in tensors) == 2 * (192 + 312 + 208 + 104 + 240) + 16


@pytest.mark.parametrize(("name", "norms"), [("qwen3_wide_heads_yarn", True), ("qwen2_gqa7_tied", False)])
def test_norms_of_queries_and_keys_save_their_inputs(name, norms):
    config = config_of(name)
    widths = {tensor.name: tensor.width for tensor in layer_tensors(config, with_experts=False)}
    # One copy before the norms, one rotated.
    assert widths.get("queries and keys before their norms", 0) == (widths["rotated queries and keys"] if norms else 0)


def activations(parallel: ParallelConfig, tokens: int = 64, name: str = "qwen3_moe_sparse_step", **passes):
    return [rank.activations for rank in memory_by_rank(config_of(name), parallel, PassSettings(tokens, **passes), num_ranks=8)]


def test_context_and_sequence_parallelism_shard_activations():
    whole = activations(ParallelConfig())[0]
    assert activations(ParallelConfig(context_parallel_size=4))[0] == pytest.approx(whole / 4)
    sharded = ParallelConfig(tensor_parallel_size=2, expert_tensor_parallel_size=1, expert_parallel_size=2, sequence_parallel=True)
    assert activations(sharded)[0] == pytest.approx(whole / 2)
    # Without sequence parallelism norms and residuals stay whole; experts under tensor parallelism process all tokens.
    assert whole / 2 < activations(replace(sharded, sequence_parallel=False))[0] < whole
    assert whole / 2 < activations(replace(sharded, expert_tensor_parallel_size=2))[0] < whole


def test_earlier_stages_save_more_microbatches():
    one = activations(ParallelConfig(), name="deepseek_v3_plain_query")[0]
    deep = ParallelConfig(pipeline_parallel_size=4)
    first, *_, last = activations(deep, num_packs=100)
    assert first > last
    assert activations(deep, num_packs=1)[0] < first
    assert first < 4 * one


def test_full_recomputation_saves_layer_inputs_and_one_layer():
    parallel, name = ParallelConfig(), "llama3_scaled"
    none, selective, full = (activations(parallel, name=name, recompute=recompute)[0] for recompute in Recompute)
    tensors = layer_tensors(config_of(name), with_experts=False)
    one_layer = 64 * sum(tensor.width * (4 if tensor.in_float32 else 2) for tensor in tensors)
    head = 64 * 2 * 2 * 48
    assert none == 2 * one_layer + head
    assert full == one_layer + 2 * 64 * 2 * 48 + head
    assert full < selective < none


def test_saved_logits_are_counted_in_both_precisions():
    kept = activations(ParallelConfig(), keeps_logits=True)[0]
    assert kept - activations(ParallelConfig())[0] == 64 * 6 * 101
