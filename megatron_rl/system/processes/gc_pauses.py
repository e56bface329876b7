"""When the garbage collector looks for cycles. It holds up all threads while it does, 0.15 s for what thousands of responses are."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_NEVER = 2**31 - 1


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Inside nothing is collected; what is there at the end stays for good, so the collector does not look at it again.

    For imports, when it would walk the growing heap again and again and find nothing: a tenth to a fifth of the seconds in which
    torch, Megatron and transformers are imported.
    """
    if not gc.isenabled():
        yield  # inside another one
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def gc_young_only() -> Iterator[None]:
    """Freeze existing objects (above all prompts) and collect only young ones inside the block; ``gc.collect`` still visits older ones.

    For a run's event loop, which is not to stand still in the middle of a step: the run collects when it waits for no answer.
    """
    gc.collect()
    gc.freeze()
    thresholds = gc.get_threshold()
    gc.set_threshold(thresholds[0], _NEVER, _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
