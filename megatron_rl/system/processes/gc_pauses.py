"""Control of the garbage collector. A full collection stops all threads, for 0.15 s with the objects of thousands of responses."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_NEVER = 2**31 - 1
_FULL_EVERY_STEPS = 10


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable garbage collection inside the block; objects that exist at its end are never examined again.

    For imports: the collector would walk the growing heap repeatedly and find nothing, which costs a tenth to a fifth of the
    time to import torch, Megatron and transformers.
    """
    if not gc.isenabled():
        yield  # inside another such block
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def gc_young_only() -> Iterator[None]:
    """Collect only young objects inside the block, and freeze existing ones (above all prompts).

    For a run's event loop, which must not pause within a step: the run calls ``gc_between_windows`` when no reply is awaited.
    """
    gc.collect()
    gc.freeze()
    thresholds = gc.get_threshold()
    gc.set_threshold(thresholds[0], _NEVER, _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def gc_between_windows(step: int) -> None:
    """Collect the objects that were made since the last call; in every tenth step also the older ones.

    Garbage is rarely older than a step, and a visit to all objects takes 3 % of a step of a tiny model.
    """
    gc.collect(1 if step % _FULL_EVERY_STEPS else 2)
