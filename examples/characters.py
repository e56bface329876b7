"""Code shared by the dialogue examples: an untrained model whose tokens are printable characters, and files of rows.

Invariant: the same arguments write the same bytes.
"""

import json
import string
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tiny_model import END, SPECIAL_TOKENS, write_tiny_model

VOCABULARY = (*SPECIAL_TOKENS, *string.printable[:95])
__all__ = ["END", "write_model_folder", "write_rows"]


def write_model_folder(folder: Path) -> None:
    """An untrained model whose tokens are characters; ids beyond them make the vocabulary divide by 8."""
    write_tiny_model(folder, VOCABULARY, "", vocab_size=104)


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
