"""Megatron's globals as a value: what ``parallel_state`` and the random trackers hold for one layout of the ranks.

Megatron keeps one layout in module variables. To have several, each one's variables are captured once it is
initialised and put back whenever it is used. A capture holds references: nothing is copied, and switching costs no
communication. Buffers that only save memory belong to no layout and stay.
"""

import re
from typing import Any

from megatron.core import parallel_state
from megatron.core.tensor_parallel import random as megatron_random

Capture = dict[str, Any]
"""Name of a variable -> its value; the captures of one process have the same names."""

_SHARED = ("_GLOBAL_MEMORY_BUFFER", "_GLOBAL_SYMMETRIC_MEMORY_BUFFER")
_NAMES = {
    parallel_state: [
        name
        for name in vars(parallel_state)
        if name == "_global_process_group_list" or (re.fullmatch(r"_[A-Z][A-Z_]+", name) and name not in _SHARED)
    ],
    megatron_random: ["_CUDA_RNG_STATE_TRACKER", "_CUDA_RNG_STATE_TRACKER_INITIALIZED"],
}


def save_globals() -> Capture:
    """Return Megatron's present globals without copying them."""
    return {name: getattr(module, name) for module, names in _NAMES.items() for name in names}


def load_globals(captured: Capture) -> None:
    """Make Megatron's globals those that were captured."""
    for module, names in _NAMES.items():
        for name in names:
            setattr(module, name, captured[name])


def reset_globals() -> None:
    """Reset the globals to their state before any initialization, which Megatron asserts."""
    load_globals(_EMPTY)
    for name in _SHARED:
        setattr(parallel_state, name, None)


_EMPTY = save_globals()
