"""Trains with several presets, one after the other, in this process: ``RECIPE OUTPUT {name of the run: [key=value, ...]}`` (JSON)."""

import json
import sys
import traceback
from pathlib import Path

from megatron_rl.cli import main


def run_all(recipe: str, output: str, runs: dict[str, list[str]]) -> None:
    for name, overrides in runs.items():
        folder = Path(output) / name
        print(f"== {name} begins", flush=True)
        try:
            status = main(["train", f"--config={recipe}", f"run.output_dir={folder}", *overrides])
        except Exception:
            traceback.print_exc()
            status = -1
        print(f"== {name} ended with {status}", flush=True)


if __name__ == "__main__":
    run_all(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
