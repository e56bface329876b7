"""Normalizes prompts with images: text parts and image parts, and the images in order.

Rows may have either messages whose content is a list of parts ({"type": "image", "image": ...}, {"type": "video",
"frames": [...], "timestamps": [...]}, {"type": "text", "text": ...}), or text with ``<image>`` marks
and a column of images (data.images_field). A video becomes images, each after the text ``[1.5 second]``.
"""

import base64
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_rl.config.schema import DataConfig
from megatron_rl.data.images import ImageSource, image_source
from megatron_rl.data.row_files import describe, is_missing, lookup
from megatron_rl.data.video import plan_video, timestamp_text
from megatron_rl.errors import DataError

IMAGE_MARK = "<image>"
"""Mark for an image of the column in a text."""
_SPOKEN_MARK = "[image]"
"""Replacement for an image in plain text (judges, reports)."""

Part = dict[str, str]
"""{"type": "text", "text": ...} or {"type": "image"}, as chat templates expect them."""
IMAGE_PART: Part = {"type": "image"}


@dataclass(frozen=True)
class ImageFolder:
    """Folder of a row's images, and token limits for videos."""

    path: Path
    max_video_tokens: int
    frame_levels: tuple[int, ...]


def folder_of(place: str, data: DataConfig) -> ImageFolder:
    """Image folder of a row. ``place`` is its "file:line"; paths are relative to the data file, or to data.image_dir."""
    name = Path(place.rsplit(":", 1)[0])
    folder_of_file = name if name.is_dir() else name.parent
    path = Path(data.image_dir) if data.image_dir else folder_of_file
    return ImageFolder(path, data.max_video_tokens, tuple(data.video_frame_tokens))


def column_images(row: Mapping[str, Any], field: str, place: str, folder: ImageFolder) -> list[ImageSource]:
    """Images of data.images_field; empty for a row without the column."""
    value = lookup(row, field)
    if is_missing(value):
        return []
    if not isinstance(value, list):
        raise DataError(f"{place}: field {field!r}: expected a list of images, got {describe(value)}")
    return [
        image_source(image, folder.path, f"{place}: field {field!r}: image {i}") for i, image in enumerate(value, 1)
    ]


def split_image_marks(text: str) -> list[Part]:
    """Split a text with ``<image>`` marks into text parts and image parts."""
    parts: list[Part] = []
    for i, piece in enumerate(text.split(IMAGE_MARK)):
        if i:
            parts.append(IMAGE_PART)
        if piece:
            parts.append({"type": "text", "text": piece})
    return parts


def content_parts(content: Sequence[Any], where: str, folder: ImageFolder) -> tuple[list[Part], list[ImageSource]]:
    """(parts of a message's content with videos as frames, its images in order). Raises DataError with the part's
    source."""
    parts: list[Part] = []
    images: list[ImageSource] = []
    for number, part in enumerate(content, start=1):
        place = f"{where}: part {number}"
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        elif kind in ("image", "image_url"):
            value = part.get("image", part.get("image_url"))
            if isinstance(value, Mapping) and "url" in value:
                value = value["url"]
            images.append(image_source(value, folder.path, place))
            parts.append(IMAGE_PART)
        elif kind == "video":
            for seconds, frame in _frames(part, place, folder):
                parts += [{"type": "text", "text": timestamp_text(seconds)}, IMAGE_PART]
                images.append(frame)
        else:
            raise DataError(f"{place}: expected a part of type text, image or video, got {describe(part)}")
    if not parts:
        raise DataError(f"{where}: content: expected non-empty text or parts, got an empty list")
    return parts, images


def moved_row(row: Mapping[str, Any], place: str, data: DataConfig, target: Path) -> dict[str, Any]:
    """The row for a JSON file in the folder ``target``: image paths are adjusted and bytes become data URLs."""
    source = folder_of(place, data).path

    def moved(image: Any) -> Any:
        if isinstance(image, Mapping):
            image = image.get("bytes") or image.get("path") or image.get("image") or image.get("url") or image
        if isinstance(image, (bytes, bytearray)):
            return f"data:image;base64,{base64.b64encode(image).decode()}"
        embedded = isinstance(image, str) and image.startswith(("data:", "http://", "https://"))
        if not isinstance(image, str) or embedded or data.image_dir or Path(image).is_absolute():
            return image
        return os.path.relpath(source / image, target)

    def moved_part(part: Any) -> Any:
        if not isinstance(part, Mapping):
            return part
        images = {name: moved(part[name]) for name in ("image", "image_url") if part.get(name) is not None}
        frames = {"frames": [moved(frame) for frame in part["frames"]]} if isinstance(part.get("frames"), list) else {}
        return {**part, **images, **frames}

    result = dict(row)
    if isinstance(row.get(data.images_field), list):
        result[data.images_field] = [moved(image) for image in row[data.images_field]]
    if isinstance(row.get(data.prompt_field), list):
        result[data.prompt_field] = [
            {**message, "content": [moved_part(part) for part in message["content"]]}
            if isinstance(message, Mapping) and isinstance(message.get("content"), list)
            else message
            for message in row[data.prompt_field]
        ]
    return result


def plain_text(content: str | Sequence[Part], *, marked: bool = False) -> str:
    """Plain text of a content, with ``[image]`` for images. ``marked``: ``<image>`` marks of a text are images."""
    if isinstance(content, str):
        return content.replace(IMAGE_MARK, _SPOKEN_MARK) if marked else content
    return "".join(part.get("text", _SPOKEN_MARK) for part in content)


def texts_of(content: str | Sequence[Part]) -> str:
    """Text of a content without its images."""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _frames(part: Mapping[str, Any], place: str, folder: ImageFolder) -> list[tuple[float, ImageSource]]:
    """(seconds, image) of every frame that is shown."""
    frames = part.get("frames")
    if not isinstance(frames, list) or not frames:
        raise DataError(
            f"{place}: frames: expected a list of images, got {describe(frames)}; cut videos into frames first"
        )
    seconds = _timestamps(part, len(frames), place)
    # Sources are created for all frames, also those not shown, so that a missing file is an error in any plan.
    plan = plan_video(len(frames), max_tokens=folder.max_video_tokens, levels=folder.frame_levels)
    sources = [image_source(frame, folder.path, f"{place}: frame {i}") for i, frame in enumerate(frames, start=1)]
    return [(seconds[i], replace(sources[i], max_tokens=plan.max_frame_tokens)) for i in plan.frames]


def _timestamps(part: Mapping[str, Any], num_frames: int, place: str) -> list[float]:
    given, fps = part.get("timestamps"), part.get("fps")
    if (given is None) == (fps is None):
        raise DataError(f"{place}: expected either timestamps (seconds, one per frame) or fps, got {_which(given, fps)}")
    if fps is not None:
        if not _is_number(fps) or fps < _MIN_FPS:
            raise DataError(f"{place}: fps: expected a number above 0 (at least {_MIN_FPS:g}), got {describe(fps)}")
        return [i / fps for i in range(num_frames)]
    if not isinstance(given, list) or len(given) != num_frames or not all(map(_is_number, given)):
        raise DataError(f"{place}: timestamps: expected {num_frames} numbers, one per frame, got {describe(given)}")
    for i, (before, after) in enumerate(itertools.pairwise(given), start=2):
        if not before < after:
            raise DataError(
                f"{place}: timestamps: expected increasing seconds, but frame {i} is at {after} and the previous frame "
                f"at {before}; sort the frames and remove duplicates"
            )
    if given[0] < 0:
        raise DataError(f"{place}: timestamps: expected seconds from 0, got {given[0]}")
    return [float(seconds) for seconds in given]


_MIN_FPS = 1e-6


def _which(given: Any, fps: Any) -> str:
    return "both" if given is not None and fps is not None else "neither"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
