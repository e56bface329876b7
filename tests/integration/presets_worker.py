"""Runs several presets one after the other in this process: ``presets_worker.py RECIPE OUTPUT PRESET[ key=value]...``."""

import json
import sys
import traceback
from pathlib import Path

from megatron_rl.cli import main
from megatron_rl.rewards.registry import register


@register("even_length", range=(0.0, 1.0))
def even_length(response: str, answer: str) -> float:
    """A reward that random text gets half of the time."""
    return float(len(response) % 2 == 0)


def run_all(recipe: str, output: str, runs: dict[str, list[str]]) -> None:
    for name, overrides in runs.items():
        folder = Path(output) / name
        print(f"== {name} begins", flush=True)
        try:
            status = main(["train", f"--config={recipe}", f"preset={name}", f"run.output_dir={folder}", *overrides])
        except Exception:
            traceback.print_exc()
            status = -1
        print(f"== {name} ended with {status}", flush=True)


if __name__ == "__main__":
    run_all(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
