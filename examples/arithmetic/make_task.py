"""Write the arithmetic task: problems, worked solutions and an untrained model folder with its tokenizer.

A problem is a chain of one-digit additions with labelled terms; its solution repeats each term and writes the running
total out, two digits each, so that lengths have a long tail. The last total is the answer::

    prompt   "a:3 b:8 c:1="        3 + 8 + 1
    response " b:8=11 c:1=12"      then the end-of-text token
    answer   "12"

One token is a digit, the equals sign or a whole label (" b:"): a chain of n terms has 2n + 1 prompt tokens and
5(n - 1) + 1 response tokens. Labels let a tiny model find the next term; without them it has to count.

Many sft solutions are hasty: they stop after three totals, right so far, but without the answer of a longer chain. A
policy that imitates them does short chains only; that carrying on pays is for reinforcement learning to find out.

Invariants: the same arguments write the same bytes; no eval prompt is among those of train and sft, for every prompt
belongs to one side, decided by its hash; both sides have the same distribution of lengths; every total has two digits
at most; the output folder appears whole or not at all. Short chains are few (100 of two terms), so prompts repeat.

    python examples/arithmetic/make_task.py --output outputs/arithmetic/task
"""

import argparse
import hashlib
import random
import string
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from task_folder import at_least_one, write_task_folder
from tiny_model import SPECIAL_TOKENS, write_tiny_model

UNKNOWN_TOKEN = SPECIAL_TOKENS[-1]
"""Stands for what the vocabulary lacks: it occurs in no text of the task."""
LABELS = string.ascii_lowercase
MAX_TOTAL = 99
"""Totals are written with two digits."""
EVAL_SHARE = 0.2
"""Share of all possible prompts that only eval may draw."""


@dataclass(frozen=True)
class ChainDistribution:
    """The number of terms n has a probability proportional to ``length_decay ** n``."""

    min_terms: int
    max_terms: int
    length_decay: float

    def __post_init__(self) -> None:
        if not 2 <= self.min_terms <= self.max_terms <= len(LABELS):
            raise ValueError(
                f"expected 2 <= min-terms <= max-terms <= {len(LABELS)} (the labels a to z), "
                f"got min-terms {self.min_terms} and max-terms {self.max_terms}"
            )
        if not 0.0 < self.length_decay <= 1.0:
            raise ValueError(
                f"expected 0 < length-decay <= 1 (1: all lengths alike; less: short chains are more frequent), "
                f"got {self.length_decay}"
            )

    def draw_num_terms(self, generator: random.Random) -> int:
        lengths = range(self.min_terms, self.max_terms + 1)
        return generator.choices(lengths, [self.length_decay**n for n in lengths])[0]


@dataclass(frozen=True)
class Problem:
    terms: tuple[int, ...]

    @property
    def totals(self) -> list[int]:
        """Running totals, from the second term on."""
        return [sum(self.terms[: i + 1]) for i in range(1, len(self.terms))]

    @property
    def prompt(self) -> str:
        return " ".join(f"{label}:{term}" for label, term in zip(LABELS, self.terms, strict=False)) + "="

    @property
    def response(self) -> str:
        steps = zip(LABELS[1:], self.terms[1:], self.totals, strict=False)
        return "".join(f" {label}:{term}={total:02d}" for label, term, total in steps)

    def hasty_response(self, num_totals: int) -> str:
        """The solution given up after ``num_totals`` totals; the whole one where it has no more."""
        return " ".join(self.response.split(" ")[: num_totals + 1])

    @property
    def answer(self) -> str:
        return f"{self.totals[-1]:02d}"

    def is_eval(self, seed: int) -> bool:
        """True if the prompt is held out for evaluation. A hash decides, so no list of the training prompts is needed."""
        digest = hashlib.sha256(f"{seed} {self.prompt}".encode()).digest()
        return int.from_bytes(digest[:8], "big") < EVAL_SHARE * 2**64


def draw_problem(generator: random.Random, chains: ChainDistribution, *, for_eval: bool, seed: int) -> Problem:
    """A problem of the side asked for. The length is drawn first, so that rejections do not favour any."""
    num_terms = chains.draw_num_terms(generator)
    while True:
        problem = Problem(tuple(generator.randint(0, 9) for _ in range(num_terms)))
        if sum(problem.terms) <= MAX_TOTAL and problem.is_eval(seed) == for_eval:
            return problem


@dataclass(frozen=True)
class Haste:
    """``share`` of the sft solutions stop after ``num_totals`` totals, right so far but without the answer."""

    share: float
    num_totals: int

    def __post_init__(self) -> None:
        if not 0.0 <= self.share < 1.0:
            raise ValueError(f"expected 0 <= hasty-share < 1, got {self.share}")
        if self.num_totals < 1:
            raise ValueError(f"expected hasty-totals of at least 1, got {self.num_totals}")


def rows(name: str, count: int, chains: ChainDistribution, haste: Haste, seed: int) -> Iterator[dict[str, str]]:
    """The rows of file ``name`` (train, sft or eval), each file from a random stream of its own."""
    generator = random.Random(f"{seed} {name}")
    for index in range(count):
        problem = draw_problem(generator, chains, for_eval=name == "eval", seed=seed)
        hasty = name == "sft" and generator.random() < haste.share
        yield {
            "id": f"{name}-{index:06d}",
            "prompt": problem.prompt,
            "answer": problem.answer,
            "response": problem.hasty_response(haste.num_totals) if hasty else problem.response,
        }


def vocabulary() -> list[str]:
    """All tokens, in the order of their ids. Only the first label of a prompt has no space before it."""
    labels = [f"{LABELS[0]}:", *(f" {label}:" for label in LABELS[1:])]
    return [*SPECIAL_TOKENS, *string.digits, "=", *labels]


def write_model_folder(folder: Path) -> None:
    """An untrained model of this vocabulary, which divides by 2 and 4 for tensor parallelism."""
    write_tiny_model(folder, vocabulary(), " ?[a-z]:|.", vocab_size=len(vocabulary()))


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder that receives the task")
    parser.add_argument("--num-train", type=at_least_one, default=20000, help="prompts for reinforcement learning")
    parser.add_argument("--num-sft", type=at_least_one, default=20000, help="worked solutions for the warm start")
    parser.add_argument("--num-eval", type=at_least_one, default=500, help="held-out prompts")
    parser.add_argument("--min-terms", type=int, default=2, help="terms of the shortest chain")
    parser.add_argument("--max-terms", type=int, default=16, help="terms of the longest chain")
    parser.add_argument(
        "--length-decay", type=float, default=0.85, help="P(n terms) is proportional to this to the power n; 1: uniform"
    )
    parser.add_argument("--hasty-share", type=float, default=0.6, help="share of the sft solutions that are hasty")
    parser.add_argument("--hasty-totals", type=int, default=3, help="a hasty solution stops after so many totals")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--overwrite", action="store_true", help="replace an output folder that is there already")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    options = parse_arguments(arguments)
    counts = {"train": options.num_train, "sft": options.num_sft, "eval": options.num_eval}
    try:
        chains = ChainDistribution(options.min_terms, options.max_terms, options.length_decay)
        haste = Haste(options.hasty_share, options.hasty_totals)
        files = {name: rows(name, count, chains, haste, options.seed) for name, count in counts.items()}
        write_task_folder(options.output, files, write_model_folder, overwrite=options.overwrite)
    except (ValueError, OSError) as error:
        print(f"make_task: error: {error}", file=sys.stderr)
        return 2
    sizes = ", ".join(f"{count} {name}" for name, count in counts.items())
    print(f"make_task: {sizes} problems of {chains.min_terms} to {chains.max_terms} terms in {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
