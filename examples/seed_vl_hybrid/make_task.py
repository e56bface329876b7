"""Write the task of hybrid RL: visual puzzles that verifiers check, general prompts that a judge compares, and its data.

    outputs/seed_vl_hybrid/task/
        pictures/*/*.png                    what the rows' image parts name
        prompts.train.jsonl                 all types; ``response`` is a worked solution for sft, wrong in half of the rows
        prompts.held_out.jsonl              the same for other scenes; and general prompts once more as type named, which a
                                            rule checks: whether the judge taught the truth
        judgements.train.jsonl              texts as the judge reads them, and YES or NO
        judgements.held_out.jsonl
        model/                              the untrained policy: a Qwen3-VL-MoE
        judge_model/                        the untrained judge: a Qwen3

    python examples/seed_vl_hybrid/make_task.py --output outputs/seed_vl_hybrid/task
"""

import argparse
import random
import sys
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]
from characters import write_rows
from pictures import draw
from puzzles import MAKERS, WORDS, Puzzle, near_misses, puzzles
from vision_model import write_vision_model
from words import write_model_folder

from megatron_rl.rewards.judges.templates import NO_WORD, YES_WORD, render_judge

SPOKEN_PICTURE = "[image]"
"""Text that a judge reads instead of a picture."""
RULE_TYPE = "named"


def rows(folder: Path, *, count: int, held_out: bool, seed: int) -> Iterator[dict[str, Any]]:
    """``count`` rows of each type; writes their pictures."""
    side = "held_out" if held_out else "train"
    (folder / "pictures" / side).mkdir(parents=True, exist_ok=True)
    for type_ in MAKERS:
        generator = random.Random(f"{seed} worked {type_} {held_out}")
        for index, puzzle in enumerate(puzzles(type_, count, held_out=held_out, seed=seed)):
            id_ = f"{side}-{type_}-{index}"
            content = [{"type": "text", "text": puzzle.question}]
            if puzzle.with_picture:
                path = f"pictures/{side}/{type_}-{index}.png"
                draw(puzzle.scene).save(folder / path)
                content = [{"type": "image", "image": path}, *content]
            row = {"id": id_, "prompt": [{"role": "user", "content": content}], "type": type_, "answer": puzzle.solution}
            yield row | {"response": puzzle.worked(generator)}
            if held_out and type_ == "general":
                yield row | {"id": f"{id_}-rule", "type": RULE_TYPE, "answer": in_any_order(puzzle.solution)}


def in_any_order(solution: str) -> str:
    """A regular expression of all ways to name the same things."""
    return "|".join(", ".join(names) for names in permutations(solution.split(", ")))


def judgements(count: int, *, held_out: bool, seed: int) -> Iterator[dict[str, str]]:
    """Half of the responses are right: the reference's things in any order."""
    generator = random.Random(f"{seed} judgements {held_out}")
    side = "held_out" if held_out else "train"
    for index, puzzle in enumerate(puzzles("general", count, held_out=held_out, seed=seed + 1000)):
        right = generator.random() < 0.5
        names = puzzle.solution.split(", ")
        generator.shuffle(names)
        response = ", ".join(names) if right else generator.choice(near_misses(names, generator))
        text = render_judge(spoken(puzzle), response, puzzle.solution)
        yield {"id": f"{side}-{index}", "prompt": text, "response": YES_WORD if right else NO_WORD}


def spoken(puzzle: Puzzle) -> str:
    return f"{SPOKEN_PICTURE}{puzzle.question}" if puzzle.with_picture else puzzle.question


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder that receives the task")
    parser.add_argument("--num-train", type=int, default=3000, help="of each type")
    parser.add_argument("--num-held-out", type=int, default=100, help="of each type")
    parser.add_argument("--num-judgements", type=int, default=12000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    for side, count, num_judged in (
        ("train", options.num_train, options.num_judgements),
        ("held_out", options.num_held_out, options.num_held_out),
    ):
        where = {"held_out": side == "held_out", "seed": options.seed}
        write_rows(options.output / f"prompts.{side}.jsonl", rows(options.output, count=count, **where))
        write_rows(options.output / f"judgements.{side}.jsonl", judgements(num_judged, **where))
    write_vision_model(options.output / "model", WORDS)
    write_model_folder(options.output / "judge_model", [*WORDS, "image"])
    print(f"make_task: pictures, puzzles and judgements in {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
