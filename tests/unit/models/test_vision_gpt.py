"""Images in a pack: positions against transformers, assignment to ranks, and rejected batches."""

import functools
import operator
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from megatron_rl.config.schema import ParallelConfig
from megatron_rl.data.batch import Images
from megatron_rl.errors import ModelError
from megatron_rl.families.vision_encoder import build_encoder
from megatron_rl.models.hf.megatron_config import check_layout
from megatron_rl.models.hf.model_config import _check_vision
from megatron_rl.models.image_encoding import assign_images, image_flops
from megatron_rl.models.vision_gpt import image_rows, mrope_angles, mrope_positions, rope_axes
from megatron_rl.system.gpu.torchvision_ops import declare_torchvision_ops
from tests.tiny_families import VISION_SHAPES, VISION_TOKENS

declare_torchvision_ops()

IMAGE, START, END = (VISION_TOKENS[name] for name in ("image_token_id", "vision_start_token_id", "vision_end_token_id"))


def make_pack(seed: int) -> tuple[Tensor, list[int], Images]:
    """Random sequences of text and images; some have no image."""
    rng = random.Random(seed)
    sequences, grids, owners = [], [], []
    for index in range(5):
        tokens = [7] * rng.randrange(1, 5)
        for _ in range(rng.randrange(3) if index else 2):
            grid = [rng.randrange(1, 3), 2 * rng.randrange(1, 5), 2 * rng.randrange(1, 5)]
            tokens += [START, *[IMAGE] * (grid[0] * grid[1] * grid[2] // 4), END, *[7] * rng.randrange(4)]
            grids.append(grid)
            owners.append(index)
        sequences.append(tokens)
    sequences.insert(2, [])
    owners = [index + (index >= 2) for index in owners]
    images = Images([], torch.tensor(grids), torch.tensor(owners))
    return torch.tensor(functools.reduce(operator.iadd, sequences, [])), [len(tokens) for tokens in sequences], images


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shape", VISION_SHAPES)
def test_image_positions_and_angles_equal_transformers(shape: str, seed: int) -> None:
    from transformers import AutoModelForImageTextToText

    config = AutoConfig.for_model(**VISION_SHAPES[shape])
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    rotary = type(model.model.language_model.rotary_emb)(config.text_config)
    tokens, lengths, images = make_pack(seed)
    rows = image_rows(tokens, lengths, images, IMAGE, 2)
    positions = mrope_positions(lengths, images, rows, 2)
    axes = rope_axes(config.text_config.rope_parameters["mrope_section"], interleaved=shape != "qwen2_5_vl")
    angles = mrope_angles(positions, rotary.inv_freq, axes)[:, 0, 0]
    assert positions.shape == (3, len(tokens))
    for index, own in enumerate(tokens.split(lengths)):
        start = sum(lengths[:index])
        found = positions[:, start : start + len(own)]
        grids = images.grids[images.sequences == index]
        if len(grids) == 0:
            assert torch.equal(found, torch.arange(len(own)).expand(3, -1))
            continue
        types = (own == IMAGE).int()[None]
        expected, _ = model.model.get_rope_index(own[None], mm_token_type_ids=types, image_grid_thw=grids)
        assert torch.equal(found, expected[:, 0])
        cosine, sine = rotary(torch.zeros(1), expected)
        torch.testing.assert_close(angles[start : start + len(own)].cos(), cosine[0], atol=1e-6, rtol=0)
        torch.testing.assert_close(angles[start : start + len(own)].sin(), sine[0], atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("tokens", "sequences", "message"),
    [
        ([7, IMAGE, IMAGE], [0], r"has 2 image tokens .*need 4"),
        ([IMAGE, IMAGE, 7, IMAGE, IMAGE], [0], r"image 0 .* are at 0 to 4"),
        ([IMAGE] * 4, [1], r"consecutive tokens in sequence 1, .* in sequences 0 to 0"),
    ],
    ids=["too few", "apart", "another sequence"],
)
def test_images_that_do_not_match_their_tokens_are_rejected(tokens: list[int], sequences: list[int], message: str) -> None:
    images = Images([], torch.tensor([[1, 4, 4]]), torch.tensor(sequences))
    with pytest.raises(ModelError, match=message):
        image_rows(torch.tensor(tokens), [len(tokens), 0], images, IMAGE, 2)


def test_image_tokens_without_an_image_are_rejected() -> None:
    with pytest.raises(ModelError, match="1 image tokens .* its 0 images"):
        image_rows(torch.tensor([3, IMAGE]), [2], None, IMAGE, 2)


# Balance -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(50))
def test_no_rank_encodes_more_than_the_mean_plus_one_image(seed: int) -> None:
    rng = random.Random(seed)
    num_ranks = rng.randrange(1, 9)
    costs = [rng.lognormvariate(0, 1.5) for _ in range(rng.randrange(0, 40))]
    homes = [range(first := rng.randrange(num_ranks), first + 1) for _ in costs]
    ranks = assign_images(costs, num_ranks, homes)
    assert len(ranks) == len(costs) and all(0 <= rank < num_ranks for rank in ranks)
    loads = [sum(cost for cost, own in zip(costs, ranks) if own == rank) for rank in range(num_ranks)]
    for cost, rank in zip(costs, ranks):
        # Without its cheapest image, a rank has at most the load of any other.
        smallest = min(c for c, own in zip(costs, ranks) if own == rank)
        assert loads[rank] - smallest <= min(loads) + 1e-9 and cost <= loads[rank] + 1e-9
    assert assign_images(costs, num_ranks, homes) == ranks


def test_equal_images_stay_on_their_home_ranks() -> None:
    homes = [range(0, 2), range(2, 4), range(2, 4), range(0, 2)]
    ranks = assign_images([3.0] * 4, 4, homes)
    assert all(rank in home for rank, home in zip(ranks, homes)) and sorted(ranks) == [0, 1, 2, 3]


@pytest.mark.parametrize("shape", VISION_SHAPES)
@pytest.mark.parametrize("grid", [(1, 4, 6), (2, 8, 2)])
def test_image_flops_equal_pytorchs_count(shape: str, grid: tuple[int, int, int]) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    config = AutoConfig.for_model(**VISION_SHAPES[shape]).vision_config
    encoder = build_encoder(config)
    patches = torch.zeros(grid[0] * grid[1] * grid[2], 3 * 2 * config.patch_size**2)
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        encoder(patches, grid_thw=torch.tensor([grid]))
    counted = counter.get_total_flops()
    # Not compared: the patches' embedding, attention on a CPU, and windows truncated at an image's border.
    assert image_flops(config, grid) == pytest.approx(counted, rel=0.15)


# Refusals ------------------------------------------------------------------------------------------------------------


def make_config(shape: str, **overrides: dict[str, Any]) -> Any:
    fields = VISION_SHAPES[shape]
    nested = {name: {**fields[name], **changed} for name, changed in overrides.items()}
    return AutoConfig.for_model(**{**fields, **nested})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (dict(vision_config=dict(out_hidden_size=32)), "out_hidden_size 32 is not text_config.hidden_size 48"),
        (dict(text_config=dict(vocab_size=90)), "image_token_id 90 is not in the vocabulary of 90"),
        (dict(text_config=dict(num_hidden_layers=1)), "names 2 layers, more than text_config.num_hidden_layers 1"),
        (dict(text_config=dict(head_dim=24)), r"mrope_section \[4, 3, 3\] .* add up to 12"),
    ],
)
def test_inconsistent_vision_configurations_are_rejected(overrides: Any, message: str, tmp_path: Any) -> None:
    with pytest.raises(ModelError, match=message):
        _check_vision(make_config("qwen3_vl", **overrides), tmp_path / "config.json")


def test_deepstack_layers_outside_the_first_stage_are_rejected() -> None:
    config = make_config("qwen3_vl")
    check_layout(config, ParallelConfig(pipeline_parallel_size=2))
    uneven = ParallelConfig(pipeline_parallel_size=2, pipeline_layers=[1, 3])
    for parallel in (ParallelConfig(pipeline_parallel_size=4), uneven):
        with pytest.raises(ModelError, match="first 2 layers take image features .* stage has 1"):
            check_layout(config, parallel)
    check_layout(make_config("qwen2_5_vl"), ParallelConfig(pipeline_parallel_size=4))
