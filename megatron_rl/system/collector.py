"""The garbage collector while modules are imported: it would walk the growing heap again and again and find nothing.

A tenth to a fifth of the seconds in which torch, Megatron and transformers are imported.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """Inside nothing is collected; what is there at the end stays for good, so the collector does not look at it again."""
    if not gc.isenabled():
        yield  # inside another one
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
