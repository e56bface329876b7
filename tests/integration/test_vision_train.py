"""Prompts with images through `megatron-rl train`: T-PPO windows with a real SGLang server, and a resume in mid-response."""

import json
import random

import pytest
from PIL import Image, ImageDraw

from megatron_rl.tracking.metrics_file import read_metrics
from tests.integration.test_train import run
from tests.tiny_families import DEEPSTACK, make_vision_model
from tests.tiny_vision import write_vision_files

RECIPE = """
preset: tppo
run: {{num_steps: 2, seed: 3, save_every_steps: 1, output_dir: "{folder}/run"}}
policy:
  path: {folder}/model
  optimizer: {{lr: 1.0e-3}}
critic: {{warmup_steps: 1, optimizer: {{lr: 1.0e-3}}}}
parallel: {{num_ranks: 1, collective_timeout_s: 120}}
batch:
  num_prompts_per_step: 4
  num_samples_per_prompt: 2
  max_prompt_tokens: 100
  max_response_tokens: 12
  window_tokens: 5
  window_jitter_tokens: 0
  policy_minibatch_size: 8
  critic_minibatch_size: 8
  max_tokens_per_microbatch: 200
algorithm: {{ignore_boundary_tokens: 1}}
data: {{train_files: ["{folder}/train.jsonl"], eval_files: ["{folder}/train.jsonl"], max_video_tokens: 16,
        video_frame_tokens: [8, 4]}}
eval: {{every_steps: 2, num_prompts: 3}}
reward: {{name: math}}
"""


def draw(rng, path):
    image = Image.new("RGB", (rng.randint(40, 120), rng.randint(40, 120)), "white")
    ImageDraw.Draw(image).ellipse((5, 5, 30, 30), fill=(rng.randint(0, 255), 0, 0))
    image.save(path)
    return path.name


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vision")
    # SGLang counts on three of them in this family.
    vision = dict(DEEPSTACK, patch_size=16, deepstack_visual_indexes=[0, 1, 2])
    make_vision_model(folder / "model", "qwen3_vl_moe", vision_config=vision)
    write_vision_files(folder / "model", max_tokens=12)
    rng = random.Random(0)
    names = [draw(rng, folder / f"{i}.{kind}") for i, kind in enumerate(["png", "jpg"] * 3)]
    rows = [{"prompt": f"<image>and<image>{i}?", "images": [names[i], names[i - 1]]} for i in range(4)]
    rows += [{"prompt": f"{i}+1="} for i in range(2)]
    video = {"type": "video", "frames": names[:3], "fps": 2}
    rows += [{"prompt": [{"role": "user", "content": [video, {"type": "text", "text": f"{i}"}]}]} for i in range(2)]
    rows = [{"answer": "1", "response": str(i), **row} for i, row in enumerate(rows)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.yaml").write_text(RECIPE.format(folder=folder))
    return folder


def test_images_pass_through_windows_weight_updates_and_a_resume(folder):
    status, output = run(folder, "train")
    assert status == 0, output
    assert "Megatron and SGLang agree on" in output
    rows = read_metrics(folder / "run" / "metrics.jsonl")
    assert rows[-1].metrics["rollout/num_finished"] < 8, "a response goes over the end of the run"
    status, output = run(folder, "train", "run.resume=true", "run.num_steps=4")
    assert status == 0, output
    metrics = {row.step: row.metrics for row in read_metrics(folder / "run" / "metrics.jsonl")}
    assert sorted(metrics) == [0, 1, 2, 3, 4] and metrics[3]["rollout/num_carried"] > 0
    # In step 4 a server that has seen the images under other weights meets them again.
    for step in range(1, 5):
        assert metrics[step]["mismatch/max_abs_log_ratio"] < 1e-3
        assert metrics[step].get("policy/num_updates", 0) == (step > 1)
    state = json.loads((folder / "run" / "checkpoints" / "step-4" / "driver.json").read_text())
    images = [image for prompt in state["pool"]["prompts"] for image in prompt["images"]]
    assert images and all(len(json.dumps(image)) < 1000 for image in images)
    assert (folder / "run" / "policy" / "processor_config.json").is_file(), "the policy can be served as it is"
