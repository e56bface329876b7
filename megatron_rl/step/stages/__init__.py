"""The stages: one file per row of the table (``schedule/table.py``), each with a function ``run``.

``run(step, state, *, ...)`` reads and fills the step's ``StepState``. Its keywords name the fields of ``LoopComponents`` that the stage
uses, and it gets no others. A coroutine function runs on the asyncio thread.
"""

import inspect
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any


@cache
def function_of(stage: str) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """Return a stage's ``run``, and the names of the components that it takes."""
    run = import_module(f"{__name__}.{stage}").run
    return run, tuple(name for name, one in inspect.signature(run).parameters.items() if one.kind is one.KEYWORD_ONLY)
