"""Stores a run's responses during training: bounded on disk, each step once, safe against kills.

Waits: ``add`` waits for the previous step's write only; a checkpoint waits for the rows of its step (``settle``),
so that a run resumed from it lacks none. Writing never raises into training.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megatron_rl.data.token_text import TokenText
from megatron_rl.tracking.samples_file import FOLDER, sample_files, write_samples

_NEWEST_STEPS = 16
"""Number of newest steps that are kept while older ones are removed."""
_REPEATED = re.compile(r"(<[^<>\s]{1,40}>)\1{7,}")


class SampleStore:
    """Stores the responses of a run on a writer thread."""

    def __init__(
        self, folder: Path, spelling: TokenText | None, *, first_step: int, max_gib: float, warn: Callable[[str], None]
    ) -> None:
        """``first_step``: steps done before this start; stored rows of later steps are removed, because the run repeats them."""
        self._folder, self._spelling, self._max_bytes, self._warn = folder, spelling, int(max_gib * 2**30), warn
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="samples")
        self._written: Future[None] | None = None
        self._has_warned = False
        for step, path in sample_files(folder).items():
            if step > first_step:
                path.unlink()
        # A kill leaves partial files.
        for torn in (folder / FOLDER).glob(".*.partial"):
            torn.unlink()

    def add(self, step: int, columns: dict[str, Any]) -> None:
        """Store rows of ``step``, counted from 1, in the format of ``write_samples`` without the texts of the tokens."""
        # One step at a time: a slow disk delays training before rows of many steps fill the memory.
        self.finish_background_save()
        self._written = self._writer.submit(self._write, step, columns)

    def finish_background_save(self) -> None:
        """Wait until all added rows are on disk."""
        if self._written is not None:
            self._written.result()

    def close(self) -> None:
        self._writer.shutdown()

    def _write(self, step: int, columns: dict[str, Any]) -> None:
        try:
            write_samples(self._folder, step, columns | self._texts(columns))
            files = sample_files(self._folder)
            for old in steps_to_drop({number: path.stat().st_size for number, path in files.items()}, self._max_bytes):
                files[old].unlink(missing_ok=True)
        except Exception as error:
            if not self._has_warned:
                self._has_warned = True
                self._warn(f"the responses of step {step} could not be stored ({type(error).__name__}: {error}); training continues")

    def _texts(self, columns: Mapping[str, Any]) -> dict[str, list[Any]]:
        if self._spelling is None:
            return {name: [""] * len(columns["id"]) for name in ("prompt", "response")} | {"token_ends": columns["token_ids"]}
        prompts = [self._spelling.spelled(ids) for ids in columns["prompt_ids"]]
        responses = [self._spelling.spelled(ids) for ids in columns["token_ids"]]
        return {
            # An image is thousands of equal tokens: print one with a count.
            "prompt": [_REPEATED.sub(lambda found: f"{found[1]}[{len(found[0]) // len(found[1])}]", text) for text, _ in prompts],
            "response": [text for text, _ in responses],
            "token_ends": [ends for _, ends in responses],
        }


def steps_to_drop(sizes: Mapping[int, int], max_bytes: int) -> Sequence[int]:
    """Steps to remove so that the rest fits: first those among the older steps whose neighbors are closest together.

    A long run thus keeps its newest steps and its past at even distances. ``sizes``: bytes by step.
    """
    left, removed = sorted(sizes), []
    total = sum(sizes.values())
    while total > max_bytes and left:
        inner = range(1, len(left) - _NEWEST_STEPS)
        # If the newest steps alone are too large, remove the oldest, down to nothing.
        index = min(inner, key=lambda i: left[i + 1] - left[i - 1]) if inner else 0
        total -= sizes[left[index]]
        removed.append(left.pop(index))
    return removed
