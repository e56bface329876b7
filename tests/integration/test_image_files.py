"""Images travel as files and are cut by the ranks that encode them: the same bits as patches that every rank has."""

import base64
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageDraw

from tests.integration.image_files_worker import CASES
from tests.integration.torchrun import run_ranks
from tests.tiny_families import make_vision_model
from tests.tiny_vision import write_vision_files

LAUNCH_TIMEOUT_S = 240


def draw(rng: random.Random, file: Path) -> str:
    image = Image.new("RGB", (rng.randint(20, 60), rng.randint(20, 60)), "white")
    ImageDraw.Draw(image).ellipse((5, 5, 30, 30), fill=(rng.randint(0, 255), 0, 0))
    image.save(file)
    return file.name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, rng = tmp_path_factory.mktemp("files"), random.Random(0)
    for model in {case.model for case in CASES.values()}:
        write_vision_files(make_vision_model(folder / model, model), max_tokens=12)
    names = [draw(rng, folder / f"{i}.{kind}") for i, kind in enumerate(["png", "jpg"] * 3)]
    url = "data:image/png;base64," + base64.b64encode((folder / names[0]).read_bytes()).decode()
    video = {"type": "video", "frames": names[3:], "fps": 2}
    rows: list[dict[str, Any]] = [
        {"prompt": "<image>and<image>?", "images": names[:2]},
        {"prompt": "1+1="},
        {"prompt": "<image>?", "images": [url]},
        {"prompt": [{"role": "user", "content": [video, {"type": "text", "text": "?"}]}]},
        {"prompt": "<image>", "images": [names[2]]},
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"answer": "1", **row}) + "\n" for row in rows))
    for mode in ("files", "patches"):
        run_ranks(2, "tests.integration.image_files_worker", folder, mode, log=folder / "log.txt", timeout_s=LAUNCH_TIMEOUT_S)
    return folder


def assert_same_bits(found: Any, expected: Any, where: str) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for name, value in expected.items():
            assert_same_bits(found[name], value, f"{where}, {name}")
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected), where
    else:
        assert found == expected, where


@pytest.mark.parametrize("name", CASES)
def test_results_do_not_depend_on_the_rank_that_cuts_an_image(folder: Path, name: str) -> None:
    seen, expected = (torch.load(folder / f"{name}-{mode}.pt", weights_only=False) for mode in ("files", "patches"))
    assert_same_bits(seen, expected, name)
    logprobs = [seen["step 0"][f"log-probs of {engine}"] for engine in ("policy", "reference")]
    assert torch.equal(*logprobs) and not torch.equal(seen["after"], logprobs[0]), "the policy has learned"
    assert seen["step 0"]["policy"]["metrics"]["lm_loss"][0] > 0


NUM_IMAGES = 6
"""Different ones: the data URL is of the first file. Three samples of a prompt show each."""
POLICY, CRITIC = 3 * NUM_IMAGES, 2 * NUM_IMAGES
"""Cut by one rank that cuts for itself alone: policy and reference have two steps and a call that belongs to none."""


@pytest.mark.parametrize(
    ("name", "by_rank"),
    [
        # The second stage has no encoder; of two context ranks each cuts its part.
        ("stages and context ranks", [(POLICY + CRITIC // 2,) * 2, (CRITIC // 2,) * 2]),
        # A replica's sequences may show all of them; tensor ranks with sequence parallelism cut their parts.
        ("replicas and tensor ranks", [(CRITIC // 2 + 1, CRITIC // 2 + POLICY)] * 2),
        # Without it both encode all of them, as both need the gradients.
        ("tensor ranks alone and replicas", [(POLICY + 1, POLICY + CRITIC)] * 2),
    ],
)
def test_an_image_is_cut_once_per_replica_and_step(folder: Path, name: str, by_rank: list[tuple[int, int]]) -> None:
    for rank, (least, most) in enumerate(by_rank):
        cuts = json.loads((folder / f"{name}-files-{rank}.json").read_text())
        assert least <= len(cuts) <= most, (rank, len(cuts))
