"""Kinds of values, by the last word of a key's name: a path, an address, a number of tokens, a count.

Invariant: every number and text of a recipe has a kind, so that a new key needs no code to refuse values that no machine
or run can have. A bound at the field in the schema narrows its kind.
"""

import os
from collections.abc import Mapping
from pathlib import PurePath

from megatron_rl.system.http.addresses import is_host

_MAX_FLOAT = 1e30
"""Small enough that a product with 1e8 does not overflow float32."""
_MAX_INT = 2**53
"""Largest bound below which all JSON readers represent every integer exactly."""
_LARGEST: Mapping[str, float] = {
    "seed": _MAX_INT,
    "_bytes": 2**40,
    "_mb": 10**7,
    "tokens": 10**8,
    "steps": 10**8,
    "step": 10**8,
    "horizon": 10**9,
    "_servers": 1024,
    "_workers": 1024,
    "_concurrency": 2**16,
    "_requests": 2**16,
    "_ranks": 2**17,
    "_parallel_size": 2**17,
    "_retries": 1000,
    "_restarts": 1000,
    "_epochs": 1000,
    "port": 2**16 - 1,
    "max_grad_norm": _MAX_FLOAT,
}
"""Ending of a key -> largest value, above what any machine has or any run needs."""
_LARGEST_OTHER = 10**6
_SMALLEST = 1e-20
"""Smallest size of a number that is not 0: its square still fits a float32."""
_MAX_SECONDS, _MIN_SECONDS = 10**7, 1e-3
"""A few months, well below the limit of clocks and condition variables (9e9 s), and a millisecond."""
_PATHS = ("path", "_dir", "files", "_file")
_TEXTS = ("system_prompt", "after", "yes_word", "no_word")
"""Keys whose text may have lines, and blanks at its ends."""
_MAX_PATH, _MAX_NAME, _MAX_TEXT = 4095, 255, 10**6
_NO_DISKS = ("/proc", "/sys", "/dev")
_ON_DISK = "/dev/shm"
_STORES = ("http", "https", "sqlite", "postgresql", "mysql", "mssql", "file", "databricks")


def number_expected(name: str, value: float, *, is_option: bool = False) -> str:
    """Return the expectation that ``value`` of the key ``name`` does not meet; empty if there is none.

    ``is_option``: the number is an argument of a function, which knows its own bounds.
    """
    if name.endswith("_s"):
        if value > _MAX_SECONDS:
            return f"at most {_MAX_SECONDS} seconds"
        return f"0 or at least {_MIN_SECONDS} seconds" if 0 < value < _MIN_SECONDS else ""
    if is_option:
        largest: float = _MAX_INT if isinstance(value, int) else _MAX_FLOAT
    else:
        largest = next((limit for ending, limit in _LARGEST.items() if name.endswith(ending)), _LARGEST_OTHER)
    if abs(value) > largest:
        return f"a number of at most {largest:,} in size"
    if is_option:
        return ""
    return f"0 or a number of at least {_SMALLEST:g} in size" if 0 < abs(value) < _SMALLEST else ""


def text_expected(name: str, text: str) -> str:
    """Return the expectation that ``text`` of the key ``name`` does not meet; empty if there is none, or no text."""
    if not is_writable(text):
        return "text that can be written as UTF-8, without NUL"
    if name in _TEXTS:
        is_text = len(text) <= _MAX_TEXT and text.replace("\n", "").replace("\t", "").isprintable()
        return "" if is_text else f"at most {_MAX_TEXT} characters without control characters"
    if not is_one_line(text):
        return f"one line of at most {_MAX_PATH} printable characters, without blanks at its ends"
    if not text:
        return ""
    if name == "urls_file" and "://" in text:
        return ""  # an address that returns URLs: its check is the servers'
    if name.endswith(_PATHS):
        return _path_expected(text)
    if name == "host" and not is_host(text):
        return "a host name or an IP address, without a port"
    if name == "mlflow_uri" and text.partition(":")[0].partition("+")[0] not in _STORES:
        return f"the address of a store (a text that begins with {', '.join(_STORES)} and a colon)"
    return ""


def is_writable(text: str) -> bool:
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:  # a lone surrogate: bytes of the command line that are not UTF-8
        return False


def is_one_line(text: str) -> bool:
    return text.isprintable() and text == text.strip() and len(text) <= _MAX_PATH


def _path_expected(text: str) -> str:
    if text.startswith("~"):
        return "a path without ~, which only a shell replaces by the home folder"
    if "://" in text:
        return "a path on this machine, not an address; download it, or mount the store"
    if any(len(part.encode()) > _MAX_NAME for part in PurePath(text).parts):
        return f"names of at most {_MAX_NAME} bytes between two /"
    place = os.path.abspath(text)
    is_special = any(place == folder or place.startswith(f"{folder}/") for folder in _NO_DISKS)
    if is_special and not place.startswith(f"{_ON_DISK}/"):
        return f"a path on a disk: {', '.join(_NO_DISKS)} hold no files"
    return ""
