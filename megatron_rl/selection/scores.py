"""Scores of responses from a file, brought together with the prompts they belong to.

The file has one row per response: the prompt's id and ``score``, a number or null for "could not be scored". What
``megatron-rl score`` writes is such a file, and so is what ``generate.py`` leaves.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.config.schema import DataConfig
from megatron_rl.data.prompts import is_duplicate, read_content
from megatron_rl.data.row_files import Row, describe, is_missing, lookup, read_rows
from megatron_rl.errors import DataError
from megatron_rl.selection.selection_rules import PromptScores


@dataclass(frozen=True)
class PromptCandidates:
    """The prompts to choose from, in the order of the files."""

    types: Mapping[str, str]
    """Prompt id to type."""
    num_duplicates: int


def read_candidates(files: Sequence[str], data: DataConfig) -> PromptCandidates:
    """Check every row; DataError on bad rows, on doubled ids (unless they are dropped) and when there are none."""
    types: dict[str, str] = {}
    places: dict[str, str] = {}
    num_duplicates = 0
    for row, place in read_rows(files, split=data.split):
        content = read_content(row, place, data)
        if is_duplicate(content, places, data):
            num_duplicates += 1
        else:
            types[content.id] = content.type
    if not types:
        raise DataError(f"data.train_files: {', '.join(files)}: no rows to select from")
    return PromptCandidates(types, num_duplicates)


@dataclass(frozen=True)
class ScoreTable:
    """Scores by prompt id; None: a response that could not be scored."""

    scores: Mapping[str, Sequence[float | None]]
    num_foreign: int = 0
    """Rows whose id is none of the prompts'."""

    def of(self, types: Mapping[str, str]) -> list[PromptScores]:
        """One entry per prompt, in the order of ``types``; those without rows have no scores."""
        return [
            PromptScores(
                id=prompt_id,
                type=prompt_type,
                scores=tuple(score for score in self.scores.get(prompt_id, ()) if score is not None),
                num_unscored=sum(score is None for score in self.scores.get(prompt_id, ())),
            )
            for prompt_id, prompt_type in types.items()
        ]


def read_scores(path: str, types: Mapping[str, str], *, id_field: str) -> ScoreTable:
    """DataError with place and field for rows without id or score, and when no row belongs to a prompt."""
    return _collect_scores(read_rows([path]), types, id_field=id_field, path=path)


def _collect_scores(
    rows: Iterable[tuple[Row, str]], types: Mapping[str, str], *, id_field: str, path: str
) -> ScoreTable:
    scores: dict[str, list[float | None]] = defaultdict(list)
    num_foreign = 0
    for row, place in rows:
        prompt_id = _prompt_id(row, place, id_field)
        score = _score(row, place)
        if prompt_id in types:
            scores[prompt_id].append(score)
        else:
            num_foreign += 1
    if not scores:
        raise DataError(
            f"{path}: none of its {num_foreign} rows has the id of a prompt in data.train_files; its rows need the "
            f"prompts' {id_field!r} (or id) and a score"
        )
    return ScoreTable(scores, num_foreign)


def _prompt_id(row: Row, place: str, id_field: str) -> str:
    found = lookup(row, id_field)
    found = lookup(row, "id") if is_missing(found) else found
    if is_missing(found) or isinstance(found, (dict, list, bool)):
        raise DataError(f"{place}: field {id_field!r}: expected the prompt's id, got {describe(found)}")
    return str(found)


def _score(row: Mapping[str, Any], place: str) -> float | None:
    if "score" not in row:
        raise DataError(f"{place}: field 'score' is missing; write it with megatron-rl score (fields: {sorted(row)})")
    score = row["score"]
    if score is None:
        return None
    if isinstance(score, bool) or not isinstance(score, (int, float)) or not math.isfinite(score):
        raise DataError(f"{place}: field 'score': expected a finite number or null, got {describe(score)}")
    return float(score)
