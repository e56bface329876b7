"""Laws of videos as frames: budgets, timestamps, and prompts that show them."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from megatron_rl.config.checks import check_config
from megatron_rl.config.schema import Config, DataConfig
from megatron_rl.data.chat_content import choose_frames, timestamp_text
from megatron_rl.data.prompts import load_prompts
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.errors import ConfigError, DataError
from tests.tiny_vision import write_vision_files
from tests.unit.data.test_images import CONFIG, IMAGE, shown

LEVELS, BUDGET = DataConfig().video_frame_tokens, DataConfig().max_video_tokens
BUDGETS = st.integers(min(LEVELS), 3 * BUDGET)


@given(st.integers(1, 20_000), BUDGETS)
def test_video_of_any_length_keeps_its_budget_and_order(num_frames, budget):
    shown, limit = choose_frames(num_frames, budget, LEVELS)
    assert len(shown) * limit <= budget
    assert limit in LEVELS
    assert shown == sorted(set(shown)) and shown[0] == 0 and shown[-1] < num_frames
    if len(shown) > 1:
        assert shown[-1] == num_frames - 1
        gaps = [after - before for before, after in itertools.pairwise(shown)]
        assert max(gaps) - min(gaps) <= 1


@given(st.integers(1, 20_000), BUDGETS)
def test_the_largest_level_at_which_all_frames_fit_is_chosen(num_frames, budget):
    shown, limit = choose_frames(num_frames, budget, LEVELS)
    fitting = [level for level in LEVELS if num_frames * level <= budget]
    assert limit == max(fitting, default=min(LEVELS))
    assert len(shown) == (num_frames if fitting else budget // min(LEVELS))


@given(st.integers(1, 5_000), st.integers(0, 5_000), BUDGETS)
def test_longer_video_has_no_larger_frames_and_shows_no_fewer(num_frames, more, budget):
    short, short_limit = choose_frames(num_frames, budget, LEVELS)
    long, long_limit = choose_frames(num_frames + more, budget, LEVELS)
    assert long_limit <= short_limit and len(long) >= len(short)


@pytest.mark.parametrize(
    ("num_frames", "level"), [(1, 640), (128, 640), (129, 512), (160, 512), (161, 384), (640, 128)]
)
def test_frame_levels_match_the_paper(num_frames, level):
    assert choose_frames(num_frames, BUDGET, LEVELS) == (list(range(num_frames)), level)


def test_too_long_video_drops_frames_evenly():
    shown, limit = choose_frames(10_000, BUDGET, LEVELS)
    assert limit == 128 and len(shown) == 640
    assert choose_frames(5, 3, [1]) == ([0, 2, 4], 1)
    assert choose_frames(9, 1, [1]) == ([0], 1)
    for num_frames, budget in ((0, BUDGET), (4, 127)):
        with pytest.raises(ValueError, match="at least one frame and 128 tokens"):
            choose_frames(num_frames, budget, LEVELS)


def test_timestamps_have_the_format_of_the_paper():
    assert [timestamp_text(seconds) for seconds in (0, 1.5, 12.25)] == ["[0.0 second]", "[1.5 second]", "[12.2 second]"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vision")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    write_vision_files(folder)
    return Tokenizer(folder)


def load(tokenizer, folder, part, **fields):
    for i in range(6):
        Image.new("RGB", (48, 40), (40 * i, 0, 0)).save(folder / f"{i}.png")
    row = {"prompt": [{"role": "user", "content": [part, {"type": "text", "text": "which?"}]}], "answer": "1"}
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    settings = DataConfig(**{"video_frame_tokens": [30, 12, 4], "max_video_tokens": 90, **fields})
    return load_prompts([str(folder / "rows.jsonl")], settings, tokenizer, max_prompt_tokens=500).prompts[0]


def frames(number):
    return [f"{i}.png" for i in range(number)]


@pytest.mark.parametrize(
    ("number", "grid"), [(3, (1, 10, 12)), (4, (1, 6, 6)), (6, (1, 6, 6))], ids=["native", "coarser", "as coarse"]
)
def test_frames_get_coarser_until_the_video_fits(tmp_path, tokenizer, number, grid):
    prompt = load(tokenizer, tmp_path, {"type": "video", "frames": frames(number), "fps": 2})
    tokens = grid[1] * grid[2] // 4
    expected = "".join(f"[{i / 2:.1f} second]<{'#' * tokens}>" for i in range(number))
    assert shown(tokenizer, prompt) == f"user: {expected}which?\nassistant: "
    assert prompt.text == "".join(f"[{i / 2:.1f} second][image]" for i in range(number)) + "which?"
    assert prompt.token_ids.count(IMAGE) <= 90
    vision = tokenizer.vision
    for image in prompt.images:
        assert image.grid == grid and len(vision.patchify(vision.file(image))) == image.num_patches


def test_video_that_is_still_too_long_shows_fewer_frames(tmp_path, tokenizer):
    part = {"type": "video", "frames": frames(6), "timestamps": [0, 0.5, 1, 2, 5, 9.5]}
    prompt = load(tokenizer, tmp_path, part, max_video_tokens=12)
    assert prompt.text == "[0.0 second][image][2.0 second][image][9.5 second][image]which?"
    assert prompt.token_ids.count(IMAGE) <= 12


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"timestamps": [0, 1, 1]}, "increasing seconds, but frame 3 is at 1 and the previous frame at 1"),
        ({"timestamps": [0, 1]}, "timestamps: expected 3 numbers"),
        ({"timestamps": [-1, 0, 1]}, "seconds from 0, got -1"),
        ({"timestamps": [0, 1, 2], "fps": 1}, "either timestamps .* or fps, got both"),
        ({}, "got neither"),
        ({"fps": 0}, "fps: expected a number above 0"),
        ({"fps": 1, "frames": []}, "frames: expected a list of images"),
        ({"fps": 1, "frames": ["0.png", "9.png"]}, "frame 2: image .*9.png does not exist"),
    ],
)
def test_invalid_videos_are_rejected_with_their_source(tmp_path, tokenizer, change, expected):
    with pytest.raises(DataError, match=f"rows.jsonl:1: field 'prompt': message 1: part 1: .*{expected}"):
        load(tokenizer, tmp_path, {"type": "video", "frames": frames(3), **change})


def test_frame_that_cannot_shrink_enough_is_rejected(tmp_path, tokenizer):
    Image.new("RGB", (400, 8)).save(tmp_path / "long.png")
    part = {"type": "video", "frames": ["long.png"], "fps": 1}
    with pytest.raises(DataError, match="may take 4 tokens, but the model's image processor makes"):
        load(tokenizer, tmp_path, part, max_video_tokens=4)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (dict(max_video_tokens=100), "data.max_video_tokens: expected enough for one frame of 128"),
        (dict(video_frame_tokens=[]), "data.video_frame_tokens: expected at least one"),
        (dict(video_frame_tokens=[4, 0]), "data.video_frame_tokens: expected at least one"),
    ],
)
def test_video_budget_below_one_frame_is_rejected_before_a_run(settings, key):
    with pytest.raises(ConfigError, match=key):
        check_config(Config(data=DataConfig(**settings)), command="sft")
