"""Write the task of pairwise PPO: digits to be sorted, preferences for the judge, anchors for the policy.

    prompt "729:"   right "279"   anchor "297" (two neighbours have changed places)

The judge learns from pairs of a right response and a wrong one: neighbours exchanged, shuffled, a digit left out, a
digit too many, another digit. What it never sees is the answer: it has to look at prompt and response. Half of the
worked solutions, from which the policy starts, are near misses like the anchors. ``answer`` is for measuring alone;
during reinforcement learning only the judge is asked. Held-out digits never occur in training, of neither model.

    python examples/pairwise_ppo/make_task.py --output outputs/pairwise_ppo/task
"""

import argparse
import random
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from characters import write_rows
from words import digit_rows, joined, near_miss, write_model_folder

WORDS = ("think",)
"""A policy's words beyond those of the judge's text: one model folder serves both models and examples/seed_vl_hybrid."""
RIGHT_SHARE = 0.5
"""Share of right ones among the worked solutions."""


def wrong_response(digits: list[int], generator: random.Random) -> str:
    """Any other text than the sorted digits, of the kinds that a policy tries."""
    right = sorted(digits)
    row = list(right)
    while row == right:
        kind = generator.choice(["neighbours", "neighbours", "shuffled", "left out", "too many", "another"])
        place = generator.randrange(len(right))
        row = {
            "neighbours": near_miss(digits, generator),
            "shuffled": generator.sample(right, len(right)),
            "left out": [*right[:place], *right[place + 1 :]],
            "too many": [*right[: place + 1], generator.randint(1, 9), *right[place + 1 :]],
            "another": [*right[:place], generator.randint(1, 9), *right[place + 1 :]],
        }[kind]
    return joined(row)


def preferences(count: int, *, held_out: bool, seed: int) -> Iterator[dict[str, str]]:
    generator = random.Random(f"{seed} preferences {held_out}")
    for digits in digit_rows(count, held_out=held_out, seed=seed):
        right, wrong = joined(sorted(digits)), wrong_response(digits, generator)
        yield {"prompt": f"{joined(digits)}:", "chosen": right, "rejected": wrong}


def prompts(count: int, *, held_out: bool, seed: int) -> Iterator[dict[str, str]]:
    """One row per prompt, since a prompt has one anchor."""
    generator = random.Random(f"{seed} prompts {held_out}")
    seen = set()
    for digits in digit_rows(count, held_out=held_out, seed=seed):
        prompt = f"{joined(digits)}:"
        if prompt in seen:
            continue
        seen.add(prompt)
        right, anchor = joined(sorted(digits)), joined(near_miss(digits, generator))
        response = right if generator.random() < RIGHT_SHARE else joined(near_miss(digits, generator))
        yield {"id": prompt, "prompt": prompt, "answer": right, "anchor": anchor, "response": response}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder that receives the task")
    parser.add_argument("--num-train", type=int, default=12000)
    parser.add_argument("--num-held-out", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    for side, count in (("train", options.num_train), ("held_out", options.num_held_out)):
        for name, rows in (("preferences", preferences), ("prompts", prompts)):
            found = rows(count, held_out=side == "held_out", seed=options.seed)
            write_rows(options.output / f"{name}.{side}.jsonl", found)
    write_model_folder(options.output / "model", WORDS)
    print(f"make_task: digits to be sorted, preferences and anchors in {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
