"""Training data of reward models: pairs of responses of which one is better, and programs with labeled lines.

A preference is a row with the prompt (data.prompt_field: text or messages) and the texts ``chosen`` and
``rejected``. A labeled program has the prompt, data.response_field and ``line_labels``, as written by `megatron-rl
label-lines`. Every row is checked before training; an invalid row is an error with source, field and reason.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_rl.config.derived import model_has_vision
from megatron_rl.config.schema import Config, DataConfig, RewardModelKind, RewardTrainConfig
from megatron_rl.data.code_lines import ENTRY_POINT_FIELD, code_lines
from megatron_rl.data.prompts import RowContent, check_images, read_content, text_field
from megatron_rl.data.row_files import describe, lookup, read_rows
from megatron_rl.errors import DataError, UserError

CHOSEN_FIELD, REJECTED_FIELD = "chosen", "rejected"
_LABELS_FIELD = "line_labels"
LABELS = (1, -1, 0)


@dataclass(frozen=True)
class Preference:
    content: RowContent
    """Content of the prompt."""
    chosen: str
    rejected: str


@dataclass(frozen=True)
class LabeledProgram:
    content: RowContent
    """Content of the prompt."""
    response: str
    entry_point: str
    """Function under test, if the row names it."""
    labels: tuple[int, ...]
    """One label per line of the response's program: 1 recoverable, -1 not, 0 neutral."""


def load_preferences(files: Sequence[str], data: DataConfig) -> list[Preference]:
    """Every row of ``files``; raises DataError for the first invalid row and for files without rows."""
    return list(_loaded(files, data, _preference, "preferences {prompt, chosen, rejected}"))


def load_labelled_programs(files: Sequence[str], data: DataConfig) -> list[LabeledProgram]:
    """Every row of ``files``; raises DataError for the first invalid row, also if labels do not fit the program's
    lines."""
    return list(_loaded(files, data, _labelled_program, "programs with line_labels, as label-lines writes them"))


def check_reward_files(config: Config, command: str = "reward-train") -> None:
    """Raise UserError for the first invalid row of the command's files, or an output that would overwrite the base
    model; needs no model."""
    settings = config.dpo if command == "dpo" else config.reward_train
    if Path(settings.output_path).resolve() == Path(config.policy.path).resolve():
        section = command.replace("-", "_")
        raise UserError(f"{section}.output_path: it is policy.path, which would be overwritten; give another folder")
    kind = settings.kind if isinstance(settings, RewardTrainConfig) else None
    takes_images = model_has_vision(config)
    for files in filter(None, (settings.train_files, settings.eval_files)):
        rows: Sequence[Preference | LabeledProgram]
        read = load_labelled_programs if kind is RewardModelKind.process else load_preferences
        rows = read(files, config.data)
        for row in rows:
            # A judge of two responses reads the prompt as text.
            check_images(row.content, takes_images=None if kind is RewardModelKind.pairwise else takes_images)


def _loaded(files: Sequence[str], data: DataConfig, build: Any, expected: str) -> Iterator[Any]:
    # No reward reads these rows, so they need no ground truth.
    data = replace(data, answer_required=False, reward_fields=[])
    has_rows = False
    for row, place in read_rows(files, split=data.split):
        has_rows = True
        yield build(row, place, data)
    if not has_rows:
        raise DataError(f"{', '.join(files)}: no rows; expected {expected}")


def _preference(row: dict[str, Any], place: str, data: DataConfig) -> Preference:
    content = read_content(row, place, data)
    chosen, rejected = (text_field(row, name, place) for name in (CHOSEN_FIELD, REJECTED_FIELD))
    if chosen == rejected:
        raise DataError(f"{place}: fields 'chosen' and 'rejected' are the same text; remove the row")
    return Preference(content, chosen, rejected)


def _labelled_program(row: dict[str, Any], place: str, data: DataConfig) -> LabeledProgram:
    content = read_content(row, place, data)
    response = text_field(row, data.response_field, place, "data.response_field")
    labels = lookup(row, _LABELS_FIELD)
    if not isinstance(labels, list) or any(isinstance(x, bool) or x not in LABELS for x in labels):
        raise DataError(f"{place}: field {_LABELS_FIELD!r}: expected a list of 1, -1 and 0, got {describe(labels)}")
    entry_point = str(lookup(row, ENTRY_POINT_FIELD) or "")
    num_lines = len(code_lines(response, entry_point=entry_point))
    if len(labels) != num_lines:
        raise DataError(
            f"{place}: field {_LABELS_FIELD!r}: {len(labels)} labels for a program of {num_lines} lines; "
            "label the rows again with `megatron-rl label-lines`"
        )
    return LabeledProgram(content, response, entry_point, tuple(int(x) for x in labels))
