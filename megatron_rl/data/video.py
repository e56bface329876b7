"""Videos as frames: selects the frames that a prompt shows, and their token limit (Seed1.5-VL, arXiv 2505.07062).

Laws: the frames of one video never take more tokens than its budget, for any length. A longer video has no larger
frames and shows no fewer of them. Frames keep their order; the first frame is always shown, and so is the last if there
is capacity for two. Trainer and rollout use the same function.
"""

from collections.abc import Sequence
from dataclasses import dataclass

FRAME_LEVELS = (640, 512, 384, 256, 160, 128)
"""Token limits of a frame, from the highest to the lowest resolution."""
MAX_VIDEO_TOKENS = 81_920


@dataclass(frozen=True)
class VideoPlan:
    frames: tuple[int, ...]
    """Indices of the frames that are shown, ascending."""
    max_frame_tokens: int


def plan_video(
    num_frames: int, *, max_tokens: int = MAX_VIDEO_TOKENS, levels: Sequence[int] = FRAME_LEVELS
) -> VideoPlan:
    """Choose the largest level at which all frames fit into ``max_tokens``; at the lowest level, as many evenly spaced
    frames as fit.

    Raises ValueError without frames, and for a budget below one frame of the lowest level.
    """
    lowest = min(levels)
    if num_frames < 1 or max_tokens < lowest:
        raise ValueError(f"expected at least one frame and {lowest} tokens, got {num_frames} and {max_tokens}")
    for level in sorted(levels, reverse=True):
        if num_frames * level <= max_tokens:
            return VideoPlan(tuple(range(num_frames)), level)
    num_kept = max_tokens // lowest
    if num_kept == 1:
        return VideoPlan((0,), lowest)
    last = num_frames - 1
    # Integer rounding gives the same result on every machine.
    return VideoPlan(tuple((2 * i * last + num_kept - 1) // (2 * (num_kept - 1)) for i in range(num_kept)), lowest)


def timestamp_text(seconds: float) -> str:
    """Text before a frame."""
    return f"[{seconds:.1f} second]"
