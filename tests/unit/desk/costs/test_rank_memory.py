"""A rank's memory against sums over single tensors, and its laws: desk/costs: counts, activations, rank_memory.

The planner's weights, gradients and optimizer state equal the bytes of ranks that Megatron builds.
"""

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from megatron.core import parallel_state
from transformers import AutoConfig

from megatron_rl.config.layout import expert_tensor_size, layout_problems, parse_layout, ranks_needed
from megatron_rl.config.schema import Dtype, LoraConfig, OptimizerConfig, ParallelConfig, Recompute, VisionConfig
from megatron_rl.desk.costs import rank_memory
from megatron_rl.desk.costs.parameter_counts import num_parameters
from megatron_rl.desk.costs.rank_memory import (
    ParameterBytes,
    PassSettings,
    layer_tensors,
    memory_by_rank,
    parameter_bytes,
)
from megatron_rl.errors import ModelError
from megatron_rl.families.adapters import linear_modules
from megatron_rl.families.model_facts import as_config, has_experts, read_model_json
from megatron_rl.families.parameters import entries
from megatron_rl.families.transforms import Replicated, VocabParallel, padded_vocab_size
from megatron_rl.models import critic, policy
from megatron_rl.models.hf.megatron_config import check_layout
from megatron_rl.models.hf.model_config import load_hf_config
from megatron_rl.models.image_encoding import freeze
from megatron_rl.models.lora import add_adapters
from megatron_rl.system.gpu.torchvision_ops import declare_torchvision_ops
from megatron_rl.training import engine
from megatron_rl.training.ddp import wrap
from megatron_rl.training.optimizer import build_optimizer
from tests.fake_world import fake_rank
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


declare_torchvision_ops()
MODELS = Path(__file__).parents[4] / "tools" / "published" / "models"
NOTHING = PassSettings(0)
BUILD = {"policy": policy.build_policy, "critic": critic.build_critic}

REAL = [
    ("qwen2.5-math-7b", "tp4+sp", 8),
    ("qwen2.5-32b", "tp8+sp+pp2", 64),
    ("qwen3-30b-a3b", "tp4+sp+ep8+etp1", 8),
    ("qwen3-235b-a22b", "tp4+sp+pp2+ep32+etp1", 128),
    ("glm-4.5-air", "tp4+sp+pp2+ep8+etp2+layers24/22", 128),
    ("deepseek-v3", "tp8+sp+pp4+cp2+ep64+etp1+layers15/15/16/15", 1024),
]
"""Model, layout and number of ranks."""


def counted(chunks, num_ranks: int, parallel: ParallelConfig) -> tuple[int, float]:
    """(parameters on this rank, the rank's share of the optimizer state), with the sizes of Megatron's own groups."""
    replicas = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    of_expert = parallel_state.get_expert_data_parallel_world_size()
    held, share = 0, 0.0
    for parameter in itertools.chain(*(chunk.parameters() for chunk in chunks)):
        held += parameter.numel()
        share += parameter.numel() / (replicas if getattr(parameter, "allreduce", True) else of_expert)
    return held, share


@pytest.mark.parametrize("role", ["policy", "critic"])
@pytest.mark.parametrize(("name", "layout", "num_ranks"), REAL)
def test_planned_states_equal_real_models_on_the_meta_device(name: str, layout: str, num_ranks: int, role: str) -> None:
    parallel, _ = parse_layout(layout)
    assert list(layout_problems(parallel, num_ranks)) == []
    planned = memory_by_rank(
        as_config(read_model_json(MODELS / name)), parallel, NOTHING, num_ranks=num_ranks, is_critic=role == "critic"
    )
    stages = parallel.pipeline_parallel_size
    for stage in {0, stages - 1}:
        # The last rank of a stage; any other rank of the stage would also do.
        rank = (stage + 1) * (num_ranks // stages) - 1
        with fake_rank(rank, num_ranks, parallel), torch.device("meta"):
            chunks = BUILD[role](load_hf_config(MODELS / name), parallel, dtype=torch.bfloat16, seed=None)
            held, share = counted(chunks, num_ranks, parallel)
        assert planned[stage].weights == 2 * held
        assert planned[stage].gradients == 4 * held
        assert planned[stage].optimizer == pytest.approx(12 * share, rel=1e-12)


@st.composite
def models(draw) -> Any:
    """A tiny model of any family, with sizes that differ from the test suite's."""
    name = draw(st.sampled_from([*SHAPES, *VISION_SHAPES]))
    fields = {**COMMON, **{**SHAPES, **VISION_SHAPES}[name]}
    text = fields["text_config"] = dict(fields["text_config"]) if "text_config" in fields else fields
    if text is fields:
        del fields["text_config"]
    text["vocab_size"] = draw(st.integers(97, 140))
    text["intermediate_size"] = 8 * draw(st.integers(5, 12))
    text["num_hidden_layers"] = draw(st.integers(2, 5))
    text.pop("mlp_only_layers", None)
    fields["tie_word_embeddings"] = draw(st.booleans())
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


@st.composite
def layouts(draw, config: Any) -> tuple[ParallelConfig, int]:
    """A layout of at most 8 ranks, and its number of ranks."""
    tp, pp, cp, ep, dp = (draw(st.sampled_from(sizes)) for sizes in ([1, 2], [1, 2], [1, 2], [1, 2], [1, 2, 3]))
    has = any(has_experts(config))
    ep = ep if has else 1
    etp = draw(st.sampled_from([0, 1])) if ep > 1 else 0
    vpp = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    layers = num_layers_of(config)
    cuts = sorted(draw(st.permutations(range(1, layers)))[: pp * vpp - 1])
    parallel = ParallelConfig(
        tensor_parallel_size=tp,
        sequence_parallel=tp > 1,
        pipeline_parallel_size=pp,
        context_parallel_size=cp,
        expert_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        virtual_pipeline_size=vpp,
        pipeline_layers=[end - start for start, end in itertools.pairwise([0, *cuts, layers])] if pp > 1 else [],
    )
    num_ranks = ranks_needed(parallel, dp)
    assume(num_ranks <= 8 and not list(layout_problems(parallel, num_ranks)))
    try:
        check_layout(config, parallel)
    except ModelError:
        assume(False)
    return parallel, num_ranks


def num_layers_of(config: Any) -> int:
    return getattr(config, "text_config", config).num_hidden_layers


def built(
    config: Any, parallel: ParallelConfig, role: str, dtype: torch.dtype, vision: VisionConfig, lora: LoraConfig
) -> ParameterBytes:
    """Bytes of this rank's tensors, in the fields of ``ParameterBytes``."""
    chunks = BUILD[role](config, parallel, dtype=dtype, seed=None)
    if lora.rank:
        add_adapters(chunks, config, role, lora, seed=1)
    weights = [parameter for chunk in chunks for parameter in chunk.parameters()]
    if not lora.rank:
        freeze(chunks, train_encoder=vision.train_encoder, train_adapter=vision.train_adapter)
    replicas = wrap(chunks, dtype)
    optimizer = build_optimizer(OptimizerConfig(), replicas, dtype)
    gradients = [parameter.main_grad for parameter in weights if parameter.requires_grad]
    state = []
    for part in optimizer.chained_optimizers:
        if part.is_stub_optimizer:
            continue
        for parameter in itertools.chain(*(group["params"] for group in part.optimizer.param_groups)):
            moments = part.optimizer.state[parameter]
            state += [moments["exp_avg"], moments["exp_avg_sq"]]
            # Main weights of a float32 model are views of the model's own.
            state += [parameter] if dtype is not torch.float32 else []
    return ParameterBytes(*(sum(t.numel() * t.element_size() for t in tensors) for tensors in (weights, gradients, state)))


@settings(max_examples=12, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(data=st.data())
def test_planned_states_equal_any_tiny_model_in_any_layout(data: st.DataObject) -> None:
    config = data.draw(models())
    parallel, num_ranks = data.draw(layouts(config))
    role, dtype = data.draw(st.sampled_from(["policy", "critic"])), data.draw(st.sampled_from(Dtype))
    vision = VisionConfig(train_encoder=data.draw(st.booleans()), train_adapter=data.draw(st.booleans()))
    may_adapt = expert_tensor_size(parallel) == 1 and any(".experts." in name for name in linear_modules(config))
    experts = ["experts.*"] if may_adapt and data.draw(st.booleans()) else []
    lora = LoraConfig(rank=data.draw(st.sampled_from([0, 3])), targets=["all-linear", *experts])
    states = parameter_bytes(dtype, OptimizerConfig(), vision, lora)
    planned = memory_by_rank(
        config, parallel, NOTHING, num_ranks=num_ranks, is_critic=role == "critic", states=states
    )
    in_stage, optimizer = num_ranks // parallel.pipeline_parallel_size, 0
    for rank in range(num_ranks):
        with fake_rank(rank, num_ranks, parallel):
            found = built(config, parallel, role, getattr(torch, dtype.value), vision, lora)
        stage = planned[rank // in_stage]
        assert (stage.weights, stage.gradients) == (found.weight, found.gradient)
        optimizer += found.optimizer
    # Bucket boundaries decide which rank stores how much of the state; all ranks together store it exactly once.
    assert sum(stage.optimizer for stage in planned) * in_stage == pytest.approx(optimizer, rel=1e-12)


def test_logits_are_estimated_for_the_chunk_sizes_of_the_engine() -> None:
    assert engine.DEFAULT_CHUNK_SIZE == rank_memory._TOKENS_PER_CHUNK
    assert engine._LOGITS_PER_CHUNK == rank_memory._LOGITS_PER_CHUNK
