"""Count the labels of label-lines that equal the true labels, which the task knows.

    python examples/line_rewards/check_labels.py outputs/line_rewards/labelled.train.jsonl
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from make_task import body, steps_of

from megatron_rl.data.row_files import read_rows


def true_labels(prompt: str, response: str) -> list[int]:
    """1 up to the first line that differs from the right program, -1 from it on."""
    right, written = body(steps_of(prompt)).splitlines(), response.splitlines()
    differing = (i for i, line in enumerate(written) if right[i : i + 1] != [line])
    first_bad = next(differing, len(written))
    return [1 if i < first_bad else -1 for i in range(len(written))]


def main(paths: list[str]) -> int:
    rows = [row for row, _ in read_rows(paths)]
    pairs = [
        pair for row in rows for pair in zip(true_labels(row["prompt"], row["response"]), row["line_labels"], strict=True)
    ]
    equal = sum(true == found for true, found in pairs)
    missed = sum(true == 1 and found == -1 for true, found in pairs)
    completions = sum(row["num_completions_graded"] for row in rows)
    print(
        f"check_labels: {equal} of {len(pairs)} labels of {len(rows)} programs are true ({equal / len(pairs):.1%}); "
        f"{missed} good lines were called bad; {completions} completions"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
