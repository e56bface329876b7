"""Write the long-tailed task: division by repeated subtraction, worked solutions, and an untrained model folder.

A response takes the divisor away until what is left falls below zero; all steps have to be right. Numbers are written
from their units up, each digit with its place, so that a token is a digit and its place. An apostrophe in the place of a
plus says that the units have borrowed a ten::

    prompt   "from 1+30+000+0000 take 2+10:"                        31, 12
    response " 9'10+000+0000 7'00+000+0000 5+90+900<0"              19, 7, and below zero; then the end-of-text token

A response has five tokens for each subtraction: it is as long as the quotient is large. Quotients have a long tail by
nature: that of two random numbers is above q with a probability of about 1 / q. Here that probability is that of a
Pareto distribution, ``q ** -tail``, from the least quotient up to the largest one.

Worked solutions are careless: a ten that the units borrow is forgotten with a probability (``slip_share``), and the
solution goes on from the wrong number. A policy that imitates them is right on short chains only; reinforcement learning
finds out that forgetting never pays.

Invariants: the same arguments write the same bytes; no eval prompt is among those of train and sft, for every prompt
belongs to one side, decided by its hash; both sides have the same distribution of lengths; exactly one response is
right; the output folder appears whole or not at all.

    python examples/long_tail/make_task.py --output outputs/long_tail/task [--tail 1.15] [--seed 1]
"""

import argparse
import hashlib
import random
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from task_folder import at_least_one, write_task_folder
from tiny_model import SPECIAL_TOKENS, write_tiny_model

PLACES = 4
"""Digits of a dividend; a divisor has two."""
MAX_DIVISOR = 99
EVAL_SHARE = 0.2
"""Share of all possible prompts that only eval may draw."""
MAX_QUOTIENT = 420
"""Longer responses do not fit into the model."""
BORROWED = "'"
BELOW_ZERO = "<0"
"""Mark of a number below zero instead of its last digit; the other digits are those of the number plus 10,000."""
MAX_TOKENS = 2176
"""Maximum tokens of prompt and response."""


@dataclass(frozen=True)
class Quotients:
    """Quotients from ``smallest`` to ``largest``: a Pareto distribution of index ``tail``, cut off and rounded down."""

    tail: float
    smallest: int
    largest: int

    def __post_init__(self) -> None:
        if not self.tail > 0.0:
            raise ValueError(f"expected a tail above 0 (1.15; less: a heavier tail), got {self.tail}")
        if not 1 <= self.smallest <= self.largest <= MAX_QUOTIENT:
            raise ValueError(
                f"expected 1 <= min-quotient <= max-quotient <= {MAX_QUOTIENT} (longer responses do not fit into the model), "
                f"got min-quotient {self.smallest} and max-quotient {self.largest}"
            )

    def draw(self, generator: random.Random) -> int:
        """Draw a quotient by the inverse of the distribution function."""
        cut = (self.smallest / (self.largest + 1)) ** self.tail
        drawn = self.smallest * (1.0 - generator.random() * (1.0 - cut)) ** (-1.0 / self.tail)
        return min(int(drawn), self.largest)


@dataclass(frozen=True)
class Problem:
    dividend: int
    divisor: int

    @property
    def prompt(self) -> str:
        return f"from{written(self.dividend)} take{written(self.divisor, 2)}:"

    @property
    def response(self) -> str:
        return self.careless_response(0.0, random.Random())

    def careless_response(self, slip_share: float, generator: random.Random) -> str:
        """The solution of one who forgets that share of the tens that units borrow; cut off at 421 subtractions."""
        left, steps = self.dividend, []
        while left >= 0 and len(steps) <= MAX_QUOTIENT:
            borrows = left % 10 < self.divisor % 10 and generator.random() >= slip_share
            forgets = left % 10 < self.divisor % 10 and not borrows
            left -= self.divisor - 10 * forgets
            steps.append(written(left, borrows=borrows))
        return "".join(steps)

    def is_eval(self, seed: int) -> bool:
        """True if the prompt is held out for evaluation. A hash decides, so no list of the training prompts is needed."""
        digest = hashlib.sha256(f"{seed} {self.prompt}".encode()).digest()
        return int.from_bytes(digest[:8], "big") < EVAL_SHARE * 2**64


def written(number: int, places: int = PLACES, *, borrows: bool = False) -> str:
    """``" 7+20+000+0000"`` for 27, ``" 1+90+900<0"`` for -9; an apostrophe for the first plus with ``borrows``."""
    units, *others = (f"{number // 10**place % 10}{'0' * place}" for place in range(places))
    others = ["+".join(others)] if number >= 0 else ["+".join(others[:-1]) + BELOW_ZERO]
    return f" {units}{BORROWED if borrows else '+'}{''.join(others)}"


def draw_problem(generator: random.Random, quotients: Quotients, *, for_eval: bool, seed: int) -> Problem:
    """A problem of the side asked for. The quotient is drawn first, so that rejections do not favour any."""
    quotient = quotients.draw(generator)
    while True:
        divisor = generator.randint(1, min(MAX_DIVISOR, 10**PLACES // (quotient + 1)))
        problem = Problem(quotient * divisor + generator.randrange(divisor), divisor)
        if problem.is_eval(seed) == for_eval:
            return problem


def rows(name: str, count: int, quotients: Quotients, slip_share: float, seed: int) -> Iterator[dict[str, str]]:
    """The rows of file ``name`` (train, sft or eval), each file from a random stream of its own.

    The answer is a regular expression that the whole response has to match.
    """
    generator = random.Random(f"{seed} {name}")
    for index in range(count):
        problem = draw_problem(generator, quotients, for_eval=name == "eval", seed=seed)
        right = problem.response
        response = problem.careless_response(slip_share, generator) if name == "sft" else right
        yield {"id": f"{name}-{index:06d}", "prompt": problem.prompt, "answer": re.escape(right), "response": response}


def vocabulary() -> list[str]:
    """All tokens, in the order of their ids."""
    digits = [f"{before}{digit}{'0' * place}" for place, before in enumerate((" ", "", "+", "+")) for digit in range(10)]
    return [*SPECIAL_TOKENS, "from", " take", ":", "+", BORROWED, BELOW_ZERO, *digits]


def write_model_folder(folder: Path) -> None:
    """An untrained model of 32 dimensions; ids beyond the vocabulary make its size divide by 4 for tensor parallelism."""
    pattern = r"from| take|:|<0| \d|\+\d0{2,3}(?!\d)|\d0(?!\d)|[+']"
    write_tiny_model(folder, vocabulary(), pattern, vocab_size=52, max_tokens=MAX_TOKENS, hidden_size=32)


def share(text: str) -> float:
    value = float(text)
    if not 0.0 <= value <= 1.0:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 1, got {text}")
    return value


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder that receives the task")
    parser.add_argument("--num-train", type=at_least_one, default=20000, help="prompts for reinforcement learning")
    parser.add_argument("--num-sft", type=at_least_one, default=20000, help="worked solutions for the warm start")
    parser.add_argument("--num-eval", type=at_least_one, default=2000, help="held-out prompts")
    parser.add_argument("--tail", type=float, default=1.15, help="index of the quotients' Pareto tail; less: heavier")
    parser.add_argument("--min-quotient", type=int, default=3)
    parser.add_argument("--max-quotient", type=int, default=400)
    parser.add_argument("--slip-share", type=share, default=0.4, help="share of borrowed tens that sft solutions forget")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--overwrite", action="store_true", help="replace an output folder that is there already")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    options = parse_arguments(arguments)
    counts = {"train": options.num_train, "sft": options.num_sft, "eval": options.num_eval}
    try:
        quotients = Quotients(options.tail, options.min_quotient, options.max_quotient)
        files = {name: rows(name, count, quotients, options.slip_share, options.seed) for name, count in counts.items()}
        write_task_folder(options.output, files, write_model_folder, overwrite=options.overwrite)
    except (ValueError, OSError) as error:
        print(f"make_task: error: {error}", file=sys.stderr)
        return 2
    sizes = ", ".join(f"{count} {name}" for name, count in counts.items())
    print(f"make_task: {sizes} problems with quotients of {quotients.smallest} to {quotients.largest} in {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
