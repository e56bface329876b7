"""Write the PAG task: six digits to sort, answered, verified and revised by one tiny model.

A worked solution is a dialogue in the words that recipe pag.yaml gives the environment::

    prompt "729153:"   "123759" end " Right?" "no" end " Again:" "123579" end " Right?" "yes"

To see that a list is not sorted is easier than to sort it, so a verdict can be better than a guess. Answers and verdicts of the worked
solutions are often wrong (in a wrong answer two neighbours have changed places): the model that imitates them knows the roles, and
reinforcement learning makes it good at them. Prompts of eval never occur in training.

    python examples/pag/make_task.py --output outputs/pag/task
"""

import argparse
import random
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from characters import END, write_model_folder, write_rows

VERIFY, REVISE, RIGHT, WRONG = " Right?", " Again:", "yes", "no"
"""The texts of environment.options in pag.yaml."""
ANSWER_RIGHT, REVISION_RIGHT, VERDICT_RIGHT = 0.6, 0.7, 0.9
"""Shares of the worked solutions."""
NUM_DIGITS = 6
EVAL_SHARE = 5
"""One in so many prompts is for eval."""


def solution(digits: str, generator: random.Random) -> str:
    right = "".join(sorted(digits))

    def answer(share_right: float) -> str:
        if generator.random() < share_right:
            return right
        places = [i for i in range(len(right) - 1) if right[i] != right[i + 1]]
        i = generator.choice(places)
        return right[:i] + right[i + 1] + right[i] + right[i + 2 :]

    def verdict(given: str) -> str:
        says_right = (given == right) == (generator.random() < VERDICT_RIGHT)
        return RIGHT if says_right else WRONG

    first = answer(ANSWER_RIGHT)
    turns = [first, f"{VERIFY}{verdict(first)}"]
    if turns[-1].endswith(WRONG):
        second = answer(REVISION_RIGHT)
        turns += [f"{REVISE}{second}", f"{VERIFY}{verdict(second)}"]
    return END.join(turns)


def rows(name: str, count: int, seed: int) -> Iterator[dict[str, str]]:
    """The rows of file ``name``: train, sft or eval."""
    generator = random.Random(f"{seed} {name}")
    index = 0
    while index < count:
        digits = "".join(generator.choices("123456789", k=NUM_DIGITS))
        if (zlib.crc32(digits.encode()) % EVAL_SHARE == 0) != (name == "eval") or len(set(digits)) == 1:
            continue
        response = solution(digits, generator)
        yield {"id": f"{name}-{index}", "prompt": f"{digits}:", "answer": "".join(sorted(digits)), "response": response}
        index += 1


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder that receives the task")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    for name, count in (("train", 8000), ("sft", 20000), ("eval", 200)):
        write_rows(options.output / f"{name}.jsonl", rows(name, count, options.seed))
    write_model_folder(options.output / "model")
    print(f"make_task: the PAG task lies in {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
