"""Write the line-rewards task: steps in symbols, to be written as a function, a line per step, judged by unit tests.

Every line goes on from the line before. One that reads another variable spoils the program, and the tests only say that
something is wrong::

    prompt   "+3 *2 -4:"
    response " b=a+3\\n c=b*2\\n d=c-4\\n return d\\n"      the body of f(a)
    tests    assert f(1) == 4 ...

Each line of the worked solutions reads a wrong variable with a probability of 30 %, so a policy that imitates them
passes the tests of long programs rarely.

Invariants: the same arguments write the same bytes; a prompt belongs to training or is held out, by its hash.

    python examples/line_rewards/make_task.py --output outputs/line_rewards/task
"""

import argparse
import random
import string
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from characters import write_rows
from tiny_model import SPECIAL_TOKENS, write_tiny_model

Step = tuple[str, int]
"""Operator and number."""
OPERATORS = "+-*"
NUMBERS = (2, 3, 4, 5)
LENGTHS = (5, 9)
"""Steps of a program, from and to."""
VARIABLES = string.ascii_lowercase[: LENGTHS[1] + 1]
HEAD = f"def f({VARIABLES[0]}):\n"
TEST_INPUTS = (1, 10, 37)
HELD_OUT_SHARE = 5
"""One in so many prompts is held out."""
TOKEN_PATTERN = r" [a-z]=| return |[\s\S]"
VOCABULARY = (
    *SPECIAL_TOKENS, *(f" {name}=" for name in VARIABLES), *VARIABLES, " return ", *OPERATORS, *string.digits, " ", ":", "\n",
)  # fmt: skip


def body(steps: Sequence[Step], read: str = VARIABLES) -> str:
    """The function's body; line i reads variable ``read[i]``, in a right program the one before its own."""
    lines = [
        f" {name}={source}{operator}{number}\n"
        for name, source, (operator, number) in zip(VARIABLES[1:], read, steps, strict=False)
    ]
    return "".join(lines) + f" return {VARIABLES[len(steps)]}\n"


def slips(count: int, share: float, generator: random.Random) -> str:
    """The variables that ``count`` lines read, of which ``share`` are wrong."""
    return "".join(
        generator.choice(VARIABLES.replace(name, "")) if generator.random() < share else name for name in VARIABLES[:count]
    )


def apply(steps: Sequence[Step], value: int) -> int:
    for operator, number in steps:
        value = value + number if operator == "+" else value - number if operator == "-" else value * number
    return value


def steps_of(prompt: str) -> list[Step]:
    return [(step[0], int(step[1:])) for step in prompt.rstrip(":").split()]


def tasks(count: int, *, held_out: bool, seed: int) -> Iterator[tuple[str, list[Step]]]:
    generator = random.Random(f"{seed} steps {held_out}")
    while count:
        num_steps = generator.randint(*LENGTHS)
        steps = [(generator.choice(OPERATORS), generator.choice(NUMBERS)) for _ in range(num_steps)]
        prompt = " ".join(f"{operator}{number}" for operator, number in steps) + ":"
        if (zlib.crc32(prompt.encode()) % HELD_OUT_SHARE == 0) == held_out:
            count -= 1
            yield prompt, steps


def prompts(count: int, *, held_out: bool, seed: int) -> Iterator[dict[str, object]]:
    """Rows for label-lines and train; the tests are the only ground truth."""
    for number, (prompt, steps) in enumerate(tasks(count, held_out=held_out, seed=seed)):
        tests = [f"assert f({x}) == {apply(steps, x)}" for x in TEST_INPUTS]
        yield {"id": f"{number}", "prompt": prompt, "prompt_code": HEAD, "entry_point": "f", "tests": tests}


def solutions(count: int, *, slip_share: float, seed: int) -> Iterator[dict[str, str]]:
    """Rows for sft: each line is wrong with probability ``slip_share``."""
    generator = random.Random(f"{seed} slips")
    for prompt, steps in tasks(count, held_out=False, seed=seed + 1):
        yield {"prompt": prompt, "response": body(steps, slips(len(steps), slip_share, generator))}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder that receives the task")
    parser.add_argument("--num-train", type=int, default=6000)
    parser.add_argument("--num-sft", type=int, default=40000)
    parser.add_argument("--num-held-out", type=int, default=300)
    parser.add_argument("--num-label", type=int, default=300, help="prompts whose responses get line labels")
    parser.add_argument("--slip-share", type=float, default=0.3, help="wrong lines of the worked solutions")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    output, seed = options.output, options.seed
    write_rows(output / "train.jsonl", prompts(options.num_train, held_out=False, seed=seed))
    write_rows(output / "held_out.jsonl", prompts(options.num_held_out, held_out=True, seed=seed))
    write_rows(output / "label.train.jsonl", prompts(options.num_label, held_out=False, seed=seed + 2))
    write_rows(output / "label.held_out.jsonl", prompts(options.num_label // 4, held_out=True, seed=seed + 2))
    write_rows(output / "sft.jsonl", solutions(options.num_sft, slip_share=options.slip_share, seed=seed))
    write_tiny_model(output / "model", VOCABULARY, TOKEN_PATTERN, vocab_size=48)
    print(f"make_task: the line-rewards task lies in {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
