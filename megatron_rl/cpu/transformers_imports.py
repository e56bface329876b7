"""Skips two libraries that transformers imports for functions never called here: 1.3 s in every process."""

import importlib.machinery
import types
from collections.abc import Sequence
from typing import Any

MISSED = {
    "transformers.generation.candidate_generator": "is_sklearn_available",
    "transformers.loss.loss_for_object_detection": "is_scipy_available",
}
"""Maps a module to the function that reports its library. Without it, only assisted generation and detection losses fail."""


def find_spec(
    fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
) -> importlib.machinery.ModuleSpec | None:
    """Import spec of a module in ``MISSED``. While the module is imported, its library is reported as not installed."""
    spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
    if spec is None or spec.loader is None:
        return spec
    run_module = spec.loader.exec_module

    def exec_module(module: types.ModuleType) -> None:
        import transformers.utils as utils

        question = MISSED[fullname]
        real = getattr(utils, question)
        setattr(utils, question, lambda: False)
        try:
            run_module(module)
        finally:
            setattr(utils, question, real)

    loader: Any = spec.loader
    loader.exec_module = exec_module
    return spec
