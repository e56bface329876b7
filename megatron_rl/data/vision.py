"""Image processing of a vision-language model's folder: grids, tokens and patches, one processor for all uses.

Invariants: token ids of prompts are *expanded*: an image of grid (t, h, w) takes t*h*w / merge_size^2 image tokens.
SGLang gets them *collapsed*, one image token per image, and expands them itself; both start from the same pixels.
Token counts follow from image sizes alone. The driver's batch contains the image files; the ranks that encode the
images cut them into patches.
"""

import base64
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from megatron_rl.data.batch import Images
from megatron_rl.data.images import ImageFile, ImageRef, ImageSource, decode, digest_of, inspect, png_bytes
from megatron_rl.errors import DataError
from megatron_rl.families.model_facts import as_config, read_model_json, vision_titles, vision_token_ids

_WIRE_CACHE_BYTES = 1 << 30


def collapse(token_ids: Sequence[int] | np.ndarray, image_token_id: int, counts: Sequence[int]) -> np.ndarray:
    """Replace each run of ``counts[i]`` image tokens by one image token; [n] int32. The inverse of ``expand``.

    Raises ValueError if the image tokens are not those of ``counts`` images.
    """
    ids = np.asarray(token_ids, dtype=np.int32)
    is_image = ids == image_token_id
    indices = np.flatnonzero(is_image)
    first = 0
    kept = ~is_image
    for count in counts:
        run = indices[first : first + count]
        if len(run) < count or run[-1] - run[0] != count - 1:
            raise ValueError(f"expected runs of {list(counts)} image tokens, but a run of {count} is missing")
        kept[run[0]] = True
        first += count
    if first < len(indices):
        raise ValueError(f"expected {first} image tokens, got {len(indices)}")
    return ids[kept]


def expand(token_ids: Sequence[int], image_token_id: int, counts: Sequence[int]) -> list[int]:
    """Replace the i-th image token by ``counts[i]`` image tokens; raises ValueError for another number of image tokens."""
    num_images = list(token_ids).count(image_token_id)
    if num_images != len(counts):
        raise ValueError(f"expected {len(counts)} image tokens, got {num_images}")
    remaining = iter(counts)
    return [
        token for given in token_ids for token in ([given] * next(remaining) if given == image_token_id else [given])
    ]


class ImageProcessor:
    """Image processor of one model folder, and the images read so far. Thread-safe."""

    def __init__(self, path: str | Path) -> None:
        """Load the processor. Raises DataError if the folder has no supported image processor."""
        self.path = Path(path)
        model = read_model_json(self.path)
        self.image_token_id: int = model["image_token_id"]
        self.video_token_id: int | None = model.get("video_token_id")
        self.start_token_id: int = model["vision_start_token_id"]
        self.end_token_id: int = model["vision_end_token_id"]
        self.banned_token_ids = vision_token_ids(as_config(model))
        self._processor = _image_processor(self.path)
        self._patch_size: int = self._processor.patch_size
        self.merge_size: int = self._processor.merge_size
        self._check_sizes(model["vision_config"])
        self._sources: dict[tuple[str, int], tuple[ImageSource, ImageRef]] = {}
        self._files: WeakValueDictionary[tuple[str, int], ImageFile] = WeakValueDictionary()
        """Files of batches that are still in use."""
        self._wire = _EncodedImageCache(_WIRE_CACHE_BYTES)

    def reference(self, source: ImageSource) -> ImageRef:
        """Reference to an image, for prompts. Raises DataError for an image that cannot be used."""
        digest, width, height = inspect(source)
        sent_height, sent_width = self._resized(*self._size(height, width, source.max_tokens))
        grid = (1, sent_height // self._patch_size, sent_width // self._patch_size)
        ref = ImageRef(source.name, digest, grid, source.max_tokens)
        if source.max_tokens and self.num_tokens(ref) > source.max_tokens:
            raise DataError(
                f"image {source.name}: as a frame of its video it may take {source.max_tokens} tokens, but the model's "
                f"image processor makes {self.num_tokens(ref)} of {width} x {height} pixels; raise "
                "data.video_frame_tokens, or give frames of a less extreme shape"
            )
        # Keyed by content: the same image in several rows or files is read and encoded once.
        self._sources.setdefault((digest, source.max_tokens), (source, ref))
        return ref

    def num_tokens(self, ref: ImageRef) -> int:
        return ref.num_patches // self.merge_size**2

    def expanded(self, token_ids: Sequence[int], refs: Sequence[ImageRef]) -> list[int]:
        return expand(token_ids, self.image_token_id, [self.num_tokens(ref) for ref in refs])

    def collapsed(self, token_ids: Sequence[int] | np.ndarray, refs: Sequence[ImageRef]) -> np.ndarray:
        """``token_ids`` (prompt and response) with one image token per image."""
        return collapse(token_ids, self.image_token_id, [self.num_tokens(ref) for ref in refs])

    def file(self, ref: ImageRef) -> ImageFile:
        """Input of ``patchify``. Raises DataError if the file cannot be read or has changed."""
        file = self._files.get((ref.digest, ref.max_tokens))
        if file is None:
            file = ImageFile(ref, np.frombuffer(self._bytes(ref), np.uint8))
            self._files[ref.digest, ref.max_tokens] = file
        return file

    def patchify(self, file: ImageFile) -> Tensor:
        """[t*h*w, values of a patch] float32, cut by the model's processor; ``file`` may come from any folder."""
        with _placed(file.ref):
            result = self._processor(images=[self._pixels(file.data.tobytes(), file.ref)], return_tensors="pt")
            self._check_grid(file.ref, tuple(result["image_grid_thw"][0].tolist()))
        return result["pixel_values"].to(torch.float32)

    def wire(self, ref: ImageRef) -> Future[str]:
        """The image in SGLang's format: base64 of an image file with the pixels that ``patchify`` cuts.

        The future is shared between callers and must not be cancelled. Raises DataError as ``file``.
        """

        def encode() -> str:
            data = self._bytes(ref)
            image = self._pixels(data, ref)
            return base64.b64encode(data if _is_plain_png(data, image) else png_bytes(image)).decode()

        return self._wire.get((ref.digest, ref.max_tokens), encode)

    def batch(self, sequences: Sequence[Sequence[ImageRef]]) -> Images | None:
        """Images of a batch's sequences, in order; None without images."""
        refs = [ref for images in sequences for ref in images]
        if not refs:
            return None
        return Images(
            sources=[self.file(ref) for ref in refs],
            grids=torch.tensor([ref.grid for ref in refs], dtype=torch.int64),
            sequences=torch.repeat_interleave(torch.tensor([len(images) for images in sequences], dtype=torch.int64)),
        )

    def check_known(self, refs: Iterable[ImageRef]) -> None:
        """Raise DataError for an image of a checkpoint that the data files no longer contain with the same bytes
        and grid."""
        for ref in refs:
            with _placed(ref):
                self._check_grid(ref, self._source(ref)[1].grid)

    def _source(self, ref: ImageRef) -> tuple[ImageSource, ImageRef]:
        found = self._sources.get((ref.digest, ref.max_tokens))
        if found is None:
            raise DataError(
                f"run.resume: image {ref.name} is not the one that the run was started with (its bytes have "
                "changed, or no row of the data files lists it); restore the file, or start a new run"
            )
        return found

    def _check_grid(self, ref: ImageRef, found: tuple[int, ...]) -> None:
        if found != ref.grid:
            raise DataError(
                f"image {ref.name}: expected a grid of {ref.grid} patches, but the image processor of {self.path} "
                f"makes {found}; use the preprocessor_config.json that the run was started with, on every node"
            )

    def _bytes(self, ref: ImageRef) -> bytes:
        with _placed(ref):
            data = self._source(ref)[0].read()
            if digest_of(data) != ref.digest:
                raise DataError(
                    f"image {ref.name}: its bytes have changed since the run started; restore the file and resume"
                )
        return data

    def _pixels(self, data: bytes, ref: ImageRef) -> Any:
        image = decode(data, ref.name)
        height, width = self._size(image.height, image.width, ref.max_tokens)
        return image if (width, height) == image.size else image.resize((width, height))

    def _size(self, height: int, width: int, max_tokens: int) -> tuple[int, int]:
        """(height, width) given to the processor: the image's own size, or smaller for a frame of a long video."""
        factor = self._patch_size * self.merge_size
        if not max_tokens or math.prod(self._resized(height, width)) <= max_tokens * factor**2:
            return height, width
        return self._resized(height, width, max_pixels=max_tokens * factor**2)

    def _resized(self, height: int, width: int, max_pixels: int | None = None) -> tuple[int, int]:
        """(height, width) after the processor's resizing."""
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

        size = self._processor.size
        return smart_resize(
            height,
            width,
            factor=self._patch_size * self.merge_size,
            min_pixels=size["shortest_edge"],
            max_pixels=size["longest_edge"] if max_pixels is None else min(max_pixels, size["longest_edge"]),
        )

    def _check_sizes(self, vision: dict[str, Any]) -> None:
        expected = (vision.get("patch_size"), vision.get("spatial_merge_size"))
        if expected != (self._patch_size, self.merge_size):
            raise DataError(
                f"{self.path}: preprocessor_config.json cuts patches of {self._patch_size} pixels and merges "
                f"{self.merge_size} x {self.merge_size}, but config.json says patch_size={expected[0]} and "
                f"spatial_merge_size={expected[1]}; use the files that belong to this checkpoint"
            )


@contextmanager
def _placed(ref: ImageRef) -> Iterator[None]:
    """Append the source (file:line) of the image's row to the message of each DataError raised inside the block."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{error} ({ref.place})" if ref.place and ref.place not in ref.name else str(error)) from error


def _image_processor(path: Path) -> Any:
    from megatron_rl.system.gpu.torchvision_ops import declare_torchvision_ops

    declare_torchvision_ops()
    from transformers import AutoImageProcessor
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

    if not any((path / name).is_file() for name in ("preprocessor_config.json", "processor_config.json")):
        raise DataError(
            f"{path}: no preprocessor_config.json; a vision-language model's folder needs its image processor"
        )
    try:
        processor = AutoImageProcessor.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: the image processor cannot be loaded: {str(error).splitlines()[0]}") from error
    if not isinstance(processor, Qwen2VLImageProcessor):
        raise DataError(
            f"{path}: image processor {type(processor).__name__} is not supported; supported is Qwen2VLImageProcessor, "
            f"which {' and '.join(vision_titles())} have"
        )
    return processor


def _is_plain_png(data: bytes, image: Any) -> bool:
    """True if the bytes are a PNG whose stored pixels already equal the result of ``decode``."""
    import io

    from PIL import Image

    stored = Image.open(io.BytesIO(data))
    return stored.format == "PNG" and stored.mode == "RGB" and not stored.info and stored.size == image.size


class _EncodedImageCache:
    """Cache of encoded images, bounded in bytes and evicting the least recently used. Each is encoded once, on a
    thread."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._futures: OrderedDict[Any, Future[str]] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.RLock()
        self._threads = ThreadPoolExecutor(thread_name_prefix="images")

    def get(self, key: Any, make: Callable[[], str]) -> Future[str]:
        with self._lock:
            if key not in self._futures:
                future = self._futures[key] = self._threads.submit(make)
                future.add_done_callback(partial(self._made, key))  # which removes a failed one again
                return future
            self._futures.move_to_end(key)
            return self._futures[key]

    def _made(self, key: Any, future: Future[str]) -> None:
        with self._lock:
            if future.cancelled() or future.exception() is not None:
                del self._futures[key]
                return
            self._num_bytes += len(future.result())
            while self._num_bytes > self._max_bytes and len(self._futures) > 1:
                oldest = next(iter(self._futures.values()))
                if not oldest.done():
                    return  # its size is not known yet; eviction continues when it is done
                self._num_bytes -= len(oldest.result())
                self._futures.popitem(last=False)
