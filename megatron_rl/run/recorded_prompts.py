"""Records ``first_prompts.json`` of a run: tokens of some prompts at its start, to detect later changes of the tokenizer or
its chat template."""

import json
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.data.trajectory import Prompt
from megatron_rl.system.files.atomic_files import write_atomic

_FILE = "first_prompts.json"
_NUMBER = 16


def write_first_prompts(folder: Path, prompts: Sequence[Prompt]) -> None:
    """Write the file once per run; an existing file stays. Raises OSError."""
    if not (folder / _FILE).exists():
        write_atomic(folder / _FILE, json.dumps({p.source or p.id: list(p.token_ids) for p in prompts[:_NUMBER]}))


def read_first_prompts(folder: Path) -> dict[str, list[int]]:
    """Token ids by source of the row; empty if the run has no record."""
    try:
        recorded = json.loads((folder / _FILE).read_text())
    except (OSError, ValueError):
        return {}
    return recorded if isinstance(recorded, dict) else {}
