"""Transformer Engine that is installed and does not load: its package is there, a shared library or symbol is not.

Megatron Core expects it whole or missing: some of its modules catch ModuleNotFoundError alone, and a library that
``ctypes`` does not find is an OSError. What does not load therefore counts as missing, and says why.
"""

import importlib
import sys

_PACKAGE = "transformer_engine"

problem = ""
"""Why it does not load; empty where it does, and where it is not installed."""


def disable_if_broken() -> None:
    """Before Megatron's first import: every later import of a Transformer Engine that does not load finds none."""
    global problem
    try:
        importlib.import_module(f"{_PACKAGE}.pytorch")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == _PACKAGE:
            return
        problem = f"{type(error).__name__}: {error}"
    except (ImportError, OSError) as error:
        problem = f"{type(error).__name__}: {error}"
    else:
        return
    for name in [name for name in sys.modules if name.partition(".")[0] == _PACKAGE]:
        del sys.modules[name]
    vars(sys)["modules"][_PACKAGE] = None
