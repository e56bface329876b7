"""Normalizes a row's messages and images for the chat template, and reads the row's template arguments.

Rows may have either messages whose content is a list of parts ({"type": "image", "image": ...}, {"type": "video",
"frames": [...], "timestamps": [...]}, {"type": "text", "text": ...}), or text with ``<image>`` marks
and a column of images (data.images_field). A video becomes images, each after the text ``[1.5 second]``
(Seed1.5-VL, arXiv 2505.07062).
"""

import base64
import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_rl.config.checks.data_settings import TAKEN_ARGUMENTS, reserved_argument_problem
from megatron_rl.config.schema import DataConfig
from megatron_rl.data.images import ImageSource, image_source
from megatron_rl.data.row_files import Row, describe, is_missing, lookup, not_json
from megatron_rl.errors import DataError

IMAGE_MARK = "<image>"
"""Mark for an image of the column in a text."""
_SPOKEN_MARK = "[image]"
"""Replacement for an image in plain text (judges, reports)."""

Part = dict[str, str]
"""{"type": "text", "text": ...} or {"type": "image"}, as chat templates expect them."""
IMAGE_PART: Part = {"type": "image"}
TOOLS = "tools"


def image_folder(place: str, data: DataConfig) -> Path:
    """Folder that a row's image paths start at: the data file's, or data.image_dir. ``place`` is the row's "file:line"."""
    name = Path(place.rsplit(":", 1)[0])
    folder_of_file = name if name.is_dir() else name.parent
    return Path(data.image_dir) if data.image_dir else folder_of_file


def column_images(row: Mapping[str, Any], place: str, data: DataConfig) -> list[ImageSource]:
    """Images of data.images_field; empty for a row without the column."""
    field, folder = data.images_field, image_folder(place, data)
    value = lookup(row, field)
    if is_missing(value):
        return []
    if not isinstance(value, list):
        raise DataError(f"{place}: field {field!r}: expected a list of images, got {describe(value)}")
    return [
        image_source(image, folder, f"{place}: field {field!r}: image {i}") for i, image in enumerate(value, 1)
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


def content_parts(
    content: Sequence[Any], where: str, folder: Path, data: DataConfig
) -> tuple[list[Part], list[ImageSource]]:
    """(parts of a message's content, its images in order); a video becomes its frames. Raises DataError with the part's source."""
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
            images.append(image_source(value, folder, place))
            parts.append(IMAGE_PART)
        elif kind == "video":
            for seconds, frame in _frames(part, place, folder, data):
                parts += [{"type": "text", "text": timestamp_text(seconds)}, IMAGE_PART]
                images.append(frame)
        else:
            raise DataError(f"{place}: expected a part of type text, image or video, got {describe(part)}")
    if not parts:
        raise DataError(f"{where}: content: expected non-empty text or parts, got an empty list")
    return parts, images


def moved_row(row: Mapping[str, Any], place: str, data: DataConfig, target: Path) -> dict[str, Any]:
    """The row for a JSON file in the folder ``target``: image paths are adjusted and bytes become data URLs."""
    source = image_folder(place, data)

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


def _frames(part: Mapping[str, Any], place: str, folder: Path, data: DataConfig) -> list[tuple[float, ImageSource]]:
    """(seconds, image) of every frame that is shown."""
    frames = part.get("frames")
    if not isinstance(frames, list) or not frames:
        raise DataError(
            f"{place}: frames: expected a list of images, got {describe(frames)}; cut videos into frames first"
        )
    seconds = _timestamps(part, len(frames), place)
    # Sources are created for all frames, also those not shown, so that a missing file is an error in any plan.
    shown, max_frame_tokens = choose_frames(len(frames), data.max_video_tokens, data.video_frame_tokens)
    sources = [image_source(frame, folder, f"{place}: frame {i}") for i, frame in enumerate(frames, start=1)]
    return [(seconds[i], replace(sources[i], max_tokens=max_frame_tokens)) for i in shown]


def choose_frames(num_frames: int, max_tokens: int, levels: Sequence[int]) -> tuple[list[int], int]:
    """(ascending indices of the frames of a video that a prompt shows, token limit of each of these frames).

    The limit is the largest of ``levels`` at which all frames fit into ``max_tokens``; at the lowest level as many
    evenly spaced frames are shown as fit. So a longer video has no larger frames and shows no fewer of them. The
    first frame is always shown, and so is the last if there is capacity for two. Raises ValueError without frames,
    and for a budget below one frame of the lowest level.
    """
    lowest = min(levels)
    if num_frames < 1 or max_tokens < lowest:
        raise ValueError(f"expected at least one frame and {lowest} tokens, got {num_frames} and {max_tokens}")
    for level in sorted(levels, reverse=True):
        if num_frames * level <= max_tokens:
            return list(range(num_frames)), level
    num_shown = max_tokens // lowest
    if num_shown == 1:
        return [0], lowest
    last, num_gaps = num_frames - 1, num_shown - 1
    # Integer rounding gives the same result on every machine.
    return [(2 * i * last + num_gaps) // (2 * num_gaps) for i in range(num_shown)], lowest


def timestamp_text(seconds: float) -> str:
    """Text before a frame."""
    return f"[{seconds:.1f} second]"


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


def chat_arguments(row: Row, place: str, data: DataConfig, *, chat: bool) -> dict[str, Any]:
    """Keyword arguments of ``apply_chat_template`` for this row: the recipe's, overridden by the row's, and its tools.

    ``chat``: the prompt goes through the template; otherwise the result is empty. Raises DataError with source and
    field for values of another type, and for arguments that would not be read.
    """
    own, tools = _arguments(row, place, data), _tools(row, place, data)
    given = {data.chat_template_kwargs_field: own, data.tools_field: tools}
    if chat:
        return {**data.chat_template_kwargs, **(own or {}), **({} if tools is None else {TOOLS: tools})}
    for field, value in given.items():
        if value is not None:
            raise DataError(
                f"{place}: field {field!r}: a text prompt does not go through the chat template, so the field would not be read; set "
                "data.use_chat_template=true, give the prompt as messages, or remove the field"
            )
    return {}


def _arguments(row: Row, place: str, data: DataConfig) -> dict[str, Any] | None:
    """The row's own arguments; None if it has none."""
    where = f"{place}: field {data.chat_template_kwargs_field!r}"
    value = json_value(row, data.chat_template_kwargs_field, where)
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise DataError(f'{where}: expected an object like {{"enable_thinking": false}}, got {describe(value)}')
    taken = sorted(set(value) & set(TAKEN_ARGUMENTS))
    if taken:
        raise DataError(f"{where}: {reserved_argument_problem(taken[0])}")
    if problem := not_json(value):
        raise DataError(f"{where}: expected JSON values, but {problem}")
    # Parquet gives every row the keys of all rows, with nulls.
    return {name: inner for name, inner in value.items() if inner is not None} or None


def _tools(row: Row, place: str, data: DataConfig) -> list[dict[str, Any]] | None:
    where = f"{place}: field {data.tools_field!r}"
    value = json_value(row, data.tools_field, where)
    if value is None:
        return None
    expected = 'expected a list of JSON schemas like {"type": "function", "function": {"name": ...}}'
    if not isinstance(value, list):
        raise DataError(f"{where}: {expected}, got {describe(value)}")
    for number, tool in enumerate(value, start=1):
        if not isinstance(tool, Mapping):
            raise DataError(f"{where}: tool {number}: {expected}, got {describe(tool)}")
        function = tool.get("function", tool)
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            raise DataError(f"{where}: tool {number}: {expected}, got one without a name: {describe(dict(tool))}")
        if problem := not_json(tool):
            raise DataError(f"{where}: tool {number}: expected JSON values, but {problem}")
    return value


def json_value(row: Row, field: str, where: str) -> Any:
    """Value of the column, parsed if it is JSON text; None if the value is missing or no column is configured."""
    value = lookup(row, field) if field else None
    if is_missing(value):
        return None
    if not isinstance(value, str):
        return _without_nulls(value)
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: expected an object or a list, or JSON of one, got {describe(value)} ({error})") from error


def _without_nulls(value: Any) -> Any:
    """Remove nulls, because Parquet gives every object the keys of all objects of the column."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value
