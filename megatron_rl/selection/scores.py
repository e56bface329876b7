"""Reads scores of responses from a file and assigns them to their prompts.

The file has one row per response: the prompt's id and ``score``, a number, or null for an unscored response.
``megatron-rl score`` and ``generate.py`` write such files.
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
    """Maps prompt ids to types."""
    num_duplicates: int


def read_candidates(files: Sequence[str], data: DataConfig) -> PromptCandidates:
    """Read and check all prompts.

    Raises:
        DataError: a bad row, a duplicate id (unless ``data`` drops duplicates), or no rows.
    """
    types: dict[str, str] = {}
    sources: dict[str, str] = {}
    num_duplicates = 0
    for row, source in read_rows(files, split=data.split):
        content = read_content(row, source, data)
        if is_duplicate(content, sources, data):
            num_duplicates += 1
        else:
            types[content.id] = content.type
    if not types:
        raise DataError(f"data.train_files: {', '.join(files)}: no rows to select from")
    return PromptCandidates(types, num_duplicates)


@dataclass(frozen=True)
class ScoreTable:
    """Scores of responses, keyed by prompt id; None is an unscored response."""

    scores: Mapping[str, Sequence[float | None]]
    num_foreign: int = 0
    """Number of rows whose id belongs to no prompt."""

    def of(self, types: Mapping[str, str]) -> list[PromptScores]:
        """One entry per prompt, in the order of ``types``; prompts without rows have no scores."""
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
    """Read the scores of the prompts in ``types`` from ``path``.

    Raises:
        DataError: a row without a valid id or score (reported with file, line and field), or no row of any prompt.
    """
    return _collect_scores(read_rows([path]), types, id_field=id_field, path=path)


def _collect_scores(
    rows: Iterable[tuple[Row, str]], types: Mapping[str, str], *, id_field: str, path: str
) -> ScoreTable:
    scores: dict[str, list[float | None]] = defaultdict(list)
    num_foreign = 0
    for row, source in rows:
        prompt_id = _prompt_id(row, source, id_field)
        score = _score(row, source)
        if prompt_id in types:
            scores[prompt_id].append(score)
        else:
            num_foreign += 1
    if not scores:
        raise DataError(
            f"{path}: none of {num_foreign} rows has the id of a prompt in data.train_files; rows need the "
            f"prompts' {id_field!r} (or id) and a score"
        )
    return ScoreTable(scores, num_foreign)


def _prompt_id(row: Row, source: str, id_field: str) -> str:
    value = lookup(row, id_field)
    value = lookup(row, "id") if is_missing(value) else value
    if is_missing(value) or isinstance(value, (dict, list, bool)):
        raise DataError(f"{source}: field {id_field!r}: expected the prompt's id, got {describe(value)}")
    return str(value)


def _score(row: Mapping[str, Any], source: str) -> float | None:
    if "score" not in row:
        raise DataError(f"{source}: field 'score' is missing; write it with megatron-rl score (fields: {sorted(row)})")
    score = row["score"]
    if score is None:
        return None
    if isinstance(score, bool) or not isinstance(score, (int, float)) or not math.isfinite(score):
        raise DataError(f"{source}: field 'score': expected a finite number or null, got {describe(score)}")
    return float(score)
