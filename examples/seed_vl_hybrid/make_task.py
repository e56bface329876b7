"""Write the task of hybrid RL: sums that a verifier checks and digits to be sorted that a judge compares.

    verifiable   prompt "7+5+9="   response "<think>7+5=12</think>21"
    general      prompt "729:"     response "<think>729</think>279"   anchor "297" (two neighbours have changed places)

Many worked solutions are wrong, and some lack the thought: they say the solution at once, which require_think scores 0.
``answer`` of general prompts is for measuring alone; in the run they have the judge. The held-out general prompts
stand in a file of their own as well, for that measurement. Held-out prompts never occur in training.

    python examples/seed_vl_hybrid/make_task.py --output outputs/seed_vl_hybrid/task
"""

import argparse
import random
import sys
import zlib
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from characters import write_rows
from words import HELD_OUT_SHARE, digit_rows, joined, near_miss, write_model_folder

WORDS = ("think",)
RIGHT_SHARE = 0.5
THOUGHT_SHARE = 0.7
"""Of the worked solutions."""


def with_thought(thought: str, solution: str, generator: random.Random) -> str:
    return f"<think>{thought}</think>{solution}" if generator.random() < THOUGHT_SHARE else solution


def verifiable(count: int, *, held_out: bool, seed: int) -> Iterator[dict[str, str]]:
    """Each of the 1,000 sums belongs to one side; training repeats them."""
    generator = random.Random(f"{seed} verifiable {held_out}")
    index = 0
    while index < count:
        a, b, c = (generator.randint(0, 9) for _ in range(3))
        prompt, total = f"{a}+{b}+{c}=", a + b + c
        if (zlib.crc32(prompt.encode()) % HELD_OUT_SHARE == 0) != held_out:
            continue
        given = total if generator.random() < RIGHT_SHARE else max(0, total + generator.choice([-2, -1, 1, 2]))
        response = with_thought(f"{a}+{b}={a + b}", str(given), generator)
        side = "held_out" if held_out else "train"
        row = {"id": f"{side}-{index}", "prompt": prompt, "type": "verifiable", "answer": str(total)}
        yield row | {"response": response}
        index += 1


def general(count: int, *, held_out: bool, seed: int) -> Iterator[dict[str, str]]:
    """One row a prompt, since a prompt has one anchor."""
    generator = random.Random(f"{seed} general {held_out}")
    seen = set()
    for digits in digit_rows(count, held_out=held_out, seed=seed):
        prompt = f"{joined(digits)}:"
        if prompt in seen:
            continue
        seen.add(prompt)
        right, anchor = joined(sorted(digits)), joined(near_miss(digits, generator))
        solution = right if generator.random() < RIGHT_SHARE else joined(near_miss(digits, generator))
        row = {"id": prompt, "prompt": prompt, "type": "general", "answer": right, "anchor": anchor}
        yield row | {"response": with_thought(joined(digits), solution, generator)}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder that receives the task")
    parser.add_argument("--num-train", type=int, default=8000, help="of each type; doubled general prompts are dropped")
    parser.add_argument("--num-held-out", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    for side, count in (("train", options.num_train), ("held_out", options.num_held_out)):
        where = {"held_out": side == "held_out", "seed": options.seed}
        judged = list(general(count, **where))
        checked = islice(verifiable(count, **where), len(judged))
        write_rows(options.output / f"prompts.{side}.jsonl", chain(checked, judged))
        if side == "held_out":
            write_rows(options.output / "general.held_out.jsonl", judged)
    write_model_folder(options.output / "model", WORDS)
    print(f"make_task: sums and digits to be sorted in {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
