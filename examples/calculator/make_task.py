"""Write the calculator task: products and sums that a tiny model can only guess, and a tool that knows them.

A response either guesses or calls the tool, which answers in round brackets, and then repeats the result::

    prompt "47*8+13="   guess "401"   call "[47*8+13](389)389"

The worked solutions mostly guess, a little off; that calling the tool pays is for reinforcement learning to find out.
Prompts of eval never occur in training.

    python examples/calculator/make_task.py --output outputs/calculator/task
"""

import argparse
import random
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from characters import write_model_folder, write_rows

CALL_SHARE = 0.3
"""Share of the worked solutions that call the tool."""
EVAL_SHARE = 5
"""One in so many prompts is for eval."""


def rows(name: str, count: int, seed: int) -> Iterator[dict[str, str]]:
    """The rows of file ``name``: train, sft or eval."""
    generator = random.Random(f"{seed} {name}")
    index = 0
    while index < count:
        a, b, c = generator.randint(10, 99), generator.randint(2, 9), generator.randint(10, 99)
        expression, value = f"{a}*{b}+{c}", a * b + c
        if (zlib.crc32(expression.encode()) % EVAL_SHARE == 0) != (name == "eval"):
            continue
        guess = str(round(value * generator.uniform(0.9, 1.1)))
        call = f"[{expression}]({value}){value}"
        response = call if generator.random() < CALL_SHARE else guess
        yield {"id": f"{name}-{index}", "prompt": f"{expression}=", "answer": str(value), "response": response}
        index += 1


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder that receives the task")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    for name, count in (("train", 8000), ("sft", 12000), ("eval", 300)):
        write_rows(options.output / f"{name}.jsonl", rows(name, count, options.seed))
    write_model_folder(options.output / "model")
    print(f"make_task: the calculator task lies in {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
