"""Print the results of search.sh: mean accuracy over the training time, final accuracy, finished responses per second.

    python examples/long_tail/search.py outputs/long_tail/search --start outputs/long_tail/sft --seconds 24
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]
from compare import accuracy_of
from curves import Curve, on_grid

from megatron_rl.run.checkpoints import policy_exports
from megatron_rl.tracking.metrics_file import read_metrics


def curve_of(folder: Path, start: Path) -> Curve:
    kept = policy_exports(folder)
    times = [0.0, *(one.trained_s for one in kept)]
    return Curve(np.array(times), np.array([accuracy_of(start), *(accuracy_of(one.folder) for one in kept)]))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--start", type=Path, required=True, help="the policy that the runs started from")
    parser.add_argument("--seconds", type=float, required=True, help="of training, for all runs")
    options = parser.parse_args(arguments)
    grid = np.linspace(0.0, options.seconds, 81)
    print("| run | mean accuracy | at the end | finished per second | steps |\n|---|---|---|---|---|")
    for folder in sorted(options.folder.iterdir()):
        values = on_grid([curve_of(folder, options.start)], grid)[0]
        rows = [row.metrics for row in read_metrics(folder / "metrics.jsonl") if row.step > 0]
        speed = sum(row["rollout/num_finished"] for row in rows) / sum(row["step/time_s"] for row in rows)
        print(f"| {folder.name} | {values.mean():.1%} | {values[-1]:.1%} | {speed:.1f} | {len(rows)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
