"""Add to every prompt its anchor for the rewards ``pairwise`` and ``genrm``: the best of its scored responses.

    megatron-rl score --reward NAME --input responses.jsonl --output scored.jsonl
    python tools/make_anchors.py --scored scored.jsonl --prompts prompts.jsonl --output prompts_with_anchors.jsonl

``scored.jsonl`` has one row per response (id, response, score), several per id; an unscored response (score null) and a
response with a malformed thought cannot be an anchor. The anchor is the response's solution, without its thought.

The choice depends on the responses only, not on their order: the highest score wins, then the shorter solution, then
the alphabetically first. A prompt without an anchor is an error, or is skipped with ``--drop``.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.data.row_files import read_rows
from megatron_rl.errors import DataError, UserError
from megatron_rl.rewards.judges.judge import solution_of

MAX_REPORTED = 5

Row = dict[str, Any]


@dataclass(frozen=True)
class Best:
    score: float
    solution: str
    num_responses: int
    """Number of responses that could have been the anchor."""

    @property
    def rank(self) -> tuple[float, int, str]:
        """Smaller is better."""
        return -self.score, len(self.solution), self.solution


def best_responses(rows: Iterable[tuple[Row, str]], id_field: str = "id") -> dict[str, Best]:
    """The best response of every id.

    Args:
        rows: (row, place) of scored responses.
        id_field: The field that says which prompt a response belongs to.

    Raises:
        DataError: a row without id, response or score, with its place.
    """
    found: dict[str, Best] = {}
    for row, place in rows:
        key = _id(row, place, id_field)
        response, score = row.get("response"), row.get("score")
        if not isinstance(response, str):
            raise DataError(f"{place}: field 'response': expected text, got {type(response).__name__}")
        if "score" not in row or isinstance(score, bool) or not isinstance(score, (int, float, type(None))):
            raise DataError(f"{place}: field 'score': expected a number or null, got {score!r}; score the file first")
        solution = solution_of(response, require_think=False, opened_by_prompt=False)
        if score is None or not math.isfinite(score) or not solution:
            continue
        earlier = found.get(key)
        candidate = Best(float(score), solution, 1 + (earlier.num_responses if earlier else 0))
        if earlier is None or candidate.rank < earlier.rank:
            found[key] = candidate
        else:
            found[key] = Best(earlier.score, earlier.solution, candidate.num_responses)
    return found


def with_anchors(
    prompts: Iterable[tuple[Row, str]], best: dict[str, Best], id_field: str = "id", *, drop: bool = False
) -> tuple[list[Row], list[str]]:
    """(prompts with the fields anchor and anchor_score, places of those without an anchor).

    Raises:
        DataError: an id twice, or prompts without an anchor unless they may be dropped.
    """
    rows, missing, places = [], [], {}
    for row, place in prompts:
        key = _id(row, place, id_field)
        if key in places:
            raise DataError(f"{place}: id {key!r} already stands at {places[key]}; a prompt has one anchor")
        places[key] = place
        if key in best:
            rows.append({**row, "anchor": best[key].solution, "anchor_score": best[key].score})
        else:
            missing.append(f"{place}: id {key!r} has no response that could be its anchor")
    if missing and not drop:
        shown = "\n".join(missing[:MAX_REPORTED])
        raise DataError(
            f"{len(missing)} prompts have no anchor; score more responses, or leave them out (--drop):\n{shown}"
        )
    return rows, missing


def _id(row: Row, place: str, id_field: str) -> str:
    if row.get(id_field) is None:
        raise DataError(f"{place}: field {id_field!r} is missing; the row has {sorted(row)}")
    return str(row[id_field])


def _write(path: Path, rows: Sequence[Row]) -> None:
    """The file appears whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    os.replace(partial, path)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Best of N responses as the anchor of every prompt.")
    parser.add_argument("--scored", required=True, nargs="+", help="scored responses: id, response, score")
    parser.add_argument("--prompts", required=True, nargs="+", help="prompts that receive the field anchor")
    parser.add_argument("--output", required=True, help="JSONL file to write")
    parser.add_argument("--id-field", default="id")
    parser.add_argument("--drop", action="store_true", help="skip prompts without an anchor")
    arguments = parser.parse_args(argv)
    try:
        best = best_responses(read_rows(arguments.scored), arguments.id_field)
        prompts = read_rows(arguments.prompts)
        rows, missing = with_anchors(prompts, best, arguments.id_field, drop=arguments.drop)
        if not rows:
            raise DataError("no prompt has an anchor; do the ids of both files agree?")
        _write(Path(arguments.output), rows)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    counts = [best[_id(row, "", arguments.id_field)].num_responses for row in rows]
    print(
        f"{len(rows)} prompts with an anchor, best of {min(counts)} to {max(counts)} responses, "
        f"mean score {sum(row['anchor_score'] for row in rows) / len(rows):.4f}; {len(missing)} left out"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
