"""A server's start without what a CPU server never uses. Of the time until SGLang answers, imports are nine tenths.

Half of that went to the garbage collector, which walks the growing heap again and again, to ``torch.compile``, which
loads Inductor for functions that are never compiled here, and to the files of models that are not served.
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
    """In a process that becomes a server, and in no other that imports SGLang."""
    if not _becomes_server():
        return
    import torch

    gc.disable()
    # SGLang's debugging aid imports Megatron where it finds it.
    sys.modules["megatron"] = None  # type: ignore[assignment]
    # With TORCH_COMPILE_DISABLE the compiled function is the function itself, after a second of imports.
    torch.compile = _as_it_is


def end() -> None:
    """All is imported: what is there now stays, so the collector need not look at it again, here or in a fork."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def skip_unserved_models(server_args: Any) -> None:
    """Import of SGLang's models only the files that define the architecture served, and what these import."""
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
    left_out = not_defining(architectures, sources)
    if left_out:
        os.environ.setdefault(_OTHER_MODELS, ",".join(left_out))


def not_defining(architectures: Sequence[str], sources: Mapping[str, str]) -> list[str]:
    """Names of the ``sources`` that define no class of ``architectures``; none where one of these is defined nowhere."""
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
    """This process is a server, or one that it spawned."""
    return _becomes_server() or "--multiprocessing-fork" in sys.orig_argv


def _becomes_server() -> bool:
    words = sys.orig_argv
    return any(first == "-m" and name in _ANY_SERVER for first, name in itertools.pairwise(words))


def _as_it_is(model: Any = None, **options: Any) -> Any:
    return model if model is not None else _as_it_is
