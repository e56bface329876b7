"""Copy chains of additions with a type for each: short with at most five terms, else long.

    python examples/effects/chain_types.py outputs/arithmetic/task/train.jsonl outputs/effects/chains.jsonl
"""

import json
import sys
from pathlib import Path

MAX_SHORT_TERMS = 5


def main(source: str, target: str) -> None:
    rows = [json.loads(line) for line in Path(source).read_text().splitlines()]
    for row in rows:
        row["type"] = "short" if row["prompt"].count(":") <= MAX_SHORT_TERMS else "long"
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    Path(target).write_text("".join(f"{json.dumps(row)}\n" for row in rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
