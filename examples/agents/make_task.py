"""Writes the prompts of the two adapters: sums for verifiers, numbers to guess for openenv. Run: python make_task.py --output FOLDER"""

import argparse
import json
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--num-train", type=int, default=81)
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    sums, guesses = [], []
    for i in range(options.num_train):
        a, b = divmod(i, 9)
        sums.append({"id": f"s{i}", "prompt": f"What is {a} + {b}?", "answer": str(a + b), "sum": a + b})
        guesses.append({"id": f"g{i}", "prompt": "Guess the number.", "answer": str(1 + b), "seed": b})
    for name, rows in (("sums", sums), ("guesses", guesses)):
        (options.output / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
