"""Prompt files: JSONL rows to Prompts, every row checked before a run starts.

A row that cannot be used is an error with file, line and field; prompts that are merely too long are left out and
counted.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.config.schema import DataConfig
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.data.trajectory import Prompt
from megatron_rl.errors import DataError


@dataclass(frozen=True)
class PromptSet:
    prompts: tuple[Prompt, ...]
    num_too_long: int
    """Prompts left out because they are longer than max_prompt_tokens."""


def load_prompts(files: Sequence[str], data: DataConfig, tokenizer: Tokenizer, *, max_prompt_tokens: int) -> PromptSet:
    """Read and tokenise prompts; DataError on bad rows, on duplicate ids and when nothing is left."""
    prompts: list[Prompt] = []
    places: dict[str, str] = {}
    num_too_long = 0
    for row, place in read_rows(files):
        prompt = _to_prompt(row, place, data, tokenizer)
        if prompt.id in places:
            raise DataError(
                f"{place}: field {data.id_field!r}: {prompt.id!r} already stands at {places[prompt.id]}; ids must be unique"
            )
        places[prompt.id] = place
        if len(prompt.token_ids) > max_prompt_tokens:
            num_too_long += 1
        else:
            prompts.append(prompt)
    if not prompts:
        raise DataError(
            f"{', '.join(files)}: no prompt is left ({num_too_long} are longer than batch.max_prompt_tokens={max_prompt_tokens}); "
            "give more data or raise batch.max_prompt_tokens"
        )
    return PromptSet(tuple(prompts), num_too_long)


def load_solutions(files: Sequence[str], data: DataConfig, tokenizer: Tokenizer) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, response ids ending in the end-of-text token) of every row, for supervised training."""
    pairs = []
    for row, place in read_rows(files):
        prompt = _to_prompt(row, place, data, tokenizer)
        response = tokenizer.encode(_text_field(row, data.response_field, place))
        pairs.append((list(prompt.token_ids), [*response, tokenizer.eos_id]))
    if not pairs:
        raise DataError(
            f"{', '.join(files)}: no rows; supervised training needs prompts with a {data.response_field!r} field"
        )
    return pairs


def read_rows(files: Sequence[str]) -> Iterator[tuple[dict[str, Any], str]]:
    """(row, "file:line") of every JSONL row."""
    for name in files:
        if not Path(name).is_file():
            raise DataError(f"data file {name} does not exist; give the path of a JSONL file")
        with open(name, encoding="utf-8") as lines:
            try:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        yield _parse(line, f"{name}:{number}"), f"{name}:{number}"
            except UnicodeDecodeError as error:
                raise DataError(f"{name}: not UTF-8 text: {error}; expected one JSON object a line") from error


def _parse(line: str, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: not valid JSON: {error}; expected one object a line") from error
    if not isinstance(row, dict):
        raise DataError(f"{place}: expected a JSON object, got {type(row).__name__}")
    return row


def check_files(files: Sequence[str], data: DataConfig, *, with_response: bool) -> None:
    """Every row has the fields it needs; DataError with file, line and field. Needs no tokenizer, so it comes first."""
    for row, place in read_rows(files):
        _prompt_and_answer(row, place, data)
        if with_response:
            _text_field(row, data.response_field, place)


def _prompt_and_answer(row: dict[str, Any], place: str, data: DataConfig) -> tuple[str, str]:
    answer = row.get(data.answer_field)
    if answer is None or isinstance(answer, (dict, list)):
        raise DataError(
            f"{place}: field {data.answer_field!r}: expected text or a number, got {_kind(row, data.answer_field)}"
        )
    return _text_field(row, data.prompt_field, place), str(answer)


def _to_prompt(row: dict[str, Any], place: str, data: DataConfig, tokenizer: Tokenizer) -> Prompt:
    text, answer = _prompt_and_answer(row, place, data)
    token_ids = tokenizer.encode_prompt(text, chat=data.use_chat_template)
    if not token_ids:
        raise DataError(f"{place}: field {data.prompt_field!r}: the prompt has no tokens")
    unknown = tokenizer.unknown_text(text)
    if unknown:
        raise DataError(
            f"{place}: field {data.prompt_field!r}: the tokenizer does not know {unknown!r}; clean the data or use another tokenizer"
        )
    return Prompt(
        id=str(row.get(data.id_field, place)), token_ids=tuple(token_ids), text=text, answer=answer, source=place
    )


def _text_field(row: dict[str, Any], field: str, place: str) -> str:
    value = row.get(field)
    if not isinstance(value, str) or not value:
        raise DataError(
            f"{place}: field {field!r}: expected non-empty text, got {_kind(row, field)}; fields here are {sorted(row)}"
        )
    return value


def _kind(row: dict[str, Any], field: str) -> str:
    if field not in row:
        return "nothing (the field is missing)"
    return f"{type(row[field]).__name__} {str(row[field])[:40]!r}"
