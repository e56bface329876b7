"""Laws of images in prompts: rejected files, token counts, and the pixels of trainer and servers."""

import asyncio
import base64
import io
import json
import shutil
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from megatron_rl.config.schema import Config, DataConfig
from megatron_rl.data import images as images_module
from megatron_rl.data import vision as vision_module
from megatron_rl.data.chat_content import moved_row
from megatron_rl.data.conversation_rows import load_sequences
from megatron_rl.data.images import ImageSource, decode
from megatron_rl.data.prompts import check_files, load_prompts
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.data.trajectory import Prompt, Segment, Trajectory
from megatron_rl.data.vision import ImageProcessor, collapse, expand
from megatron_rl.environments.base import EnvironmentFault, Message
from megatron_rl.errors import DataError
from megatron_rl.rollout.generation import GenerationPlan, images_of_request, make_dialogue
from megatron_rl.rollout.sglang.wire.protocol import validate
from megatron_rl.rollout.windows import WindowGenerator
from megatron_rl.step.packing import window_batch
from megatron_rl.step.parity import EngineMismatch, compare_logprobs, sample_for_parity
from megatron_rl.supervised.fine_tuning import sequence_batch
from megatron_rl.supervised.reward_models import BradleyTerry, Pairwise, example_batch
from tests.tiny_vision import MAX_TOKENS, write_vision_files
from tests.unit.rollout.test_windows import SAMPLING, Engine, Talk

CONFIG = {
    "model_type": "qwen3_vl",
    "image_token_id": 90,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
    "text_config": {"vocab_size": 101},
    "vision_config": {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2},
}
IMAGE = CONFIG["image_token_id"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vision")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    write_vision_files(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer(folder)


def picture(width=24, height=16, seed=0, mode="RGB"):
    channels = len(mode) if mode in ("RGB", "RGBA") else 1
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return Image.fromarray(pixels.squeeze(-1) if channels == 1 else pixels, mode)


def as_bytes(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def write(folder, *rows, name="rows.jsonl"):
    (folder / name).write_text("".join(json.dumps({"answer": "1", **row}) + "\n" for row in rows))
    return [str(folder / name)]


def load(tokenizer, files, **fields):
    return load_prompts(files, DataConfig(**fields), tokenizer, max_prompt_tokens=1000).prompts


def shown(tokenizer, prompt):
    """The prompt's tokens as text, with each run of image tokens written as one token and its length."""
    words = tokenizer._tokenizer.convert_ids_to_tokens(prompt.token_ids)
    text = "".join("#" if token == IMAGE else word for token, word in zip(prompt.token_ids, words))
    return text.replace("<|vision_start|>", "<").replace("<|vision_end|>", ">")


def test_all_notations_of_a_prompt_with_images_give_the_same_tokens(tmp_path, tokenizer):
    picture().save(tmp_path / "a.png")
    url = "data:image/png;base64," + base64.b64encode((tmp_path / "a.png").read_bytes()).decode()
    parts = lambda image: [{"type": "text", "text": "see "}, image, {"type": "text", "text": " here"}]  # noqa: E731
    rows = [
        {"prompt": [{"role": "user", "content": parts({"type": "image", "image": "a.png"})}]},
        {"prompt": [{"role": "user", "content": parts({"type": "image", "image": url})}]},
        {"prompt": [{"role": "user", "content": parts({"type": "image_url", "image_url": {"url": url}})}]},
        {"prompt": [{"role": "user", "content": "see <image> here"}], "images": ["a.png"]},
        {"prompt": [{"role": "user", "content": "see <image> here"}], "images": [{"path": "a.png", "bytes": None}]},
    ]
    prompts = load(tokenizer, write(tmp_path, *rows))
    # 24 x 16 pixels: 3 x 2 tokens of 8 x 8.
    assert {shown(tokenizer, p) for p in prompts} == {"user: see <######> here\nassistant: "}
    assert {p.text for p in prompts} == {"see [image] here"} and {p.images[0].grid for p in prompts} == {(1, 4, 6)}
    assert len({p.images[0].digest for p in prompts}) == 1


def test_plain_text_has_images_at_its_marks_and_without_marks_before_it(tmp_path, tokenizer):
    picture(8, 8).save(tmp_path / "a.png")
    picture(16, 8).save(tmp_path / "b.png")
    rows = [{"prompt": "<image>or<image>?", "images": ["a.png", "b.png"]}, {"prompt": "what", "images": ["b.png"]}]
    first, second = load(tokenizer, write(tmp_path, *rows))
    assert (shown(tokenizer, first), first.text) == ("<#>or<##>?", "[image]or[image]?")
    assert (shown(tokenizer, second), second.text) == ("<##>what", "[image]what")
    (chat, _) = load(tokenizer, write(tmp_path, *rows), use_chat_template=True)
    assert shown(tokenizer, chat) == "user: <#>or<##>?\nassistant: "


def test_images_may_be_embedded_in_parquet_or_in_another_folder(tmp_path, tokenizer):
    import pyarrow as pa
    from pyarrow import parquet

    data = as_bytes(picture(8, 16))
    table = {"prompt": ["<image>?"], "answer": ["1"], "images": [[{"bytes": data, "path": None}]]}
    parquet.write_table(pa.table(table), tmp_path / "rows.parquet")
    (prompt,) = load(tokenizer, [str(tmp_path / "rows.parquet")])
    assert shown(tokenizer, prompt) == "<##>?" and prompt.images[0].name.endswith("row 1: field 'images': image 1")
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(data)
    files = write(tmp_path, {"prompt": "<image>?", "images": ["a.png"]})
    (same,) = load(tokenizer, files, image_dir=str(tmp_path / "pictures"))
    assert same.images[0].digest == prompt.images[0].digest
    with pytest.raises(
        DataError, match=r"rows.jsonl:1: field 'images': image 1: image .*a.png does not exist.*image_dir"
    ):
        load(tokenizer, files)


def animated():
    return as_bytes(picture(), "GIF", save_all=True, append_images=[picture(seed=1)])


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"no image", "not an image"),
        (as_bytes(picture(200, 200))[:-600], "damaged or truncated"),
        (as_bytes(picture(200, 200), "JPEG")[:-600], "damaged or truncated"),
        (animated(), r"animated \(2 frames\)"),
        (as_bytes(picture(402, 2)), "402 x 2 pixels.*200 times"),
        (b"", "not an image that can be read"),
    ],
)
def test_damaged_or_animated_images_are_rejected_with_their_source(tmp_path, tokenizer, data, expected):
    (tmp_path / "a.png").write_bytes(data)
    files = write(tmp_path, {"prompt": "fine"}, {"prompt": "<image>?", "images": ["a.png"]})
    for read in (lambda: check_files(files, DataConfig()), lambda: load(tokenizer, files)):
        with pytest.raises(DataError, match=f"rows.jsonl:2: .*{expected}"):
            read()


IMAGE_PART = {"type": "image", "image": "a.png"}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "<image><image>", "images": ["a.png"]}, "1 images for 2 <image> marks"),
        ({"prompt": "<image>?"}, "<image> marks but no images"),
        ({"prompt": "?", "images": "a.png"}, "field 'images': expected a list of images, got str"),
        ({"prompt": "?", "images": [3]}, "image 1: expected a path, a data URL"),
        ({"prompt": "?", "images": ["http://x/y.png"]}, "is an address; download"),
        ({"prompt": "?", "images": ["data:image/png;base64,@"]}, "not base64"),
        ({"prompt": [{"role": "user", "content": [{"type": "sound"}]}]}, "message 1: part 1: expected a part of type"),
        ({"prompt": [{"role": "user", "content": []}]}, "expected non-empty text or parts"),
        (
            {"prompt": [{"role": "user", "content": [IMAGE_PART]}], "images": ["a.png"]},
            "in the messages and in field 'images'",
        ),
        (
            {"prompt": "a<|vision_start|><|image_pad|><|vision_end|>b"},
            "expected 0 image tokens, got 1.*must not contain it",
        ),
        ({"prompt": "a<|video_pad|>b"}, "contains the video token"),
    ],
)
def test_invalid_image_rows_are_rejected_with_source_and_field(tmp_path, tokenizer, row, expected):
    picture().save(tmp_path / "a.png")
    with pytest.raises(DataError, match=f"rows.jsonl:1: .*{expected}"):
        load(tokenizer, write(tmp_path, row))


def test_model_without_vision_rejects_images_and_reads_marks_as_text(tmp_path):
    picture().save(tmp_path / "a.png")
    files = write(tmp_path, {"prompt": "?", "images": ["a.png"]})
    with pytest.raises(DataError, match="rows.jsonl:1: the prompt has 1 images, but the model.*has no vision"):
        check_files(files, DataConfig(), takes_images=False)
    plain = write(tmp_path, {"prompt": "the tag <image> in text"}, name="plain.jsonl")
    assert check_files(plain, DataConfig(), takes_images=False) == {"": 1}


def test_response_with_image_tokens_is_rejected(tmp_path, tokenizer):
    files = write(tmp_path, {"prompt": "?", "response": "look <|vision_start|>"})
    with pytest.raises(DataError, match="rows.jsonl:1: field 'response': a response cannot contain image"):
        load_sequences(files, DataConfig(), tokenizer)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 5), st.tuples(st.integers(1, 4))), max_size=12))
def test_collapse_undoes_expand(pieces):
    """Images are tuples with their number of tokens; the image token is 9."""
    counts = [piece[0] for piece in pieces if isinstance(piece, tuple)]
    collapsed = [9 if isinstance(piece, tuple) else piece for piece in pieces]
    expanded = expand(collapsed, 9, counts)
    assert len(expanded) == len(collapsed) - len(counts) + sum(counts)
    assert collapse(expanded, 9, counts).tolist() == collapsed
    with pytest.raises(ValueError, match="image tokens"):
        collapse([*expanded, 9], 9, counts)
    with pytest.raises(ValueError, match="image tokens"):
        expand(collapsed, 9, [*counts, 1])


@settings(max_examples=60, deadline=None)
@given(width=st.integers(1, 120), height=st.integers(1, 120), max_tokens=st.sampled_from([0, 0, 6, 16]))
def test_grids_follow_from_sizes_as_the_processor_cuts_them(folder, width, height, max_tokens):
    vision = ImageProcessor(folder)
    source = ImageSource("x", data=as_bytes(picture(width, height)), max_tokens=max_tokens)
    if max_tokens and max(width, height) > 2 * min(width, height):
        return  # shapes for which a frame of so few tokens is refused
    ref = vision.reference(source)
    patches = vision.patchify(vision.file(ref))
    assert len(patches) == ref.num_patches and 1 <= vision.num_tokens(ref) <= (max_tokens or MAX_TOKENS)


def test_patches_equal_those_of_the_models_own_processor(folder):
    from transformers import AutoImageProcessor

    vision, image = ImageProcessor(folder), picture(50, 30)
    ref = vision.reference(ImageSource("x", data=as_bytes(image)))
    expected = AutoImageProcessor.from_pretrained(folder)(images=[image], return_tensors="pt")
    assert torch.equal(vision.patchify(vision.file(ref)), expected["pixel_values"])
    assert ref.grid == tuple(expected["image_grid_thw"][0].tolist())


def turned(image):
    exif = Image.Exif()
    exif[images_module.ORIENTATION_TAG] = 6
    return as_bytes(image, "JPEG", exif=exif, quality=95)


@pytest.mark.parametrize(
    "data",
    [
        as_bytes(picture()),
        as_bytes(picture(), "JPEG"),
        as_bytes(picture(mode="RGBA")),
        as_bytes(picture(mode="L")),
        as_bytes(picture(mode="L").convert("P")),
        turned(picture(40, 16)),
        as_bytes(picture(), dpi=(72, 72)),
    ],
    ids=["png", "jpeg", "alpha", "grey", "palette", "turned", "with extras"],
)
def test_servers_get_the_pixels_that_the_trainer_cuts(folder, data):
    vision = ImageProcessor(folder)
    ref = vision.reference(ImageSource("x", data=data))
    sent = Image.open(io.BytesIO(base64.b64decode(vision.wire(ref).result())))
    assert sent.mode == "RGB" and sent.format == "PNG"
    assert np.array_equal(np.asarray(sent), np.asarray(decode(data, "x")))
    assert vision._resized(sent.height, sent.width) == (ref.grid[1] * 4, ref.grid[2] * 4)


def test_transparent_pixels_are_white_and_photos_upright():
    clear = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    assert np.asarray(decode(as_bytes(clear), "x")).min() == 255
    assert decode(turned(picture(40, 16)), "x").size == (16, 40)


def test_plain_png_is_sent_unchanged(folder):
    vision, data = ImageProcessor(folder), as_bytes(picture())
    assert base64.b64decode(vision.wire(vision.reference(ImageSource("x", data=data))).result()) == data


def test_image_is_encoded_once_even_if_a_request_is_cancelled(folder, monkeypatch):
    vision, encoded, may_go_on = ImageProcessor(folder), [], threading.Event()
    refs = [vision.reference(ImageSource(str(i), data=as_bytes(picture(seed=i), "JPEG"))) for i in range(3)]
    prompts = [Prompt(str(i), (IMAGE,), images=(ref, refs[0])) for i, ref in enumerate(refs)]

    def slowly(image):
        may_go_on.wait(10)
        encoded.append(image.size)
        return as_bytes(image)

    monkeypatch.setattr(vision_module, "png_bytes", slowly)

    async def requests():
        tasks = [asyncio.create_task(images_of_request(vision, prompt)) for prompt in prompts for _ in range(4)]
        await asyncio.sleep(0.05)
        for task in tasks[::4]:
            task.cancel()
        may_go_on.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    found = asyncio.run(requests())
    assert len(encoded) == 3
    for index, images in enumerate(found):
        if index % 4 == 0:
            assert isinstance(images, asyncio.CancelledError)
        else:
            assert images.data == [vision.wire(ref).result() for ref in prompts[index // 4].images]


def test_encoded_images_are_cached_and_failures_retried():
    texts = vision_module._EncodedImageCache(10)
    made = [texts.get(i, lambda i=i: str(i) * 4).result() for i in (0, 1, 0, 2)]
    with pytest.raises(ZeroDivisionError):
        texts.get("bad", lambda: 1 // 0).result()
    # Threads come back to the account after their answers are there.
    deadline_s = time.monotonic() + 10
    while list(texts._futures) != [0, 2] and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert made == ["0000", "1111", "0000", "2222"] and list(texts._futures) == [0, 2]
    assert texts.get("bad", lambda: "good").result() == "good"


def trajectory_of(prompt, id=0):
    """Two windows: steps 0 and 1."""
    segments = [Segment((5, 6), (-0.5, -0.5), 1, "length", 0), Segment((7, 1), (-0.5, -0.5), 2, "stop", 1)]
    return Trajectory(id, prompt, 0, 0, 16, segments=segments)


def test_every_window_carries_the_files_of_its_prompts_images(tmp_path, tokenizer):
    picture(16, 8).save(tmp_path / "a.png")
    picture(8, 8, seed=1).save(tmp_path / "b.png")
    rows = [{"prompt": "<image>?", "images": ["a.png"]}, {"prompt": "?"}, {"prompt": "?", "images": ["b.png", "a.png"]}]
    prompts = load(tokenizer, write(tmp_path, *rows))
    vision = tokenizer.vision
    trajectories = [trajectory_of(p, i) for i, p in enumerate(prompts)]
    for step in (0, 1):
        batch = window_batch(trajectories, step, vision).joined()
        assert batch.images.sequences.tolist() == [0, 2, 2]
        assert batch.images.grids.tolist() == [[1, 2, 4], [1, 2, 2], [1, 2, 4]]
        assert int((batch.tokens == IMAGE).sum()) == (8 + 4 + 8) // 4
        names = [("a.png", "b.png")[index] for index in (0, 1, 0)]
        assert [file.data.tobytes() for file in batch.images.sources] == [(tmp_path / name).read_bytes() for name in names]
        assert batch.images.sources[0] is batch.images.sources[2], "read once"
    assert window_batch(trajectories[1:2], 0, vision).images is None
    assert window_batch(trajectories, 0).images is None


def test_every_request_has_one_image_token_per_image_and_bans_new_ones(tmp_path, tokenizer):
    picture(16, 8).save(tmp_path / "a.png")
    rows = [{"prompt": "<image>or<image>?", "images": ["a.png", "a.png"]}, {"prompt": "?"}]
    prompts, vision, engine = load(tokenizer, write(tmp_path, *rows)), tokenizer.vision, Engine(end_weight=0.0)
    trajectories = [Trajectory(i, prompt, i, 0, 8) for i, prompt in enumerate(prompts)]
    plan = GenerationPlan(replace(SAMPLING, vision=vision), decode=str)

    async def recover(lost):
        raise lost

    for step in (0, 1):
        window = WindowGenerator(engine, recover, plan, step=step, num_tokens=3, weight_version=1, kind="train")
        asyncio.run(window.generate(trajectories))
    assert len(engine.requests) == 4
    for request in engine.requests:
        validate(request, 101)
        number, step = int(request.rid.split("-")[2]), int(request.rid.split("-")[1])
        assert request.images.num_tokens == (4, 0)[number] and len(request.images.data) == (2, 0)[number]
        assert request.num_prompt_tokens == len(prompts[number].token_ids) + 3 * step
        assert set(request.banned_token_ids) == {90, 91, 92, 93}
        assert request.prompt_name == prompts[number].source
    assert {t.num_response_tokens for t in trajectories} == {6}


def test_parity_check_includes_images_and_reports_the_prompt(tmp_path, tokenizer):
    picture(16, 8).save(tmp_path / "a.png")
    rows = [*[{"prompt": "?"}] * 5, {"prompt": "<image>?", "images": ["a.png"]}]
    prompts = load(tokenizer, write(tmp_path, *rows))
    config = Config()
    config.rollout.num_parity_prompts, config.rollout.max_logprob_difference = 4, 0.01
    trajectories = sample_for_parity(config, prompts)
    assert [bool(t.prompt.images) for t in trajectories] == [True, False, False, False]
    for t in trajectories:
        t.segments.append(Segment((5, 6), (-0.5, -0.5), 1, "length", 0))

    def group(wrong_row):
        def logprobs(batch, temperature):
            assert batch.images.sequences.tolist() == [0]
            rows = torch.arange(4).repeat_interleave(batch.lengths)
            return torch.where(rows == wrong_row, -2.0, -0.5)

        return SimpleNamespace(logprobs=logprobs)

    for row, expected in (
        (0, r"rows.jsonl:6 \(1 images\). Only prompts with images differ"),
        (2, r"rows.jsonl:2 \(0 im"),
    ):
        with pytest.raises(EngineMismatch, match=expected):
            compare_logprobs(config, group(row), trajectories, list, tokenizer.vision)


def test_selected_rows_in_another_folder_refer_to_the_same_images(tmp_path, tokenizer):
    picture(16, 8).save(tmp_path / "a.png")
    part = {"type": "image", "image": "a.png"}
    video = {"type": "video", "frames": ["a.png"], "fps": 1}
    rows = [
        {"prompt": "<image>?", "images": ["a.png", {"bytes": (tmp_path / "a.png").read_bytes(), "path": "x.png"}]},
        {"prompt": [{"role": "user", "content": [part, video, {"type": "text", "text": "?"}]}]},
        {"prompt": "?", "images": [str(tmp_path / "a.png")]},
    ]
    rows[0]["prompt"] = "<image><image>?"
    (tmp_path / "new" / "deep").mkdir(parents=True)
    place = f"{tmp_path}/rows.jsonl:1"
    moved = [moved_row(row, place, DataConfig(), tmp_path / "new" / "deep") for row in rows]
    assert moved[0]["images"][0] == "../../a.png" and rows[0]["images"][0] == "a.png"
    prompts = load(tokenizer, write(tmp_path / "new" / "deep", *moved))
    assert [len(p.images) for p in prompts] == [2, 2, 1]
    assert len({image.digest for p in prompts for image in p.images}) == 1
    assert moved_row(rows[0], place, DataConfig(image_dir="/pictures"), tmp_path)["images"][0] == "a.png"


def test_messages_of_dialogues_cannot_have_images(tokenizer):
    encode = make_dialogue(Talk(stop_strings=()), tokenizer, chat=False).encode_message
    assert encode(Message("go on"), 5)
    with pytest.raises(EnvironmentFault, match="images belong to prompts"):
        encode(Message("see <|image_pad|>"), 5)


def test_supervised_examples_carry_the_images_of_their_prompts(tmp_path, tokenizer):
    picture(16, 8).save(tmp_path / "a.png")
    rows = [{"prompt": "?", "response": "1"}, {"prompt": "<image>?", "images": ["a.png"], "response": "no"}]
    sequences, _ = load_sequences(write(tmp_path, *rows), DataConfig(), tokenizer)
    batch = sequence_batch(sequences, tokenizer.vision)
    assert batch.images.sequences.tolist() == [1] and batch.fields["mask"].tolist()[-4:] == [False, True, True, True]
    config = Config()
    config.data = DataConfig(answer_required=False)
    pairs = [{"prompt": "<image>?", "images": ["a.png"], "chosen": "yes", "rejected": "no"}]
    (example,) = BradleyTerry(config, tokenizer).examples(write(tmp_path, *pairs))
    batch = example_batch([example, example], tokenizer.vision)
    assert batch.images.sequences.tolist() == [0, 1, 2, 3]
    config.reward_train.yes_word, config.reward_train.no_word = "Y", "N"
    (judged,) = Pairwise(config, tokenizer).examples(write(tmp_path, *pairs))
    assert judged.images == () and IMAGE not in judged.sequences[0]


def test_checkpoints_hold_references_and_a_changed_file_ends_a_resume(tmp_path, tokenizer, folder):
    picture().save(tmp_path / "a.png")
    files = write(tmp_path, {"prompt": "<image>?", "images": ["a.png"]})
    (prompt,) = load(tokenizer, files)
    state = json.loads(as_json(trajectory_of(prompt)))
    assert len(json.dumps(state)) < 2000
    again = Trajectory.from_dict(state)
    assert as_json(again) == as_json(trajectory_of(prompt))
    resumed = Tokenizer(folder)
    load(resumed, files)
    resumed.vision.check_known(again.prompt.images)
    pixels = [of.vision.patchify(of.vision.file(again.prompt.images[0])) for of in (resumed, tokenizer)]
    assert torch.equal(*pixels)
    picture(seed=1).save(tmp_path / "a.png")
    changed = Tokenizer(folder)
    load(changed, files)
    with pytest.raises(DataError, match=r"run.resume: image .*a.png is not the one"):
        changed.vision.check_known(again.prompt.images)
    for use in (lambda ref: resumed.vision.wire(ref).result(), resumed.vision.file):
        with pytest.raises(DataError, match=r"image .*a.png: its bytes have changed since the run started.* \(.*rows.jsonl:1\)$"):
            use(again.prompt.images[0])
    (tmp_path / "a.png").unlink()
    with pytest.raises(DataError, match=r"image .*a.png: No such file or directory \(.*rows.jsonl:1\)$"):
        window_batch([again], 1, resumed.vision)


def test_changed_processor_is_detected_by_driver_and_ranks_at_a_resume(tmp_path, tokenizer, folder):
    picture(24, 16).save(tmp_path / "a.png")
    files = write(tmp_path, {"prompt": "<image>?", "images": ["a.png"]})
    (prompt,) = load(tokenizer, files)
    shutil.copytree(folder, tmp_path / "other")
    for file in (tmp_path / "other").glob("*processor_config.json"):
        file.unlink()
    write_vision_files(tmp_path / "other", max_tokens=4)
    other = Tokenizer(tmp_path / "other")
    load(other, files)
    for use in (lambda: other.vision.check_known(prompt.images), lambda: other.vision.patchify(tokenizer.vision.file(prompt.images[0]))):
        with pytest.raises(DataError, match=r"image .*a.png: expected a grid of \(1, 4, 6\) patches.*preprocessor_config.json"):
            use()


def as_json(trajectory):
    return json.dumps(trajectory.to_dict(), default=np.ndarray.tolist)


def test_checkpoint_from_before_images_loads():
    state = trajectory_of(Prompt("p", (1, 2))).to_dict()
    del state["prompt"]["images"]
    assert Trajectory.from_dict(state).prompt.images == ()


def test_processor_that_does_not_fit_the_model_is_rejected(tmp_path):
    config = {**CONFIG, "vision_config": {**CONFIG["vision_config"], "patch_size": 8}}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write_vision_files(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match="patches of 4 pixels.*patch_size=8"):
        ImageProcessor(tmp_path)
    for file in tmp_path.glob("*processor_config.json"):
        file.unlink()
    with pytest.raises(DataError, match="no preprocessor_config.json"):
        ImageProcessor(tmp_path)
