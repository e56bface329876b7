"""Halves the import time of a CPU server, which is nine tenths of the time until SGLang replies.

Three causes of that time are avoided: the garbage collector, which repeatedly scans the growing heap;
``torch.compile``, which loads Inductor for functions that are never compiled here; and the files of models that
are not served.
"""

import gc
import itertools
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_ANY_SERVER = ("sglang.launch_server", "sglang")
_OTHER_MODELS = "SGLANG_DISABLED_MODEL_ARCHS"


def begin() -> None:
    """Disable garbage collection and ``torch.compile`` during the imports of a server process; no effect in other processes."""
    if not _becomes_server():
        return
    import torch

    gc.disable()
    # Even with TORCH_COMPILE_DISABLE, torch.compile takes a second of imports before it returns the function itself.
    torch.compile = _identity


def hide_megatron() -> None:
    """Make Megatron's import fail in this process, with a GPU or without; before SGLang's debugging aid tries the import.

    The import would take seconds, and gigabytes of device memory per worker once Transformer Engine loads its kernels.
    """
    sys.modules.setdefault("megatron", None)  # type: ignore[arg-type]


def end() -> None:
    """Enable the collector again, and freeze the imported objects, so that it never scans them, here or in a fork."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def skip_unserved_models(server_args: Any) -> None:
    """Limit SGLang's model imports to the files that define the served architecture, and to what these import."""
    if (
        not _becomes_server()
        or server_args.speculative_algorithm
        or server_args.model_impl not in (None, "auto", "sglang")
    ):
        return
    try:
        architectures = (
            json.loads((Path(server_args.model_path) / "config.json").read_text()).get("architectures") or []
        )
    except (OSError, ValueError):
        return
    import sglang.srt

    sources = {path.stem: path.read_text() for path in Path(sglang.srt.__path__[0], "models").glob("*.py")}
    skipped = not_defining(architectures, sources)
    if skipped:
        os.environ.setdefault(_OTHER_MODELS, ",".join(skipped))


def not_defining(architectures: Sequence[str], sources: Mapping[str, str]) -> list[str]:
    """Names of ``sources`` (name -> source text) that define no class in ``architectures``; empty if one class is defined nowhere."""
    defining = [
        {
            name
            for name, text in sources.items()
            if re.search(rf"^class {re.escape(architecture)}\b", text, re.MULTILINE)
        }
        for architecture in architectures
    ]
    if not defining or not all(defining):
        return []
    return sorted(set(sources) - set().union(*defining))


def serves() -> bool:
    """True if this process is a server, or was spawned by one."""
    return _becomes_server() or "--multiprocessing-fork" in sys.orig_argv


def _becomes_server() -> bool:
    words = sys.orig_argv
    return any(first == "-m" and name in _ANY_SERVER for first, name in itertools.pairwise(words))


def _identity(model: Any = None, **options: Any) -> Any:
    return model if model is not None else _identity
