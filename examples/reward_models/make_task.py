"""Write three small tasks for reward models: preferences, labelled programs, and an untrained model folder.

Preferences: digits are to be sorted; the sorted row is chosen over a row of the same digits in another order::

    prompt "7 2 9:"   chosen "2 7 9"   rejected "7 2 9"

Programs assign letters; a line is wrong if it uses a letter without a value, and nothing after it can fix that::

    a = 4         1
    # note        0
    b = a + 1     1
    c = d + 2    -1      (d has no value)
    a = 1        -1

responses.jsonl holds such programs with their tests, for label-lines (``true_labels`` say what it should find), and
solutions.jsonl programs without a spoilt line, from which sft makes the model that completes prefixes.

The same prompts with answers (prompts.*.jsonl) serve sft and train: a critic may start from these models.
The same arguments write the same bytes; held-out digits never occur in training.

    python examples/reward_models/make_task.py --output outputs/reward_models/task
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from words import digit_rows, joined, write_model_folder

LETTERS = "abcdef"


def preferences(count: int, *, held_out: bool, seed: int) -> Iterator[dict[str, str]]:
    generator = random.Random(f"{seed} wrong {held_out}")
    for digits in digit_rows(count, held_out=held_out, seed=seed):
        wrong = sorted(digits)
        while wrong == sorted(digits):
            wrong = generator.sample(digits, len(digits))
        yield {"prompt": f"{_spaced(digits)}:", "chosen": _spaced(sorted(digits)), "rejected": _spaced(wrong)}


def prompts(count: int, *, held_out: bool, seed: int) -> Iterator[dict[str, str]]:
    """Rows for sft and train; the reward compares the digits as one number."""
    for number, digits in enumerate(digit_rows(count, held_out=held_out, seed=seed)):
        answer = joined(sorted(digits))
        yield {"id": f"{number}", "prompt": f"{_spaced(digits)}:", "answer": answer, "response": answer}


def programs(
    count: int, *, held_out: bool, seed: int, spoilt_share: float = 0.2, name: str = "programs"
) -> Iterator[dict[str, Any]]:
    generator = random.Random(f"{seed} {name} {held_out}")
    for _ in range(count):
        lines, labels = [], []
        known: list[str] = []
        spoilt = False
        for _ in range(generator.randint(3, 8)):
            if generator.random() < 0.15:
                lines.append("# note")
                labels.append(0)
                continue
            letter, number = generator.choice(LETTERS), generator.randint(1, 9)
            unknown = [letter for letter in LETTERS if letter not in known]
            if unknown and generator.random() < spoilt_share:
                lines.append(f"{letter} = {generator.choice(unknown)} + {number}")
                spoilt = True
            elif known and generator.random() < 0.6:
                lines.append(f"{letter} = {generator.choice(known)} + {number}")
            else:
                lines.append(f"{letter} = {number}")
            labels.append(-1 if spoilt else 1)
            if letter not in known:
                known.append(letter)
        yield {"prompt": "# note\n", "response": "\n".join(lines) + "\n", "line_labels": labels}


def responses(count: int, *, seed: int) -> Iterator[dict[str, Any]]:
    """Rows for label-lines: the tests are passed by any program that runs to its end."""
    for number, row in enumerate(programs(count, held_out=True, seed=seed, name="responses")):
        yield {"id": f"{number}", "tests": "assert True", "true_labels": row.pop("line_labels"), **row}


def solutions(count: int, *, seed: int) -> Iterator[dict[str, Any]]:
    """Rows for sft."""
    for row in programs(count, held_out=False, seed=seed, spoilt_share=0.0, name="solutions"):
        yield {"prompt": row["prompt"], "response": row["response"], "answer": "0"}


def _spaced(digits: list[int]) -> str:
    return " ".join(map(str, digits))


def write_task(output: Path, *, num_train: int, num_held_out: int, seed: int) -> None:
    write_model_folder(output / "model", ["note"])
    for name, rows in (("preferences", preferences), ("programs", programs), ("prompts", prompts)):
        for side, count in (("train", num_train), ("held_out", num_held_out)):
            with open(output / f"{name}.{side}.jsonl", "w", encoding="utf-8") as file:
                for row in rows(count, held_out=side == "held_out", seed=seed):
                    file.write(json.dumps(row) + "\n")
    for name, rows, count in (("responses", responses, num_held_out), ("solutions", solutions, num_train)):
        with open(output / f"{name}.jsonl", "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows(count, seed=seed))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder that receives the files")
    parser.add_argument("--num-train", type=int, default=8000)
    parser.add_argument("--num-held-out", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    write_task(options.output, num_train=options.num_train, num_held_out=options.num_held_out, seed=options.seed)
    print(f"make_task: {options.num_train} training and {options.num_held_out} held-out rows in {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
