"""Images of prompts: sources, validation, and the pixels that trainer and servers share.

Invariants: an image is identified by the digest of its bytes, so a file that changes during a run is noticed. Files
that are not complete, still, ordinary images are rejected when the data is read. Pixels are RGB, upright (EXIF
rotation is applied) and on a white background; all patches and sent images start from these pixels.
"""

import base64
import functools
import hashlib
import io
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_rl.data.row_files import describe
from megatron_rl.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

_MAX_ASPECT = 200
"""Maximum ratio of the longer to the shorter side; the processors of the Qwen-VL families reject more."""
ORIENTATION_TAG = 274
_TURNED = (5, 6, 7, 8)
"""EXIF orientations that exchange width and height."""
_NUM_REMEMBERED = 1 << 18


@dataclass(frozen=True)
class ImageSource:
    """Source of an image, as given by a row."""

    name: str
    """Name for messages: the path, or the source of embedded bytes."""
    path: str = ""
    data: bytes = b""
    """Bytes of the image, if they are part of the row."""
    max_tokens: int = 0
    """Maximum number of tokens (a frame of a video); 0: as many as the model's processor gives it."""

    def read(self) -> bytes:
        """Read the image file. Raises DataError if the file cannot be read."""
        if not self.path:
            return self.data
        try:
            return Path(self.path).read_bytes()
        except OSError as error:
            raise DataError(f"image {self.name}: {error.strerror or error}") from error


@dataclass(frozen=True)
class ImageRef:
    """Reference to an image of a prompt, small enough for checkpoints; the digest of its bytes locates the pixels."""

    name: str
    digest: str
    grid: tuple[int, int, int]
    """Patches in time, height and width."""
    max_tokens: int = 0
    place: str = ""
    """File and line of the row that lists the image."""

    @property
    def num_patches(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]


@dataclass(frozen=True, eq=False)
class ImageFile:
    """An image as sent to the ranks, which cut it into patches."""

    ref: ImageRef
    data: np.ndarray
    """[bytes] uint8: content of the file, unchanged."""


def image_source(value: Any, folder: Path, where: str) -> ImageSource:
    """Parse a row's image: a path, a data URL or Parquet's {bytes, path}. Raises DataError for other values."""
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path") or value.get("image")
    if isinstance(value, (bytes, bytearray)) and value:
        return ImageSource(name=where, data=bytes(value))
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{where}: expected a path, a data URL or {{bytes, path}}, got {describe(value)}")
    if value.startswith("data:"):
        header, comma, encoded = value.partition(",")
        if not comma or not header.endswith(";base64"):
            raise DataError(f"{where}: expected data:image/png;base64,..., got {value[:40]!r}")
        try:
            return ImageSource(name=where, data=base64.b64decode(encoded, validate=True))
        except ValueError as error:
            raise DataError(f"{where}: the data URL is not base64: {error}") from error
    if value.startswith(("http://", "https://")):
        raise DataError(f"{where}: {value[:60]} is an address; download the image and give its path")
    path = folder / value.removeprefix("file://")
    try:
        is_there = path.is_file()
    except OSError as error:  # a name that no file can have
        raise DataError(f"{where}: image {str(path)[:80]}: {error.strerror}") from error
    if not is_there:
        raise DataError(f"{where}: image {path} does not exist; paths start at {folder} (data.image_dir)")
    return ImageSource(name=str(path), path=str(path))


def inspect(source: ImageSource) -> tuple[str, int, int]:
    """(digest, width, height) of a valid image, in pixels and upright; raises DataError for an invalid one.

    Decodes each file once.
    """
    if not source.path:
        return _facts(source.data, source.name)
    try:
        stat = Path(source.path).stat()
    except OSError as error:
        raise DataError(f"image {source.name}: {error.strerror or error}") from error
    return _facts_of_file(source.path, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=_NUM_REMEMBERED)
def _facts_of_file(path: str, mtime_ns: int, num_bytes: int) -> tuple[str, int, int]:
    """Facts of an image file. Cached, because rows are read several times before a run starts."""
    return _facts(Path(path).read_bytes(), path)


def _facts(data: bytes, name: str) -> tuple[str, int, int]:
    image = _opened(data, name)
    width, height = image.size
    _check_shape(image, name)
    # Decode the whole file, because a truncated file opens without an error; JPEG at an eighth of its size, which is faster.
    image.draft(image.mode, (1, 1))
    _load(image, name)
    if image.getexif().get(ORIENTATION_TAG) in _TURNED:
        width, height = height, width
    return digest_of(data), width, height


def _check_shape(image: "Image", name: str) -> None:
    width, height = image.size
    # A photo in the multi-picture format is still: its other frames are previews and depth maps.
    num_frames = getattr(image, "n_frames", 1)
    if num_frames > 1 and image.format != "MPO":
        raise DataError(f"image {name}: it is animated ({num_frames} frames); give a video part with its frames")
    if min(width, height) < 1 or max(width, height) > _MAX_ASPECT * min(width, height):
        raise DataError(
            f"image {name}: {width} x {height} pixels; expected at least 1 x 1 and at most {_MAX_ASPECT} times as long "
            "as wide; crop or pad it"
        )


def digest_of(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def decode(data: bytes, name: str) -> "Image":
    """Decode to RGB pixels, upright, on white."""
    from PIL import Image, ImageOps

    image = _opened(data, name)
    _load(image, name)
    image = ImageOps.exif_transpose(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image).convert("RGB")
    return image.convert("RGB")


def png_bytes(image: "Image") -> bytes:
    """Lossless PNG, compressed for speed rather than size; every decoder gives the same pixels."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def _opened(data: bytes, name: str) -> "Image":
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            return Image.open(io.BytesIO(data))
    except UnidentifiedImageError as error:
        raise DataError(f"image {name}: not an image that can be read ({len(data)} bytes); give PNG or JPEG") from error
    except Exception as error:  # as in ``_load``
        raise DataError(f"image {name}: cannot be read: {error}") from error


def _load(image: "Image", name: str) -> None:
    try:
        image.load()
    except Exception as error:  # Pillow raises many kinds of errors on damaged files
        raise DataError(f"image {name}: the file is damaged or truncated: {error}; copy it again") from error
