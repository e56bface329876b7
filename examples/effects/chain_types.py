"""Copy chains of additions with a type for each: short with at most five terms, else long.

    python examples/effects/chain_types.py outputs/arithmetic/task/train.jsonl outputs/effects/chains.jsonl
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from characters import write_rows

from megatron_rl.data.row_files import read_rows

MAX_SHORT_TERMS = 5


def main(source: str, target: str) -> None:
    rows = (row for row, _ in read_rows([source]))
    types = ({**row, "type": "short" if row["prompt"].count(":") <= MAX_SHORT_TERMS else "long"} for row in rows)
    write_rows(Path(target), types)


if __name__ == "__main__":
    main(*sys.argv[1:])
