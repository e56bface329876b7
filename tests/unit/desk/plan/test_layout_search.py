"""Layouts against the laws that train checks and Megatron builds by: megatron_rl/desk/plan/layout_search.py."""

import itertools

import pytest
from transformers import AutoConfig

from megatron_rl.config.layout import experts_problem, layers_problem, layout_problems, parse_layout
from megatron_rl.desk.plan.layout_search import (
    LayoutFamily,
    context_sizes,
    cut_layers,
    expert_sizes,
    layout_refusal,
    layouts,
    shape_of,
    tensor_sizes,
)
from megatron_rl.errors import ModelError
from megatron_rl.families.model_facts import dims, text_config
from megatron_rl.models.hf.megatron_config import check_layout
from megatron_rl.system.gpu.torchvision_ops import declare_torchvision_ops
from tests.tiny_families import COMMON, SHAPES, VISION_SHAPES

declare_torchvision_ops()


def config_of(name: str):
    fields = {**COMMON, **{**SHAPES, **VISION_SHAPES}[name]}
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def all_layouts(shape, num_ranks: int):
    pairs = [*itertools.product((1, 2, 4, 8), (1, 2, 3, 4))]
    for stages, experts, whole in itertools.product(range(1, 17), expert_sizes(shape, num_ranks), (True, False)):
        for chunks in (1, 2):
            yield from layouts(shape, LayoutFamily(stages, experts, whole, chunks), num_ranks, pairs)
        yield from layouts(shape, LayoutFamily(stages, experts, whole, pinned={"sequence_parallel": False}), num_ranks, pairs)


@pytest.mark.parametrize("num_ranks", [4, 6])
@pytest.mark.parametrize("name", [*SHAPES, *VISION_SHAPES])
def test_a_layout_is_refused_where_train_or_megatron_refuses_it(name, num_ranks):
    config = config_of(name)
    shape, sizes = shape_of(config), dims(config)
    for parallel in all_layouts(shape, num_ranks):
        if len(parallel.pipeline_layers) and min(parallel.pipeline_layers) < 1:
            assert layout_refusal(shape, parallel)
            continue
        problems = [
            *layout_problems(parallel, num_ranks),
            layers_problem(parallel, text_config(config).num_hidden_layers),
            experts_problem(parallel, sizes["experts"], sizes["expert_ffn"]),
        ]
        try:
            check_layout(config, parallel)
        except ModelError as error:
            problems.append(str(error))
        assert bool(layout_refusal(shape, parallel)) == any(problems), (parallel, problems)


@pytest.mark.parametrize("num_layers", range(1, 20))
def test_layers_are_cut_evenly_and_the_ends_are_short_first(num_layers):
    for num_chunks in range(1, num_layers + 1):
        cut = cut_layers(num_layers, num_chunks)
        if not cut:
            assert num_layers % num_chunks == 0
            continue
        assert (sum(cut), len(cut)) == (num_layers, num_chunks) and max(cut) - min(cut) == 1
        assert cut[-1] <= min(cut[1:-1], default=cut[-1] + 1) or cut[0] == cut[-1] + 1 or cut[-1] == min(cut)


def test_the_layouts_of_a_group_share_more_and_more():
    shape = shape_of(config_of("qwen3_moe_sparse_step"))
    pairs = itertools.product(tensor_sizes(64, 8), context_sizes(64))
    found = layouts(shape, LayoutFamily(1, 1, whole=False), 64, pairs)
    products = [p.tensor_parallel_size * p.context_parallel_size for p in found]
    assert products == sorted(products) and products[0] == 1
    assert parse_layout("tp2+sp")[0].sequence_parallel
