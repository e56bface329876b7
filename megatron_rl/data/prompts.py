"""Prompt files: converts rows to Prompts and checks every row before a run starts.

A row that cannot be used is an error with file, line and field. Prompts that are too long are skipped and counted,
and so are duplicate ids if the configuration says so. ``row_files.py`` handles formats and sources.
"""

import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from megatron_rl.config.schema import DataConfig, DuplicateIds
from megatron_rl.data.chat_content import (
    IMAGE_MARK,
    chat_arguments,
    column_images,
    content_parts,
    image_folder,
    plain_text,
    split_image_marks,
    texts_of,
)
from megatron_rl.data.images import ImageRef, ImageSource, inspect
from megatron_rl.data.row_files import Row, describe, is_missing, lookup, not_json, read_rows
from megatron_rl.data.tokenizer import Message, Tokenizer
from megatron_rl.data.trajectory import Prompt
from megatron_rl.errors import DataError

NUM_FIRST_ROWS = 1000
"""Rows at each end of the data that are tokenized before a run starts."""


@dataclass(frozen=True)
class PromptSet:
    prompts: tuple[Prompt, ...]
    num_too_long: int
    """Number of prompts skipped because they are longer than max_prompt_tokens."""
    num_too_long_by_type: Mapping[str, int] = field(default_factory=dict)
    num_duplicates: int = 0
    """Number of rows skipped because an earlier row has the same id."""
    num_unread: Mapping[str, int] = field(default_factory=dict)
    """Number of prompts per chat-template argument that the template never reads."""

    @property
    def num_by_type(self) -> dict[str, int]:
        """Number of prompts of each type, most frequent first."""
        return dict(Counter(prompt.type for prompt in self.prompts).most_common())


@dataclass(frozen=True)
class RowContent:
    """Content of a row before tokenization."""

    id: str
    prompt: str | list[Message]
    """Text or messages. The content of a message may be a list of parts; text with images has <image> marks."""
    answer: str
    type: str
    fields: dict[str, Any]
    place: str
    images: tuple[ImageSource, ...] = ()
    """Images in the order of their positions in the prompt."""
    chat_arguments: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the chat template, including ``tools``."""

    @property
    def text(self) -> str:
        """The prompt as plain text: the user's message, or several turns, each with its role.

        Images are written as ``[image]``.
        """
        if isinstance(self.prompt, str):
            return plain_text(self.prompt, marked=bool(self.images))
        turns = [message for message in self.prompt if message["role"] != "system"]
        if len(turns) == 1:
            return plain_text(turns[0]["content"])
        return "\n\n".join(f"{message['role']}: {plain_text(message['content'])}" for message in turns)


def load_prompts(
    files: Sequence[str], data: DataConfig, tokenizer: Tokenizer, *, max_prompt_tokens: int, all_rows: bool = True
) -> PromptSet:
    """Read and tokenize prompts. Raises DataError for invalid rows, for duplicate ids and if no prompt is left.

    ``all_rows`` False: only the first and last rows (``first_and_last``), but all if none of their prompts is left.
    """
    prompts: list[Prompt] = []
    places: dict[str, str] = {}
    num_duplicates = 0
    too_long: Counter[str] = Counter()
    unread: Counter[str] = Counter()
    rows = read_rows(files, split=data.split)
    for row, place in rows if all_rows else first_and_last(rows):
        content = read_content(row, place, data)
        if is_duplicate(content, places, data):
            num_duplicates += 1
            continue
        prompt = tokenize(content, data, tokenizer)
        if len(prompt.token_ids) > max_prompt_tokens:
            too_long[prompt.type] += 1
        else:
            prompts.append(prompt)
            unread.update(name for name in prompt.chat_arguments if not tokenizer.template_reads(name))
    if not prompts and not all_rows:
        return load_prompts(files, data, tokenizer, max_prompt_tokens=max_prompt_tokens)
    if not prompts:
        raise DataError(
            f"{', '.join(files)}: no prompt is left ({too_long.total()} are longer than batch.max_prompt_tokens={max_prompt_tokens}); "
            "give more data or raise batch.max_prompt_tokens"
        )
    return PromptSet(tuple(prompts), too_long.total(), dict(too_long), num_duplicates, dict(unread))


def first_and_last(rows: Iterator[tuple[Row, str]]) -> Iterator[tuple[Row, str]]:
    """Yield the first and the last ``NUM_FIRST_ROWS`` rows; the rows between them are read, but not kept."""
    yield from islice(rows, NUM_FIRST_ROWS)
    yield from deque(rows, NUM_FIRST_ROWS)


def encode_response(text: str, place: str, field: str, tokenizer: Tokenizer) -> list[int]:
    """Ids of a given response. Raises DataError for tokens that only prompts may have."""
    token_ids = tokenizer.encode(text)
    if tokenizer.vision is not None and not set(token_ids).isdisjoint(tokenizer.vision.banned_token_ids):
        raise DataError(
            f"{place}: field {field!r}: a response cannot contain image or video tokens; remove their text"
        )
    return token_ids


def check_files(
    files: Sequence[str], data: DataConfig, *, takes_images: bool | None = None, unique_ids: bool = False, columns: Sequence[str] = ()
) -> dict[str, int]:
    """Check that every row has the required fields and readable images; returns the number of rows of each type.

    Needs no tokenizer, so it can run first. ``takes_images``: the model has vision (None: unknown). Raises
    DataError with file, line and field, also for a file without rows. ``unique_ids``: duplicate ids are an error, unless
    data.duplicate_ids says otherwise. ``columns``: see ``rows_of_each``.
    """
    num_by_type: Counter[str] = Counter()
    places: dict[str, str] = {}
    # Rows of different types may lack a field, but a field that no row has is a typo.
    never_seen = set(data.reward_fields)
    for row, place in rows_of_each(files, data, columns):
        content = read_content(row, place, data)
        check_images(content, takes_images=takes_images)
        num_by_type[content.type] += not (unique_ids and is_duplicate(content, places, data))
        never_seen = {path for path in never_seen if _field_name(path) not in content.fields}
    if never_seen and num_by_type:
        raise DataError(
            f"data.reward_fields: no row of {', '.join(files)} has {', '.join(sorted(never_seen))}; "
            "correct the name or remove it"
        )
    return dict(num_by_type)


OPTIONAL_COLUMNS = ("id_field", "type_field", "images_field", "tools_field", "chat_template_kwargs_field")
"""Keys of ``data`` that name a column which rows may lack."""


def rows_of_each(files: Sequence[str], data: DataConfig, columns: Sequence[str] = ()) -> Iterator[tuple[Row, str]]:
    """Yield the rows of ``files``. Raises DataError for a file without rows, which is a mistake at its writing.

    ``columns``: keys of ``data`` that name a column which rows may lack. A name that the recipe sets and no row has is an error.
    """
    named = {key: getattr(data, key) for key in columns}
    absent = {key: name for key, name in named.items() if name and name != getattr(DataConfig, key)}
    names: set[str] = set()
    for name in files:
        is_empty = True
        for row, place in read_rows([name], split=data.split):
            is_empty = False
            if absent:
                names.update(row)
                absent = {key: name for key, name in absent.items() if is_missing(lookup(row, name))}
            yield row, place
        if is_empty:
            raise DataError(f"{name}: the file has no rows; write it again, or remove it from the list")
    for key, name in absent.items():
        raise DataError(f"data.{key}: no row of {', '.join(files)} has a field {name!r}; fields there are {sorted(names)}")


def read_content(row: Row, place: str, data: DataConfig) -> RowContent:
    """Mapped fields of a row. Raises DataError with source and field for a row that cannot be used."""
    row_id = lookup(row, data.id_field)
    if isinstance(row_id, (dict, list, bool, bytes)) or row_id in (math.inf, -math.inf):
        raise DataError(f"{place}: field {data.id_field!r}: expected text or a number, got {describe(row_id)}")
    prompt, images = _prompt(row, place, data)
    chat = data.use_chat_template or not isinstance(prompt, str)
    return RowContent(
        id=place if is_missing(row_id) else str(row_id),
        prompt=prompt,
        answer=_answer(row, place, data),
        type=_type(row, data.type_field, place),
        fields=_reward_fields(row, data.reward_fields, place),
        place=place,
        images=tuple(images),
        chat_arguments=chat_arguments(row, place, data, chat=chat),
    )


def check_images(content: RowContent, *, takes_images: bool | None) -> None:
    """Raise DataError for images that cannot be used, or that the model cannot see (None: unknown)."""
    if content.images and takes_images is False:
        raise DataError(
            f"{content.place}: the prompt has {len(content.images)} images, but the model of policy.path has no vision; "
            "use a vision-language model, or remove these rows"
        )
    if takes_images and not content.images and IMAGE_MARK in content.text:
        raise DataError(
            f"{content.place}: the prompt has {IMAGE_MARK} marks but no images; set data.images_field to their column, "
            "or remove the marks"
        )
    for image in content.images:
        try:
            inspect(image)
        except DataError as error:
            raise DataError(f"{content.place}: {error}") from error


def is_duplicate(content: RowContent, places: dict[str, str], data: DataConfig) -> bool:
    """True if an earlier row has this id; ``places`` maps ids to sources. Raises DataError if ids must be unique."""
    if content.id not in places:
        places[content.id] = content.place
        return False
    if data.duplicate_ids is DuplicateIds.error:
        raise DataError(
            f"{content.place}: field {data.id_field!r}: {content.id!r} is already used at {places[content.id]}; ids must "
            "be unique (data.duplicate_ids=drop keeps the first)"
        )
    return True


def tokenize(content: RowContent, data: DataConfig, tokenizer: Tokenizer) -> Prompt:
    """Tokenize a row. Raises DataError with source and field for an empty prompt or text that the tokenizer does
    not know."""
    where = f"{content.place}: field {data.prompt_field!r}"
    check_images(content, takes_images=tokenizer.vision is not None)
    prompt, chat = content.prompt, data.use_chat_template or not isinstance(content.prompt, str)
    if content.images and isinstance(prompt, str):
        prompt = [{"role": "user", "content": split_image_marks(prompt)}] if chat else prompt.replace(IMAGE_MARK, tokenizer.image_text)
    try:
        token_ids = tokenizer.encode_prompt(prompt, chat=chat, system_prompt=data.system_prompt, arguments=content.chat_arguments)
        images, token_ids = expand_images(content, token_ids, tokenizer)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    if not token_ids:
        raise DataError(f"{where}: the prompt has no tokens")
    texts = [content.prompt] if isinstance(content.prompt, str) else [texts_of(m["content"]) for m in content.prompt]
    text = "".join(texts).replace(IMAGE_MARK, "") if content.images else "".join(texts)
    unknown = tokenizer.unknown_text(text, token_ids)
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
        images=images,
        chat_arguments=content.chat_arguments,
    )


def expand_images(
    content: RowContent, token_ids: list[int], tokenizer: Tokenizer
) -> tuple[tuple[ImageRef, ...], list[int]]:
    """(images of a prompt, its ids with every image expanded to its tokens)."""
    vision = tokenizer.vision
    if vision is None:
        return (), token_ids
    if vision.video_token_id in token_ids:
        raise DataError("the text contains the video token; remove it, and give videos as parts with frames")
    refs = tuple(replace(vision.reference(image), place=content.place) for image in content.images)
    try:
        return refs, vision.expanded(token_ids, refs)
    except ValueError as error:
        raise DataError(
            f"{error}: the chat template of {tokenizer.path} must write one image token per image, and texts must not "
            "contain it themselves"
        ) from error


def with_reward_fields(data: DataConfig, names: Sequence[str]) -> DataConfig:
    """``data`` with the additional reward fields in ``names`` that data.reward_fields does not list yet."""
    given = {_field_name(path) for path in data.reward_fields}
    return replace(data, reward_fields=[*data.reward_fields, *(name for name in names if name not in given)])


def _field_name(path: str) -> str:
    """Name of a reward field for rewards: the last component of a nested path."""
    return path.rsplit(".", 1)[-1]


def _prompt(row: Row, place: str, data: DataConfig) -> tuple[str | list[Message], list[ImageSource]]:
    """(prompt, its images in the order of their positions)."""
    path = data.prompt_field
    column = column_images(row, place, data)
    value = lookup(row, path)
    if not isinstance(value, list):
        text = text_field(row, path, place, "data.prompt_field")
        text = data.instruction.replace("{prompt}", text) if data.instruction else text
        return _with_marks(text, text.count(IMAGE_MARK), column, place, data), column
    folder = image_folder(place, data)
    parsed = [_message(given, f"{place}: field {path!r}: message {i}", folder, data) for i, given in enumerate(value, 1)]
    messages = [message for message, _ in parsed]
    if not messages or messages[-1]["role"] in ("system", "assistant"):
        last = messages[-1]["role"] if messages else "none"
        remedy = {
            "assistant": "; remove the last message, as tools/prepare_data.py messages does: for sft it is the text of "
            "data.response_field, for a reward data.answer_field",
            "system": "; add the user's message",
        }
        raise DataError(
            f"{place}: field {path!r}: expected messages, the last of which the model answers (user), got {last}{remedy.get(last, '')}"
        )
    images = [image for _, images in parsed for image in images]
    if not column:
        return messages, images
    if images:
        raise DataError(f"{place}: images are in the messages and in field {data.images_field!r}; give them once")
    texts = [message["content"] for message in messages if isinstance(message["content"], str)]
    num_marks = sum(text.count(IMAGE_MARK) for text in texts)
    first = next((m for m in messages if m["role"] == "user" and isinstance(m["content"], str)), messages[-1])
    first["content"] = _with_marks(first["content"], num_marks, column, place, data)
    for message in messages:
        if isinstance(message["content"], str) and IMAGE_MARK in message["content"]:
            message["content"] = split_image_marks(message["content"])
    return messages, column


def _with_marks(text: str, num_marks: int, column: Sequence[ImageSource], place: str, data: DataConfig) -> str:
    """``text`` with a mark for every image of the column; images come first if the text has no marks."""
    if num_marks == 0:
        return IMAGE_MARK * len(column) + text
    if column and num_marks != len(column):
        raise DataError(
            f"{place}: field {data.images_field!r}: {len(column)} images for {num_marks} {IMAGE_MARK} marks in "
            f"{data.prompt_field!r}; give as many, or no marks: then the images come first"
        )
    return text


def _message(message: Any, where: str, folder: Path, data: DataConfig) -> tuple[Message, list[ImageSource]]:
    """(message with its content as text or parts, images of its parts)."""
    if not isinstance(message, Mapping):
        raise DataError(f"{where}: expected an object with role and content, got {describe(message)}")
    content = message.get("content")
    images: list[ImageSource] = []
    if isinstance(content, list):
        content, images = content_parts(content, where, folder, data)
    for name, value in (("role", message.get("role")), ("content", content)):
        if not isinstance(value, (str, list) if name == "content" else str) or not value or not str(value).strip():
            raise DataError(f"{where}: {name}: expected non-empty text, got {describe(value)}")
    # Parquet gives every message all the keys that any message of the file has.
    return {key: value for key, value in {**message, "content": content}.items() if value is not None}, images


def _answer(row: Row, place: str, data: DataConfig) -> str:
    value = lookup(row, data.answer_field)
    # A blank ground truth counts as missing: no response could match it.
    is_blank = isinstance(value, str) and not value.strip()
    missing = is_missing(value) or is_blank
    if missing and not data.answer_required:
        return ""
    if missing or isinstance(value, (dict, list, bytes, bool)) or value in (math.inf, -math.inf):
        got = "empty text" if is_blank else describe(value)
        remedy = f"{_fields_of(row)}; set data.answer_field, or data.answer_required=false if the reward needs none"
        hint = f"; {remedy}" if missing else ""
        raise DataError(f"{place}: field {data.answer_field!r}: expected text or a number, got {got}{hint}")
    return str(value)


def _fields_of(row: Row) -> str:
    return f"fields here are {[name[:40] for name in sorted(row)]}"  # a damaged file may make a name of its whole text


def _type(row: Row, path: str, place: str) -> str:
    value = lookup(row, path)
    if is_missing(value):
        return ""
    if not isinstance(value, str) or not value.isprintable():
        raise DataError(f"{place}: field {path!r}: expected the name of a prompt type, which is printable text, got {describe(value)}")
    return value


def _reward_fields(row: Row, paths: Sequence[str], place: str) -> dict[str, Any]:
    """Reward fields that the row has; rows of different types have different fields."""
    fields: dict[str, Any] = {}
    for path in paths:
        value = lookup(row, path)
        if is_missing(value):
            continue
        problem = not_json(value)
        if problem:
            raise DataError(f"{place}: field {path!r}: expected a JSON value, but {problem}; convert it to text")
        if _field_name(path) in fields:
            raise DataError(
                f"data.reward_fields: two fields are named {_field_name(path)!r} in {place}; rename a column"
            )
        fields[_field_name(path)] = value
    return fields


def text_field(row: Row, path: str, place: str, key: str = "") -> str:
    """The text at ``path``. Raises DataError if it is missing, blank or not text. ``key``: of the recipe, which names the field."""
    value = lookup(row, path)
    if not isinstance(value, str) or not value.strip():
        remedy = f"; set {key} to one of them" if key and is_missing(value) else ""
        raise DataError(
            f"{place}: field {path!r}: expected non-empty text, got {describe(value)}; {_fields_of(row)}{remedy}"
        )
    return value
