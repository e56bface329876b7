"""Write the prompt-selection task: digits to be sorted, and a pool of new prompts of which most are learned already.

The policy has imitated right solutions of short rows, and careless ones of long rows: most of those have two neighbours
in the wrong order. Falling order is rarer than rising::

    prompt "rising 7294:"       response "2479"
    prompt "falling 72941865:"  response "98765421"

In the pool of new prompts most are short, some are long, and a few are broken (their reference is wrong, so
no response to them is ever right). ``random.jsonl`` holds a random share of the pool, to compare a selection with, and
``original.jsonl`` as many short prompts, which stand for what the policy was trained on before.

Invariants: the same arguments write the same bytes; a prompt belongs to training or is held out, by its hash; the pool
repeats no prompt.

    python examples/prompt_selection/make_task.py --output outputs/prompt_selection/task
"""

import argparse
import random
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from characters import write_rows
from words import joined, near_miss, write_model_folder

SHORT, LONG = (3, 4), (6, 8)
"""Digits of a prompt, from and to."""
FALLING_SHARE = 0.3
"""Share of falling prompts; the others are rising."""
HELD_OUT_SHARE = 5
"""One prompt out of this number is held out."""
BROKEN_SHARE = 0.01
"""Share of the pool."""
SELECTED_SHARE = 0.1
"""Share of the pool: select_prompts.keep_share of select.yaml."""


def prompts(
    name: str, count: int, *, long_share: float, held_out: bool, seed: int, broken_share: float = 0.0
) -> Iterator[dict[str, str]]:
    generator = random.Random(f"{seed} {name}")
    seen = set()
    while len(seen) < count:
        lengths = LONG if generator.random() < long_share else SHORT
        question = "falling" if generator.random() < FALLING_SHARE else "rising"
        digits = generator.sample(range(1, 10), generator.randint(*lengths))
        prompt = f"{question} {joined(digits)}:"
        if prompt in seen or (zlib.crc32(prompt.encode()) % HELD_OUT_SHARE == 0) != held_out:
            continue
        seen.add(prompt)
        answer = sorted(digits, reverse=question == "falling")
        kind = "long" if len(digits) >= LONG[0] else "short"
        if generator.random() < broken_share and digits[::-1] != answer:
            answer, kind = digits[::-1], "broken"
        yield {"id": f"{name}-{len(seen)}", "prompt": prompt, "answer": joined(answer), "type": question, "kind": kind}


def solutions(count: int, *, careless_share: float, seed: int) -> Iterator[dict[str, str]]:
    """Rows for sft, half of them long; ``careless_share`` of the long ones are near misses."""
    generator = random.Random(f"{seed} solutions")
    for row in prompts("sft", count, long_share=0.5, held_out=False, seed=seed):
        response = row["answer"]
        if row["kind"] == "long" and generator.random() < careless_share:
            missed = joined(near_miss(list(map(int, response)), generator))
            response = missed if row["type"] == "rising" else missed[::-1]
        yield {**row, "response": response}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder that receives the task")
    parser.add_argument("--num-pool", type=int, default=2400)
    parser.add_argument("--num-sft", type=int, default=6000)
    parser.add_argument("--num-held-out", type=int, default=200, help="prompts of each of the two lengths")
    parser.add_argument("--pool-long-share", type=float, default=0.05)
    parser.add_argument("--careless-share", type=float, default=0.85, help="near misses among the long solutions of sft")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    output, seed = options.output, options.seed
    pool = list(
        prompts("pool", options.num_pool, long_share=options.pool_long_share, held_out=False, seed=seed, broken_share=BROKEN_SHARE)
    )
    share = random.Random(f"{seed} random").sample(pool, round(len(pool) * SELECTED_SHARE))
    write_rows(output / "pool.jsonl", pool)
    write_rows(output / "random.jsonl", share)
    original = prompts("original", len(share), long_share=0.0, held_out=False, seed=seed)
    write_rows(output / "original.jsonl", original)
    for kind, long_share in (("short", 0.0), ("long", 1.0)):
        held_out = prompts(kind, options.num_held_out, long_share=long_share, held_out=True, seed=seed)
        write_rows(output / f"held_out_{kind}.jsonl", held_out)
    write_rows(output / "sft.jsonl", solutions(options.num_sft, careless_share=options.careless_share, seed=seed))
    write_model_folder(output / "model", ["rising", "falling"])
    print(f"make_task: the prompt-selection task lies in {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
