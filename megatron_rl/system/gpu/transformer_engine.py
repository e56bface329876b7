"""Hides a Transformer Engine that is installed but does not load, for example because a shared library is missing.

Megatron Core expects Transformer Engine complete or missing: some of its modules catch only ModuleNotFoundError, but the
import of Transformer Engine may raise anything. A package that does not load therefore counts as missing, and the reason
is recorded.
"""

import importlib
import sys

_PACKAGE = "transformer_engine"

problem = ""
"""Reason why Transformer Engine does not load; empty if it loads or is not installed."""


def disable_if_broken() -> None:
    """Call before Megatron's first import: later imports of a Transformer Engine that does not load then find none."""
    global problem
    try:
        importlib.import_module(f"{_PACKAGE}.pytorch")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == _PACKAGE:
            return
        problem = f"{type(error).__name__}: {error}"
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    else:
        return
    for name in [name for name in sys.modules if name.partition(".")[0] == _PACKAGE]:
        del sys.modules[name]
    vars(sys)["modules"][_PACKAGE] = None
