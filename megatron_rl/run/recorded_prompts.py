"""``first_prompts.json`` of a run: some of its prompts as the tokens that it began with, for whoever asks later whether the
tokenizer or its chat template have changed since."""

import json
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.data.trajectory import Prompt
from megatron_rl.system.files.atomic_files import write_atomic

_FILE = "first_prompts.json"
_NUMBER = 16


def write_first_prompts(folder: Path, prompts: Sequence[Prompt]) -> None:
    """Once per run: what is there stays. Raises OSError."""
    if not (folder / _FILE).exists():
        write_atomic(folder / _FILE, json.dumps({p.source or p.id: list(p.token_ids) for p in prompts[:_NUMBER]}))


def read_first_prompts(folder: Path) -> dict[str, list[int]]:
    """Token ids by the row's place; empty where the run recorded none."""
    try:
        said = json.loads((folder / _FILE).read_text())
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}
