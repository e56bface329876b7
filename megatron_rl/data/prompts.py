"""Prompt files: rows to Prompts, every row checked before a run starts.

A row that cannot be used is an error with file, line and field; prompts that are merely too long are left out and
counted, and so are doubled ids where the configuration says so. Formats and places: ``rows.py``.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_rl.config.schema import DataConfig, DuplicateIds
from megatron_rl.data.rows import Row, describe, is_missing, lookup, not_json, read_rows
from megatron_rl.data.tokenizer import Message, Tokenizer
from megatron_rl.data.trajectory import Prompt
from megatron_rl.errors import DataError


@dataclass(frozen=True)
class PromptSet:
    prompts: tuple[Prompt, ...]
    num_too_long: int
    """Prompts left out because they are longer than max_prompt_tokens."""
    num_too_long_by_type: Mapping[str, int] = field(default_factory=dict)
    num_duplicates: int = 0
    """Rows left out because an earlier row has their id."""

    @property
    def num_by_type(self) -> dict[str, int]:
        """Prompts of each type, most frequent first."""
        return dict(Counter(prompt.type for prompt in self.prompts).most_common())


@dataclass(frozen=True)
class RowContent:
    """What a row says, before it is tokenised."""

    id: str
    prompt: str | list[Message]
    answer: str
    type: str
    fields: dict[str, Any]
    place: str

    @property
    def text(self) -> str:
        """The prompt as plain text: the user's message, or with several turns each after its role."""
        if isinstance(self.prompt, str):
            return self.prompt
        turns = [message for message in self.prompt if message["role"] != "system"]
        if len(turns) == 1:
            return turns[0]["content"]
        return "\n\n".join(f"{message['role']}: {message['content']}" for message in turns)


def load_prompts(files: Sequence[str], data: DataConfig, tokenizer: Tokenizer, *, max_prompt_tokens: int) -> PromptSet:
    """Read and tokenise prompts; DataError on bad rows, on duplicate ids and when nothing is left."""
    prompts: list[Prompt] = []
    places: dict[str, str] = {}
    num_duplicates = 0
    too_long: Counter[str] = Counter()
    for row, place in read_rows(files, split=data.split):
        content = read_content(row, place, data)
        if is_duplicate(content, places, data):
            num_duplicates += 1
            continue
        prompt = tokenize(content, data, tokenizer)
        if len(prompt.token_ids) > max_prompt_tokens:
            too_long[prompt.type] += 1
        else:
            prompts.append(prompt)
    if not prompts:
        raise DataError(
            f"{', '.join(files)}: no prompt is left ({too_long.total()} are longer than batch.max_prompt_tokens={max_prompt_tokens}); "
            "give more data or raise batch.max_prompt_tokens"
        )
    return PromptSet(tuple(prompts), too_long.total(), dict(too_long), num_duplicates)


def load_solutions(files: Sequence[str], data: DataConfig, tokenizer: Tokenizer) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, response ids ending in the end-of-text token) of every row, for supervised training."""
    pairs = []
    for row, place in read_rows(files, split=data.split):
        prompt = tokenize(read_content(row, place, data), data, tokenizer)
        response = tokenizer.encode(_text_field(row, data.response_field, place))
        pairs.append((list(prompt.token_ids), [*response, tokenizer.eos_id]))
    if not pairs:
        raise DataError(
            f"{', '.join(files)}: no rows; supervised training needs prompts with a {data.response_field!r} field"
        )
    return pairs


def check_files(files: Sequence[str], data: DataConfig, *, with_response: bool) -> dict[str, int]:
    """Every row has the fields it needs; returns the number of rows of each type.

    Needs no tokenizer, so it comes first. DataError with file, line and field.
    """
    num_by_type: Counter[str] = Counter()
    never_seen = set(data.reward_fields)
    for row, place in read_rows(files, split=data.split):
        content = read_content(row, place, data)
        num_by_type[content.type] += 1
        never_seen = {path for path in never_seen if field_name(path) not in content.fields}
        if with_response:
            _text_field(row, data.response_field, place)
    if never_seen and num_by_type:
        raise DataError(
            f"data.reward_fields: no row of {', '.join(files)} has {', '.join(sorted(never_seen))}; "
            "correct the name or take it out"
        )
    return dict(num_by_type)


def read_content(row: Row, place: str, data: DataConfig) -> RowContent:
    """The mapped fields of a row; DataError with place and field for one that cannot be used."""
    found = lookup(row, data.id_field)
    if isinstance(found, (dict, list, bool, bytes)):
        raise DataError(f"{place}: field {data.id_field!r}: expected text or a number, got {describe(found)}")
    return RowContent(
        id=place if is_missing(found) else str(found),
        prompt=_prompt(row, data.prompt_field, place),
        answer=_answer(row, place, data),
        type=_type(row, data.type_field, place),
        fields=_reward_fields(row, data.reward_fields, place),
        place=place,
    )


def is_duplicate(content: RowContent, places: dict[str, str], data: DataConfig) -> bool:
    """Whether an earlier row has this id; ``places`` remembers who stands where. DataError where ids must differ."""
    if content.id not in places:
        places[content.id] = content.place
        return False
    if data.duplicate_ids is DuplicateIds.error:
        raise DataError(
            f"{content.place}: field {data.id_field!r}: {content.id!r} already stands at {places[content.id]}; ids must "
            "be unique (data.duplicate_ids=drop keeps the first)"
        )
    return True


def tokenize(content: RowContent, data: DataConfig, tokenizer: Tokenizer) -> Prompt:
    """DataError with place and field when the prompt has no tokens or text that the tokenizer does not know."""
    where = f"{content.place}: field {data.prompt_field!r}"
    chat = data.use_chat_template or not isinstance(content.prompt, str)
    try:
        token_ids = tokenizer.encode_prompt(content.prompt, chat=chat, system_prompt=data.system_prompt)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    if not token_ids:
        raise DataError(f"{where}: the prompt has no tokens")
    texts = [content.prompt] if isinstance(content.prompt, str) else [m["content"] for m in content.prompt]
    unknown = tokenizer.unknown_text("".join(texts))
    if unknown:
        raise DataError(f"{where}: the tokenizer does not know {unknown!r}; clean the data or use another tokenizer")
    return Prompt(
        id=content.id,
        token_ids=tuple(token_ids),
        text=content.text,
        answer=content.answer,
        source=content.place,
        type=content.type,
        fields=content.fields,
    )


def with_reward_fields(data: DataConfig, names: Sequence[str]) -> DataConfig:
    """``data`` with further reward fields: those that rewards read and data.reward_fields do not give already."""
    given = {field_name(path) for path in data.reward_fields}
    return replace(data, reward_fields=[*data.reward_fields, *(name for name in names if name not in given)])


def field_name(path: str) -> str:
    """The name under which a reward finds the field: the last part of a nested one."""
    return path.rsplit(".", 1)[-1]


def _prompt(row: Row, path: str, place: str) -> str | list[Message]:
    value = lookup(row, path)
    if not isinstance(value, list):
        return _text_field(row, path, place)
    messages = [_message(message, f"{place}: field {path!r}: message {i}") for i, message in enumerate(value, start=1)]
    if not messages or messages[-1]["role"] in ("system", "assistant"):
        last = messages[-1]["role"] if messages else "none"
        raise DataError(
            f"{place}: field {path!r}: expected messages of which the last waits for an answer (user), got {last}"
        )
    return messages


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise DataError(f"{where}: expected an object with role and content, got {describe(message)}")
    for name in ("role", "content"):
        if not isinstance(message.get(name), str) or not message[name].strip():
            raise DataError(f"{where}: {name}: expected non-empty text, got {describe(message.get(name))}")
    # Parquet gives every message all the keys that any message of the file has.
    return {key: value for key, value in message.items() if value is not None}


def _answer(row: Row, place: str, data: DataConfig) -> str:
    value = lookup(row, data.answer_field)
    missing = is_missing(value) or value == ""
    if missing and not data.answer_required:
        return ""
    if missing or isinstance(value, (dict, list, bytes)):
        got = "empty text" if value == "" else describe(value)
        hint = "; set data.answer_required=false if the reward needs none" if missing else ""
        raise DataError(f"{place}: field {data.answer_field!r}: expected text or a number, got {got}{hint}")
    return str(value)


def _type(row: Row, path: str, place: str) -> str:
    value = lookup(row, path)
    if is_missing(value):
        return ""
    if not isinstance(value, str):
        raise DataError(f"{place}: field {path!r}: expected the name of a prompt type, got {describe(value)}")
    return value


def _reward_fields(row: Row, paths: Sequence[str], place: str) -> dict[str, Any]:
    """Those that the row has: rows of different types bring different ones."""
    fields: dict[str, Any] = {}
    for path in paths:
        value = lookup(row, path)
        if is_missing(value):
            continue
        problem = not_json(value)
        if problem:
            raise DataError(f"{place}: field {path!r}: expected a JSON value, but {problem}; convert it to text")
        if field_name(path) in fields:
            raise DataError(
                f"data.reward_fields: two fields are called {field_name(path)!r} in {place}; rename a column"
            )
        fields[field_name(path)] = value
    return fields


def _text_field(row: Row, path: str, place: str) -> str:
    value = lookup(row, path)
    if not isinstance(value, str) or not value:
        raise DataError(
            f"{place}: field {path!r}: expected non-empty text, got {describe(value)}; fields here are {sorted(row)}"
        )
    return value
