"""Write the FIRE task: digits in an order that is asked for, by a model whose first word is a habit.

The first word of a response names the method, the digits follow from it::

    prompt   "backwards 7294:"
    response "back 4927"          right
    response "up 2479"            the habit: sorted, whatever was asked

Worked solutions nearly always begin with ``up``. Drills show what every method does: their prompts end with the method,
so that they teach nothing about its choice. A policy that imitates both carries out whatever its first word names, and
hardly ever chooses another first word than ``up``: which one a question needs is left to reinforcement learning.

Invariants: the same arguments write the same bytes; held-out digits never occur in training; no two methods give the
same answer to a prompt.

    python examples/fire/make_task.py --output outputs/fire/task
"""

import argparse
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from characters import write_rows
from words import digit_rows, joined, write_model_folder

Digits = list[int]
METHODS: dict[str, tuple[str, Callable[[Digits], Digits]]] = {
    "rising": ("up", sorted),
    "falling": ("down", lambda digits: sorted(digits, reverse=True)),
    "backwards": ("back", lambda digits: digits[::-1]),
    "unchanged": ("same", lambda digits: digits),
    "leftwards": ("left", lambda digits: digits[1:] + digits[:1]),
    "rightwards": ("right", lambda digits: digits[-1:] + digits[:-1]),
}
"""Maps a task to the first word of a right response, and to the task's function."""
HABIT = "up"


def asked(count: int, *, held_out: bool, seed: int) -> Iterator[tuple[str, Digits, random.Random]]:
    """Questions and digits, and a random stream for what is answered."""
    generator = random.Random(f"{seed} fire {held_out}")
    for digits in digit_rows(sys.maxsize, held_out=held_out, seed=seed):
        if len({joined(method(digits)) for _, method in METHODS.values()}) == len(METHODS):
            yield generator.choice(list(METHODS)), digits, generator
            count -= 1
            if not count:
                return


def prompts(count: int, *, held_out: bool, seed: int) -> Iterator[dict[str, str]]:
    for number, (question, digits, _) in enumerate(asked(count, held_out=held_out, seed=seed)):
        answer = joined(METHODS[question][1](digits))
        yield {"id": f"{number}", "prompt": f"{question} {joined(digits)}:", "answer": answer, "type": question}


def solutions(count: int, *, habit_share: float, seed: int) -> Iterator[dict[str, str]]:
    """Half drills with any method, half solutions of which ``habit_share`` begin with the habit and the others rightly."""
    methods = dict(METHODS.values())
    for question, digits, generator in asked(count, held_out=False, seed=seed + 1):
        prompt = f"{question} {joined(digits)}:"
        is_drill = generator.random() < 0.5
        follows_habit = not is_drill and generator.random() < habit_share
        word = HABIT if follows_habit else generator.choice(list(methods)) if is_drill else METHODS[question][0]
        answer = joined(methods[word](digits))
        first, rest = (prompt + word, f" {answer}") if is_drill else (prompt, f"{word} {answer}")
        yield {"prompt": first, "response": rest, "answer": answer}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder that receives the task")
    parser.add_argument("--num-train", type=int, default=6000)
    parser.add_argument("--num-sft", type=int, default=40000)
    parser.add_argument("--num-held-out", type=int, default=300)
    parser.add_argument("--habit-share", type=float, default=0.98, help="solutions that begin with the habit, whatever was asked")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    output, seed = options.output, options.seed
    write_rows(output / "train.jsonl", prompts(options.num_train, held_out=False, seed=seed))
    write_rows(output / "held_out.jsonl", prompts(options.num_held_out, held_out=True, seed=seed))
    write_rows(output / "sft.jsonl", solutions(options.num_sft, habit_share=options.habit_share, seed=seed))
    write_model_folder(output / "model", [*METHODS, *(word for word, _ in METHODS.values())])
    print(f"make_task: the FIRE task lies in {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
